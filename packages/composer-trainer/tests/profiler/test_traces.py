"""Merging of traces."""

import pytest

from composer.profiler.traces import merged_traces, read_trace, write_trace


def trace(base, *events, rank=0):
    return {"traceEvents": [{"pid": 7, **event} for event in events], "baseTimeNanoseconds": base, "rank": rank}


def test_merged_traces_keep_their_times():
    """Traces with different start times keep their offset, to the nanosecond."""
    now = 1_790_000_000_123_456_789
    later, first = trace(now + 1_000_003, {"name": "c", "ts": 0.0}), trace(now, {"name": "b", "ts": 0.007})

    events = merged_traces([later, first])["traceEvents"]

    assert [(event["name"], event["ts"]) for event in events] == [("c", 1000.003), ("b", 0.007)]


def test_processes_and_arrows_stay_apart():
    """Processes of several ranks may have the same number, as may arrows in several traces."""
    parts = [trace(0, {"ts": 0.0, "id": 1}, rank=rank) for rank in (0, 1, 1)]

    events = merged_traces(parts)["traceEvents"]

    assert [event["pid"] for event in events] == ["rank 0: 7", "rank 1: 7", "rank 1: 7"]
    assert len({event["id"] for event in events}) == 3


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_files(tmp_path, name):
    """A trace is read as it was written, compressed or not."""
    write_trace(trace(1, {"ts": 0.5}), tmp_path / name)

    assert read_trace(tmp_path / name) == trace(1, {"ts": 0.5})
    assert (tmp_path / name).read_bytes().startswith(b"{") is name.endswith("json")
