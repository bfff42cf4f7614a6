"""Whether the loop runs the events that algorithms need, and the optimizers that they have prepared."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, TypeAlias

from torch.optim.optimizer import register_optimizer_step_post_hook

from composer.core.event import MODEL_EVENTS, PLACES, STEP_EVENTS, Event
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from composer.core.plan import Entry
    from composer.core.state import State

__all__ = ["LoopCheck"]

_TRAINING = frozenset({Event.ITERATION_START, Event.EPOCH_START, *STEP_EVENTS})
_AFTER_A_STEP = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.FIT_END})
_BEFORE_TRAINING = [event for event in Event if event in MODEL_EVENTS]

_Entries: TypeAlias = "Mapping[Event, Sequence[Entry]]"
_Missed: TypeAlias = tuple[Event, list[str], str]
"""An event, who has missed it, and how the sentence about them goes on."""


class LoopCheck:
    """Warns, once for each, of algorithms whose events the loop does not run, and of optimizers that it passes over.

    The engine calls :meth:`notice` when an event runs for the first time since the plan was made: what the loop runs
    is known from that alone, and no event pays for it later. Optimizers are watched until the first ``batch_end``
    after one has stepped.

    Args:
        state: Whose clock says whether an epoch has passed, and whose optimizers should step.
        on_step: Called when an optimizer has stepped that is watched: :meth:`notice` wants to see the next
            ``batch_end``, also if it is not the first one.

    Example:
        >>> from composer.core import State
        >>> LoopCheck(State(model=None)).has_batches
        False
    """

    def __init__(self, state: State, on_step: Callable[[], object] = lambda: None) -> None:
        self._state = state
        self._steps = _Steps(state, on_step)
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
        if event in _TRAINING:
            self._steps.begin()
        if event in _AFTER_A_STEP:
            for text in self._steps.passed_over():
                warnings.warn(text, UserWarning, stacklevel=4)

    def close(self) -> None:
        """Watch no longer."""
        self._steps.end()

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


class _Steps:
    """Which optimizers step: those of the state, or others that train the same parameters in their place.

    An optimizer that has not stepped may be right, as gradients are accumulated over several batches or were infinite.
    It is wrong if another one, such as that which it wraps, has stepped instead.
    """

    def __init__(self, state: State, on_step: Callable[[], object]) -> None:
        self._state, self._on_step = state, on_step
        self._own: list[Optimizer] = []
        self._others: list[Optimizer] = []
        self._has_begun = False
        self.end: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """Watch, once, all optimizers of the process, as nobody knows which the loop has at hand."""
        if self._has_begun:
            return
        self._has_begun = True
        watching = weakref.ref(self)  # torch's list of hooks must not keep the state alive

        def hook(optimizer: Optimizer, *_: object) -> None:
            steps = watching()
            if steps is not None:
                steps.note(optimizer)

        self.end = weakref.finalize(self, register_optimizer_step_post_hook(hook).remove)

    def note(self, optimizer: Optimizer) -> None:
        """Remember that an optimizer has stepped, if it has to do with those of the state."""
        is_own = _is_in(optimizer, self._state.optimizers)
        noted = self._own if is_own else self._others
        if not _is_in(optimizer, noted) and (is_own or any(_shares(optimizer, one) for one in self._state.optimizers)):
            noted.append(optimizer)
            self._on_step()

    def passed_over(self) -> Iterator[str]:
        """Yield a sentence for each optimizer of the state in whose place another one has stepped."""
        if not self._own and not self._others:
            return
        self.end()
        for optimizer in self._state.optimizers:
            # A class that never called Optimizer.__init__ steps unseen.
            is_seen = getattr(type(optimizer).step, "hooked", False)
            instead = [one for one in self._others if _shares(one, optimizer)]
            if is_seen and instead and not _is_in(optimizer, self._own):
                yield (
                    f"{type(optimizer).__name__} is in state.optimizers and has not stepped, but "
                    f"{type(instead[0]).__name__}, which is not, has stepped with its parameters. Algorithms may "
                    "replace the optimizers before training: take them from state.optimizers after the events 'init' "
                    "to 'fit_start'."
                )
        self._own, self._others = [], []


def _is_in(optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> bool:
    return any(optimizer is one for one in optimizers)


def _shares(one: Optimizer, other: Optimizer) -> bool:
    held = {id(parameter) for group in one.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for group in other.param_groups for parameter in group["params"])


def _needing(event: Event, entries: _Entries) -> Sequence[Entry]:
    """Return the algorithms that declare the event; what has no stage is asked everywhere by ``match``, or watches."""
    return [entry for entry in entries.get(event, ()) if entry.stage is not None]


def _names(keys: Sequence[str]) -> str:
    shown = list(keys) if len(keys) <= 3 else [*keys[:3], f"{len(keys) - 3} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
