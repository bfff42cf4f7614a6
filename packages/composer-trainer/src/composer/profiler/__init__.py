"""Where the time of a run goes: traces of some batches, for chrome://tracing and Perfetto."""

from composer.profiler.json_trace_handler import JSONTraceHandler
from composer.profiler.marker import Marker
from composer.profiler.profiler import Profiler
from composer.profiler.schedule import ProfilerAction, cyclic_schedule
from composer.profiler.torch_profiler import TorchProfiler
from composer.profiler.trace import TraceEvent, TraceHandler

__all__ = [
    "JSONTraceHandler",
    "Marker",
    "Profiler",
    "ProfilerAction",
    "TorchProfiler",
    "TraceEvent",
    "TraceHandler",
    "cyclic_schedule",
]
