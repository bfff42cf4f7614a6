"""Problems of loaders."""

import pytest
import torch
from torch.utils.data import DataLoader

import composer.trainer.data.loaders
from composer.core import DataSpec
from composer.trainer.data.batches import Batches
from fixtures import small_run
from fixtures.data import make_batches, vector_batches

[BATCH] = vector_batches(1)


class OwnLoader(DataLoader):
    """A custom iterable loader with its own order."""

    def __iter__(self):
        return super().__iter__()


@pytest.mark.usefixtures("one_of_two")
class TestRepeats:
    def test_repeats_that_cannot_be_excluded_warn(self):
        """The warning states the number of repeated samples and the remedy."""
        with pytest.warns(
            UserWarning, match=r"1 samples of each epoch are trained on twice.*OwnLoader.*drop_last=True"
        ):
            make_batches(OwnLoader, 5)

    @pytest.mark.parametrize(("samples", "options"), [(4, {}), (5, {"drop_last": True})])
    def test_no_repeats_do_not_warn(self, samples, options):
        """Evenly divisible and dropped samples are trained on once by any loader."""
        assert make_batches(OwnLoader, samples, **options).position.length == 1


@pytest.mark.usefixtures("one_of_two")
def test_sparse_batches_are_not_compared(monkeypatch):
    """First batches with sparse tensors are not compared across processes."""
    batches = Batches(DataSpec([torch.eye(3).to_sparse()]), -1, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")

    assert batches.next().is_sparse


def test_very_many_batches(monkeypatch, caplog):
    """An epoch of unknown length with very many batches gives one warning."""
    monkeypatch.setattr(composer.trainer.data.loaders, "_MANY_BATCHES", 3)

    class Stream:
        def __iter__(self):
            return iter([BATCH] * 5)

    small_run(train_dataloader=Stream(), max_duration="1ep").fit()
    small_run(train_dataloader=[BATCH] * 5, max_duration="1ep").fit()

    (message,) = caplog.messages
    assert "has no length and has returned 3 batches in one epoch" in message
    assert "train_subset_num_batches" in message
