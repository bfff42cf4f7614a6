"""Metric values that a device may still compute: read many with one synchronization, and format them."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from numbers import Real
from typing import Any, TextIO, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = int | float

Stream: TypeAlias = str | TextIO
"""``"stdout"``, ``"stderr"`` or an open text file."""


def read(values: Sequence[Any]) -> list[Any]:
    """Return values with tensors converted to numbers or lists, with one synchronization per device and dtype.

    Example:
        >>> read([torch.tensor(0.5), "as it is", torch.tensor([1, 2])])
        [0.5, 'as it is', [1, 2]]
    """
    numbers = list(values)
    # Stacked and copied at once: `.item()` would wait for the device once per value.
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            if value.numel() == 1:
                by_kind.setdefault((value.device, value.dtype), []).append(place)
            else:
                numbers[place] = value.tolist()
    for places in by_kind.values():
        stacked = torch.stack([values[place].detach().reshape(()) for place in places])
        for place, number in zip(places, stacked.tolist(), strict=True):
            numbers[place] = number
    return numbers


def numbers_by_name(logged: Sequence[Mapping[str, Any]]) -> list[dict[str, Number]]:
    """Return the numbers of several dictionaries, with one synchronization per device and dtype.

    Each element of a tensor with several elements gets its own name, with its index; values that are not numbers are
    skipped.

    Example:
        >>> numbers_by_name([{"loss": torch.tensor(0.5), "text": "none"}, {"recall": torch.tensor([0.25, 1.0])}])
        [{'loss': 0.5}, {'recall/0': 0.25, 'recall/1': 1.0}]
    """
    values = iter(read([value for metrics in logged for value in metrics.values()]))
    return [
        {
            name: _plain_number(value)
            for name, value in flat(dict(zip(metrics, values, strict=False))).items()
            if isinstance(value, Real)
        }
        for metrics in logged
    ]


def _plain_number(value: Any) -> Number:
    return value if type(value) in {int, float} else float(value)


def flat(nested: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Return nested dictionaries and lists as one dictionary with joined names; empty ones are kept as values.

    Example:
        >>> flat({"algorithms": {"MixUp": {"alpha": 0.2}}, "betas": [0.9, 0.99], "tags": []})
        {'algorithms/MixUp/alpha': 0.2, 'betas/0': 0.9, 'betas/1': 0.99, 'tags': []}
    """
    flattened: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, (list, tuple)) and value:
            value = dict(enumerate(value))  # noqa: PLW2901
        if isinstance(value, Mapping) and value:
            flattened |= {f"{name}{separator}{inner}": item for inner, item in flat(value, separator).items()}
        else:
            flattened[str(name)] = value
    return flattened


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of several patterns such as ``"loss/*"``.

    Example:
        >>> matches("loss/train/total", ["metrics/*", "loss/*"])
        True
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def show(value: object) -> str:
    """Return a value as text; a float has four significant digits.

    Example:
        >>> show(0.123456), show(7)
        ('0.1235', '7')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Return the rows of a table as lines with aligned columns.

    Args:
        rows: The cells; the first row may be the heads of the columns.
        left: The number of columns that are aligned to the left, the others to the right; None for all.

    Example:
        >>> aligned([["name", "calls"], ["EMA", "3"]], left=1)
        ['name  calls', 'EMA       3']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    justify = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return [
        "  ".join(one(cell, width) for one, cell, width in zip(justify, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def markdown_table(rows: Sequence[Sequence[object]], left: int | None = None) -> str:
    r"""Return a table in Markdown.

    Args:
        rows: The cells; the first row has the heads of the columns.
        left: The number of columns that are aligned to the left, the others to the right; None for all.

    Example:
        >>> print(markdown_table([["name", "calls"], ["a|b", 3]], left=1))
        | name | calls |
        | --- | ---: |
        | a\|b | 3 |
    """
    head, *others = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    left = len(head) if left is None else left
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *others))


def html_table(rows: Iterable[Sequence[object]], head: Sequence[str] = (), caption: str = "", left: int = 1) -> str:
    """Return a table for notebooks, with escaped strings.

    Args:
        rows: The cells.
        head: The heads of the columns.
        caption: A paragraph above the table; its lines are kept.
        left: The number of columns that are aligned to the left, the others to the right.

    Example:
        >>> html_table([["a<b", 1]], left=1)
        '<table><tr><td style="text-align: left">a&lt;b</td><td style="text-align: right">1</td></tr></table>'
    """

    def line(cells: Sequence[object], tag: str) -> str:
        sides = ["left"] * left + ["right"] * (len(cells) - left)
        shown = [
            f'<{tag} style="text-align: {side}">{escape(str(cell))}</{tag}>'
            for side, cell in zip(sides, cells, strict=False)
        ]
        return f"<tr>{''.join(shown)}</tr>"

    above = f'<caption style="text-align: left; white-space: pre-line">{escape(caption)}</caption>' if caption else ""
    heads = line(head, "th") if head else ""
    return f"<table>{above}{heads}{''.join(line(row, 'td') for row in rows)}</table>"


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return each value averaged with up to ``reach`` neighbours before and after it.

    Example:
        >>> smoothed([1.0, 2.0, 6.0], reach=1)
        [1.5, 3.0, 4.0]
    """
    line = torch.tensor(values, dtype=torch.float64)[None]
    return torch.nn.functional.avg_pool1d(line, 2 * reach + 1, 1, reach, count_include_pad=False)[0].tolist()


def check_stream(stream: Stream) -> Stream:
    """Return the stream.

    Raises:
        ValueError: It is neither one of the two names nor a writable file.
    """
    if stream not in {"stdout", "stderr"} and not hasattr(stream, "write"):
        raise ValueError(f"stream must be 'stderr', 'stdout' or an open text file, got {stream!r}.")
    return stream


def open_stream(stream: Stream) -> TextIO:
    """Return the current standard stream of that name, or the open file."""
    if isinstance(stream, str):
        return sys.stdout if stream == "stdout" else sys.stderr
    return stream
