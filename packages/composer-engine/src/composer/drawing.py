"""A plan as a table of text, and as a drawing: phases of a training, their events, and a row or box for each call.

``composer.core.plan`` states what is in them; this module only places and colours it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from typing import NamedTuple, TypeAlias

Row: TypeAlias = tuple[str, str, str, str]
"""Event, name, stage, reason."""

_HEADER: Row = ("EVENT", "RUNS", "STAGE", "WHY HERE")
COLUMNS, _REASON = 80, 20
"""The width of the table, and the least width of the reasons, which make it wider beside long names."""
_PARTS = ("batch", "loss", "model", "weights")
_STYLE = """\
.plan text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.plan .phase { font-style: italic } .plan .phase, .plan .what { fill: #59636e }
.plan .paper { fill: #ffffff; stroke: #d1d9e0 } .plan .loop { stroke: #d1d9e0; stroke-width: 2 }
.plan .batch { fill: #cfe3fb } .plan .loss { fill: #fbe3b8 } .plan .model { fill: #e2d6f9 } \
.plan .weights { fill: #cdeed3 } .plan .other { fill: #e8ebef }
@media (prefers-color-scheme: dark) {
.plan text { fill: #e6edf3 } .plan .phase, .plan .what { fill: #9aa5b1 }
.plan .paper { fill: #14181e; stroke: #3d444d } .plan .loop { stroke: #3d444d }
.plan .batch { fill: #1c4069 } .plan .loss { fill: #5f4305 } .plan .model { fill: #463073 } \
.plan .weights { fill: #1d4f2b } .plan .other { fill: #30363d }
}"""
_WIDTH, _MARGIN, _EVENTS, _CALLS = 820, 16, 20, 270
"""The width of the drawing, its margin, the indentation of events, and the left edge of the boxes, in pixels."""
_LINE, _BOX, _INDENT, _CHARACTER, _PADDING = 30, 22, 14, 7.3, 8
"""The heights of a line and a box, the indentation of a loop, and the widths of a character and a box's padding."""


class Box(NamedTuple):
    """A call.

    Attributes:
        name: Its name.
        what: Its kind, which follows the name.
        why: The reason for its place, shown when the mouse is over it; empty if there is none.
        part: What it changes, which is its colour: ``"batch"``, ``"loss"``, ``"model"``, ``"weights"``; else empty.
    """

    name: str
    what: str
    why: str = ""
    part: str = ""


class Phase(NamedTuple):
    """A phase: its name, the number of loops that it is in, and its events with their calls."""

    name: str
    depth: int
    events: Sequence[tuple[str, Sequence[Box]]]


def draw_plan(title: str, phases: Sequence[Phase], everywhere: Sequence[Box], folded: Sequence[str]) -> str:
    """Return the drawing of a plan.

    Args:
        title: The names of the algorithms.
        phases: The phases, in their order; those without an event are left out.
        everywhere: The calls at every event.
        folded: The names of callbacks and loggers, whose events are not shown.

    Example:
        >>> phase = Phase("every batch", 1, [("batch_start", [Box("MixUp", "mix", part="batch")])])
        >>> svg = draw_plan("MixUp", [phase], everywhere=[], folded=[])
        >>> svg.count("<rect"), svg.startswith("<svg")
        (3, True)
    """
    body, y = [], _MARGIN
    for phase in phases:
        if phase.events:
            lines, y = _phase(phase, _MARGIN + phase.depth * _INDENT, y)
            body += lines
    if everywhere:
        lines, y = _row("at every event", everywhere, _MARGIN, y)
        body += lines
    if folded:
        body += [_text(_MARGIN, y + 15, f"Callbacks and loggers: {', '.join(folded)}", "what")]
        y += _LINE
    boxes = [*everywhere, *(box for phase in phases for _, boxes in phase.events for box in boxes)]
    x = float(_MARGIN)
    for part in [part for part in _PARTS if part in {box.part for box in boxes}]:
        body += [f'<rect class="{part}" x="{x:g}" y="{y + 4}" width="14" height="14" rx="3"/>']
        body += [_text(x + 20, y + 15, f"changes the {part}", "what")]
        x = round(x + 40 + _CHARACTER * len(f"changes the {part}"), 1)
    y += _LINE if x > _MARGIN else 0
    height = y + _MARGIN // 2
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" role="img" viewBox="0 0 {_WIDTH} {height}">',
        f"<title>Plan of {escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
    ]
    return "\n".join([*svg, *body, "</svg>"])


def _phase(phase: Phase, x: float, y: int) -> tuple[list[str], int]:
    """Return the lines of a phase that begins at ``y``, and where it ends."""
    lines, begin = [_text(x + 8, y + 15, phase.name, "phase")], y
    y += _LINE - 4
    for event, boxes in phase.events:
        row, y = _row(event, boxes, x + _EVENTS, y)
        lines += row
    return [f'<path class="loop" d="M{x:g} {begin + 3}V{y - 5}"/>', *lines], y + 4


def _row(name: str, boxes: Sequence[Box], x: float, y: int) -> tuple[list[str], int]:
    """Return the lines of an event with its boxes, which continue on the next line if they are too wide."""
    lines, left = [_text(x, y + 15, name)], float(_CALLS)
    for box in boxes:
        width = round(2 * _PADDING + _CHARACTER * len(f"{box.name} {box.what}"), 1)
        if left + width > _WIDTH - _MARGIN and left > _CALLS:
            left, y = float(_CALLS), y + _LINE
        colour = box.part or "other"
        lines.append(f'<rect class="{colour}" x="{left:g}" y="{y}" width="{width:g}" height="{_BOX}" rx="5"/>')
        label = f'{escape(box.name)}<tspan class="what"> {escape(box.what)}</tspan>'
        reason = f"<title>{escape(box.why)}</title>" if box.why else ""
        lines.append(f'<text x="{left + _PADDING:g}" y="{y + 15}" xml:space="preserve">{label}{reason}</text>')
        left = round(left + width + 6, 1)
    return lines, y + _LINE


def _text(x: float, y: int, text: str, kind: str = "") -> str:
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:g}" y="{y}">{escape(text)}</text>'


def table_lines(phases: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield the lines of a table: its header, and the name and the rows of each phase that has any.

    Example:
        >>> for line in table_lines({"every batch": [("batch_end", "EMA", "weights", "as listed")], "every epoch": []}):
        ...     print(line)
          EVENT        RUNS  STAGE    WHY HERE
          every batch
            batch_end  EMA   weights  as listed
    """
    rows = [_HEADER, *chain.from_iterable(phases.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    yield _line(_HEADER, widths, indent=2)
    for phase, shown in phases.items():
        if shown:
            yield f"  {phase}"
            yield from chain.from_iterable(_lines(row, widths) for row in shown)


def _lines(row: Row, widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row, of which its reason needs several if it is long."""
    width = max(_REASON, COLUMNS - sum(widths) - 4 - 2 * 3)
    first, *others = wrap(row[3], width) or [""]
    yield _line((*row[:3], first), widths, indent=4)
    yield from (_line(("", "", "", other), widths, indent=4) for other in others)


def _line(row: Row, widths: Sequence[int], indent: int) -> str:
    event, *cells = row
    # The header and the events start at different columns, the other cells at the same.
    first = f"{' ' * indent}{event:<{widths[0] + 4 - indent}}"
    return "  ".join(
        [first, *(f"{cell:<{width}}" for cell, width in zip(cells, [*widths[1:], 0], strict=True))]
    ).rstrip()


def wrap(text: str, width: int, subsequent_indent: str = "") -> list[str]:
    """Return the lines of a paragraph; words are not broken."""
    return textwrap.wrap(
        text, width, subsequent_indent=subsequent_indent, break_long_words=False, break_on_hyphens=False
    )
