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
    """Return what a schedule says before each batch of a training whose epochs have five batches."""
    state, said = State(model=None), []
    for batch in range(batches):
        state.timestamp = Timestamp(
            batch=batch, epoch=batch // epoch_length, batch_in_epoch=batch % epoch_length, sample=8 * batch
        )
        said.append(schedule(state))
    return said


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
@given(FEW, FEW, FEW, st.integers(1, 4), FEW)
def test_as_torch_does(skip_first, wait, warmup, active, repeat):
    """Batch for batch it says what torch's schedule says for the step, also across epochs."""
    settings = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}

    ours = actions(cyclic_schedule(**settings), 40)

    theirs = torch.profiler.schedule(**settings)
    assert [IN_TORCH[action] for action in ours] == [theirs(step) for step in range(40)]


def test_by_default():
    """One batch to get ready, four that are recorded, and no more."""
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
    """Each is refused by name."""
    with pytest.raises(ValueError, match=message):
        cyclic_schedule(**settings)
