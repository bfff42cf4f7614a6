"""The plan: what runs at which event, in which order and why. Made from declarations alone, before anything runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import attrs

from composer.core.algorithm import Algorithm
from composer.core.callback import Callback
from composer.core.event import Event
from composer.core.logger import LoggerDestination
from composer.core.passes import AlgorithmPass, default_passes, stage_of
from composer.core.stage import Stage

__all__ = ["AlgorithmConflictError", "Entry", "Plan", "build_plan", "explain"]

_PHASES: Mapping[str, tuple[Event, Event]] = {
    "once, before training": (Event.INIT, Event.FIT_START),
    "every iteration and epoch, at its beginning": (Event.ITERATION_START, Event.EPOCH_START),
    "every batch, before it is computed": (Event.BEFORE_DATALOADER, Event.BEFORE_TRAIN_BATCH),
    "every microbatch": (Event.BEFORE_FORWARD, Event.AFTER_BACKWARD),
    "every batch, after it was computed": (Event.AFTER_TRAIN_BATCH, Event.BATCH_CHECKPOINT),
    "every epoch and iteration, at its end": (Event.EPOCH_END, Event.ITERATION_CHECKPOINT),
    "once, after training": (Event.FIT_END, Event.FIT_END),
    "evaluation": (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_END),
    "prediction": (Event.PREDICT_START, Event.PREDICT_END),
}


class AlgorithmConflictError(ValueError):
    """Two algorithms of a run cannot work together."""


@attrs.frozen
class Entry:
    """One call at an event.

    Args:
        component: What is called.
        key: Its name in the run: the class, numbered from the second of a class on.
        kind: ``"algorithm"``, ``"callback"`` or ``"logger"``.
        stage: An algorithm's stage there; None for one that declares none.
        placed_by: The passes that moved it from its place in the user's list.
        asked: Whether it decides by its own ``match`` each time.
    """

    component: Algorithm | Callback = attrs.field(repr=False)
    key: str
    kind: str
    stage: Stage | None = None
    placed_by: tuple[str, ...] = ()
    asked: bool = False

    @property
    def reads(self) -> list[str]:
        """What it declares to read."""
        return sorted(self.component.reads) if isinstance(self.component, Algorithm) else []

    @property
    def writes(self) -> list[str]:
        """What it declares to change."""
        return sorted(self.component.writes) if isinstance(self.component, Algorithm) else []

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return {
            "name": self.key,
            "kind": self.kind,
            "stage": None if self.stage is None else self.stage.name.lower(),
            "placed_by": list(self.placed_by),
            "asked_each_time": self.asked,
            "reads": self.reads,
            "writes": self.writes,
        }

    def _columns(self) -> tuple[str, str, str]:
        if self.kind != "algorithm":
            return self.key, self.kind, ""
        stage = "no stage" if self.stage is None else self.stage.name.lower()
        notes = [f"changes {', '.join(self.writes)}"] if self.writes else []
        notes += ["decides each time whether to run"] if self.asked else []
        notes += [f"moved here by {' and '.join(self.placed_by)}"] if self.placed_by else []
        return self.key, stage, "; ".join(notes)


@attrs.frozen
class Plan:
    """What runs at which event, from first to last; prints as text, :meth:`to_dict` and :meth:`to_json` give data.

    Args:
        entries: The calls of each event that anything runs at.
        warnings: What the passes warned about.

    Example:
        >>> print(build_plan([]))
        Nothing runs at any event: there are no algorithms, callbacks or loggers.
    """

    entries: Mapping[Event, tuple[Entry, ...]]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: ``{"events": {event: [entry, …]}, "warnings": […]}``."""
        events = {event.value: [entry.to_dict() for entry in entries] for event, entries in self.entries.items()}
        return {"events": events, "warnings": list(self.warnings)}

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        if not self.entries:
            return "Nothing runs at any event: there are no algorithms, callbacks or loggers."
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "What runs when. Within an event, from top to bottom."
        everywhere = self._asked_everywhere()
        rows = [row for entries in self.entries.values() for row in map(Entry._columns, entries)]
        name_width, stage_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        events = list(Event)
        for phase, (first, last) in _PHASES.items():
            shown = [
                (event, entries)
                for event in events[events.index(first) : events.index(last) + 1]
                if (entries := [entry for entry in self.entries.get(event, ()) if entry.key not in everywhere])
            ]
            if shown:
                yield f"\n{phase.upper()}"
            for event, entries in shown:
                yield f"  {event.value}"
                for name, stage, note in map(Entry._columns, entries):
                    yield f"    {name:<{name_width}}  {stage:<{stage_width}}  {note}".rstrip()
        if everywhere:
            yield f"\nAT EVERY EVENT\n  {', '.join(sorted(everywhere))}"
        yield from (f"\nWARNING: {warning}" for warning in self.warnings)

    def _asked_everywhere(self) -> set[str]:
        keys = [{entry.key for entry in self.entries.get(event, ())} for event in Event]
        return set.intersection(*keys)


def explain(
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Callback] = (),
    algorithm_passes: Sequence[AlgorithmPass] = (),
) -> Plan:
    """Return the plan of some algorithms, without a model or data.

    Args:
        algorithms: In the order of the list that a trainer would be given.
        callbacks: The same of callbacks.
        algorithm_passes: Passes that come after the default ones.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.

    Example:
        >>> explain([]).to_dict()
        {'events': {}, 'warnings': []}
    """
    return build_plan(algorithms, callbacks, passes=[*default_passes(), *algorithm_passes])


def build_plan(
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Callback] = (),
    destinations: Sequence[LoggerDestination] = (),
    passes: Sequence[AlgorithmPass] | None = None,
) -> Plan:
    """Return the plan of algorithms, callbacks and loggers, ordered by ``passes`` (the default ones if None).

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
    """
    check_conflicts(algorithms)
    keys = _keys(chain(algorithms, callbacks, destinations))
    plan: dict[Event, tuple[Entry, ...]] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for event in Event:
            ordered = _ordered(algorithms, event, default_passes() if passes is None else passes)
            called = [_algorithm_entry(algorithm, event, placed_by, keys) for algorithm, placed_by in ordered]
            watching = [Entry(one, keys[id(one)], "callback") for one in callbacks if hook_of(one, event)]
            storing = [Entry(one, keys[id(one)], "logger") for one in destinations if hook_of(one, event)]
            # At INIT loggers open what the others may already want to write to; later they come last, to see it all.
            entries = [*storing, *called, *watching] if event is Event.INIT else [*called, *watching, *storing]
            if entries:
                plan[event] = tuple(entries)
    return Plan(plan, tuple(dict.fromkeys(str(warning.message) for warning in caught)))


def check_conflicts(algorithms: Sequence[Algorithm]) -> None:
    """Refuse two algorithms that own the same thing.

    Raises:
        AlgorithmConflictError: With both names, what both own, and the remedy.
    """
    for first, second in combinations(algorithms, 2):
        shared = sorted(first.owns & second.owns)
        if not shared:
            continue
        names = [type(first).__name__, type(second).__name__]
        who = f"Two {names[0]}" if names[0] == names[1] else " and ".join(names)
        raise AlgorithmConflictError(
            f"{who} cannot run together: each must have {' and '.join(shared)} to itself. Remove one: {first!r} or {second!r}."
        )


def overrides_match(algorithm: Algorithm) -> bool:
    """Return whether the algorithm has a ``match`` of its own."""
    return type(algorithm).match is not Algorithm.match


def hook_of(callback: Callback, event: Event) -> Callable[..., None] | None:
    """Return what a callback does at an event, as ``f(state, logger)`` or ``run_event``; None if it does nothing."""
    if type(callback).run_event is not Callback.run_event:
        return callback.run_event
    overridden = getattr(type(callback), event.value) is not getattr(Callback, event.value)
    return getattr(callback, event.value) if overridden else None


def _keys(components: Iterable[Algorithm | Callback]) -> dict[int, str]:
    counts: dict[str, int] = {}
    keys = {}
    for component in components:
        name = type(component).__name__
        place = counts[name] = counts.get(name, -1) + 1
        keys[id(component)] = f"{name}.{place}" if place else name
    return keys


def _runs_at(algorithm: Algorithm, event: Event) -> bool:
    places = algorithm.places()
    return event in places or (not places and overrides_match(algorithm))


def _ordered(
    algorithms: Sequence[Algorithm], event: Event, passes: Sequence[AlgorithmPass]
) -> list[tuple[Algorithm, tuple[str, ...]]]:
    """Return the event's algorithms in order, each with the passes that moved it."""
    current = [algorithm for algorithm in algorithms if _runs_at(algorithm, event)]
    moved_by: dict[int, list[str]] = {id(algorithm): [] for algorithm in current}
    for one_pass in passes:
        if not current:
            break
        returned = one_pass(tuple(current), event)
        if returned is None:
            raise TypeError(
                f"The pass {_name(one_pass)} returned None at {event.value!r}; it must return the algorithms."
            )
        before, current = current, list(returned)
        for place, algorithm in enumerate(current):
            moved_by.setdefault(id(algorithm), [])
            if place >= len(before) or before[place] is not algorithm:
                moved_by[id(algorithm)].append(_name(one_pass))
    return [(algorithm, tuple(moved_by[id(algorithm)])) for algorithm in current]


def _name(one_pass: AlgorithmPass) -> str:
    return getattr(one_pass, "__name__", repr(one_pass))


def _algorithm_entry(algorithm: Algorithm, event: Event, placed_by: tuple[str, ...], keys: Mapping[int, str]) -> Entry:
    declared = algorithm.places()
    return Entry(
        algorithm,
        keys.get(id(algorithm), type(algorithm).__name__),
        "algorithm",
        stage=stage_of(algorithm, event) if event in declared else None,
        placed_by=placed_by,
        asked=overrides_match(algorithm),
    )
