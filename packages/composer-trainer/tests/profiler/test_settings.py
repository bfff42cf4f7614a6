"""Settings that the profiler refuses at construction."""

import inspect

import pytest

from composer.profiler import JSONTraceHandler, Profiler, TorchProfiler, cyclic_schedule


@pytest.mark.parametrize(
    "name", [name for name, one in inspect.signature(Profiler).parameters.items() if one.annotation == "bool"]
)
def test_flags_accept_no_text(name):
    """A text for a flag is an error, as every text counts as true."""
    with pytest.raises(TypeError, match=f"{name.removeprefix('torch_prof_')} must be True or False, got 'no'"):
        Profiler(cyclic_schedule(), [], **{"sys_prof_cpu": False, name: "no"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JSONTraceHandler(5), "folder must be a text or a path, got 5"),
        (lambda: JSONTraceHandler(filename=5), "filename must be a text or a path, got 5"),
        (lambda: JSONTraceHandler(merged_trace_filename=5), "merged_trace_filename must be a text or a path, got 5"),
        (lambda: TorchProfiler(filename=5, use_gzip=True), "filename must be a text or a path, got 5"),
        (
            lambda: Profiler(cyclic_schedule(), [], sys_prof_stats_thread_interval_seconds="1"),
            "sys_prof_stats_thread_interval_seconds must be a number, got '1'",
        ),
    ],
)
def test_other_kinds_are_refused(make, message):
    """A value of the wrong kind is refused by the parameter's name."""
    with pytest.raises(TypeError, match=f"^{message}"):
        make()
