"""Whether the loop runs the events that algorithms need."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeAlias

from composer.core.event import MODEL_EVENTS, PLACES, STEP_EVENTS, Event
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from composer.core.plan import Entry
    from composer.core.state import State

__all__ = ["LoopCheck"]

_TRAINING = frozenset({Event.ITERATION_START, Event.EPOCH_START, *STEP_EVENTS})
_BEFORE_TRAINING = [event for event in Event if event in MODEL_EVENTS]

_Entries: TypeAlias = "Mapping[Event, Sequence[Entry]]"
_Missed: TypeAlias = tuple[Event, list[str], str]
"""An event, who has missed it, and how the sentence about them goes on."""


class LoopCheck:
    """Warns, once for each, of algorithms whose events the loop does not run.

    The engine calls :meth:`notice` when an event runs for the first time since the plan was made: what the loop runs
    is known from that alone, and no event pays for it later.

    Args:
        state: Whose clock says whether an epoch has passed.

    Example:
        >>> from composer.core import State
        >>> LoopCheck(State(model=None)).has_batches
        False
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._ran: set[Event] = set()
        self._prepared: dict[Event, list[object]] = {event: [] for event in _BEFORE_TRAINING}
        self._told: set[tuple[str, Event]] = set()
        self._first_epoch: int | None = None

    @property
    def has_batches(self) -> bool:
        """Whether any event of a batch has run."""
        return not self._ran.isdisjoint(STEP_EVENTS)

    def notice(self, event: Event, entries: _Entries) -> None:
        """Take down that an event runs now, and warn of what should have run before."""
        self._ran.add(event)
        if event in self._prepared:
            self._prepared[event] += [entry.component for entry in entries.get(event, ())]
        for missed, keys, text in self._missed(event, entries):
            untold = [key for key in keys if (key, missed) not in self._told]
            self._told.update((key, missed) for key in untold)
            if untold:
                who = f"{_names(untold)} {'runs' if len(untold) == 1 else 'run'}"
                warnings.warn(f"{who} at {missed.value!r}, but {text}", UserWarning, stacklevel=4)

    def _missed(self, event: Event, entries: _Entries) -> Iterator[_Missed]:
        if event in _TRAINING:
            if self._first_epoch is None:
                self._first_epoch = self._epoch()
            yield from self._never_ran(_BEFORE_TRAINING, entries, "training begins")
            yield from self._too_late(entries)
        elif event is Event.EPOCH_END and self.has_batches:
            yield from self._never_ran([Event.EPOCH_START, *STEP_EVENTS], entries, "a whole epoch passed")
        elif event is Event.FIT_END and self.has_batches:
            epochs = [Event.EPOCH_START, Event.EPOCH_END] if self._epoch() > (self._first_epoch or 0) else []
            yield from self._never_ran([*STEP_EVENTS, *epochs], entries, "the training ended")

    def _too_late(self, entries: _Entries) -> Iterator[_Missed]:
        for event, components in self._prepared.items():
            if event in self._ran:
                # What loading made again was applied by it.
                ran = [*components, *self._state.made_on_load]
                late = [one.key for one in _needing(event, entries) if not any(one.component is each for each in ran)]
                yield (
                    event,
                    late,
                    "only came when that was over. Give algorithms to the engine or trainer as it is made.",
                )

    def _never_ran(self, events: Iterable[Event], entries: _Entries, what: str) -> Iterator[_Missed]:
        for event in events:
            if event not in self._ran:
                keys = [entry.key for entry in _needing(event, entries)]
                remedy = f'Add engine.run_event("{event.value}") to the loop: {PLACES[event]}.'
                yield event, keys, f"{what} without that event, so nothing is done there. {remedy}"

    def _epoch(self) -> int:
        return int(self._state.timestamp.count(TimeUnit.EPOCH))


def _needing(event: Event, entries: _Entries) -> Sequence[Entry]:
    """Return the algorithms that declare the event; what has no stage is asked everywhere by ``match``, or watches."""
    return [entry for entry in entries.get(event, ()) if entry.stage is not None]


def _names(keys: Sequence[str]) -> str:
    shown = list(keys) if len(keys) <= 3 else [*keys[:3], f"{len(keys) - 3} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
