"""Run torch's profiler, which records each operation, also on the GPU."""

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
    from composer.core import Logger, State

__all__ = ["TorchProfiler"]


class TorchProfiler:
    """Run :class:`torch.profiler.profile` in the batches of a schedule, and write its traces.

    A :class:`~composer.profiler.Profiler` creates and controls it. The steps in the trace are the numbers of the
    batches, from 0; the trace also contains events, algorithms, callbacks and markers. In the names ``{run_name}``,
    ``{rank}``, ``{epoch}`` and ``{batch}`` are filled in, the latter two with the completed epochs and batches.

    Args:
        folder: Folder of the traces; created if it does not exist.
        filename: Name of each trace.
        remote_file_name: Name of each trace at loggers that store files; None uploads nothing.
        memory_filename: Name of a memory timeline for each trace: ``….html`` (requires matplotlib), ``….json`` or
            ``….json.gz``. It requires ``record_shapes``, ``profile_memory`` and ``with_stack``.
        memory_remote_file_name: Name of the timeline at loggers that store files; None uploads nothing.
        overwrite: Whether a new training may overwrite existing traces.
        use_gzip: Whether to compress traces; ``.gz`` is appended to names without it.
        record_shapes: Whether to record the shapes of operations' inputs.
        profile_memory: Whether to record allocations and releases.
        with_stack: Whether to record the call stack of operations.
        with_flops: Whether to estimate the floating point operations of matrix products and convolutions.
        num_traces_to_keep: Number of traces to keep, the newest; -1 keeps all.

    Raises:
        ValueError: A name contains another field in braces, ``num_traces_to_keep`` is less than -1, or a memory
            timeline is requested without the settings that it requires.
        FileExistsError: When training starts: traces exist, and ``overwrite`` is False.

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
        self.options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        check_flags(use_gzip=use_gzip, **self.options)
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
                    "memory_filename requires record_shapes=True, profile_memory=True and with_stack=True, got "
                    f"record_shapes={record_shapes}, profile_memory={profile_memory}, with_stack={with_stack}."
                )
            self.memory_files = TraceFiles(folder, memory_filename, memory_remote_file_name, **options)
        self._action = ProfilerAction.SKIP
        self._profile: torch.profiler.profile | None = None

    def open(self, state: State) -> None:
        """Reset the state of an earlier run, and reject a folder that contains traces."""
        self.files.paths = []
        if self.memory_files is not None:
            self.memory_files.paths = []
        self.files.check_folder(state)

    def follow(self, action: ProfilerAction, state: State, logger: Logger) -> None:
        """Start, continue or finish profiling, as the schedule's action for the next batch requires."""
        self._action = action
        if action is ProfilerAction.SKIP:
            self.finish(state, logger)
        elif self._profile is None:
            self._profile = self._begin(state)
        else:
            self._profile.step()

    def finish(self, state: State, logger: Logger) -> None:
        """Stop the profile, and write its recording, if any."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        is_recording = profile.current_action is not torch.profiler.ProfilerAction.WARMUP
        profile.stop()
        if is_recording:
            self.files.write(lambda path: profile.export_chrome_trace(str(path)), state, logger)
            if self.memory_files is not None:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "`export_memory_timeline` is deprecated", FutureWarning)
                    self.memory_files.write(lambda path: profile.export_memory_timeline(str(path)), state, logger)

    def _begin(self, state: State) -> torch.profiler.profile:
        # torch calls the schedule with its own step; the action of the batch is already known here.
        profile = torch.profiler.profile(schedule=lambda _: _TORCH_ACTIONS[self._action], **self.options)
        profile.step_num = int(state.timestamp.count(TimeUnit.BATCH))
        profile.start()
        return profile


_TORCH_ACTIONS = {
    ProfilerAction.SKIP: torch.profiler.ProfilerAction.NONE,
    ProfilerAction.WARMUP: torch.profiler.ProfilerAction.WARMUP,
    ProfilerAction.ACTIVE: torch.profiler.ProfilerAction.RECORD,
    # The recording is written when the profile is stopped, so torch's own saving is not needed.
    ProfilerAction.ACTIVE_AND_SAVE: torch.profiler.ProfilerAction.RECORD,
}


def _zipped(parameter: str, name: str | None, use_gzip: bool) -> Any:
    if name is None or not use_gzip:
        return name
    return f"{to_path(parameter, name).removesuffix('.gz')}.gz"
