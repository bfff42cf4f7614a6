"""Capture the lines that a program prints, and still print them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

_UP = "\x1b[A"
"""Moves the cursor up, from a second progress bar to the first, which is drawn again."""


class CapturedStream:
    """Replace ``sys.stdout`` or ``sys.stderr``: pass all output to the original stream, and each line to a function.

    A line that is redrawn, such as a progress bar, is not passed. All other attributes (``isatty``, ``encoding``, …)
    are those of the original stream.

    Args:
        name: ``"stdout"`` or ``"stderr"``.
        sink: ``f(line)``, called for each line that is not blank.

    Example:
        >>> lines = []
        >>> captured = CapturedStream("stdout", lines.append)
        >>> captured.install()
        >>> print("hello")
        hello
        >>> captured.remove()
        >>> lines
        ['hello']
    """

    def __init__(self, name: Literal["stdout", "stderr"], sink: Callable[[str], None]) -> None:
        self._name = name
        self._sink: Callable[[str], None] | None = sink
        self._original: Any = None
        self._line = ""

    def install(self) -> None:
        """Replace the stream."""
        self._original = getattr(sys, self._name)
        if self._original is not None:  # a program without a terminal may have none
            setattr(sys, self._name, self)

    def remove(self) -> None:
        """Restore the stream, unless it was replaced again, and stop calling the function."""
        self._take_line(self._line)
        self._line, self._sink = "", None
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._active_stream())

    def write(self, text: str) -> int:
        """Write to the original stream, and pass complete lines to the function."""
        count: int = self._original.write(text)
        if self._sink is not None:
            *lines, unfinished = (self._line + text.replace(_UP, "\r\r")).split("\n")
            for line in lines:
                self._take_line(_newest_drawing(line.removesuffix("\r")))
            self._line = _newest_drawing(unfinished)
        return count

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._original, attribute)

    def _take_line(self, line: str) -> None:
        if line.strip() and not line.startswith("\r") and self._sink is not None:
            self._sink(line)

    def _active_stream(self) -> Any:
        # Streams that were captured earlier and removed since then are skipped.
        stream = self._original
        while isinstance(stream, CapturedStream) and stream._sink is None:  # noqa: SLF001
            stream = stream._original  # noqa: SLF001
        return stream


def _newest_drawing(line: str) -> str:
    """Return a line without its earlier drawings; it begins with a carriage return if it was not cleared between."""
    earlier, carriage_return, newest = line.rpartition("\r")
    before = earlier.rpartition("\r")[2]
    return newest if before and not before.strip() else carriage_return + newest
