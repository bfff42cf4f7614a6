"""The plan: what runs at which event, in which order and why, as data; ``composer.drawing`` lays out its table."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.event import Event, Stage
from composer.drawing import COLUMNS, Box, Phase, Row, draw_plan, table_lines, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from composer.core.base import Algorithm, Callback
    from composer.core.observable_list import ObservableList
    from composer.core.time import Time

_PHASES: Mapping[str, tuple[Event, Event, int]] = {
    "once, before training": (Event.INIT, Event.FIT_START, 0),
    "every iteration and epoch, at its beginning": (Event.ITERATION_START, Event.EPOCH_START, 1),
    "every batch, before it is computed": (Event.BEFORE_DATALOADER, Event.BEFORE_TRAIN_BATCH, 2),
    "every microbatch": (Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, 3),
    "every batch, after it was computed": (Event.AFTER_TRAIN_BATCH, Event.BATCH_CHECKPOINT, 2),
    "every epoch and iteration, at its end": (Event.EPOCH_END, Event.ITERATION_CHECKPOINT, 1),
    "once, after training": (Event.FIT_END, Event.FIT_END, 0),
    "every evaluation": (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_END, 0),
    "every prediction": (Event.PREDICT_START, Event.PREDICT_END, 0),
}
"""The phases of a run, in their order, each with its first and last event, and the number of loops that it is in."""

_RULES = (
    f"Stages, in their order: {', '.join(stage.name.lower() for stage in Stage if stage is not Stage.UNDECLARED)}. "
    "Within a stage the list's order counts; at after_* events its reverse. After_forward, after_loss and "
    "after_backward reverse the stages, too, so that each algorithm undoes its own change."
)
_WITHOUT_STAGE = (
    " Without a stage: after all others; first where stages are reversed; as architecture before training (init to "
    "fit_start)."
)


@attrs.frozen(eq=False)
class Subscription:
    """A function that the engine calls at an event, until ``remove()``; ``engine.on(…)`` returns one.

    Args:
        event: The event.
        function: The function ``f(state, logger)``.
        every: How often; None is each time.

    Example:
        >>> from composer.core import Engine, State
        >>> engine = Engine(State(model=None))
        >>> subscription = engine.on("fit_end", lambda state, logger: print("done"))
        >>> engine.run_event("fit_end")
        done
        >>> subscription.remove()
        >>> engine.run_event("fit_end")
    """

    event: Event
    function: Callable[..., object]
    every: Time | None
    _subscriptions: ObservableList[Subscription] = attrs.field(repr=False)

    @property
    def name(self) -> str:
        """The function's qualified name; the class's of an object that can be called."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__qualname__", type(function).__qualname__))

    def remove(self) -> None:
        """Stop calling the function, from the next event on. A second call does nothing."""
        if self in self._subscriptions:
            self._subscriptions.remove(self)


@attrs.frozen
class Entry:
    """One call at an event.

    Args:
        component: The algorithm, callback, subscription or logger.
        key: Its name in the run: the class, or a subscribed function's name, numbered from the second of a name on.
        kind: ``"algorithm"``, ``"callback"``, ``"subscription"`` or ``"logger"``.
        stage: The stage of an algorithm there; None if it declares none.
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
    """

    name: str
    summary: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    owns: tuple[str, ...]


@attrs.frozen
class Plan:
    """What runs at which event, from first to last.

    ``str(plan)`` is a table; :meth:`to_dict` and :meth:`to_json` return data, and :meth:`to_svg` a drawing, which
    notebooks display.

    Args:
        entries: The calls of each event at which anything runs.
        algorithms: The declarations of the algorithms, in the order of the list.
        warnings: The warnings of the passes, and those about algorithms that run nowhere.
        acted: What each algorithm did since the training began, by name: a number, and its unit.
        verbose: Whether the table and the SVG show the events of callbacks and loggers; else only their names.

    Example:
        >>> print(Plan({}))
        Nothing runs at any event: there are no algorithms, callbacks or loggers that do anything.
    """

    entries: Mapping[Event, tuple[Entry, ...]]
    algorithms: tuple[Declaration, ...] = ()
    warnings: tuple[str, ...] = ()
    acted: Mapping[str, tuple[int, str]] = attrs.field(factory=dict, kw_only=True)
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
        """Return the keys of components that run, or are asked, each time at every event."""
        seldom = {entry.key for entry in chain.from_iterable(self.entries.values()) if entry.every}
        common = set.intersection(*({entry.key for entry in self.entries.get(event, ())} for event in Event))
        return [entry.key for entry in self.entries.get(Event.INIT, ()) if entry.key in common - seldom]

    def shown_everywhere(self) -> list[Entry]:
        """Return the shown entries of :meth:`keys_everywhere`."""
        return [entry for entry in self.shown_at(Event.INIT) if entry.key in self.keys_everywhere()]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data.

        Returns:
            A dictionary with the keys ``algorithms``, ``events``, ``warnings`` and, if known, ``acted``.
        """
        return {
            "algorithms": [attrs.asdict(one) for one in self.algorithms],
            "events": {event.value: [entry.to_dict() for entry in entries] for event, entries in self.entries.items()},
            "warnings": list(self.warnings),
            **({"acted": {name: list(acts) for name, acts in self.acted.items()}} if self.acted else {}),
        }

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_svg(self) -> str:
        """Return a drawing of the plan as SVG: the events of the loop with the components that run there."""
        phases = [
            Phase(name, depth, [(event.value, _boxes(entries)) for event, entries in shown if entries])
            for name, depth, shown in _by_phase(self)
        ]
        title = ", ".join(one.name for one in self.algorithms) or "callbacks and loggers"
        return draw_plan(title, phases, _boxes(self.shown_everywhere()), self.folded())

    def _repr_svg_(self) -> str:  # the method that notebooks call
        return self.to_svg()

    def __str__(self) -> str:
        return "\n".join(_text_lines(self))


def _boxes(entries: Iterable[Entry]) -> list[Box]:
    """Return what is drawn of calls."""
    boxes = []
    for entry in entries:
        often = "" if entry.every is None else f" every {entry.every}"
        boxes.append(Box(entry.key, entry.what + often, entry.why, "" if entry.stage is None else entry.stage.part))
    return boxes


def _text_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan: algorithms, calls of each event, rules of the order, warnings."""
    if not plan.entries and not plan.algorithms:
        yield "Nothing runs at any event: there are no algorithms, callbacks or loggers that do anything."
        return
    if plan.algorithms:
        yield "ALGORITHMS, as listed"
        name_width = max(len(declaration.name) for declaration in plan.algorithms)
        yield from chain.from_iterable(_declared(declaration, name_width) for declaration in plan.algorithms)
        yield ""
    shown = list(chain.from_iterable(map(plan.shown_at, plan.entries)))
    if shown:
        yield "PLAN, from the first event to the last, and at each event from top to bottom"
        yield from _table(plan)
    if folded := plan.folded():
        line = f"Callbacks and loggers (explain(verbose=True) shows where): {', '.join(folded)}"
        yield from ("", *wrap(line, COLUMNS, subsequent_indent="  ")) if shown else [line]
    algorithms = [entry for entry in shown if entry.kind == "algorithm"]
    if algorithms:
        without_stage = any(entry.stage is None for entry in algorithms)
        yield from ("", *wrap(_RULES + _WITHOUT_STAGE if without_stage else _RULES, COLUMNS))
    if plan.acted:
        acts = ", ".join(f"{name} {count} {unit}" for name, (count, unit) in plan.acted.items())
        yield from ("", *wrap(f"Acted in this training: {acts}.", COLUMNS))
    for warning in plan.warnings:
        yield from ("", *wrap(f"WARNING: {warning}", COLUMNS, subsequent_indent="  "))


def _declared(declaration: Declaration, name_width: int) -> Iterator[str]:
    indent = " " * (name_width + 4)
    only_read = [word for word in declaration.reads if word not in declaration.writes]
    declared = [f"changes {', '.join(declaration.writes)}"] if declaration.writes else []
    declared += [f"reads {', '.join(only_read)}"] if only_read else []
    declared += [f"owns {' and '.join(declaration.owns)}"] if declaration.owns else []
    texts = [declaration.summary, "; ".join(declared) or "does not declare what it reads and changes"]
    lines = [line for text in texts for line in wrap(text, COLUMNS - len(indent))]
    yield f"  {declaration.name:<{name_width}}  {lines[0]}"
    yield from (f"{indent}{line}" for line in lines[1:])


def _by_phase(plan: Plan) -> Iterator[tuple[str, int, list[tuple[Event, list[Entry]]]]]:
    """Yield each phase with its depth, and its events with what they show, without components of all events."""
    events, everywhere = [*Event], plan.keys_everywhere()
    for phase, (first, last, depth) in _PHASES.items():
        place = slice(events.index(first), events.index(last) + 1)
        yield (
            phase,
            depth,
            [(event, [one for one in plan.shown_at(event) if one.key not in everywhere]) for event in events[place]],
        )


def _table(plan: Plan) -> Iterator[str]:
    phases = {
        phase: [row for event, entries in shown for row in _rows(event, entries)] for phase, _, shown in _by_phase(plan)
    }
    phases["at every event"] = [
        ("", one.key, one.what, "if match(); see below" if one.kind == "algorithm" else "own run_event")
        for one in plan.shown_everywhere()
    ]
    return table_lines(phases)


def _rows(event: Event, entries: Sequence[Entry]) -> list[Row]:
    rows = [(entry.key, entry.what, _reason(entry)) for entry in entries]
    return [("" if place else event.value, *row) for place, row in enumerate(rows)]


def _reason(entry: Entry) -> str:
    often = "" if entry.every is None else f"every {entry.every}"
    return "; ".join(filter(None, [entry.why, often, "if match()" if entry.asked else ""]))
