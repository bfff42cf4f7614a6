"""Profile some batches of a run with torch's profiler, in traces for chrome://tracing and Perfetto."""

from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.profiler.json_trace_handler import JSONTraceHandler, TraceHandler
from composer.profiler.profiler import Profiler
from composer.profiler.schedule import ProfilerAction, cyclic_schedule

__all__ = ["JSONTraceHandler", "Profiler", "ProfilerAction", "TraceHandler", "cyclic_schedule"]

unquote_annotations(globals())
serve_former_names(__name__)
