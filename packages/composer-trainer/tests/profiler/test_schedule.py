"""Which batches are profiled, compared with torch's own schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.core import State, Timestamp
from composer.profiler import cyclic_schedule

FEW = st.integers(0, 4)


def actions(schedule, batches, epoch_length=5):
    """Return a schedule's action before each batch of a training with five batches per epoch."""
    state, said = State(model=None), []
    for batch in range(batches):
        state.timestamp = Timestamp(
            batch=batch, epoch=batch // epoch_length, batch_in_epoch=batch % epoch_length, sample=8 * batch
        )
        said.append(schedule(state))
    return said


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
@given(FEW, FEW, FEW, st.integers(1, 4), FEW)
def test_equals_torch_schedule(skip_first, wait, warmup, active, repeat):
    """For each batch the action equals that of torch's schedule, also across epochs."""
    settings = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}

    actual = actions(cyclic_schedule(**settings), 40)

    expected = torch.profiler.schedule(**settings)
    assert [action.value for action in actual] == [expected(step) for step in range(40)]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"skip_first": -1}, ValueError, "skip_first must be at least 0, got -1"),
        ({"wait": 0.5}, TypeError, "wait must be an int, got 0.5"),
        ({"warmup": True}, TypeError, "warmup must be an int"),
        ({"active": 0}, ValueError, "active must be at least 1, got 0"),
        ({"repeat": -2}, ValueError, "repeat must be at least 0, got -2"),
    ],
)
def test_bad_numbers(settings, error, message):
    """Each raises with its name."""
    with pytest.raises(error, match=message):
        cyclic_schedule(**settings)
