"""What a GPU's memory held when there was not enough of it."""

from __future__ import annotations

import sys

import attrs
import torch

from composer.callbacks._memory_history import (
    check_names,
    is_recordable,
    start_history,
    stop_history,
    write_snapshot,
)
from composer.core import Callback, Logger, State
from composer.core.checks import true_or_false, whole_number_from

__all__ = ["OOMObserver"]


@attrs.define(eq=False)
class OOMObserver(Callback):
    """Write down what is allocated on the GPU, and by which lines of code, when a run ends for want of memory.

    The file, ``<folder>/<filename>.pickle``, can be looked at in a browser: https://docs.pytorch.org/memory_viz. It
    is written when the :class:`torch.OutOfMemoryError` ends the run; an error that was caught, as when the trainer
    looks for the size of a microbatch, leaves none. Recording costs a few microseconds an allocation. On other devices
    than CUDA it says so and does nothing.

    Args:
        max_entries: How many allocations and releases to keep, the last ones.
        folder: Where the file is written; ``{run_name}``, ``{rank}`` and ``{batch}`` are filled in here and below.
        filename: Its name, without the ending.
        remote_file_name: What loggers that keep files are to call it; None gives it to none.
        overwrite: Whether to write over a file that exists.

    Raises:
        ValueError: ``max_entries`` is less than 1, or a name has something else in braces.

    Example:
        >>> OOMObserver(folder="traces").filename
        'rank{rank}_oom'
    """

    max_entries: int = attrs.field(
        default=100000, validator=whole_number_from(1, meaning="It is the number of allocations to keep.")
    )
    folder: str = "{run_name}/torch_traces"
    filename: str = "rank{rank}_oom"
    remote_file_name: str | None = "{run_name}/oom_traces/rank{rank}_oom"
    overwrite: bool = attrs.field(default=False, validator=true_or_false)

    _is_on: bool = attrs.field(default=False, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_names(folder=self.folder, filename=self.filename, remote_file_name=self.remote_file_name)

    def init(self, state: State, logger: Logger) -> None:
        """Begin to record."""
        del logger
        self._is_on = is_recordable(state, "OOMObserver")
        if self._is_on:
            start_history(self.max_entries)

    def close(self, state: State, logger: Logger) -> None:
        """Write the file if the run ends for want of memory, and record nothing any more."""
        if not self._is_on:
            return
        self._is_on = False
        try:
            if is_out_of_memory(sys.exception()):
                write_snapshot(
                    self.folder, self.filename, self.remote_file_name, state, logger, overwrite=self.overwrite
                )
        finally:
            stop_history()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, is a want of memory.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("no room")), is_out_of_memory(ValueError("other"))
        (True, False)
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
