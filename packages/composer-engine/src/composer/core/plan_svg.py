"""The drawing of a plan as SVG: the phases of the loop from top to bottom, with a coloured box for each call."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from composer.core.event import Event
from composer.core.plan_text import PHASES
from composer.core.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from composer.core.plan import Entry, Plan

__all__ = ["svg_lines"]

_GROUPS: Mapping[str, range] = {
    "batch": range(Stage.SELECT, Stage.MIX + 1),
    "loss": range(Stage.LABEL, Stage.LOSS + 1),
    "model": range(Stage.ARCHITECTURE, Stage.LAYOUT + 1),
    "weights": range(Stage.GRADIENT, Stage.WEIGHTS + 1),
}
"""What the stages change, each with a colour."""
_DEPTHS = (0, 1, 2, 3, 2, 1, 0, 0, 0)
"""How many loops each phase is in."""
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


def svg_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of an SVG: the phases of the loop, their events, and a box for each call."""
    everywhere = plan.keys_everywhere()
    body, y = [], _MARGIN
    for (phase, (first, last)), depth in zip(PHASES.items(), _DEPTHS, strict=True):
        events = [*Event]
        rows = [
            (event, [entry for entry in plan.shown_at(event) if entry.key not in everywhere])
            for event in events[events.index(first) : events.index(last) + 1]
        ]
        rows = [(event, entries) for event, entries in rows if entries]
        if rows:
            lines, end = _phase(phase, rows, _MARGIN + depth * _INDENT, y)
            body += lines
            y = end
    always = [entry for entry in plan.shown_at(Event.INIT) if entry.key in everywhere]
    if always:
        lines, y = _row("at every event", always, _MARGIN, y)
        body += lines
    if folded := plan.folded():
        body += [_text(_MARGIN, y + 15, f"Callbacks and loggers: {', '.join(folded)}", "what")]
        y += _LINE
    colours = {_group(entry) for event in plan.entries for entry in plan.shown_at(event)}
    x = float(_MARGIN)
    for group in [group for group in _GROUPS if group in colours]:
        body += [f'<rect class="{group}" x="{x:g}" y="{y + 4}" width="14" height="14" rx="3"/>']
        body += [_text(x + 20, y + 15, f"changes the {group}", "what")]
        x = round(x + 40 + _CHARACTER * len(f"changes the {group}"), 1)
    y += _LINE if x > _MARGIN else 0
    title = ", ".join(one.name for one in plan.algorithms) or "callbacks and loggers"
    height = y + _MARGIN // 2
    yield f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" role="img" viewBox="0 0 {_WIDTH} {height}">'
    yield f"<title>Plan of {escape(title)}</title>"
    yield f"<style>{_STYLE}</style>"
    yield f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>'
    yield from body
    yield "</svg>"


def _phase(phase: str, rows: Sequence[tuple[Event, Sequence[Entry]]], x: float, y: int) -> tuple[list[str], int]:
    """Return the lines of a phase that begins at ``y``, and where it ends."""
    lines, begin = [_text(x + 8, y + 15, phase, "phase")], y
    y += _LINE - 4
    for event, entries in rows:
        row, y = _row(event.value, entries, x + _EVENTS, y)
        lines += row
    return [f'<path class="loop" d="M{x:g} {begin + 3}V{y - 5}"/>', *lines], y + 4


def _row(name: str, entries: Sequence[Entry], x: float, y: int) -> tuple[list[str], int]:
    """Return the lines of an event with its boxes, which continue on the next line if they are too wide."""
    lines, left = [_text(x, y + 15, name)], float(_CALLS)
    for entry in entries:
        often = "" if entry.every is None else f" every {entry.every}"
        what = f" {entry.what}{often}"
        width = round(2 * _PADDING + _CHARACTER * len(entry.key + what), 1)
        if left + width > _WIDTH - _MARGIN and left > _CALLS:
            left, y = float(_CALLS), y + _LINE
        lines.append(f'<rect class="{_group(entry)}" x="{left:g}" y="{y}" width="{width:g}" height="{_BOX}" rx="5"/>')
        label = f'{escape(entry.key)}<tspan class="what">{escape(what)}</tspan>'
        reason = f"<title>{escape(entry.why)}</title>" if entry.why else ""
        lines.append(f'<text x="{left + _PADDING:g}" y="{y + 15}" xml:space="preserve">{label}{reason}</text>')
        left = round(left + width + 6, 1)
    return lines, y + _LINE


def _group(entry: Entry) -> str:
    return next((group for group, stages in _GROUPS.items() if entry.stage in stages), "other")


def _text(x: float, y: int, text: str, kind: str = "") -> str:
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:g}" y="{y}">{escape(text)}</text>'
