"""The example ``examples/fashion_mnist.py``, on a few drawn images in the format of the data set."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from composer.trainer.reproducibility import seed_all

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLE = Path(__file__).parent.parent / "examples" / "fashion_mnist.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module, with a narrow network."""
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.BATCH_SIZE, module.TRAIN_SIZE = 8, 160
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of ten classes that differ in their brightest rows; one file is compressed."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for kind, count in [("train", 320), ("t10k", 80)]:
        labels = np.arange(count, dtype=np.uint8) % 10
        images = generator.integers(0, 120, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 6] += 130
        content = bytes(16) + images.tobytes()
        if kind == "train":
            (folder / f"{kind}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        else:
            (folder / f"{kind}-images-idx3-ubyte").write_bytes(content)
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(bytes(8) + labels.tobytes())
    return folder


def test_images_are_read(example: Any, data: Path):
    """Images and labels have their shapes and values, from compressed files and from others."""
    for kind, count in [("train", 320), ("t10k", 80)]:
        images, labels = example.read_images(kind, data)

        assert images.shape == (count, 1, 28, 28)
        assert labels[:12].tolist() == [*range(10), 0, 1]
        rows = images.mean(dim=(1, 3)).argmax(dim=1)
        assert torch.equal(rows.div(2, rounding_mode="floor") - 2, labels)


def test_images_that_are_not_there(example: Any, tmp_path: Path):
    """An error names the folder and how the images are installed."""
    with pytest.raises(FileNotFoundError, match=rf"not found in {tmp_path}: install Debian's package"):
        example.read_images("train", tmp_path)


def test_validation_images_are_not_trained_on(example: Any, data: Path):
    """The images on which settings are selected are neither those of the training nor those of the test."""
    with example.make_trainer([], 0, images="validation", data=data, progress_bar=False) as trainer:
        train, evaluators = trainer.state.train_dataloader.dataset, trainer.state.evaluators
        images, _ = example.read_images("train", data)

        assert torch.equal(train.tensors[0], images[:160])
        assert torch.equal(evaluators[0].dataloader.dataloader.dataset.tensors[0], images[160:])


@pytest.mark.parametrize("names", ["recipe", "others"])
def test_training_improves_the_accuracy(example: Any, data: Path, names: str):
    """The recipe, and all methods that may be combined with each other, learn to distinguish the images."""
    seed_all(0)
    apart = {*example.RECIPE, "SWA", "SAM", "LayerFreezing", "CutMix"}
    others = {name: make for name, make in example.METHODS.items() if name not in apart}
    chosen = example.RECIPE if names == "recipe" else others

    with example.make_trainer(
        [make() for make in chosen.values()], 0, epochs=12, data=data, progress_bar=False
    ) as trainer:
        trainer.fit()

    assert trainer.state.eval_metric_values["MulticlassAccuracy"] > 0.5
