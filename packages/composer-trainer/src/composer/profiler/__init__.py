"""Profile some batches of a run, in traces for chrome://tracing and Perfetto."""

from composer.functional.signatures import unquote_annotations
from composer.profiler.json_trace_handler import JSONTraceHandler
from composer.profiler.profiler import Profiler
from composer.profiler.recording import Marker, TraceEvent, TraceHandler
from composer.profiler.schedule import ProfilerAction, cyclic_schedule
from composer.profiler.torch_profiler import TorchProfiler

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

unquote_annotations(globals())
