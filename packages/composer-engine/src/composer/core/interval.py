"""How often: intervals, and calls that are due once in each. They depend on the clock alone, so a resume is exact."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import attrs

from composer.core.event import STEP_EVENTS, Event
from composer.core.time import Time, Timestamp, TimeUnit

Call: TypeAlias = Callable[[], object]  # at an event


class Clock(Protocol):
    """What an interval reads of a :class:`State`: its clock, and the length of the training and of an epoch."""

    timestamp: Timestamp
    previous_timestamp: Timestamp
    dataloader_len: int | None

    @property
    def max_duration(self) -> Time | None:
        """The length of the training."""


_BATCH_DONE = frozenset({Event.BATCH_END, Event.BATCH_CHECKPOINT})
_IN_BATCH = frozenset(STEP_EVENTS) - _BATCH_DONE
_EPOCH_DONE = frozenset({Event.EPOCH_END, Event.EPOCH_CHECKPOINT})
_ITERATION = frozenset({Event.ITERATION_START, Event.ITERATION_END, Event.ITERATION_CHECKPOINT})
_UNITS: Mapping[Event, tuple[TimeUnit, ...]] = {
    **dict.fromkeys(_IN_BATCH, (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)),
    **dict.fromkeys(_BATCH_DONE, (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.SECOND, TimeUnit.DURATION)),
    **dict.fromkeys((Event.EPOCH_START, *_EPOCH_DONE), (TimeUnit.EPOCH, TimeUnit.DURATION)),
    **dict.fromkeys(_ITERATION, (TimeUnit.ITERATION,)),
}
"""The units in which an interval can be due at an event; other events do not recur during training."""


def _to_length(every: Time | str | int, name: str = "An interval") -> Time:
    length = Time.from_input(every, TimeUnit.EPOCH, name=name)
    if length.value < 0:
        raise ValueError(f"{name} must be 0 (never) or more, got {length}.")
    return length


def interval_time(given: Interval | Time | str | int) -> Time:
    """Return the length of an ``interval``, as a converter of attrs."""
    return Interval.named("interval", given).every


@attrs.frozen
class Interval:
    """A length of time after which something is due again, such as ``Interval("10ba")`` or ``Interval("0.1dur")``.

    Args:
        every: A time or a string; a whole number counts epochs; 0 is never.

    Raises:
        ValueError: ``every`` is negative.

    Example:
        >>> clock = Timestamp(batch=9)
        >>> Interval("5ba").passed(clock, clock.to_next_batch())
        True
    """

    every: Time = attrs.field(converter=_to_length)

    @classmethod
    def named(cls, name: str, every: Interval | Time | str | int) -> Interval:
        """Return the interval that was given for a parameter; errors begin with the parameter's name.

        Example:
            >>> Interval.named("eval_interval", "-1ep")
            Traceback (most recent call last):
            ValueError: eval_interval must be 0 (never) or more, got -1ep.
        """
        return every if isinstance(every, Interval) else cls(_to_length(every, name))

    def passed(
        self,
        before: Timestamp,
        now: Timestamp,
        max_duration: Time | None = None,
        batches_in_epoch: int | None = None,
    ) -> bool:
        """Return whether a multiple of the interval lies after ``before`` and not after ``now``.

        Args:
            before: The earlier clock.
            now: The clock.
            max_duration: The length of the training, of which durations (``"dur"``) are a fraction.
            batches_in_epoch: If known, a fraction of a training in epochs is counted in batches, else in whole epochs.

        Raises:
            ValueError: The interval is a fraction of a training that has no length.
        """
        if not self.every.value:
            return False
        length, unit = _length(self.every, max_duration, batches_in_epoch)
        return _is_passed(length, unit, before.count(unit), now.count(unit))

    def is_due(self, clock: Clock) -> bool:
        """Return whether a multiple of the interval was passed since ``clock.previous_timestamp``."""
        return self.passed(clock.previous_timestamp, clock.timestamp, clock.max_duration, clock.dataloader_len)

    def __call__(self, clock: Clock, event: Event) -> bool:
        """Return whether it is due at the end of a batch, an epoch or an iteration, or the training is over."""
        end = clock.max_duration
        is_over = end is not None and clock.timestamp.count(end.unit) >= end.value
        return self.every.unit in _UNITS.get(event, ()) and (is_over or self.is_due(clock))


def to_interval(every: Interval | Time | str | int | None) -> Interval | None:
    """Return an argument ``every`` as an :class:`Interval`; None is each time.

    Raises:
        ValueError: It is no length of time.
        TypeError: It is no time, string or whole number.

    Example:
        >>> to_interval("10ba"), to_interval(None)
        (Interval(every=Time(10, TimeUnit.BATCH)), None)
    """
    return None if every is None else Interval.named("every", every)


def at_checkpoints(every: Time) -> dict[Event | str, Time | str | int]:
    """Return the intervals of a hook at ``*_CHECKPOINT`` that runs every so often, at the event of the interval's unit.

    Example:
        >>> [event.value for event, every in at_checkpoints(Time(2, "ep")).items() if every]
        ['epoch_checkpoint']
    """
    of_unit = {TimeUnit.EPOCH: Event.EPOCH_CHECKPOINT, TimeUnit.ITERATION: Event.ITERATION_CHECKPOINT}
    # With an interval of 0 an event never runs.
    intervals: dict[Event | str, Time | str | int] = dict.fromkeys((Event.BATCH_CHECKPOINT, *of_unit.values()), 0)
    intervals[of_unit.get(every.unit, Event.BATCH_CHECKPOINT)] = every
    return intervals


def checked_interval(every: Time | str | int, event: Event, who: str) -> Time:
    """Return an interval as a time, if it can be due at an event.

    Args:
        every: How often; a whole number counts epochs, 0 of any unit is never.
        event: Where.
        who: The owner of the interval, for the error.

    Raises:
        ValueError: It is no length of time, is negative, or could never be due at the event.
        TypeError: It is no time, string or whole number.

    Example:
        >>> checked_interval("10ba", Event.BATCH_END, "it")
        Time(10, TimeUnit.BATCH)
    """
    interval = Interval.named(f"{who}: every", every).every
    if interval.value:
        _check_unit(interval.unit, event, f"{who}: every={str(interval)!r}")
    return interval


def only_when_due(call: Call, every: Time | None, event: Event, clock: Clock) -> Call:
    """Return a function that makes the call if it is due at an event, and does nothing otherwise.

    - At the end of a batch or an epoch, it is due if a multiple of the interval was passed within it: ``"10ba"`` in
      the 10th, 20th, … batch.
    - Within a batch, which the clock has not counted yet, it is due in the batch after: ``"10ba"`` in the 11th, 21st, …
      batch, ``"2ep"`` in the first batch of the 3rd, 5th, … epoch.

    A call that is due each time (``"1ba"`` within a batch, ``"1ep"`` at the end of an epoch) is returned as it is.

    Args:
        call: The call.
        every: How often; None is always.
        event: Where.
        clock: The state, which has the clock.

    Example:
        >>> from composer.core import State, Timestamp
        >>> state = State(model=None)
        >>> call = only_when_due(lambda: print("due"), Time(10, "ba"), Event.BATCH_END, state)
        >>> state.timestamp = Timestamp(batch=10)
        >>> call()
        due
    """
    own = TimeUnit.EPOCH if event in _EPOCH_DONE or event is Event.EPOCH_START else TimeUnit.BATCH
    own = TimeUnit.ITERATION if event in _ITERATION else own
    if every is None or (every.value == 1 and every.unit is own):
        return call
    if not every.value:
        return lambda: None
    if every.unit is TimeUnit.BATCH:
        return _every_batches(call, int(every.value), clock)

    def run() -> None:
        length, unit = _length(every, clock.max_duration, clock.dataloader_len if event in STEP_EVENTS else None)
        if unit is not every.unit:
            _check_unit(unit, event, f"every={str(every)!r} of a training of {clock.max_duration}")
        if _is_passed(length, unit, *_last(unit, event, clock)):
            call()

    return run


def _check_unit(unit: TimeUnit, event: Event, what: str) -> None:
    units = _UNITS.get(event, ())
    if unit in units:
        return
    if not units:
        raise ValueError(
            f"{what} cannot be used at {event.value!r}, which does not recur during training. "
            "Leave it out, or choose an event of a batch, an epoch or an iteration."
        )
    allowed = " or ".join(filter(None, [", ".join(one.plural for one in units[:-1]), units[-1].plural]))
    raise ValueError(
        f"{what} would never be due at {event.value!r}, where {unit.plural} are not counted. "
        f"Give it in {allowed}, or choose another event."
    )


def _every_batches(call: Call, every: int, clock: Clock) -> Call:
    """Return a function that calls if the number of batches is a multiple of ``every``; this check must be fast."""
    count = operator.attrgetter("timestamp.counts.batch")

    def run() -> None:
        batch = count(clock)
        if not batch % every and batch:
            call()

    return run


def _length(every: Time, max_duration: Time | None, batches_in_epoch: int | None) -> tuple[int | float, TimeUnit]:
    """Return the length of an interval in a unit that the clock counts."""
    if every.unit is not TimeUnit.DURATION:
        return every.value, every.unit
    if max_duration is None:
        raise ValueError(f"An interval of {every} needs a training with a max_duration.")
    length = every.value * max_duration.value
    if max_duration.unit is TimeUnit.EPOCH and batches_in_epoch:
        return length * batches_in_epoch, TimeUnit.BATCH
    return length, max_duration.unit


def _is_passed(length: int | float, unit: TimeUnit, before: int | float, now: int | float) -> bool:
    if not length:
        return False
    if isinstance(length, int) and unit is not TimeUnit.SECOND:
        return before // length != now // length
    # The margin keeps 0.1 of 30 epochs, 3.0000000000000004, from being due an epoch late.
    return int(before / length + 1e-9) != int(now / length + 1e-9)


def _last(unit: TimeUnit, event: Event, clock: Clock) -> tuple[int | float, int | float]:
    """Return the clock's counts before and after the last batch, epoch or iteration.

    :meth:`Interval.is_due` compares with ``previous_timestamp``, which is at the end of what was counted last. An event
    within a batch, which is not counted yet, needs the counts of the batch before.
    """
    now = clock.timestamp.count(unit)
    if unit in (TimeUnit.EPOCH, TimeUnit.ITERATION):
        # An epoch is counted when it ends. Within a batch, that is news only in the first one of the next epoch.
        is_new = event not in _IN_BATCH or not clock.timestamp.count(TimeUnit.BATCH, in_epoch=True)
        return (now - 1 if is_new and now else now), now
    if unit is TimeUnit.BATCH:
        return max(now - 1, 0), now
    before = clock.previous_timestamp
    if clock.timestamp.count(TimeUnit.BATCH) != before.count(TimeUnit.BATCH) + 1:
        raise RuntimeError(
            f"state.previous_timestamp is not the clock before {event.value!r}. "
            "Write state.previous_timestamp = state.timestamp before the clock is advanced."
        )
    return before.count(unit), now
