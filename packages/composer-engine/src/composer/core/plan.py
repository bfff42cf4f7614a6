"""The plan: what runs at which event, in which order and why. Made from declarations alone, before anything runs."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.algorithm import Algorithm
from composer.core.callback import Callback, hook_of, intervals_of, overrides
from composer.core.conflicts import AlgorithmConflictError, check_conflicts
from composer.core.event import CLOSING_EVENTS, Event
from composer.core.fields import ServedFields, fields_at
from composer.core.passes import apply_passes, default_passes, stage_of
from composer.core.plan_mermaid import mermaid_lines
from composer.core.plan_text import plan_lines
from composer.core.stage import Stage
from composer.core.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from composer.core.logger import LoggerDestination
    from composer.core.passes import AlgorithmPass
    from composer.core.time import Time

__all__ = ["AlgorithmConflictError", "Declaration", "Entry", "LeftOut", "Plan", "build_plan", "explain"]

_MARKUP = re.compile(r"(?::\w+:)?`+~?([^`]*)`+")
_EVENTS = frozenset(Event)


@attrs.frozen
class Entry:
    """One call at an event.

    Args:
        component: What is called.
        key: Its name in the run: the class, or a subscribed function's name, numbered from the second of a name on.
        kind: ``"algorithm"``, ``"callback"``, ``"subscription"`` or ``"logger"``.
        stage: An algorithm's stage there; None for one that declares none.
        placed_by: The user's passes that moved it from where its stage and the list had put it.
        asked: Whether it decides by its own ``match`` each time.
        why: Why it comes where it comes, in a few words; empty where there is nothing to say.
        every: How often it is called there; None is each time.
        reads, writes: The fields of the state that an algorithm declares to read and to write there.
        call: What it does there, ``f(state, logger)``.
    """

    component: Algorithm | Callback | Subscription = attrs.field(repr=False)
    key: str
    kind: str
    call: Callable[..., object] = attrs.field(repr=False, eq=False)
    stage: Stage | None = None
    placed_by: tuple[str, ...] = ()
    asked: bool = False
    why: str = ""
    every: Time | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """An algorithm's stage, or what else it is."""
        if self.kind != "algorithm":
            return self.kind
        return "no stage" if self.stage is None else self.stage.name.lower()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return {
            "name": self.key,
            "kind": self.kind,
            "stage": None if self.stage is None else self.what,
            "placed_by": list(self.placed_by),
            "asked_each_time": self.asked,
            "why": self.why,
            "every": None if self.every is None else str(self.every),
            "reads": list(self.reads),
            "writes": list(self.writes),
        }


@attrs.frozen
class Declaration:
    """What an algorithm of the plan says of itself.

    Args:
        name: Its name in the run.
        summary: The first sentence of its class's docstring.
        reads: What it looks at.
        writes: What it changes.
        owns: What no other may own.
    """

    name: str
    summary: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    owns: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the declaration as plain data."""
        return {
            "name": self.name,
            "summary": self.summary,
            "reads": list(self.reads),
            "writes": list(self.writes),
            "owns": list(self.owns),
        }


@attrs.frozen
class LeftOut:
    """An algorithm that a pass took out of an event.

    Args:
        name: The algorithm's name in the run.
        event: Where it would have run.
        by: The pass.
    """

    name: str
    event: Event
    by: str

    def to_dict(self) -> dict[str, str]:
        """Return it as plain data."""
        return {"name": self.name, "event": self.event.value, "by": self.by}


@attrs.frozen
class Plan:
    """What runs at which event, from first to last.

    It prints as text; :meth:`to_dict` and :meth:`to_json` give data, :meth:`to_mermaid` a drawing.

    Args:
        entries: The calls of each event that anything runs at.
        algorithms: What the algorithms declare, in the order of the list.
        left_out: What passes took out.
        warnings: What the passes warned about, and algorithms that run nowhere.

    Example:
        >>> print(build_plan([]))
        Nothing runs at any event: there are no algorithms, callbacks or loggers that do anything.
    """

    entries: Mapping[Event, tuple[Entry, ...]]
    algorithms: tuple[Declaration, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()

    def keys_everywhere(self) -> list[str]:
        """Return who runs, or is asked, each time at every event and was moved at none, in the order of the plan."""
        moved = {entry.key for entry in chain.from_iterable(self.entries.values()) if entry.placed_by or entry.every}
        common = set.intersection(*({entry.key for entry in self.entries.get(event, ())} for event in Event))
        return [entry.key for entry in self.entries.get(Event.INIT, ()) if entry.key in common - moved]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, with the keys ``algorithms``, ``events``, ``left_out`` and ``warnings``."""
        return {
            "algorithms": [declaration.to_dict() for declaration in self.algorithms],
            "events": {event.value: [entry.to_dict() for entry in entries] for event, entries in self.entries.items()},
            "left_out": [one.to_dict() for one in self.left_out],
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_mermaid(self) -> str:
        """Return a drawing of the loop with everything at its place, in the language of Mermaid, for documents."""
        return "\n".join(mermaid_lines(self))

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


def explain(
    algorithms: Algorithm | Sequence[Algorithm],
    callbacks: Callback | Sequence[Callback] = (),
    algorithm_passes: Sequence[AlgorithmPass] = (),
) -> Plan:
    """Return the plan of some algorithms, without a model or data.

    Args:
        algorithms: One or several, in the order of the list that a trainer would be given.
        callbacks: The same of callbacks.
        algorithm_passes: Passes that come after the default ones.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.

    Example:
        >>> explain([]).to_dict()
        {'algorithms': [], 'events': {}, 'left_out': [], 'warnings': []}
    """
    return build_plan(
        [algorithms] if isinstance(algorithms, Algorithm) else algorithms,
        [callbacks] if isinstance(callbacks, Callback) else callbacks,
        passes=[*default_passes(), *algorithm_passes],
    )


def build_plan(
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Callback] = (),
    destinations: Sequence[LoggerDestination] = (),
    passes: Sequence[AlgorithmPass] | None = None,
    subscriptions: Sequence[Subscription] = (),
    serves: ServedFields | None = None,
) -> Plan:
    """Return the plan of all that may be called, ordered by ``passes`` (the default ones if None).

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        TypeError: An algorithm's declarations or a callback's intervals are not what they must be, or a pass returns
            nothing.
        ValueError: One object is given twice, a pass returns what it was not given, an interval is never due, or an
            algorithm needs more than the host ``serves``.
    """
    passes = default_passes() if passes is None else passes
    _check(algorithms, callbacks, destinations)
    keys = component_keys(chain(algorithms, callbacks, destinations, subscriptions))
    intervals = {id(one): intervals_of(one) for one in chain(callbacks, destinations)}
    plan: dict[Event, tuple[Entry, ...]] = {}
    left_out: list[LeftOut] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for event in Event:
            ordered = apply_passes([one for one in algorithms if _runs_at(one, event)], event, passes)
            called = [
                _algorithm_entry(algorithm, event, placed_by, keys)
                for algorithm, placed_by in zip(ordered.algorithms, ordered.placed_by, strict=True)
            ]
            watching = _hook_entries(callbacks, event, "callback", keys, intervals)
            watching += _subscribed_entries(subscriptions, event, keys)
            storing = _hook_entries(destinations, event, "logger", keys, intervals)
            # At INIT loggers open what the others may already want to write to; later they come last, to see it all.
            entries = [*storing, *called, *watching] if event is Event.INIT else [*called, *watching, *storing]
            left_out += [LeftOut(keys[id(algorithm)], event, by) for algorithm, by in ordered.left_out]
            if entries:
                plan[event] = _with_reasons(entries, event, {key: place for place, key in enumerate(keys.values())})
    if serves is not None:
        serves.check(plan)
    texts = [*map(_runs_nowhere, _idle(algorithms)), *(str(warning.message) for warning in caught)]
    declarations = tuple(_declaration(algorithm, keys[id(algorithm)]) for algorithm in algorithms)
    return Plan(plan, declarations, tuple(left_out), tuple(dict.fromkeys(texts)))


def component_keys(components: Iterable[object]) -> dict[int, str]:
    """Return a name for each component, by its ``id``: its class or function, numbered from the second of a name on.

    Example:
        >>> list(component_keys([1.5, 2, 2.5]).values())
        ['float', 'int', 'float.1']
    """
    counts: dict[str, int] = {}
    keys = {}
    for component in components:
        name = component.name if isinstance(component, Subscription) else type(component).__name__
        place = counts[name] = counts.get(name, -1) + 1
        keys[id(component)] = f"{name}.{place}" if place else name
    return keys


def overrides_match(algorithm: Algorithm) -> bool:
    """Return whether the algorithm has a ``match`` of its own."""
    return overrides(algorithm, Algorithm, "match")


def _check(*lists: Sequence[Algorithm | Callback]) -> None:
    seen: set[int] = set()
    for component in chain(*lists):
        if id(component) in seen:
            raise ValueError(
                f"{component!r} is given twice; give it once, or make a second {type(component).__name__}."
            )
        seen.add(id(component))
    algorithms = [one for one in lists[0] if isinstance(one, Algorithm)]
    for algorithm in algorithms:
        _check_places(algorithm)
        _check_words(algorithm)
    check_conflicts(algorithms)


def _check_places(algorithm: Algorithm) -> None:
    name, places = type(algorithm).__name__, algorithm.runs_at_events()
    if not hasattr(places, "items"):
        raise TypeError(f"{name}.runs_at must map events to stages, {{Event.AFTER_LOSS: Stage.LOSS}}, got {places!r}.")
    for event, stage in places.items():
        if event not in _EVENTS or not isinstance(stage, Stage):
            raise TypeError(f"{name}.runs_at must map events to stages, got {event!r}: {stage!r}.")


def _check_words(algorithm: Algorithm) -> None:
    for declared in ("reads", "writes", "owns"):
        words = getattr(algorithm, declared)
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise TypeError(
                f'{type(algorithm).__name__}.{declared} must be a set of words, {{"loss", "model"}}, got {words!r}.'
            )


def _runs_at(algorithm: Algorithm, event: Event) -> bool:
    places = algorithm.runs_at_events()
    return event in places or (not places and overrides_match(algorithm))


def _idle(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    return [one for one in algorithms if not one.runs_at_events() and not overrides_match(one)]


def _runs_nowhere(algorithm: Algorithm) -> str:
    return (
        f"{type(algorithm).__name__} runs at no event: say where by runs_at = {{Event.AFTER_LOSS: Stage.LOSS}}, "
        "or override match(event, state)."
    )


def _declaration(algorithm: Algorithm, key: str) -> Declaration:
    paragraph = (type(algorithm).__doc__ or "").strip().split("\n\n")[0]
    summary = _MARKUP.sub(r"\1", " ".join(paragraph.split()))
    reads, writes, owns = (
        tuple(sorted(map(str, words))) for words in (algorithm.reads, algorithm.writes, algorithm.owns)
    )
    return Declaration(key, summary, reads, writes, owns)


def _algorithm_entry(algorithm: Algorithm, event: Event, placed_by: tuple[str, ...], keys: Mapping[int, str]) -> Entry:
    return Entry(
        algorithm,
        keys[id(algorithm)],
        "algorithm",
        partial(algorithm.apply, event),
        stage=stage_of(algorithm, event) if event in algorithm.runs_at_events() else None,
        placed_by=placed_by,
        asked=overrides_match(algorithm),
        reads=tuple(sorted(fields_at(algorithm.reads, event))),
        writes=tuple(sorted(fields_at(algorithm.writes, event))),
    )


def _hook_entries(
    callbacks: Sequence[Callback],
    event: Event,
    kind: str,
    keys: Mapping[int, str],
    intervals: Mapping[int, Mapping[Event, Time]],
) -> list[Entry]:
    return [
        Entry(callback, keys[id(callback)], kind, hook, every=intervals[id(callback)].get(event))
        for callback in callbacks
        if (hook := hook_of(callback, event)) is not None
    ]


def _subscribed_entries(subscriptions: Sequence[Subscription], event: Event, keys: Mapping[int, str]) -> list[Entry]:
    return [
        Entry(one, keys[id(one)], "subscription", one.function, every=one.every)
        for one in subscriptions
        if one.event is event
    ]


def _with_reasons(entries: Sequence[Entry], event: Event, listed: Mapping[str, int]) -> tuple[Entry, ...]:
    """Return the entries, each with the reason why it does not come before the one above it."""
    before: list[Entry | None] = [None, *entries[:-1]]
    return tuple(
        attrs.evolve(entry, why=_reason(entry, previous, event, listed))
        for entry, previous in zip(entries, before, strict=True)
    )


def _reason(entry: Entry, previous: Entry | None, event: Event, listed: Mapping[str, int]) -> str:
    if entry.placed_by:
        return f"moved by {' and '.join(entry.placed_by)}"
    if previous is None:
        return ""
    if entry.kind != previous.kind:
        return "loggers open first" if previous.kind == "logger" else f"{entry.kind}s come after {previous.kind}s"
    own, other = (_stage(one, event) for one in (entry, previous))
    if own is not other:
        return _reason_of_stages(entry, previous, event)
    if listed[previous.key] < listed[entry.key]:
        return "as listed"
    return "listed first, so last out" if event.is_after_event else ""


def _reason_of_stages(entry: Entry, previous: Entry, event: Event) -> str:
    own, other = (_stage(one, event) for one in (entry, previous))
    names = ("what has no stage" if one.stage is None else one.what for one in (entry, previous))
    order = " comes after ".join(names)
    if event in CLOSING_EVENTS:
        return f"undone in reverse: {order}" if own < other else ""
    return order if own > other else ""  # against the rule a pass has moved the one above, whose own reason says so


def _stage(entry: Entry, event: Event) -> Stage:
    return stage_of(entry.component, event) if isinstance(entry.component, Algorithm) else Stage.UNDECLARED
