"""Capture the lines that a program prints, and still print them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

__all__ = ["CapturedStream"]


class CapturedStream:
    """Replace ``sys.stdout`` or ``sys.stderr``: pass all output to the original stream, and each line to a function.

    If a line is redrawn, such as a progress bar, only the last drawing is passed. All other attributes (``isatty``,
    ``encoding``, …) are those of the original stream.

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
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._take_line(line)
            # Drop earlier drawings of the line, which would grow with each update of a progress bar.
            self._line = self._line[max(0, self._line.rfind("\r")) :]
        return count

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._original, attribute)

    def _take_line(self, line: str) -> None:
        drawn = line.rstrip("\r").rpartition("\r")[2]
        if drawn.strip() and self._sink is not None:
            self._sink(drawn)

    def _active_stream(self) -> Any:
        # Streams that were captured earlier and removed since then are skipped.
        stream = self._original
        while isinstance(stream, CapturedStream) and stream._sink is None:  # noqa: SLF001
            stream = stream._original  # noqa: SLF001
        return stream
