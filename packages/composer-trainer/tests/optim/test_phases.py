"""The phases of schedules: what fits into a training."""

import re

import pytest

from composer.core import State
from composer.optim import WarmupStableDecayScheduler
from composer.optim.phases import fraction_of


@pytest.mark.parametrize(
    ("schedule", "ratio"),
    [
        (WarmupStableDecayScheduler("5ep", "11ba"), 1.0),
        (WarmupStableDecayScheduler("0.5dur", "0.6dur"), 1.0),
        (WarmupStableDecayScheduler("0ba", "7ep"), 1.0),
        (WarmupStableDecayScheduler("4ep", "1ep"), 0.5),
    ],
)
def test_phases_longer_than_the_training_raises(schedule, ratio):
    """A warm-up and a decay that overlap raise with both, the training and the ratio."""
    state = State(model=None, max_duration=f"{round(6 * ratio)}ep", dataloader_len=10)
    message = (
        f"t_warmup and t_decay together must not be longer than the training, got t_warmup={schedule.t_warmup} "
        f"and t_decay={schedule.t_decay} in a training of {state.max_duration} with a scale schedule ratio of "
    )

    with pytest.raises(ValueError, match=re.escape(f"{message}{ratio}")):
        schedule(state, ratio)


@pytest.mark.parametrize("max_duration", ["1000003tok", "0.3sec", "7ba", "1000000000000tok"])
def test_phases_as_long_as_the_training(max_duration):
    """Fractions whose sum is 1 fit despite rounding."""
    assert WarmupStableDecayScheduler("0.9dur", "0.1dur")(State(model=None, max_duration=max_duration)) == 0.0


@pytest.mark.parametrize(("done", "length", "fraction"), [(0, 4, 0.0), (3, 4, 0.75), (9, 4, 1.0), (0, 0, 1.0)])
def test_fraction_of(done, length, fraction):
    """A fraction is at most 1, which is that of an empty phase."""
    assert fraction_of(done, length) == fraction
