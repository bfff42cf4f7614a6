"""How often something is called at an event: a check of the clock alone, so that it is the same after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from composer.core.event import STEP_EVENTS, Event
from composer.core.interval import Interval
from composer.core.time import Time, TimeUnit

if TYPE_CHECKING:
    from composer.core.state import State

__all__ = ["Call", "checked_interval", "only_when_due"]

Call: TypeAlias = Callable[[], object]
"""What the engine calls at an event, with the state and the logger already in it."""

_BATCH_DONE = frozenset({Event.BATCH_END, Event.BATCH_CHECKPOINT})
_BATCH = frozenset(STEP_EVENTS)
_IN_BATCH = _BATCH - _BATCH_DONE
_EPOCH_DONE = frozenset({Event.EPOCH_END, Event.EPOCH_CHECKPOINT})
_ITERATION = frozenset({Event.ITERATION_START, Event.ITERATION_END, Event.ITERATION_CHECKPOINT})
_EVALUATED = frozenset(
    {Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END}
)
_PREDICTED = frozenset(
    {Event.PREDICT_BATCH_START, Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END}
)
_COUNTED = (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.SECOND)
_UNITS: Mapping[Event, tuple[TimeUnit, ...]] = {
    **dict.fromkeys(_IN_BATCH, (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)),
    **dict.fromkeys(_BATCH_DONE, (*_COUNTED, TimeUnit.DURATION)),
    Event.EPOCH_START: (TimeUnit.EPOCH, TimeUnit.DURATION),
    **dict.fromkeys(_EPOCH_DONE, (TimeUnit.EPOCH, *_COUNTED, TimeUnit.DURATION)),
    **dict.fromkeys(_ITERATION, (TimeUnit.ITERATION,)),
    **dict.fromkeys(_EVALUATED | _PREDICTED, (TimeUnit.BATCH,)),
}
"""In which units an interval can be due at an event; where none is given, nothing comes every so often."""


def checked_interval(every: Time | str | int, event: Event, who: str) -> Time:
    """Return an interval as a time, if it can be due at an event.

    Args:
        every: How often; a whole number counts epochs, 0 of any unit is never.
        event: Where.
        who: Whose interval it is, for the error.

    Raises:
        ValueError: It is no length of time, is negative, or could never be due at the event.
        TypeError: It is no time, text or whole number.

    Example:
        >>> checked_interval("10ba", Event.BATCH_END, "it")
        Time(10, 'ba')
    """
    interval = Interval.named(f"{who}: every", every).every
    if interval.value:
        _check_unit(interval.unit, event, f"{who}: every={str(interval)!r}")
    return interval


def only_when_due(call: Call, every: Time | None, event: Event, state: State) -> Call:
    """Return a function that makes the call at those moments of an event at which it is due, and else does nothing.

    - When a batch or an epoch is done, it is due if a multiple of the interval has been passed within it: ``"10ba"`` in
      the 10th, 20th, … batch, ``"10ba"`` at ``EPOCH_END`` in each epoch in which such a batch ended.
    - Within a batch the clock has not counted it yet, so that it is due in the batch after: ``"10ba"`` in the 11th,
      21st, … batch, ``"2ep"`` in the first batch of the 3rd, 5th, … epoch.
    - In an evaluation or prediction its own batches count.

    One that is due each time (``"1ba"`` within a batch, ``"1ep"`` at the end of an epoch) costs nothing.

    Args:
        call: What may be due.
        every: How often; None is always.
        event: Where.
        state: Whose clock is looked at.

    Example:
        >>> from composer.core import State, Timestamp
        >>> state = State(model=None)
        >>> call = only_when_due(lambda: print("due"), Time(10, "ba"), Event.BATCH_END, state)
        >>> state.timestamp = Timestamp(batch=10)
        >>> call()
        due
    """
    if every is None or _is_each_time(every, event):
        return call
    if not every.value:
        return _never
    if every.unit is TimeUnit.BATCH and event not in _EPOCH_DONE:
        return _every_batches(call, int(every.value), event, state)

    def run() -> None:
        if _is_due(every, event, state):
            call()

    return run


def _check_unit(unit: TimeUnit, event: Event, what: str) -> None:
    units = _UNITS.get(event, ())
    if unit in units:
        return
    if not units:
        raise ValueError(
            f"{what} cannot be used at {event.value!r}, which does not come again and again as training goes on. "
            "Leave it out, or choose an event of a batch, an epoch or an iteration."
        )
    allowed = " or ".join(filter(None, [", ".join(one.plural for one in units[:-1]), units[-1].plural]))
    raise ValueError(
        f"{what} would never be due at {event.value!r}, where {unit.plural} are not counted on. "
        f"Give it in {allowed}, or choose another event."
    )


def _is_each_time(every: Time, event: Event) -> bool:
    own = TimeUnit.EPOCH if event in _EPOCH_DONE or event is Event.EPOCH_START else TimeUnit.BATCH
    return every.value == 1 and every.unit is (TimeUnit.ITERATION if event in _ITERATION else own)


def _never() -> None:
    """What is called of that which is called every 0 batches."""


def _every_batches(call: Call, every: int, event: Event, state: State) -> Call:
    """Return a function that calls when the batches done are a multiple of ``every``: the check that has to be fast."""

    def in_training() -> None:
        batch = state.timestamp.counts.batch
        if not batch % every and batch:
            call()

    def in_evaluation() -> None:
        batch = state.eval_timestamp.counts.batch
        if not batch % every and batch:
            call()

    def in_prediction() -> None:
        batch = state.predict_timestamp.counts.batch
        if not batch % every and batch:
            call()

    return in_evaluation if event in _EVALUATED else in_prediction if event in _PREDICTED else in_training


def _is_due(every: Time, event: Event, state: State) -> bool:
    length, unit = _in_the_clocks_unit(every, event, state)
    before, now = _window(unit, event, state)
    if isinstance(length, int) and unit is not TimeUnit.SECOND:
        return before // length != now // length
    # The margin keeps 0.1 of 30 epochs, 3.0000000000000004, from coming an epoch late.
    return int(before / length + 1e-9) != int(now / length + 1e-9)


def _in_the_clocks_unit(every: Time, event: Event, state: State) -> tuple[int | float, TimeUnit]:
    """Return how long an interval is in a unit that the clock counts at the event."""
    if every.unit is not TimeUnit.DURATION:
        return every.value, every.unit
    whole = state.max_duration
    if whole is None:
        raise ValueError(f"An interval of {every} needs a training with a max_duration.")
    length, unit = every.value * whole.value, whole.unit
    if unit is TimeUnit.EPOCH and event in _BATCH and state.dataloader_len:
        length, unit = length * state.dataloader_len, TimeUnit.BATCH
    _check_unit(unit, event, f"every={str(every)!r} of a training of {whole}")
    return length, unit


def _window(unit: TimeUnit, event: Event, state: State) -> tuple[int | float, int | float]:
    """Return what the clock had counted before the last batch, epoch or iteration, and what it has counted now."""
    clock, before = state.timestamp, state.previous_timestamp
    now = clock.count(unit)
    if unit in (TimeUnit.EPOCH, TimeUnit.ITERATION):
        is_new = event not in _IN_BATCH or not clock.count(TimeUnit.BATCH, in_epoch=True)
        return (now - 1 if is_new and now else now), now
    if unit is TimeUnit.BATCH and event not in _EPOCH_DONE:
        return max(now - 1, 0), now
    batches = clock.count(TimeUnit.BATCH) - before.count(TimeUnit.BATCH)
    epochs = clock.count(TimeUnit.EPOCH) - before.count(TimeUnit.EPOCH)
    if (batches, epochs) != ((0, 1) if event in _EPOCH_DONE else (1, 0)):
        raise RuntimeError(
            f"state.previous_timestamp does not say where the clock stood before {event.value!r}. "
            "Write state.previous_timestamp = state.timestamp before the clock is moved on."
        )
    if event not in _EPOCH_DONE:
        return before.count(unit), now
    in_epoch = before.epoch_wct.total_seconds() if unit is TimeUnit.SECOND else before.count(unit, in_epoch=True)
    return before.count(unit) - in_epoch, now
