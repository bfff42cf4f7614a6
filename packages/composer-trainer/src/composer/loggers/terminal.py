"""The loggers that show a run in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger

if TYPE_CHECKING:
    from composer.core import LoggerDestination, Time

__all__ = ["terminal_destinations"]


def terminal_destinations(
    *,
    progress_bar: bool,
    log_to_console: bool,
    stream: str | TextIO = "stderr",
    log_interval: Time | str | int = "1ba",
    log_traces: bool = False,
) -> list[LoggerDestination]:
    """Return the destinations that show a run in a terminal: a progress bar, lines of text, both or none.

    Args:
        progress_bar: Whether to show a progress bar.
        log_to_console: Whether to print metrics as lines.
        stream: ``"stdout"``, ``"stderr"`` or an open text file.
        log_interval: How often lines are printed.
        log_traces: Whether to print which algorithms ran.

    Example:
        >>> terminal_destinations(progress_bar=False, log_to_console=False)
        []
    """
    destinations: list[LoggerDestination] = []
    if progress_bar:
        destinations.append(ProgressBarLogger(stream=stream, log_traces=log_traces))
    if log_to_console:
        destinations.append(ConsoleLogger(log_interval=log_interval, stream=stream, log_traces=log_traces))
    return destinations
