"""The example ``examples/language_model.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from composer.trainer.reproducibility import seed_all

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLE = Path(__file__).parent.parent / "examples" / "language_model.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module, with a tiny model."""
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.WIDTH, module.NUM_LAYERS, module.EVAL_SAMPLES = 32, 1, 4
    return module


@pytest.mark.parametrize("names", [[], ["LabelSmoothing", "EMA"], None], ids=["baseline", "others", "recipe"])
def test_training_reduces_the_loss(example: Any, names: list[str] | None):
    """Each method changes the model or the training, and the loss on the test modules decreases."""
    seed_all(0)
    algorithms = [example.METHODS[name]() for name in (example.RECIPE if names is None else names)]

    with example.make_trainer(algorithms, seed=0, steps=40, progress_bar=False) as trainer:
        trainer.eval()
        before = trainer.state.eval_metric_values["LanguageCrossEntropy"]
        trainer.fit()

    assert trainer.state.eval_metric_values["LanguageCrossEntropy"] < before - 0.3


def test_model_sees_only_earlier_bytes(example: Any):
    """The last byte does not change the logits of the others, with and without Alibi."""
    batch = {"input_ids": torch.arange(9)[None]}
    for algorithms in ([], [example.METHODS["Alibi"]()]):
        with example.make_trainer(algorithms, seed=0, steps=1, progress_bar=False) as trainer:
            model = trainer.state.model.eval()

            first = model(batch)["logits"]
            second = model({"input_ids": torch.arange(9)[None].index_fill(1, torch.tensor([8]), 99)})["logits"]

            torch.testing.assert_close(first[:, :8], second[:, :8])
            assert not torch.equal(first[:, 8], second[:, 8])


def test_parts_have_different_modules(example: Any):
    """Each part has sources, most are for training, and none is in two parts."""
    train, validation, test = (example.read_sources(part) for part in ("train", "validation", "test"))

    assert len(train) > 2 * (len(validation) + len(test)) > 2 * len(test) > 10**5
    assert sum(b"\nclass ArgumentParser(" in part for part in (train, validation, test)) == 1
