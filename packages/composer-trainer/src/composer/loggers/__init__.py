"""Where a run's metrics go: onto a bar, the console, into memory or a file."""

from composer.core import Logger, LoggerDestination
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.in_memory_logger import InMemoryLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger

__all__ = [
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "ProgressBarLogger",
]
