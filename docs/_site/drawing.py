"""Draws the flowcharts that ``Plan.to_mermaid`` writes, as SVG in the colors of the theme."""

from __future__ import annotations

import html
import re

from docutils import nodes
from docutils.parsers.rst import Directive

NODE = re.compile(r'(?P<name>\w+)(?P<round>\(?)\["(?P<label>.*)"\]\)?$')
GROUP = re.compile(r'subgraph \w+\["(?P<title>.*)"\]$')
ARROW = re.compile(r'(?P<tail>\w+) -->(?:\|"(?P<label>.*)"\|)? (?P<head>\w+)$')
ENTITY = re.compile(r"#(\w+);")

WIDTH, LINE, GAP, INDENT, BEND = 260, 20, 26, 24, 44


class Mermaid(Directive):
    """A flowchart: boxes from top to bottom within nested loops, with an arrow back for each loop."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        drawing = draw("\n".join(self.content))
        return [nodes.raw("", f'<div class="flowchart-frame">{drawing}</div>', format="html")]


def draw(text: str) -> str:
    """Return the SVG of a flowchart."""
    shapes, arrows, boxes, open_groups, y = [], [], {}, [], GAP
    for line in map(str.strip, text.splitlines()):
        left = INDENT * (len(open_groups) + 1)
        if match := GROUP.match(line):
            open_groups.append((match["title"], left, y))
            y += LINE + GAP / 2
        elif line == "end":
            title, left, top = open_groups.pop()
            right = INDENT * 5 + WIDTH + INDENT * (4 - len(open_groups))
            shapes.insert(0, _rectangle("loop", left, top, right - left, y - top - GAP / 2, 8))
            shapes.append(_text("title", left + 10, top + LINE, title))
            y += GAP / 2
        elif match := NODE.match(line):
            lines = match["label"].split("<br/>")
            height = LINE * len(lines) + 12
            left = INDENT * 5
            shapes.append(_rectangle("work" if match["round"] else "event", left, y, WIDTH, height, 16))
            for number, words in enumerate(lines):
                kind = "name" if number == 0 else "component"
                shapes.append(_text(kind, left + 16, y + LINE * (number + 1), words))
            boxes[match["name"]] = (y, y + height)
            y += height + GAP
        elif match := ARROW.match(line):
            arrows.append(match)
    backward = [arrow for arrow in arrows if boxes[arrow["head"]][0] < boxes[arrow["tail"]][0]]
    for arrow in arrows:
        if arrow not in backward:
            top, bottom = boxes[arrow["tail"]][1], boxes[arrow["head"]][0]
            shapes.append(_path(f"M{INDENT * 5 + WIDTH / 2} {top} V{bottom - 2}"))
    for number, arrow in enumerate(backward):
        start, end = boxes[arrow["tail"]][1] - 8 - 6 * number, boxes[arrow["head"]][0] + 10 + 6 * number
        right, bend = INDENT * 5 + WIDTH, INDENT * 9 + WIDTH + BEND * number + 12
        shapes.append(_path(f"M{right} {start} H{bend - 8} q8 0 8 -8 V{end + 8} q0 -8 -8 -8 H{right + 2}"))
        place = f"{bend + 14} {(start + end) / 2}"
        shapes.append(f'<text class="again" transform="translate({place}) rotate(-90)">{_words(arrow["label"])}</text>')
    width = INDENT * 10 + WIDTH + BEND * len(backward)
    marker = '<marker id="arrow" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
    head = f'<defs>{marker}<path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    size = f'viewBox="0 0 {width} {y}" width="{width}" role="img" aria-label="A flowchart of the training loop"'
    return f'<svg class="flowchart" xmlns="http://www.w3.org/2000/svg" {size}>{head}{"".join(shapes)}</svg>'


def _rectangle(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>'


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{_words(words)}</text>'


def _path(path: str) -> str:
    return f'<path class="arrow" d="{path}" marker-end="url(#arrow)"/>'


def _words(label: str) -> str:
    return html.escape(html.unescape(ENTITY.sub(r"&\1;", label)))
