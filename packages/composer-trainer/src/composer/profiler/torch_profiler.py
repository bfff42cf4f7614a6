"""Write the traces of torch's profiler, and timelines of memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import attrs
from torch.profiler import profile

from composer.core import Logger, State
from composer.core.checks import is_flag
from composer.core.components import transient
from composer.profiler.json_trace_handler import JSONTraceHandler, number_of_traces

if TYPE_CHECKING:
    from composer.profiler.traces import Trace


@attrs.define(eq=False)
class TorchProfiler(JSONTraceHandler):
    """Write each trace to a file, and a timeline of the memory to another; holds the options of torch's profiler.

    A :class:`~composer.profiler.Profiler` creates it from its arguments ``torch_prof_*``. In the names ``{run_name}``,
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
        >>> TorchProfiler("runs/{run_name}", use_gzip=True).filename
        'rank{rank}.{batch}.pt.trace.json.gz'
    """

    folder: str = "{run_name}/torch_traces"
    filename: str = "rank{rank}.{batch}.pt.trace.json"
    remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json"
    memory_filename: str | None = None
    memory_remote_file_name: str | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.memory_trace.html"
    overwrite: bool = attrs.field(default=False, validator=is_flag)
    use_gzip: bool = attrs.field(default=False, validator=is_flag)
    record_shapes: bool = attrs.field(default=False, validator=is_flag)
    profile_memory: bool = attrs.field(default=True, validator=is_flag)
    with_stack: bool = attrs.field(default=False, validator=is_flag)
    with_flops: bool = attrs.field(default=True, validator=is_flag)
    num_traces_to_keep: int = attrs.field(default=-1, validator=number_of_traces)
    merged_trace_filename: None = transient(default=None)
    merged_trace_remote_file_name: None = transient(default=None)
    _memory: JSONTraceHandler | None = transient(default=None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.use_gzip:
            self.filename = f"{self.filename.removesuffix('.gz')}.gz"
            if self.remote_file_name is not None:
                self.remote_file_name = f"{self.remote_file_name.removesuffix('.gz')}.gz"
        if self.memory_filename is None:
            return
        if not (self.record_shapes and self.profile_memory and self.with_stack):
            raise ValueError(
                "memory_filename requires record_shapes=True, profile_memory=True and with_stack=True, got "
                f"record_shapes={self.record_shapes}, profile_memory={self.profile_memory}, "
                f"with_stack={self.with_stack}."
            )
        self._memory = JSONTraceHandler(
            self.folder,
            self.memory_filename,
            self.memory_remote_file_name,
            overwrite=self.overwrite,
            num_traces_to_keep=self.num_traces_to_keep,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of :class:`torch.profiler.profile`."""
        return {name: getattr(self, name) for name in ("record_shapes", "profile_memory", "with_stack", "with_flops")}

    def save(self, trace: Trace, profile: profile, state: State, logger: Logger) -> None:
        """Write the files."""
        super().save(trace, profile, state, logger)
        if self._memory is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`export_memory_timeline` is deprecated", FutureWarning)
                self._memory.write(lambda path: profile.export_memory_timeline(str(path)), state, logger)
