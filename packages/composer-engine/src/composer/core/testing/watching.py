"""Watching one algorithm in a training: where it runs, what it looks at and changes, what it draws."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch

from composer.core.engine import Engine
from composer.core.event import MODEL_EVENTS, Event
from composer.core.testing.effects import Effects, observe
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.core.algorithm import Algorithm
    from composer.core.logger import Logger
    from composer.core.plan import Entry
    from composer.core.state import State
    from composer.core.testing.effects import RecordingState

__all__ = ["Watch"]

Moment: TypeAlias = tuple[int, Event]
"""The number of the batch, and the event."""


@attrs.define
class Watch:
    """What an algorithm does in a training; :meth:`make_engine` makes the engine that takes it down.

    Args:
        algorithm: Who is watched.
        effects: What it looked at and changed, by event.
        ran: Where it ran.
        draws: For each moment the seed of its own generator, and the generator's state after what was drawn.
        strangers: Whose generators it drew from instead of its own, and the global ones.

    Example:
        >>> from composer.core import Algorithm, Stage, State
        >>> class Halve(Algorithm):
        ...     runs_at = {Event.AFTER_LOSS: Stage.LOSS}
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
        >>> watch, state = Watch(Halve()), State(model=None)
        >>> state.loss = torch.tensor(4.0)
        >>> watch.make_engine(state, algorithms=[watch.algorithm]).run_event("after_loss")
        >>> watch.effects[Event.AFTER_LOSS]
        Effects(reads={'loss'}, writes={'loss'})
    """

    algorithm: Algorithm
    effects: dict[Event, Effects] = attrs.field(factory=dict, init=False)
    ran: list[Moment] = attrs.field(factory=list, init=False)
    draws: dict[Moment, list[tuple[int, tuple[int, ...]]]] = attrs.field(factory=dict, init=False)
    strangers: list[str] = attrs.field(factory=list, init=False)

    def make_engine(self, state: State, **options: Any) -> Engine:
        """Return an engine that lets the algorithm see a view of the state."""
        return _WatchingEngine(self, state, **options)

    def total(self) -> Effects:
        """Return what it looked at and changed at all events together."""
        total = Effects()
        for effects in self.effects.values():
            total |= effects
        return total

    def run(self, event: Event, asked: bool, state: State, logger: Logger) -> None:
        """Let the algorithm run at an event, and take down what it does."""
        moment = (int(state.timestamp.count(TimeUnit.BATCH)), event)

        def act(view: RecordingState) -> None:
            seen: Any = view
            if asked and not self.algorithm.match(event, seen):
                return
            self.ran.append(moment)
            returned: object = self.algorithm.apply(event, seen, logger)
            assert returned is None or isinstance(returned, int), (
                f"{type(self.algorithm).__name__}.apply returned {returned!r} at {event.value!r}; "
                "it may return nothing, or a whole number that traces keep."
            )
            self._take_draws(moment, view)

        before = _global_generators()
        effects = self.effects.setdefault(event, Effects())
        effects |= observe(state, self.algorithm, act)
        # New layers draw their first weights from torch's global generator, as all of torch's layers do.
        if event not in MODEL_EVENTS:
            self.strangers += [name for name, one in _global_generators().items() if one != before[name]]

    def _take_draws(self, moment: Moment, view: RecordingState) -> None:
        taken = []
        for owner, generator in view.generators:
            if owner is not self.algorithm:
                self.strangers.append(f"state.generator({owner!r})")
            taken.append((generator.initial_seed(), _numbers(generator.get_state())))
        if taken:
            self.draws.setdefault(moment, []).extend(taken)


class _WatchingEngine(Engine):
    """An engine that lets one algorithm run under a watch."""

    def __init__(self, watch: Watch, state: State, **options: Any) -> None:
        self._watch = watch
        super().__init__(state, **options)

    def _call(self, event: Event, order: int, entry: Entry) -> Callable[[], object]:
        if entry.component is self._watch.algorithm:
            return lambda: self._watch.run(event, entry.asked, self.state, self.logger)
        return super()._call(event, order, entry)


def _global_generators() -> dict[str, Any]:
    """Return the states of the generators that belong to nobody, by what draws from them."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"torch": _numbers(torch.get_rng_state()), "random": random.getstate()}
    if numpy:
        kind, keys, place, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), place, *rest)
    return states


def _numbers(state: torch.Tensor) -> tuple[int, ...]:
    # Bytes that can be compared, without NumPy; eight of them at a time, as each is read by itself.
    return tuple(state.view(torch.int64).tolist())
