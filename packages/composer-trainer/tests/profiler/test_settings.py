"""Settings that the profiler rejects at construction."""

import inspect

import pytest

from composer.profiler import JSONTraceHandler, Profiler, TorchProfiler, cyclic_schedule


@pytest.mark.parametrize(
    "name", [name for name, one in inspect.signature(Profiler).parameters.items() if one.annotation == "bool"]
)
def test_flags_reject_strings(name):
    """A string for a flag raises, as every non-empty string is truthy."""
    with pytest.raises(TypeError, match=f"{name.removeprefix('torch_prof_')} must be True or False, got 'no'"):
        Profiler(cyclic_schedule(), [], **{"sys_prof_cpu": False, name: "no"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JSONTraceHandler(5), "folder must be a string or a path, got 5"),
        (lambda: JSONTraceHandler(filename=5), "filename must be a string or a path, got 5"),
        (lambda: JSONTraceHandler(merged_trace_filename=5), "merged_trace_filename must be a string or a path, got 5"),
        (lambda: TorchProfiler(filename=5, use_gzip=True), "filename must be a string or a path, got 5"),
        (
            lambda: Profiler(cyclic_schedule(), [], sys_prof_stats_thread_interval_seconds="1"),
            "sys_prof_stats_thread_interval_seconds must be a number, got '1'",
        ),
    ],
)
def test_wrong_types_raise(make, message):
    """A value of the wrong type raises with the parameter's name."""
    with pytest.raises(TypeError, match=f"^{message}"):
        make()
