"""The example ``examples/language_model.py``: its data, its model and its trainer. The study itself takes hours."""

from __future__ import annotations

import importlib.util
import os
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


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of torch's threads, which the example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def construct(example: Any, names: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return new algorithms and the arguments of ``make_trainer`` for methods by their names."""
    known = {**example.METHODS, **example.SETTINGS, **example.LENGTHS, **example.SHORTER}
    methods = [known[name] for name in names]
    arguments: dict[str, Any] = {}
    for method in methods:
        arguments |= {} if callable(method) else method
    return [method() for method in methods if callable(method)], arguments


@pytest.mark.parametrize("recipe", [False, True], ids=["baseline", "recipe"])
def test_training_reduces_the_loss(example: Any, recipe: bool):
    """The loss on the test modules decreases."""
    seed_all(0)
    algorithms, arguments = construct(example, example.RECIPE if recipe else [])

    made = example.make_trainer(
        algorithms, 0, **arguments, data_bytes=80 * 1024, precision="fp32", evaluations=1, progress_bar=False
    )
    with made as trainer:
        trainer.eval()
        before = trainer.state.eval_metric_values["LanguageCrossEntropy"]
        trainer.fit()

    assert trainer.state.eval_metric_values["LanguageCrossEntropy"] < before - 0.3


@pytest.mark.skipif(os.environ.get("RESUME_MATRIX") != "all", reason="takes ten seconds; nox -s resume_matrix")
@pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")  # some begin after the first batches
@pytest.mark.filterwarnings("ignore:weight_decay=")  # the decay of the baseline is a large one
def test_every_method_trains(example: Any):
    """Each method alone, and what the search compares, is a training that the trainer accepts."""
    for name in sorted({name for trial in example.TRIALS + example.REFINED for name in trial} | example.METHODS.keys()):
        seed_all(0)
        algorithms, arguments = construct(example, [name])

        with example.make_trainer(
            algorithms, 0, **arguments, data_bytes=16 * 1024, evaluations=1, modules="validation", progress_bar=False
        ) as trainer:
            trainer.fit()

        assert trainer.state.timestamp.batch > 0, name


def test_model_sees_only_earlier_bytes(example: Any):
    """The last byte does not change the logits of the others."""
    model = example.GPT(std=0.08).eval()

    first = model({"input_ids": torch.arange(9)[None]})["logits"]
    second = model({"input_ids": torch.arange(9)[None].index_fill(1, torch.tensor([8]), 99)})["logits"]

    torch.testing.assert_close(first[:, :8], second[:, :8])
    assert not torch.equal(first[:, 8], second[:, 8])


def test_attention_depends_on_distances(example: Any):
    """The product of a rotated query and a rotated key depends on the distance of their positions only."""
    attention = example.Attention().double()
    size = example.WIDTH // example.NUM_HEADS
    query, key = torch.randn(2, 1, 1, 1, size, dtype=torch.float64)

    products = attention.rotate(query.expand(1, 1, 20, size)) @ attention.rotate(key.expand(1, 1, 20, size)).mT

    torch.testing.assert_close(products[0, 0, 3:, 3:], products[0, 0, :-3, :-3], atol=1e-5, rtol=0)
    assert not torch.allclose(products[0, 0, 0, 1:], products[0, 0, 0, :-1], atol=1e-3)


def test_parts_have_different_modules(example: Any):
    """Each part has sources, most are for training, and none is in two parts."""
    train, validation, test = (example.read_sources(part) for part in ("train", "validation", "test"))

    assert len(train) > 2 * (len(validation) + len(test)) > 2 * len(test) > 10**5
    assert sum(b"\nclass ArgumentParser(" in part for part in (train, validation, test)) == 1
