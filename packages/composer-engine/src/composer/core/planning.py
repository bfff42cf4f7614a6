"""How a plan is built from declarations, before anything runs."""

from __future__ import annotations

import re
import warnings
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import attrs

from composer.core.base import Algorithm, Callback, hook_of, intervals_of, overrides
from composer.core.declarations import ALWAYS_SERVED, OPTIONAL_EVENTS, ServedFields, check_conflicts, fields_at
from composer.core.event import CLOSING_EVENTS, Event, Stage
from composer.core.logger import LoggerDestination
from composer.core.passes import apply_passes, default_passes, stage_of
from composer.core.plan import Declaration, Entry, Plan, Subscription
from composer.core.saving.components import by_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from composer.core.passes import AlgorithmPass

_MARKUP = re.compile(r"(?::\w+:)?`+~?([^`]*)`+")
_EVENTS = frozenset(Event)


def explain(
    algorithms: Algorithm | Sequence[Algorithm],
    callbacks: Callback | Sequence[Callback] = (),
    algorithm_passes: Sequence[AlgorithmPass] = (),
    *,
    verbose: bool = False,
) -> Plan:
    """Return the plan of algorithms and callbacks, without a model or data.

    Args:
        algorithms: One or several, in the order in which they are passed to a trainer.
        callbacks: One or several.
        algorithm_passes: Passes to apply after the default ones.
        verbose: Whether the printed plan shows the events of callbacks, too.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.

    Example:
        >>> explain([]).to_dict()
        {'algorithms': [], 'events': {}, 'warnings': []}
    """
    plan = build_plan(
        [algorithms] if isinstance(algorithms, Algorithm) else algorithms,
        [callbacks] if isinstance(callbacks, Callback) else callbacks,
        passes=[*default_passes(), *algorithm_passes],
    )
    return attrs.evolve(plan, verbose=verbose)


def build_plan(
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Callback] = (),
    destinations: Sequence[LoggerDestination] = (),
    passes: Sequence[AlgorithmPass] | None = None,
    subscriptions: Sequence[Subscription] = (),
    serves: ServedFields | None = None,
) -> Plan:
    """Return the plan of all components, ordered by ``passes`` (the default ones if None).

    Loggers among the callbacks are called where the other loggers are.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        TypeError: A declaration of an algorithm or the intervals of a callback are of the wrong type, or a pass returns
            nothing.
        ValueError: One object is given twice, a pass returns other algorithms, an interval is never due, or an
            algorithm needs more than the host ``serves``.
    """
    passes = default_passes() if passes is None else passes
    _check(algorithms, callbacks, destinations)
    keys = component_keys(chain(algorithms, callbacks, destinations, subscriptions))
    listed = {key: place for place, key in enumerate(keys.values())}
    intervals = {id(callback): intervals_of(callback) for callback in chain(callbacks, destinations)}

    def hooks(callbacks: Sequence[Callback], event: Event, kind: str) -> list[Entry]:
        return [
            Entry(callback, keys[id(callback)], kind, hook, every=intervals[id(callback)].get(event))
            for callback in callbacks
            if (hook := hook_of(callback, event)) is not None
        ]

    destinations = [*(one for one in callbacks if isinstance(one, LoggerDestination)), *destinations]
    callbacks = [one for one in callbacks if not isinstance(one, LoggerDestination)]
    plan: dict[Event, tuple[Entry, ...]] = {}
    # Passes run once for each event. Their warnings become a part of the plan, each of them once.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of what the garbage collector finds in the meantime
        for event in Event:
            own = [one for one in algorithms if _runs_at(one, event)]
            ordered, changed_by = apply_passes(own, event, passes)
            usual = [*map(id, apply_passes(own, event, default_passes())[0] if changed_by else ordered)]
            pairs = pairwise(map(id, ordered))
            by_user = {two: changed_by for one, two in pairs if usual.index(one) > usual.index(two)}
            called = [_algorithm_entry(algorithm, event, keys) for algorithm in ordered]
            called += hooks(callbacks, event, "callback")
            called += [
                Entry(one, keys[id(one)], "subscription", one.function, every=one.every)
                for one in subscriptions
                if one.event is event
            ]
            storing = hooks(destinations, event, "logger")
            # At INIT loggers open what the other components may already write to; later they are called last.
            entries = [*storing, *called] if event is Event.INIT else [*called, *storing]
            if entries:
                plan[event] = tuple(
                    attrs.evolve(
                        entry, why=_reason(entry, previous, event, listed, by_user.get(id(entry.component), ()))
                    )
                    for entry, previous in zip(entries, [None, *entries], strict=False)
                )
    if serves is not None:
        check_served(serves, plan)
    texts = [
        f"{type(one).__name__} runs at no event: declare runs_at = {{Event.AFTER_LOSS: Stage.LOSS}}, "
        "or override match(event, state)."
        for one in algorithms
        if not one.runs_at_events() and not overrides_match(one)
    ]
    texts += [str(warning.message) for warning in caught]
    declarations = tuple(_declaration(algorithm, keys[id(algorithm)]) for algorithm in algorithms)
    return Plan(plan, declarations, tuple(dict.fromkeys(texts)))


def component_keys(components: Iterable[object]) -> dict[int, str]:
    """Return the key of each component by its ``id``: its class or function, numbered from the second of a name on.

    Example:
        >>> list(component_keys([1.5, 2, 2.5]).values())
        ['float', 'int', 'float.1']
    """
    named = by_key(components, lambda one: one.name if isinstance(one, Subscription) else type(one).__name__)
    return {id(one): key for key, one in named.items()}


def overrides_match(algorithm: Algorithm) -> bool:
    """Return whether the algorithm overrides ``match``."""
    return overrides(algorithm, Algorithm, "match")


def _check(algorithms: Sequence[Algorithm], *others: Sequence[Callback]) -> None:
    seen: set[int] = set()
    for component in chain(algorithms, *others):
        if id(component) in seen:
            raise ValueError(
                f"{component!r} is given twice; give it once, or make a second {type(component).__name__}."
            )
        seen.add(id(component))
    for algorithm in algorithms:
        name, runs_at = type(algorithm).__name__, algorithm.runs_at_events()
        if not hasattr(runs_at, "items"):
            raise TypeError(
                f"{name}.runs_at must map events to stages, {{Event.AFTER_LOSS: Stage.LOSS}}, got {runs_at!r}."
            )
        for event, stage in runs_at.items():
            if event not in _EVENTS or not isinstance(stage, Stage):
                raise TypeError(f"{name}.runs_at must map events to stages, got {event!r}: {stage!r}.")
        for declared in ("reads", "writes", "owns"):
            words = getattr(algorithm, declared)
            if isinstance(words, str) or not all(isinstance(word, str) for word in words):
                raise TypeError(f'{name}.{declared} must be a set of words, {{"loss", "model"}}, got {words!r}.')
    check_conflicts(algorithms)


def _runs_at(algorithm: Algorithm, event: Event) -> bool:
    runs_at = algorithm.runs_at_events()
    return event in runs_at or (not runs_at and overrides_match(algorithm))


def _declaration(algorithm: Algorithm, key: str) -> Declaration:
    paragraph = (type(algorithm).__doc__ or "").strip().split("\n\n")[0]
    summary = _MARKUP.sub(r"\1", " ".join(paragraph.split()))
    reads, writes, owns = (
        tuple(sorted(map(str, words))) for words in (algorithm.reads, algorithm.writes, algorithm.owns)
    )
    return Declaration(key, summary, reads, writes, owns)


def _algorithm_entry(algorithm: Algorithm, event: Event, keys: Mapping[int, str]) -> Entry:
    return Entry(
        algorithm,
        keys[id(algorithm)],
        "algorithm",
        partial(algorithm.apply, event),
        stage=stage_of(algorithm, event) if event in algorithm.runs_at_events() else None,
        asked=overrides_match(algorithm),
        reads=tuple(sorted(fields_at(algorithm.reads, event))),
        writes=tuple(sorted(fields_at(algorithm.writes, event))),
    )


def _reason(
    entry: Entry, previous: Entry | None, event: Event, listed: Mapping[str, int], changed_by: Sequence[str]
) -> str:
    """Return why an entry does not come before the one above it; because of the user's passes, if any are given."""
    if changed_by:
        return f"ordered by {' and '.join(changed_by)}"
    if previous is None:
        return ""
    if entry.kind != previous.kind:
        return f"after {previous.kind}s"
    own, other = (
        stage_of(one.component, event) if isinstance(one.component, Algorithm) else Stage.UNDECLARED
        for one in (entry, previous)
    )
    if own is other:
        reversed_list = "first in, last out" if event.is_after_event else ""
        return "as listed" if listed[previous.key] < listed[entry.key] else reversed_list
    order = " after ".join(one.what for one in (entry, previous))
    return f"reversed: {order}" if event in CLOSING_EVENTS else order


def check_served(serves: ServedFields, entries: Mapping[Event, Sequence[Entry]]) -> None:
    """Raise an error if algorithms of a plan need an event or a field which the host does not serve.

    An algorithm without declared events runs where its ``match`` returns True: each of its fields must be served at
    any event.

    Raises:
        ValueError: For all such algorithms, with their names, the host's, the fields and the events.
    """
    unserved: dict[str, list[str]] = {}
    for event, called in entries.items():
        for entry in called:
            if entry.kind == "algorithm" and entry.stage is not None:
                unserved.setdefault(entry.key, []).extend(_unserved(serves, entry, event))
            elif entry.kind == "algorithm" and event is Event.INIT:
                unserved[entry.key] = _unserved(serves, entry, None)
    problems = [
        f"{key} cannot run in {serves.host}: it {' and '.join(needs)}, which {serves.host} does not serve. "
        f"Remove {key}, or serve this in {serves.host}."
        for key, needs in unserved.items()
        if needs
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _unserved(serves: ServedFields, entry: Entry, event: Event | None) -> list[str]:
    """Return what an algorithm needs at an event, or at any event if None, that the host does not serve."""
    if event is not None and event not in {*serves.readable, *serves.writable}:
        return [] if event in OPTIONAL_EVENTS else [f"runs at {event.value!r}"]
    needs = []
    for verb, fields, by_event in (("reads", entry.reads, serves.readable), ("writes", entry.writes, serves.writable)):
        served = frozenset().union(*by_event.values()) if event is None else by_event.get(event, frozenset())
        names = [
            repr(field)
            for field in fields
            if field not in ALWAYS_SERVED | served and not (field.startswith("batch.") and "batch" in served)
        ]
        if names:
            where = "some event" if event is None else repr(event.value)
            needs.append(f"{verb} {' and '.join(names)} at {where}")
    return needs
