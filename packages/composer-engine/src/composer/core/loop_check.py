"""A check of loops that run events themselves: whether they run those that algorithms need, and step the optimizers."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook

from composer.core.event import MODEL_EVENTS, STEP_EVENTS, Event
from composer.core.optimizers import held_parameters
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from composer.core.plan import Entry
    from composer.core.state import State

__all__ = ["LoopCheck"]

_TRAINING = frozenset({Event.ITERATION_START, Event.EPOCH_START, *STEP_EVENTS})
# Before_dataloader also runs where the loader then turns out to have no further batch.
_WITH_A_BATCH = frozenset(STEP_EVENTS) - {Event.BEFORE_DATALOADER}
_AFTER_A_STEP = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.FIT_END})


class LoopCheck:
    """Warns once about each algorithm whose events the loop does not run, and about optimizers that do not step.

    The engine calls :meth:`notice` when an event runs for the first time since the plan was made; later runs cost
    nothing. The steps of optimizers are observed until the first ``batch_end`` after one of them.

    Args:
        state: The state with the clock and the optimizers.
        on_step: Called after the step of an observed optimizer; :meth:`notice` must be called at the next
            ``batch_end``, also if it is not the first one.

    Example:
        >>> from composer.core import State
        >>> LoopCheck(State(model=None)).has_batches
        False
    """

    def __init__(self, state: State, on_step: Callable[[], object] = lambda: None) -> None:
        self._state = state
        self._optimizers = _OptimizerWatch(state, on_step)
        self._ran: set[Event] = set()
        self._prepared: dict[Event, list[object]] = {event: [] for event in Event if event in MODEL_EVENTS}
        self._reported: set[tuple[str, Event]] = set()
        self._first_epoch: int | None = None

    @property
    def has_batches(self) -> bool:
        """Whether any event of a batch has run."""
        return not self._ran.isdisjoint(_WITH_A_BATCH)

    def notice(self, event: Event, entries: Mapping[Event, Sequence[Entry]]) -> None:
        """Record that an event runs, and warn about events that should have run before."""
        self._ran.add(event)
        if event in self._prepared:
            self._prepared[event] += [entry.component for entry in entries.get(event, ())]
        for missed, keys, text in self._missed(event, entries):
            new = [key for key in keys if (key, missed) not in self._reported]
            self._reported.update((key, missed) for key in new)
            if new:
                shown = new if len(new) <= 3 else [*new[:3], f"{len(new) - 3} more"]
                names = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
                who = f"{names} {'runs' if len(new) == 1 else 'run'}"
                warnings.warn(f"{who} at {missed.value!r}, but {text}", stacklevel=4)
        if event in _TRAINING:
            self._optimizers.begin()
        if event in _AFTER_A_STEP:
            for text in self._optimizers.passed_over():
                warnings.warn(text, stacklevel=4)

    def close(self) -> None:
        """Stop observing optimizers."""
        self._optimizers.end()

    def _missed(self, event: Event, entries: Mapping[Event, Sequence[Entry]]) -> Iterator[tuple[Event, list[str], str]]:
        """Yield events, the keys of the algorithms that missed them, and the rest of the sentence about these."""
        expected: Iterable[Event] = ()
        if event in _TRAINING:
            if self._first_epoch is None:
                self._first_epoch = self._epoch()
                if self._state.timestamp.count(TimeUnit.BATCH, in_epoch=True):
                    self._ran.add(Event.EPOCH_START)  # before the run was stopped that is resumed within the epoch
            expected, what = self._prepared, "training begins"
        elif event is Event.EPOCH_END and self.has_batches:
            expected, what = [Event.EPOCH_START, *STEP_EVENTS], "a whole epoch passed"
        elif event is Event.FIT_END and self.has_batches:
            epochs = [Event.EPOCH_START, Event.EPOCH_END] if self._epoch() > (self._first_epoch or 0) else []
            expected, what = [*STEP_EVENTS, *epochs], "the training ended"
        for missed in expected:
            # Components without a stage are called everywhere by ``match``, or only observe.
            needing = [entry for entry in entries.get(missed, ()) if entry.stage is not None]
            if missed not in self._ran:
                remedy = f'Add engine.run_event("{missed.value}") to the loop: {missed.place}.'
                text = f"{what} without that event, so nothing is done there. {remedy}"
                yield missed, [entry.key for entry in needing], text
            elif missed in self._prepared:
                # Algorithms that were rebuilt from a checkpoint have run when it was loaded.
                ran = {id(component) for component in (*self._prepared[missed], *self._state.made_on_load)}
                late = [entry.key for entry in needing if id(entry.component) not in ran]
                yield missed, late, "was added after it. Pass algorithms to the engine or trainer at construction."

    def _epoch(self) -> int:
        return int(self._state.timestamp.count(TimeUnit.EPOCH))


# Weak, so that an engine that is never closed is still freed.
_observers: weakref.WeakSet[_OptimizerWatch] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
"""The hook of torch's optimizers that reports to the observers, if there are any."""


def _note_step(optimizer: Optimizer, *_: object) -> None:
    for watch in list(_observers):
        watch.note(optimizer)


class _OptimizerWatch:
    """Records which optimizers step: those of the state, or others with the same parameters.

    An optimizer that has not stepped may be correct: gradients are accumulated over several batches, or were infinite.
    It is an error if another optimizer, such as the one that it wraps, has stepped instead.
    """

    def __init__(self, state: State, on_step: Callable[[], object]) -> None:
        self._state, self._on_step = state, on_step
        self._own: list[Optimizer] = []
        self._others: list[Optimizer] = []
        self._has_begun = False

    def begin(self) -> None:
        """Observe all optimizers of the process, as the loop may step any of them."""
        if not self._has_begun:
            self._has_begun = True
            _observers.add(self)
            if not _handles:
                _handles.append(register_optimizer_step_post_hook(_note_step))

    def end(self) -> None:
        """Stop observing optimizers; not to be called by a step of one, which iterates over its hooks."""
        _observers.discard(self)
        if not _observers and _handles:
            _handles.pop().remove()

    def note(self, optimizer: Optimizer) -> None:
        """Record the step of an optimizer, if it is in the state or shares parameters with one that is."""
        is_own = _is_in(optimizer, self._state.optimizers)
        noted = self._own if is_own else self._others
        if not _is_in(optimizer, noted) and (is_own or any(_shares(optimizer, one) for one in self._state.optimizers)):
            noted.append(optimizer)
            self._on_step()

    def passed_over(self) -> Iterator[str]:
        """Yield a sentence for each optimizer of the state instead of which another one has stepped."""
        if not self._own and not self._others:
            return
        self.end()
        for optimizer in self._state.optimizers:
            # The steps of a class that does not call Optimizer.__init__ run no hooks.
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
    parameters = {id(parameter) for parameter in held_parameters(one.param_groups)}
    return any(id(parameter) in parameters for parameter in held_parameters(other.param_groups))
