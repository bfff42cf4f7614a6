"""The example with few labels: its data and its trainer. The study itself takes minutes."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from composer.trainer.reproducibility import seed_all

EXAMPLE = Path(__file__).parent.parent / "examples" / "few_labels.py"


@pytest.fixture(scope="module")
def example():
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("few_labels", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def threads():
    """Restore the number of torch's threads, which the example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestLoadImages:
    def test_ten_labels_a_class(self, example):
        """Each seed has 10 labelled images of each digit."""
        for seed in range(3):
            train_data, _ = example.load_images(seed, "test")

            assert torch.bincount(train_data.tensors[1]).tolist() == [10] * 10

    def test_the_test_set_is_the_same_for_all_seeds(self, example):
        """Only the labelled and the validation images depend on the seed."""
        (first, one), (second, other) = (example.load_images(seed, "test") for seed in (0, 1))

        assert torch.equal(one.tensors[0], other.tensors[0])
        assert not torch.equal(first.tensors[0], second.tensors[0])


@pytest.mark.usefixtures("threads")
class TestMakeTrainer:
    def test_the_recipe_learns(self, example):
        """A few epochs with the recipe are sufficient for most digits; kornia is imported, which takes a second."""
        seed_all(0)
        algorithms, arguments = example.construct(example.RECIPE)

        with example.make_trainer(algorithms, 0, **arguments | {"epochs": 24}, progress_bar=False) as trainer:
            trainer.fit()

        assert trainer.state.eval_metric_values["MulticlassAccuracy"] > 0.85

    @pytest.mark.skipif(os.environ.get("RESUME_MATRIX") != "all", reason="takes ten seconds; nox -s resume_matrix")
    @pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")  # some begin after the first batch
    @pytest.mark.filterwarnings("ignore:weight_decay=")  # the decay of the baseline is a large one
    def test_every_method_trains(self, example):
        """Each method alone, and what the search compares, is a training that the trainer accepts."""
        example.METHODS = {**example.METHODS, **example.SETTINGS, **example.AUGMENTS}
        for name in {name for trial in example.TRIALS for name in trial}:
            seed_all(0)
            algorithms, arguments = example.construct([name])
            with example.make_trainer(algorithms, 0, **arguments, progress_bar=False) as trainer:
                trainer.fit(duration="1ba")
            assert trainer.state.timestamp.batch == 1
