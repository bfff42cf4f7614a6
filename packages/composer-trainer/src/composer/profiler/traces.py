"""Export torch's traces with counters, merge several traces into one, and read and write them."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch.profiler import profile

Counter: TypeAlias = tuple[int, str, Mapping[str, float]]
"""Time in nanoseconds since 1970, name, and values by name."""

Trace: TypeAlias = dict[str, Any]
"""The content of a file in Chrome's format: ``{"traceEvents": […], …}``."""

_BASE = "baseTimeNanoseconds"


def chrome_trace(profile: profile, counters: Iterable[Counter], rank: int) -> Trace:
    """Return the trace of torch's profiler, with counters and the rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        trace = read_trace(path)
    for time, name, values in counters:
        event = {"ph": "C", "name": name, "ts": (time - trace[_BASE]) / 1e3, "args": values}
        trace["traceEvents"].append({**event, "pid": os.getpid(), "tid": 0})
    return {**trace, "rank": rank}


def merged_traces(traces: Iterable[Trace]) -> Trace:
    """Return several traces as one, with their times aligned and the ranks in the names of their processes.

    Example:
        >>> event = {"ph": "X", "name": "forward", "ts": 1.0, "dur": 2.0, "pid": 71, "tid": 71}
        >>> traces = [{"traceEvents": [event], "baseTimeNanoseconds": base, "rank": 3} for base in (5_000, 9_000)]
        >>> [(event["ts"], event["pid"]) for event in merged_traces(traces)["traceEvents"]]
        [(1.0, 'rank 3: 71'), (5.0, 'rank 3: 71')]
    """
    traces = list(traces)
    base = min(trace[_BASE] for trace in traces)
    events = []
    for number, trace in enumerate(traces):
        later = (trace[_BASE] - base) / 1e3
        for event in trace["traceEvents"]:
            # Processes of several machines may have the same number, and each trace counts its arrows from 1.
            own = {"pid": f"rank {trace['rank']}: {event['pid']}", "ts": round(event["ts"] + later, 3)}
            events.append({**event, **own, **({"id": f"{number}.{event['id']}"} if "id" in event else {})})
    return {**traces[0], "traceEvents": events, _BASE: base}


def read_trace(path: Path) -> Trace:
    """Return the content of a trace, which is compressed if the name ends with ``.gz``."""
    content = path.read_bytes()
    trace: Trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return trace


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace, compressed if the name ends with ``.gz``."""
    content = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
