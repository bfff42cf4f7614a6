"""Products are searched when a logger is created, and imported when it is used."""

import subprocess
import sys

import pytest

from composer.loggers import (
    AimLogger,
    CometMLLogger,
    InMemoryLogger,
    MLFlowLogger,
    NeptuneLogger,
    SlackLogger,
    SwanLabLogger,
    TensorboardLogger,
    TrackioLogger,
    WandBLogger,
)

MAKERS = {
    "tensorboard": (TensorboardLogger, "tensorboard"),
    "wandb": (WandBLogger, "wandb"),
    "mlflow": (MLFlowLogger, "mlflow"),
    "psutil": (MLFlowLogger, "mlflow"),
    "comet_ml": (CometMLLogger, "comet"),
    "neptune": (NeptuneLogger, "neptune"),
    "aim": (AimLogger, "aim"),
    "swanlab": (SwanLabLogger, "swanlab"),
    "trackio": (lambda: TrackioLogger("digits"), "trackio"),
    "slack_sdk": (lambda: SlackLogger(["a"], slack_logging_api_key="x", channel_id="y"), "slack"),
}


@pytest.mark.parametrize("product", MAKERS)
def test_missing_product(monkeypatch, product):
    """A logger of a missing product raises with the install command."""
    make, extra = MAKERS[product]
    monkeypatch.setitem(sys.modules, product, None)

    with pytest.raises(ModuleNotFoundError, match=rf'{product} is not installed.*"composer-trainer\[{extra}\]"'):
        make()


def test_missing_matplotlib(monkeypatch):
    """Plotting without matplotlib raises with the install command."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    history = InMemoryLogger()
    history.log_metrics({"x": 1})

    with pytest.raises(ModuleNotFoundError, match=r'matplotlib.*"composer-trainer\[plot\]"'):
        history.plot("x")


def test_imports_are_lazy():
    """Neither importing nor creating the loggers imports a product."""
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
