"""Times of a schedule on a run's clock, and learning rates that depend only on it."""

import re
from functools import partial

import pytest
import torch

from composer.core import State, Time, Timestamp, TimeUnit
from composer.optim import WarmupStableDecayScheduler
from composer.optim.clock import ClockLR, position


def times(*spans):
    return [(Time.from_input(span, TimeUnit.EPOCH, name="span"), 1.0) for span in spans]


class TestPosition:
    @pytest.mark.parametrize(
        ("spans", "expected"),
        [
            (["20ba"], (105, [20])),
            (["2ep"], (105, [100])),
            (["20ba", "0.5dur"], (105, [20, 250.0])),
            (["30sp"], (420, [30])),
            (["0ba", "30sp", "0ep"], (420, [0, 30, 0])),
            (["0ba"], (105, [0])),
        ],
    )
    def test_in_one_unit(self, spans, expected):
        """Epochs of known length count in batches, durations are fractions of the training."""
        state = State(model=None, max_duration="10ep", dataloader_len=50)
        state.timestamp = Timestamp(epoch=2, batch=105, batch_in_epoch=5, sample=420)

        assert position(state, *times(*spans)) == expected

    @pytest.mark.parametrize(
        ("options", "spans", "message"),
        [
            ({}, ["0.5dur"], "fraction of the training, which has no length"),
            ({"max_duration": "9ba"}, ["3sp", "0.5dur"], "cannot be converted to one unit"),
            ({"max_duration": "3ep"}, ["0.5dur"], "a part of an epoch needs a data loader with a known length"),
        ],
    )
    def test_unknown_lengths_raise(self, options, spans, message):
        """Without a common unit the error has the remedy."""
        with pytest.raises(ValueError, match=message):
            position(
                State(model=None, **options),
                *times(*spans),
            )


def scaled(divisor, scale=1.0):
    """Return a factor, or what is none."""
    return None if divisor is None else scale / divisor


@pytest.mark.parametrize("arguments", [((2,), {}), ((), {"divisor": 2}), ((2,), {"scale": 1.0})])
def test_partial(arguments):
    """A partial of a function, by position or by name, is a schedule; its error names the function."""
    positional, named = arguments
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    assert ClockLR(optimizer, partial(scaled, *positional, **named)).get_last_lr() == [0.5]
    with pytest.raises(TypeError, match="The schedule scaled must return the factor"):
        ClockLR(optimizer, partial(scaled, divisor=None))


class TestClockLR:
    def test_rates_are_set_in_place(self):
        """Each group has its initial rate times the factor; a tensor stays the same object."""
        rate, factor = torch.tensor(0.5), [1.0]
        groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": rate}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler = ClockLR(optimizer, lambda: factor[0])

        factor[0] = 0.5
        scheduler.step()

        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.25])
        assert optimizer.param_groups[1]["lr"] is rate
        assert scheduler.state_dict() == {"_last_lr": [pytest.approx(0.05), pytest.approx(0.25)]}


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
