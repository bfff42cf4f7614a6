"""Settings that the profiler rejects at construction."""

import inspect

import pytest

from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule


@pytest.mark.parametrize(
    "name", [name for name, one in inspect.signature(Profiler).parameters.items() if one.annotation == "bool"]
)
def test_flags_reject_strings(name):
    """A string for a flag raises, as every non-empty string is truthy."""
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        Profiler(cyclic_schedule(), [], **{name: "no"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JSONTraceHandler(5), "folder must be a string or a path, got 5"),
        (lambda: JSONTraceHandler(filename=5), "filename must be a string or a path, got 5"),
        (lambda: Profiler("cyclic", []), "'schedule' must be callable"),
        (lambda: Profiler(cyclic_schedule(), ["json"]), "trace_handlers must be TraceHandlers"),
    ],
)
def test_wrong_types_raise(make, message):
    """A value of the wrong type raises with the parameter's name."""
    with pytest.raises(TypeError, match=f"^{message}"):
        make()


def test_single_handler():
    """A single handler is accepted."""
    handler = JSONTraceHandler()

    assert Profiler(cyclic_schedule(), handler).trace_handlers == (handler,)
