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
        (lambda: Profiler("cyclic", []), "'schedule' must be callable"),
        (lambda: Profiler(cyclic_schedule(), ["json"]), "trace_handlers must be TraceHandlers"),
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


def test_nonpositive_interval():
    """The interval must be positive."""
    with pytest.raises(ValueError, match="sys_prof_stats_thread_interval_seconds must be more than 0, got 0"):
        Profiler(cyclic_schedule(), [], sys_prof_stats_thread_interval_seconds=0)


def test_single_handler():
    """A single handler is accepted; the one of torch's files is added to it."""
    handler = JSONTraceHandler()
    profiler = Profiler(cyclic_schedule(), handler, sys_prof_cpu=False, torch_prof_with_flops=False)

    assert profiler.trace_handlers[0] is handler
    assert profiler.trace_handlers[1].options["with_flops"] is False
    assert Profiler(cyclic_schedule(), handler, sys_prof_cpu=False, torch_prof_folder=None).trace_handlers == (handler,)
