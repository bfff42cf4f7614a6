"""Products are looked for when a logger is made, and loaded only when it is used."""

import importlib.util
import subprocess
import sys

import pytest

from composer.loggers import (
    CometMLLogger,
    InMemoryLogger,
    MLFlowLogger,
    NeptuneLogger,
    SlackLogger,
    TensorboardLogger,
    WandBLogger,
)
from composer.loggers.products import import_product

MAKERS = {
    "tensorboard": (TensorboardLogger, "tensorboard"),
    "wandb": (WandBLogger, "wandb"),
    "mlflow": (MLFlowLogger, "mlflow"),
    "psutil": (MLFlowLogger, "mlflow"),
    "comet_ml": (CometMLLogger, "comet"),
    "neptune": (NeptuneLogger, "neptune"),
    "slack_sdk": (lambda: SlackLogger(["a"], slack_logging_api_key="x", channel_id="y"), "slack"),
}


@pytest.fixture
def without(monkeypatch):
    """Return a function that makes a product look as if it was not installed."""
    find = importlib.util.find_spec

    def hide(product):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == product else find(name, *rest)
        )

    return hide


@pytest.mark.parametrize("product", MAKERS)
def test_missing_product(without, product):
    """A logger of a product that is not installed says at once what to install."""
    make, extra = MAKERS[product]
    without(product)

    with pytest.raises(ModuleNotFoundError, match=rf'{product} is not installed.*"composer-trainer\[{extra}\]"'):
        make()


def test_missing_matplotlib(monkeypatch):
    """A picture needs matplotlib, and says so."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    history = InMemoryLogger()
    history.log_metrics({"x": 1})

    with pytest.raises(ModuleNotFoundError, match=r'matplotlib.*"composer-trainer\[plot\]"'):
        history.plot("x")


def test_a_broken_product_shows_its_own_error(tmp_path, monkeypatch):
    """A product that is there but lacks something of its own is not said to be missing."""
    (tmp_path / "half_a_product.py").write_text("import what_it_lacks")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModuleNotFoundError, match="No module named 'what_it_lacks'"):
        import_product("half_a_product", "wandb")


def test_nothing_is_loaded_early():
    """Neither importing the loggers nor making them loads a product."""
    program = """
import sys
from composer.loggers import *
CometMLLogger(), MLFlowLogger(), NeptuneLogger(), TensorboardLogger(), WandBLogger()
SlackLogger(["a"], slack_logging_api_key="x", channel_id="y")
products = {"comet_ml", "matplotlib", "mlflow", "neptune", "psutil", "slack_sdk", "tensorboard", "wandb"}
print(sorted(products & set(sys.modules)))
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
