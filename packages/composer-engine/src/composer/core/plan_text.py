"""The text of a plan."""

from __future__ import annotations

import textwrap
from itertools import chain
from typing import TYPE_CHECKING

from composer.core.event import Event
from composer.core.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from composer.core.plan import Declaration, Entry, Plan

__all__ = ["PHASES", "plan_lines"]

PHASES: Mapping[str, tuple[Event, Event]] = {
    "once, before training": (Event.INIT, Event.FIT_START),
    "every iteration and epoch, at its beginning": (Event.ITERATION_START, Event.EPOCH_START),
    "every batch, before it is computed": (Event.BEFORE_DATALOADER, Event.BEFORE_TRAIN_BATCH),
    "every microbatch": (Event.BEFORE_FORWARD, Event.AFTER_BACKWARD),
    "every batch, after it was computed": (Event.AFTER_TRAIN_BATCH, Event.BATCH_CHECKPOINT),
    "every epoch and iteration, at its end": (Event.EPOCH_END, Event.ITERATION_CHECKPOINT),
    "once, after training": (Event.FIT_END, Event.FIT_END),
    "every evaluation": (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_END),
    "every prediction": (Event.PREDICT_START, Event.PREDICT_END),
}
"""The phases of a run, in their order, each with its first and last event."""

_HEADER = ("EVENT", "RUNS", "STAGE", "WHY HERE")
_WIDTH = 100
_RULES = (
    f"Stages, in their order: {', '.join(stage.name.lower() for stage in Stage if stage is not Stage.UNDECLARED)}. "
    "Within a stage the list's order counts; at after_* events its reverse. After_forward, after_loss and "
    "after_backward reverse the stages, too, so that each algorithm undoes its own change."
)
_WITHOUT_STAGE = (
    " Without a stage: after all others; first where stages are reversed; as architecture before training (init to "
    "fit_start)."
)

Row = tuple[str, str, str, str]
"""Event, name, stage, reason."""


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan: algorithms, calls of each event, rules of the order, the first batch, warnings."""
    if not plan.entries and not plan.algorithms:
        yield "Nothing runs at any event: there are no algorithms, callbacks or loggers that do anything."
        return
    if plan.algorithms:
        yield "ALGORITHMS, as listed"
        name_width = max(len(declaration.name) for declaration in plan.algorithms)
        yield from chain.from_iterable(_declared(declaration, name_width) for declaration in plan.algorithms)
        yield ""
    shown = list(chain.from_iterable(map(plan.shown_at, plan.entries)))
    if shown or plan.left_out:
        yield "PLAN, from the first event to the last, and at each event from top to bottom"
        yield from _table(plan)
    if folded := plan.folded():
        line = f"Callbacks and loggers (explain(verbose=True) shows where): {', '.join(folded)}"
        yield from ("", *textwrap.wrap(line, _WIDTH, subsequent_indent="  ")) if shown else [line]
    algorithms = [entry for entry in shown if entry.kind == "algorithm"]
    if algorithms:
        without_stage = any(entry.stage is None for entry in algorithms)
        yield from ("", *textwrap.wrap(_RULES + _WITHOUT_STAGE if without_stage else _RULES, _WIDTH))
    if plan.batch:
        yield from ("", *textwrap.wrap(plan.batch, _WIDTH))
    for warning in plan.warnings:
        yield from ("", *textwrap.wrap(f"WARNING: {warning}", _WIDTH, subsequent_indent="  "))


def _declared(declaration: Declaration, name_width: int) -> Iterator[str]:
    indent = " " * (name_width + 4)
    only_read = [word for word in declaration.reads if word not in declaration.writes]
    declared = [f"changes {', '.join(declaration.writes)}"] if declaration.writes else []
    declared += [f"reads {', '.join(only_read)}"] if only_read else []
    declared += [f"owns {' and '.join(declaration.owns)}"] if declaration.owns else []
    texts = [declaration.summary, "; ".join(declared) or "does not declare what it reads and changes"]
    lines = [line for text in texts for line in textwrap.wrap(text, _WIDTH - len(indent))]
    yield f"  {declaration.name:<{name_width}}  {lines[0]}"
    yield from (f"{indent}{line}" for line in (*lines[1:], *declaration.settings))


def _table(plan: Plan) -> Iterator[str]:
    everywhere = {entry.key: entry for entry in plan.shown_at(Event.INIT) if entry.key in plan.keys_everywhere()}
    phases = {phase: [*_rows(plan, *events, everywhere)] for phase, events in PHASES.items()}
    if everywhere:
        phases["at every event"] = [
            ("", entry.key, entry.what, "if match(); see below" if entry.kind == "algorithm" else "own run_event")
            for entry in everywhere.values()
        ]
    rows = [_HEADER, *chain.from_iterable(phases.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    yield _line(_HEADER, widths, indent=2)
    for phase, shown in phases.items():
        if shown:
            yield f"  {phase}"
            yield from (_line(row, widths, indent=4) for row in shown)


def _rows(plan: Plan, first: Event, last: Event, everywhere: Mapping[str, Entry]) -> Iterator[Row]:
    events = [*Event]
    for event in events[events.index(first) : events.index(last) + 1]:
        entries = [entry for entry in plan.shown_at(event) if entry.key not in everywhere]
        rows = [(entry.key, entry.what, _reason(entry)) for entry in entries]
        rows += [(f"({one.name})", "", f"left out by {one.by}") for one in plan.left_out if one.event is event]
        for place, row in enumerate(rows):
            yield (event.value if place == 0 else "", *row)


def _reason(entry: Entry) -> str:
    often = "" if entry.every is None else f"every {entry.every}"
    return "; ".join(filter(None, [entry.why, often, "if match()" if entry.asked else ""]))


def _line(row: Row, widths: Sequence[int], indent: int) -> str:
    event, *cells = row
    # The header and the events start at different columns, the other cells at the same.
    first = f"{' ' * indent}{event:<{widths[0] + 4 - indent}}"
    return "  ".join(
        [first, *(f"{cell:<{width}}" for cell, width in zip(cells, [*widths[1:], 0], strict=True))]
    ).rstrip()
