"""The example ``examples/fashion_mnist.py``, on a few drawn images in the format of the data set."""

from __future__ import annotations

import gzip
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from composer.trainer.reproducibility import seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from composer import Trainer

EXAMPLE = Path(__file__).parent.parent / "examples" / "fashion_mnist.py"


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module, with few images to train on."""
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.TRAIN_SIZE = 160
    return module


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of torch's threads, which the example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


def trainer_with(example: Any, names: Sequence[str], data: Path, seed: int = 0, **options: Any) -> Trainer:
    """Return the trainer of a run with methods, as a study constructs it, with small batches."""
    seed_all(seed)
    methods = [{**example.METHODS, **example.LENGTHS, **example.SETTINGS, **example.VARIANTS}[name] for name in names]
    algorithms = [method() for method in methods if callable(method)]
    settings = {key: value for method in methods if not callable(method) for key, value in method.items()}
    options = {"evaluations": 1, **settings, "batch_size": 8, **options}
    return example.make_trainer(algorithms, seed, data=data, progress_bar=False, **options)


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
    with trainer_with(example, [], data, images="validation") as trainer:
        train, evaluators = trainer.state.train_dataloader.dataset, trainer.state.evaluators
        images, _ = example.read_images("train", data)

        assert torch.equal(train.tensors[0], images[:160])
        assert torch.equal(evaluators[0].dataloader.dataloader.dataset.tensors[0], images[160:])


@pytest.mark.parametrize("recipe", [False, True], ids=["baseline", "recipe"])
def test_training_improves_the_accuracy(example: Any, data: Path, recipe: bool):
    """The baseline and the recipe learn to distinguish the images."""
    with trainer_with(example, example.RECIPE if recipe else [], data, epochs=12, length=1.0) as trainer:
        trainer.fit()

    assert trainer.state.eval_metric_values["MulticlassAccuracy"] > 0.5


@pytest.mark.skipif(os.environ.get("RESUME_MATRIX") != "all", reason="takes ten seconds; nox -s resume_matrix")
@pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")  # some begin after the first batch
@pytest.mark.filterwarnings("ignore:weight_decay=.* removes:UserWarning")  # the product that AdamW uses, too
def test_every_method_trains(example: Any, data: Path):
    """Each method alone, and what the search compares, is a training that the trainer accepts."""
    for name in sorted({*example.METHODS, *(name for trial in example.TRIALS for name in trial)}):
        with trainer_with(example, [name], data) as trainer:
            trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch == 1
