"""The cool-down of a training with a stable phase: its rates decay from here, instead of at the planned end."""

from __future__ import annotations

import attrs

from composer.core import State, Time, TimeUnit
from composer.core.saving.codec import Record
from composer.optim import WarmupStableDecayScheduler
from composer.trainer.schedules import TrainingSchedule, scaled


@attrs.frozen
class Cooldown(Record):
    """When a cool-down began, and its length; both times have one unit.

    Args:
        begin: The clock at its beginning.
        length: Its length.
    """

    begin: Time
    length: Time

    @property
    def end(self) -> Time:
        """The clock at its end."""
        return self.begin + self.length


def scaled_lengths(
    duration: int | str | Time | None, cooldown: int | str | Time | None, ratio: float
) -> tuple[Time | None, Time | None]:
    """Return the length of a part of a training, scaled by ``ratio``, and that of a cool-down; None for none.

    Raises:
        ValueError: One is not greater than 0, or a fraction, or both are given.

    Example:
        >>> scaled_lengths(None, "2000ba", ratio=0.5)
        (None, Time(2000, TimeUnit.BATCH))
    """
    part = None if duration is None else scaled(duration, ratio, "duration")
    length = None if cooldown is None else scaled(cooldown, 1.0, "cooldown")
    if part is not None and length is not None:
        raise ValueError(
            f"cooldown and duration both set the end of the training, got cooldown={str(length)!r} and "
            f"duration={str(part)!r}: give one of them."
        )
    return part, length


def cooled_down(
    schedule: TrainingSchedule, state: State, length: Time | None, before: Cooldown | None, *, anywhere: bool = False
) -> tuple[TrainingSchedule, Cooldown | None]:
    """Return the schedule of a training that ends with a cool-down from here, and the cool-down.

    A run that was saved in a cool-down of this length continues it.

    Args:
        schedule: The schedule of the training.
        state: The run.
        length: The length of the cool-down; None returns ``schedule`` and None.
        before: The cool-down that the run is in.
        anywhere: Whether it may begin outside of the stable phase, as in a dry run.

    Raises:
        ValueError: A schedule has no stable phase, the run is not in it, or in a cool-down of another length.
    """
    if length is None:
        return schedule, None
    if before is None:
        _check_has_stable(schedule, state, length)
        if not anywhere:
            _check_is_stable(schedule, state)
        before = Cooldown(state.timestamp.get(length.unit), length)
    elif before.length != length:
        raise ValueError(
            f"cooldown must be {str(before.length)!r}, the length of the cool-down in which the checkpoint was saved, "
            f"got {str(length)!r}. For another length load a checkpoint of the stable phase."
        )
    # The warm-up is over, and could have another unit.
    schedulers = [attrs.evolve(one, t_warmup=Time(0, length.unit), t_decay=length) for one in _stable(schedule)]
    cooled = attrs.evolve(schedule, max_duration=before.end, schedulers=schedulers, scale_schedule_ratio=1.0)
    return cooled, before


def _stable(schedule: TrainingSchedule) -> list[WarmupStableDecayScheduler]:
    return [one for one in schedule.schedulers if isinstance(one, WarmupStableDecayScheduler)]


def _check_has_stable(schedule: TrainingSchedule, state: State, length: Time) -> None:
    """Raise a ValueError unless all schedules have a stable phase, and the length can be counted from here."""
    clock, stable = state.timestamp, _stable(schedule)
    if not stable or len(stable) < len(schedule.schedulers):
        raise ValueError(
            "cooldown requires a schedule with a stable phase, such as WarmupStableDecayScheduler('1000ba'), for each "
            f"learning rate, got schedulers={schedule.schedulers}."
        )
    if length.unit in (TimeUnit.EPOCH, TimeUnit.ITERATION) and clock.count(TimeUnit.BATCH, in_epoch=True):
        raise ValueError(
            f"cooldown must be in batches, samples, tokens or seconds within an epoch, got {str(length)!r} after "
            f"{clock.batch_in_epoch} of epoch {int(clock.epoch)}."
        )


def _check_is_stable(schedule: TrainingSchedule, state: State) -> None:
    """Raise a ValueError unless all schedules are in their stable phases."""
    for one in _stable(schedule):
        planned = one if state.max_duration is not None else attrs.evolve(one, t_decay=Time(0, TimeUnit.BATCH))
        factor = planned(state, schedule.ratio)
        if factor != 1:
            raise ValueError(
                "cooldown must begin in the stable phase, where the factor of the learning rate is 1, got a factor of "
                f"{factor:.3g} from {one!r} after {state.timestamp.batch} in a training of {state.max_duration}. "
                "Load a checkpoint that was saved after the warm-up and before the decay."
            )
