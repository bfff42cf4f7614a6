"""Settings that the profiler rejects at construction."""

import pytest

from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JSONTraceHandler(5), "folder must be a string or a path, got 5"),
        (lambda: JSONTraceHandler(filename=5), "filename must be a string or a path, got 5"),
        (lambda: Profiler("cyclic", []), "'schedule' must be callable"),
        (lambda: Profiler(cyclic_schedule(), ["json"]), "trace_handlers must be TraceHandlers"),
        (lambda: Profiler(torch_prof_folder="a"), "Profiler has no argument 'torch_prof_folder': use trace_handlers"),
    ],
)
def test_wrong_types_raise(make, message):
    """A value of the wrong type raises with the parameter's name."""
    with pytest.raises(TypeError, match=f"^{message}"):
        make()
