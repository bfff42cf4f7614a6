"""The plan: what runs at which event, in which order and why. It follows from declarations, before anything runs."""

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
from composer.core.components import numbered
from composer.core.conflicts import AlgorithmConflictError, check_conflicts
from composer.core.event import CLOSING_EVENTS, Event
from composer.core.fields import ServedFields, fields_at
from composer.core.logger import LoggerDestination
from composer.core.passes import apply_passes, default_passes, stage_of
from composer.core.plan_mermaid import mermaid_lines
from composer.core.plan_svg import svg_lines
from composer.core.plan_text import plan_lines
from composer.core.stage import Stage
from composer.core.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from composer.core.passes import AlgorithmPass
    from composer.core.time import Time

__all__ = ["AlgorithmConflictError", "Declaration", "Entry", "LeftOut", "Plan", "build_plan", "explain"]

_MARKUP = re.compile(r"(?::\w+:)?`+~?([^`]*)`+")
_EVENTS = frozenset(Event)


@attrs.frozen
class Entry:
    """One call at an event.

    Args:
        component: The algorithm, callback, subscription or logger.
        key: Its name in the run: the class, or a subscribed function's name, numbered from the second of a name on.
        kind: ``"algorithm"``, ``"callback"``, ``"subscription"`` or ``"logger"``.
        stage: The stage of an algorithm there; None if it declares none.
        placed_by: The user's passes that moved it from its place by stage and list.
        asked: Whether it overrides ``match``, which is then called each time.
        why: The reason for its place, in a few words; empty if there is none.
        every: How often it is called there; None is each time.
        reads, writes: The fields of the state that an algorithm declares to read and to write there.
        call: The call, ``f(state, logger)``.
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
        """The stage of an algorithm; the kind of other components."""
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
    """The declarations of an algorithm of the plan.

    Args:
        name: Its name in the run.
        summary: The first paragraph of its class's docstring.
        reads, writes: The fields of the state that it reads and writes.
        owns: What no other algorithm may own.
        settings: The settings without which it cannot be recognized, such as the pipeline of ``Augment``. They are the
            fields with their own text: ``attrs.field(metadata={"explain": f})``.
    """

    name: str
    summary: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    owns: tuple[str, ...]
    settings: tuple[str, ...] = ()


@attrs.frozen
class LeftOut:
    """An algorithm that a pass removed from an event.

    Args:
        name: The algorithm's name in the run.
        event: The event.
        by: The name of the pass.
    """

    name: str
    event: Event
    by: str


@attrs.frozen
class Plan:
    """What runs at which event, from first to last.

    ``str(plan)`` is a table; :meth:`to_dict` and :meth:`to_json` return data, :meth:`to_svg` and :meth:`to_mermaid`
    return drawings. A notebook displays the SVG.

    Args:
        entries: The calls of each event at which anything runs.
        algorithms: The declarations of the algorithms, in the order of the list.
        left_out: The algorithms that passes removed from events.
        warnings: The warnings of the passes, and those about algorithms that run nowhere.
        batch: A description of the first batch, with the keys of its samples and targets, if there was one.
        verbose: Whether the table and the SVG show the events of callbacks and loggers; else only their names.

    Example:
        >>> print(build_plan([]))
        Nothing runs at any event: there are no algorithms, callbacks or loggers that do anything.
    """

    entries: Mapping[Event, tuple[Entry, ...]]
    algorithms: tuple[Declaration, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()
    batch: str = ""
    verbose: bool = False

    def shown_at(self, event: Event) -> list[Entry]:
        """Return the entries of an event that the table and the SVG show."""
        folded = () if self.verbose else ("callback", "logger")
        return [entry for entry in self.entries.get(event, ()) if entry.kind not in folded]

    def folded(self) -> list[str]:
        """Return the keys of the callbacks and loggers whose events are not shown, in the order of their calls."""
        entries = [] if self.verbose else chain.from_iterable(self.entries.values())
        kinds = {entry.key: entry.kind for entry in entries if entry.kind in ("callback", "logger")}
        return sorted(kinds, key=kinds.__getitem__)  # "callback" is before "logger"

    def keys_everywhere(self) -> list[str]:
        """Return the keys of components that run, or are asked, each time at every event, and that no pass moved."""
        moved = {entry.key for entry in chain.from_iterable(self.entries.values()) if entry.placed_by or entry.every}
        common = set.intersection(*({entry.key for entry in self.entries.get(event, ())} for event in Event))
        return [entry.key for entry in self.entries.get(Event.INIT, ()) if entry.key in common - moved]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data.

        Returns:
            A dictionary with the keys ``algorithms``, ``events``, ``left_out``, ``warnings`` and, if known, ``batch``.
        """
        return {
            "algorithms": [
                {
                    "name": one.name,
                    "summary": one.summary,
                    "reads": list(one.reads),
                    "writes": list(one.writes),
                    "owns": list(one.owns),
                    "settings": list(one.settings),
                }
                for one in self.algorithms
            ],
            "events": {event.value: [entry.to_dict() for entry in entries] for event, entries in self.entries.items()},
            "left_out": [{"name": one.name, "event": one.event.value, "by": one.by} for one in self.left_out],
            "warnings": list(self.warnings),
            **({"batch": self.batch} if self.batch else {}),
        }

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_mermaid(self) -> str:
        """Return a flowchart of the loop with all calls, in the language of Mermaid, for documents."""
        return "\n".join(mermaid_lines(self))

    def to_svg(self) -> str:
        """Return a drawing of the plan as SVG: the events of the loop with the components that run there."""
        return "\n".join(svg_lines(self))

    def _repr_svg_(self) -> str:  # the method that notebooks call
        return self.to_svg()

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


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
        {'algorithms': [], 'events': {}, 'left_out': [], 'warnings': []}
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
        ValueError: One object is given twice, a pass returns what was not passed to it, an interval is never due, or an
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
    left_out: list[LeftOut] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for event in Event:
            ordered = apply_passes([one for one in algorithms if _runs_at(one, event)], event, passes)
            called = [
                _algorithm_entry(algorithm, event, placed_by, keys)
                for algorithm, placed_by in zip(ordered.algorithms, ordered.placed_by, strict=True)
            ]
            called += hooks(callbacks, event, "callback")
            called += [
                Entry(one, keys[id(one)], "subscription", one.function, every=one.every)
                for one in subscriptions
                if one.event is event
            ]
            storing = hooks(destinations, event, "logger")
            # At INIT loggers open what the other components may already write to; later they are called last.
            entries = [*storing, *called] if event is Event.INIT else [*called, *storing]
            left_out += [LeftOut(keys[id(algorithm)], event, by) for algorithm, by in ordered.left_out]
            if entries:
                plan[event] = tuple(
                    attrs.evolve(entry, why=_reason(entry, previous, event, listed))
                    for entry, previous in zip(entries, [None, *entries], strict=False)
                )
    if serves is not None:
        serves.check(plan)
    texts = [
        f"{type(one).__name__} runs at no event: declare runs_at = {{Event.AFTER_LOSS: Stage.LOSS}}, "
        "or override match(event, state)."
        for one in algorithms
        if not one.runs_at_events() and not overrides_match(one)
    ]
    texts += [str(warning.message) for warning in caught]
    declarations = tuple(_declaration(algorithm, keys[id(algorithm)]) for algorithm in algorithms)
    return Plan(plan, declarations, tuple(left_out), tuple(dict.fromkeys(texts)))


def component_keys(components: Iterable[object]) -> dict[int, str]:
    """Return the key of each component by its ``id``: its class or function, numbered from the second of a name on.

    Example:
        >>> list(component_keys([1.5, 2, 2.5]).values())
        ['float', 'int', 'float.1']
    """
    components = list(components)
    names = [one.name if isinstance(one, Subscription) else type(one).__name__ for one in components]
    return dict(zip(map(id, components), numbered(names), strict=True))


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
    kind: Any = type(algorithm)
    fields = attrs.fields(kind) if attrs.has(kind) else ()
    settings = tuple(
        f"{field.alias}: {field.metadata['explain'](getattr(algorithm, field.name))}"
        for field in fields
        if "explain" in field.metadata
    )
    return Declaration(key, summary, reads, writes, owns, settings)


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


def _reason(entry: Entry, previous: Entry | None, event: Event, listed: Mapping[str, int]) -> str:
    """Return why an entry does not come before the one above it."""
    if entry.placed_by:
        return f"moved by {' and '.join(entry.placed_by)}"
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
    is_closing = event in CLOSING_EVENTS
    if (own < other) is not is_closing:
        return ""  # a pass moved the entry above, which has the reason
    return f"reversed: {order}" if is_closing else order
