"""CutOut: squares of zeros."""

import torch

from composer.algorithms import CutOut
from composer.core import Engine, State


def holes_of(*algorithms, batch=0, seed=0):
    """Return which pixels of a batch of ones are zero after AFTER_DATALOADER."""
    state = State(model=None, rank_zero_seed=seed)
    engine = Engine(state, algorithms=list(algorithms))
    for _ in range(batch):
        state.timestamp = state.timestamp.to_next_batch(samples=4)
    state.batch = (torch.ones(4, 3, 32, 32), torch.arange(4))
    engine.run_event("after_dataloader")
    return state.batch[0] == 0


def test_square_is_zero():
    """A square of the given side is zero in every channel of every image, clipped at the border."""
    blank = holes_of(CutOut(length=0.25, uniform_sampling=True))

    assert torch.equal(blank, blank[:1, :1].expand_as(blank))
    rows, columns = blank[0, 0].any(1), blank[0, 0].any(0)
    assert 0 < rows.sum() <= 8
    assert blank[0, 0].sum() == rows.sum() * columns.sum()


def test_input_key():
    """Images in a dictionary are read by their key."""
    state = State(model=None)
    engine = Engine(state, algorithms=CutOut(input_key="pixels"))
    state.batch = {"pixels": torch.ones(2, 3, 8, 8), "labels": torch.arange(2)}

    engine.run_event("after_dataloader")

    assert (state.batch["pixels"] == 0).any()
    assert torch.equal(state.batch["labels"], torch.arange(2))
