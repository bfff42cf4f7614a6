"""The sum of the losses of a batch."""

import torch

from composer.core import State
from composer.trainer.microbatching import LossSum


def test_microbatches_are_summed_by_weight():
    """The losses of all microbatches are summed with their weights, and the state has the total."""
    state = State(model=None)
    losses = LossSum(state)
    losses.times_computed = 1

    for state.microbatch, weight in enumerate((0.75, 0.25)):
        losses.add({"a": torch.tensor(4.0), "b": torch.tensor(8.0)}, weight)

    assert losses.total == state.total_loss == 12.0
    assert losses.logged == {"total": 12.0, "a": 4.0, "b": 8.0}


def test_first_computation_is_logged():
    """If a batch is computed twice in a step, the first losses are logged, and the last total is returned."""
    state = State(model=None)
    losses = LossSum(state)
    state.microbatch = 0

    for losses.times_computed, loss in ((1, 3.0), (2, 5.0)):
        losses.add(torch.tensor(loss), 1)

    assert (losses.total, losses.logged["total"], state.total_loss) == (5.0, 3.0, 3.0)
