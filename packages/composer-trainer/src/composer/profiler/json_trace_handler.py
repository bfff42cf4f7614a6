"""Write traces as files for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from composer.core.files import fill_in_run, write_atomically
from composer.profiler.files import TraceFiles, check_optional_template
from composer.profiler.recording import TraceEvent, TraceHandler

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from composer.core import Logger, State

__all__ = ["JSONTraceHandler", "chrome_trace", "merged_traces"]

_BASE = "baseTimeNanoseconds"


class JSONTraceHandler(TraceHandler):
    """Write each sequence of active batches to a file in Chrome's trace format, and all of them to another at the end.

    Open them at https://ui.perfetto.dev or ``chrome://tracing``. A process of the trace is a rank of the run. In the
    names ``{run_name}``, ``{rank}``, ``{epoch}`` and ``{batch}`` are filled in, the latter two with the completed
    epochs and batches. Files are written atomically.

    Args:
        folder: Folder of the files; created if it does not exist.
        filename: Name of each file.
        remote_file_name: Name of each file at loggers that store files; None uploads nothing.
        merged_trace_filename: Name of the file with all traces of the folder, written by the process of rank 0 when the
            run is closed, including the traces of other ranks that exist by then. None writes none.
        merged_trace_remote_file_name: Name of that file at loggers that store files; None uploads nothing.
        overwrite: Whether a new training may overwrite existing traces.
        num_traces_to_keep: Number of files to keep, the newest; -1 keeps all.

    Raises:
        ValueError: A name contains another field in braces, or ``num_traces_to_keep`` is less than -1.
        FileExistsError: When training starts: traces exist, and ``overwrite`` is False.

    Example:
        >>> JSONTraceHandler("runs/{run_name}", "ep{epoch}-ba{batch}.json").files.filename
        'ep{epoch}-ba{batch}.json'
    """

    def __init__(
        self,
        folder: str = "{run_name}/traces",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.json",
        remote_file_name: str | None = "{run_name}/traces/ep{epoch}-ba{batch}-rank{rank}.json",
        merged_trace_filename: str | None = "merged_trace.json",
        merged_trace_remote_file_name: str | None = "{run_name}/traces/merged_trace.json",
        *,
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
    ) -> None:
        self.files = TraceFiles(
            folder, filename, remote_file_name, overwrite=overwrite, num_traces_to_keep=num_traces_to_keep
        )
        self.merged_trace_filename = check_optional_template(merged_trace_filename, "merged_trace_filename")
        self.merged_trace_remote_file_name = check_optional_template(
            merged_trace_remote_file_name, "merged_trace_remote_file_name"
        )

    def open(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and reject a folder that contains traces."""
        self.files.paths = []
        self.files.check_folder(state)

    def save(self, events: Sequence[TraceEvent], state: State, logger: Logger) -> None:
        """Write a file."""
        trace = chrome_trace(events, state.rank)
        self.files.write(partial(_write, trace), state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Merge all files of the folder into one."""
        if self.merged_trace_filename is None or state.rank != 0 or not self.files.paths:
            return
        path = self.files.folder_of(state) / fill_in_run(self.merged_trace_filename, state)
        parts = [part for part in self.files.existing(state, of_all_ranks=True) if part != path]
        merged = merged_traces(json.loads(part.read_text(encoding="utf-8")) for part in parts)
        write_atomically(partial(_write, merged), path)
        if self.merged_trace_remote_file_name is not None and logger.has_file_upload_destination():
            name = fill_in_run(self.merged_trace_remote_file_name, state)
            logger.upload_file(name, path, overwrite=self.files.overwrite)


def chrome_trace(events: Sequence[TraceEvent], rank: int) -> dict[str, Any]:
    """Return events in Chrome's trace format: spans as ``X``, instants as ``i``, counters as ``C``, times in µs.

    Args:
        events: The recorded events, sorted by their start.
        rank: The rank of the process.

    Example:
        >>> span = TraceEvent("span", "forward", ("phase",), begin=5_000, duration=2_500, thread=7, args={"batch": 3})
        >>> chrome_trace([span], rank=0)["traceEvents"][-1]["dur"]
        2.5
    """
    base = events[0].begin if events else time.time_ns()
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(event.thread for event in events))}
    shown: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "ts": 0, "args": {"sort_index": rank}},
    ]
    shown += [_shown(event, rank, threads[event.thread], base) for event in events]
    return {"traceEvents": shown, "displayTimeUnit": "ms", _BASE: base}


def merged_traces(traces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several traces as one, with their times aligned.

    Example:
        >>> first, second = (chrome_trace([TraceEvent("instant", "x", (), t, 0, 1, {})], 0) for t in (1_000, 4_000))
        >>> [event["ts"] for event in merged_traces([second, first])["traceEvents"] if event["name"] == "x"]
        [0.0, 3.0]
    """
    traces = list(traces)
    base = min((trace[_BASE] for trace in traces), default=0)
    described: dict[tuple[Any, ...], dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for trace in traces:
        later = (trace[_BASE] - base) / 1e3
        for event in trace["traceEvents"]:
            if event["ph"] == "M":
                described[event["name"], event["pid"], event["tid"]] = event
            else:
                # Rounded to nanoseconds, so that rounding errors do not move an event out of its span.
                events.append({**event, "ts": round(event["ts"] + later, 3)})
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": [*described.values(), *events], "displayTimeUnit": "ms", _BASE: base}


def _shown(event: TraceEvent, rank: int, thread: int, base: int) -> dict[str, Any]:
    kinds = {"span": "X", "instant": "i", "counter": "C"}
    shown: dict[str, Any] = {
        "ph": kinds[event.kind],
        "name": event.name,
        "cat": ",".join(event.categories),
        "ts": (event.begin - base) / 1e3,
        "pid": rank,
        "tid": thread,
        "args": dict(event.args),
    }
    if event.kind == "span":
        shown["dur"] = event.duration / 1e3
    if event.kind == "instant":
        shown["s"] = "t"
    return shown


def _write(trace: Mapping[str, Any], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(trace, file)
