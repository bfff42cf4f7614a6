"""Which batches are profiled, compared with torch's own schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.core import State, Timestamp
from composer.profiler import ProfilerAction, cyclic_schedule

IN_TORCH = {
    ProfilerAction.SKIP: torch.profiler.ProfilerAction.NONE,
    ProfilerAction.WARMUP: torch.profiler.ProfilerAction.WARMUP,
    ProfilerAction.ACTIVE: torch.profiler.ProfilerAction.RECORD,
    ProfilerAction.ACTIVE_AND_SAVE: torch.profiler.ProfilerAction.RECORD_AND_SAVE,
}
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
    assert [IN_TORCH[action] for action in actual] == [expected(step) for step in range(40)]


def test_defaults():
    """By default one batch is a warm-up, four are recorded, once."""
    said = actions(cyclic_schedule(), 8)

    assert [action.value for action in said] == [
        "warmup",
        *["active"] * 3,
        "active_and_save",
        *["skip"] * 3,
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_first": -1}, "skip_first must be a number of batches, 0 or more, got -1"),
        ({"wait": 0.5}, "wait must be a number of batches, 0 or more, got 0.5"),
        ({"warmup": True}, "warmup must be a number of batches"),
        ({"active": 0}, "active must be a number of batches, 1 or more, got 0"),
        ({"repeat": -2}, "repeat must be a number of cycles, 0 or more, got -2"),
    ],
)
def test_bad_numbers(settings, message):
    """Each raises with its name."""
    with pytest.raises(ValueError, match=message):
        cyclic_schedule(**settings)
