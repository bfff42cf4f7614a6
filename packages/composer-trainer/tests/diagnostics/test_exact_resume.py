"""The check of an exact resume, for users."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer.diagnostics import check_exact_resume
from composer.optim import CosineAnnealingScheduler
from fixtures import small_run

DATA = TensorDataset(torch.rand(20, 4), torch.arange(20) % 3)


class Counting(DataLoader):
    """A loader whose batches depend on how often it was iterated, which no state contains."""

    epochs = 0

    def __iter__(self):
        self.epochs += 1
        for inputs, labels in super().__iter__():
            yield inputs + self.epochs, labels


def make_trainer(loader, **settings):
    """Return a run of two epochs with the same weights each time."""
    torch.manual_seed(0)
    return small_run(train_dataloader=loader(DATA, batch_size=4), max_duration="2ep", **settings)


def stop_in_second_epoch(trainer):
    trainer.engine.on("batch_end", lambda state, _: state.stop_training() if state.timestamp.batch == 7 else None)


@pytest.mark.parametrize("stop", ["3ba", "1ep", stop_in_second_epoch])
def test_a_loader_of_torch_is_exact(stop, tmp_path):
    """The check passes, also with a function that arranges the stop, and writes to the folder."""
    check_exact_resume(lambda **settings: make_trainer(DataLoader, **settings), stops=[stop], folder=tmp_path)

    assert (tmp_path / "whole").is_dir()


def test_a_schedule_over_the_whole_training_is_exact():
    """A stop does not shorten the schedule, nor add an evaluation."""

    def make_scheduled(**settings):
        options = {"schedulers": CosineAnnealingScheduler(), "eval_dataloader": DataLoader(DATA, shuffle=True)}
        return make_trainer(DataLoader, **options | settings)

    check_exact_resume(make_scheduled, stops=["1ep", "7ba"])


def test_other_batches_raise():
    """The first batch that differs is named."""
    with pytest.raises(AssertionError, match="stopped after 5 batches: batch 5ba differs from that of the uninter"):
        check_exact_resume(lambda **settings: make_trainer(Counting, **settings), stops=["1ep"])


def test_other_weights_raise():
    """Weights that are initialized differently in each call are named, as the batches are equal."""
    seeds = itertools.count()

    def make_other(**settings):
        torch.manual_seed(next(seeds))
        network = torch.nn.Linear(4, 3)
        return small_run(
            network=network, train_dataloader=DataLoader(DATA, batch_size=4), max_duration="2ep", **settings
        )

    with pytest.raises(AssertionError, match=r"value \['model'\].* differs"):
        check_exact_resume(make_other, stops=["1ba"])


@pytest.mark.parametrize("stop", ["99ba", "10ba", lambda trainer: None])
def test_a_run_that_does_not_stop_raises(stop):
    """A run that did not stop shows nothing."""
    with pytest.raises(ValueError, match="stops must be before the end of the run"):
        check_exact_resume(lambda **settings: make_trainer(DataLoader, **settings), stops=[stop])
