"""Traces of torch's own profiler, which sees each operation, on the GPU too."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from composer.core import TimeUnit
from composer.core.checks import to_path
from composer.functional.checks import check_flags
from composer.profiler.files import TraceFiles
from composer.profiler.schedule import ProfilerAction

if TYPE_CHECKING:
    from pathlib import Path

    from composer.core import Logger, State

__all__ = ["TorchProfiler"]


class TorchProfiler:
    """Runs :class:`torch.profiler.profile` in the batches of a schedule, and writes what it saw.

    A :class:`~composer.profiler.Profiler` makes and drives it. The steps in the trace have the numbers of the batches,
    from 0; events, algorithms, callbacks and markers are in it, too. In the names ``{run_name}``, ``{rank}``,
    ``{epoch}`` and ``{batch}`` are filled in, the latter with what is done when the file is written.

    Args:
        folder: Where to; it is made if it does not exist.
        filename: The name of each trace.
        remote_file_name: Its name for loggers that keep files; None hands nothing to them.
        memory_filename: The name of a timeline of memory for each trace: ``….html`` (which needs matplotlib),
            ``….json`` or ``….json.gz``. It needs ``record_shapes``, ``profile_memory`` and ``with_stack``.
        memory_remote_file_name: Its name for loggers that keep files; None hands nothing to them.
        overwrite: Whether a training that begins may write where traces are already.
        use_gzip: Whether to compress traces; ``.gz`` is added to names that do not end so.
        record_shapes: Whether to record the shapes of operations' inputs.
        profile_memory: Whether to record what is allocated and freed.
        with_stack: Whether to record where in the program an operation was called.
        with_flops: Whether to estimate the floating point operations of matrix products and convolutions.
        num_traces_to_keep: How many traces are kept, the newest; -1 keeps all.

    Raises:
        ValueError: A name has something else in braces, ``num_traces_to_keep`` is less than -1, or a timeline of memory
            is wanted without what it needs.
        FileExistsError: When training begins: there are traces already, and ``overwrite`` is False.

    Example:
        >>> TorchProfiler("runs/{run_name}", use_gzip=True).files.filename
        'rank{rank}.{batch}.pt.trace.json.gz'
    """

    def __init__(
        self,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.pt.trace.json",
        remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        memory_filename: str | None = None,
        memory_remote_file_name: (
            str | None
        ) = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.memory_trace.html",
        overwrite: bool = False,
        use_gzip: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = True,
        num_traces_to_keep: int = -1,
    ) -> None:
        check_flags(
            use_gzip=use_gzip,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
        )
        options: dict[str, Any] = {"overwrite": overwrite, "num_traces_to_keep": num_traces_to_keep}
        self.files = TraceFiles(
            folder,
            _zipped("filename", filename, use_gzip),
            _zipped("remote_file_name", remote_file_name, use_gzip),
            **options,
        )
        self.memory_files: TraceFiles | None = None
        if memory_filename is not None:
            if not (record_shapes and profile_memory and with_stack):
                raise ValueError(
                    "memory_filename needs record_shapes=True, profile_memory=True and with_stack=True, got "
                    f"record_shapes={record_shapes}, profile_memory={profile_memory}, with_stack={with_stack}."
                )
            self.memory_files = TraceFiles(folder, memory_filename, memory_remote_file_name, **options)
        self.options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        self._action = ProfilerAction.SKIP
        self._profile: torch.profiler.profile | None = None

    def open(self, state: State) -> None:
        """Forget the traces of an earlier run, and refuse a folder that has any."""
        self.files.paths = []
        if self.memory_files is not None:
            self.memory_files.paths = []
        self.files.check_folder(state)

    def follow(self, action: ProfilerAction, state: State, logger: Logger) -> None:
        """Do what the schedule says for the next batch: begin, go on, or finish.

        Args:
            action: What it says.
            state: The run's state.
            logger: The run's logger.
        """
        self._action = action
        if action is ProfilerAction.SKIP:
            self.finish(state, logger)
        elif self._profile is None:
            self._profile = self._begin(state)
        else:
            self._profile.step()

    def finish(self, state: State, logger: Logger) -> None:
        """End the profile, and write what it has recorded, if anything."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        is_recording = profile.current_action is not torch.profiler.ProfilerAction.WARMUP
        profile.stop()
        if is_recording:
            self.files.write(lambda path: profile.export_chrome_trace(str(path)), state, logger)
            if self.memory_files is not None:
                self.memory_files.write(lambda path: _export_memory(profile, path), state, logger)

    def _begin(self, state: State) -> torch.profiler.profile:
        # torch asks the schedule by step, but what counts is the batch, about which ours was asked already.
        profile = torch.profiler.profile(schedule=lambda _: _TORCH_ACTIONS[self._action], **self.options)
        profile.step_num = int(state.timestamp.count(TimeUnit.BATCH))
        profile.start()
        return profile


_TORCH_ACTIONS = {
    ProfilerAction.SKIP: torch.profiler.ProfilerAction.NONE,
    ProfilerAction.WARMUP: torch.profiler.ProfilerAction.WARMUP,
    ProfilerAction.ACTIVE: torch.profiler.ProfilerAction.RECORD,
    # Saved is what has been recorded when it is stopped, so torch's own saving is not needed.
    ProfilerAction.ACTIVE_AND_SAVE: torch.profiler.ProfilerAction.RECORD,
}


def _zipped(parameter: str, name: str | None, use_gzip: bool) -> Any:
    if name is None or not use_gzip:
        return name
    return f"{to_path(parameter, name).removesuffix('.gz')}.gz"


def _export_memory(profile: torch.profiler.profile, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`export_memory_timeline` is deprecated", FutureWarning)
        profile.export_memory_timeline(str(path))
