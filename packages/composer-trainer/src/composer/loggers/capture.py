"""What a program prints, line by line, without taking it from the screen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CapturedStream"]


class CapturedStream:
    """Stands in for ``sys.stdout`` or ``sys.stderr``: all goes to the stream that was there, each line to a function.

    Of what is drawn over and over in one line, such as a progress bar, the last drawing counts. Whatever else is asked
    of it (``isatty``, ``encoding``, …) the stream that was there answers.

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
        """Take the stream's place."""
        self._original = getattr(sys, self._name)
        if self._original is not None:  # a program without a terminal may have none
            setattr(sys, self._name, self)

    def remove(self) -> None:
        """Give the stream its place back, unless another has taken it, and call the function no more."""
        self._take_line(self._line)
        self._line, self._sink = "", None
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._still_at_work())

    def write(self, text: str) -> int:
        """Write to the stream that was there, and notice what lines are whole."""
        count: int = self._original.write(text)
        if self._sink is not None:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._take_line(line)
            self._line = self._line[max(0, self._line.rfind("\r")) :]
        return count

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._original, attribute)

    def _take_line(self, line: str) -> None:
        drawn = line.rstrip("\r").rpartition("\r")[2]
        if drawn.strip() and self._sink is not None:
            self._sink(drawn)

    def _still_at_work(self) -> Any:
        # What was put in place before this one may have been removed already, and then only stands in the way.
        stream = self._original
        while isinstance(stream, CapturedStream) and stream._sink is None:  # noqa: SLF001
            stream = stream._original  # noqa: SLF001
        return stream
