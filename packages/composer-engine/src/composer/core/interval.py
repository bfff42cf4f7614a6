"""How often: whether a whole multiple of some length of time has just been passed."""

from __future__ import annotations

import attrs

from composer.core.time import Time, Timestamp, TimeUnit

__all__ = ["Interval"]


def _to_every(every: Time | str | int) -> Time:
    return Time.from_input(every, TimeUnit.EPOCH)


def _check(every: Time, name: str) -> None:
    if every.value < 0:
        raise ValueError(f"{name} must be 0 (never) or more, got {every}.")


@attrs.frozen
class Interval:
    """Every so often, such as ``Interval("10ba")`` or ``Interval("0.1dur")``; every 0 is never.

    Args:
        every: A length of time; a whole number counts epochs.

    Raises:
        ValueError: ``every`` is negative.

    Example:
        >>> clock = Timestamp(batch=9)
        >>> Interval("5ba").passed(clock, clock.to_next_batch())
        True
    """

    every: Time = attrs.field(converter=_to_every)

    def __attrs_post_init__(self) -> None:
        _check(self.every, "An interval")

    @classmethod
    def named(cls, name: str, every: Interval | Time | str | int) -> Interval:
        """Return the interval that was given for a parameter; errors begin with the parameter's name.

        Example:
            >>> Interval.named("eval_interval", "-1ep")
            Traceback (most recent call last):
            ValueError: eval_interval must be 0 (never) or more, got -1ep.
        """
        if isinstance(every, Interval):
            return every
        time = Time.from_input(every, TimeUnit.EPOCH, name=name)
        _check(time, name)
        return cls(time)

    def passed(
        self,
        before: Timestamp,
        now: Timestamp,
        max_duration: Time | None = None,
        batches_in_epoch: int | None = None,
    ) -> bool:
        """Return whether a multiple of the interval lies after ``before`` and not after ``now``.

        Args:
            before: The clock at the last look.
            now: The clock.
            max_duration: The whole training, of which durations (``"dur"``) are a fraction.
            batches_in_epoch: If known, a fraction of a training in epochs is counted in batches, else in whole epochs.

        Raises:
            ValueError: The interval is a fraction of a training that has no length.
        """
        every, unit = self.every.value, self.every.unit
        if every and unit is TimeUnit.DURATION:
            if max_duration is None:
                raise ValueError(f"An interval of {self.every} needs a training with a max_duration.")
            every, unit = every * max_duration.value, max_duration.unit
            if unit is TimeUnit.EPOCH and batches_in_epoch is not None:
                every, unit = every * batches_in_epoch, TimeUnit.BATCH
        if not every:
            return False
        if isinstance(every, int) and unit is not TimeUnit.SECOND:
            return before.count(unit) // every != now.count(unit) // every
        # The margin keeps 0.1 of 30 epochs, 3.0000000000000004, from coming an epoch late.
        return int(before.count(unit) / every + 1e-9) != int(now.count(unit) / every + 1e-9)
