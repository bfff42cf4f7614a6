"""The profiler: run torch's profiler in some batches of a run, and pass its traces to handlers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch
from torch.profiler import record_function

from composer.core import Callback, Event, Logger, State, TimeUnit
from composer.core.checks import is_flag, number
from composer.core.components import transient
from composer.core.interval import Call
from composer.loggers.products import require_product
from composer.profiler.json_trace_handler import TraceHandler
from composer.profiler.schedule import ProfilerAction
from composer.profiler.system_metrics import Sampler, read_machine
from composer.profiler.torch_profiler import TorchProfiler
from composer.profiler.traces import Counter, chrome_trace

# The measured values that each setting records, by the beginnings of their names.
_METRICS = {
    "sys_prof_cpu": ("cpu_percentage",),
    "sys_prof_memory": ("cpu_memory", "process_memory"),
    "sys_prof_disk": ("disk",),
    "sys_prof_net": ("network",),
}
_TORCH = [field.name for field in attrs.fields(TorchProfiler) if field.init]
# Phases longer than a batch have no range: it would overlap the range that torch records for each step.
_LONGER_THAN_A_BATCH = ("fit", "iteration", "epoch")


def _to_handlers(given: TraceHandler | Sequence[TraceHandler]) -> tuple[TraceHandler, ...]:
    handlers = (given,) if isinstance(given, TraceHandler) else tuple(given)
    for handler in handlers:
        if not isinstance(handler, TraceHandler):
            raise TypeError(f"trace_handlers must be TraceHandlers, such as JSONTraceHandler(), got {handler!r}.")
    return handlers


class Marker(record_function):
    """Record a part of a program as a range in the trace, in active batches; created by :meth:`Profiler.marker`.

    Use it as a context manager, one ``with`` at a time, or as a decorator of a function. It is a
    :class:`torch.autograd.profiler.record_function` with two more methods. torch records the thread that trains, and
    those of the backward pass.

    Args:
        name: Name of the range.
        count: Function that records the values of :meth:`counter`, given the name and the values.

    Example:
        >>> from composer.profiler import Profiler, cyclic_schedule
        >>> profiler = Profiler(cyclic_schedule(), [], sys_prof_cpu=False)
        >>> with profiler.marker("my part"):
        ...     total = sum(range(10))
        >>> @profiler.marker("adding")
        ... def add(a, b):
        ...     return a + b
        >>> add(1, 2)
        3
    """

    def __init__(self, name: str, count: Callable[[str, Mapping[str, float]], None]) -> None:
        super().__init__(name)
        self._count = count

    def _recreate_cm(self) -> Self:
        """Return a new range for each call of a decorated function, which may call itself."""
        return type(self)(self.name, self._count)

    def instant(self) -> None:
        """Record an instant, as a range without content."""
        with record_function(self.name):
            pass

    def counter(self, values: Mapping[str, float]) -> None:
        """Record the current values of numbers by name; a viewer draws them as curves."""
        self._count(self.name, dict(values))


@attrs.define(eq=False)
class Profiler(Callback):
    """Record how the time of some batches is spent; pass it to a trainer as ``profiler=``.

    It runs one :class:`torch.profiler.profile`. In the active batches of the schedule, the trace has every operation,
    also on the GPU, inside ranges for every event, for the phases of the loop between events (``forward``,
    ``backward``, ``dataloader``, …), for every call of an algorithm, callback, subscription or logger, and for the
    parts marked by :meth:`marker`; and counters of the machine. A batch is the range ``ProfilerStep#7``, counted from
    0, from the end of the previous batch, so that an evaluation belongs to the next batch. In skipped batches it costs
    some 30 µs, most of it for torch's step.

    A trace is passed to the handlers after each batch for which the schedule returned ``ACTIVE_AND_SAVE``, and when
    training ends or raises an error. As in torch, a schedule that stops without ``ACTIVE_AND_SAVE`` discards the
    recording, with a warning.

    Args:
        schedule: ``f(state) -> ProfilerAction``, called before each batch; see :func:`cyclic_schedule`.
        trace_handlers: One or several handlers of the traces, such as :class:`JSONTraceHandler`.
        sys_prof_cpu: Whether to record the CPU usage. This and the next three require psutil.
        sys_prof_memory: Whether to record the memory in use.
        sys_prof_disk: Whether to record the use of the disk, and the bytes read and written since the machine started.
        sys_prof_net: Whether to record the bytes sent and received since the machine started.
        sys_prof_stats_thread_interval_seconds: Seconds between two records of the machine.
        torch_prof_folder: Folder of the traces of a :class:`TorchProfiler`; None adds none to the handlers.
        torch_prof_filename: This and the other ``torch_prof_*`` arguments are passed to :class:`TorchProfiler`. Its
            options ``record_shapes``, ``profile_memory``, ``with_stack`` and ``with_flops`` hold for all traces.

    Raises:
        TypeError: ``schedule`` is not a function, or a handler is not a :class:`TraceHandler`.
        ValueError: A name or number is invalid.
        ModuleNotFoundError: psutil is required and not installed.

    Example:
        >>> from composer.profiler import JSONTraceHandler, cyclic_schedule
        >>> profiler = Profiler(cyclic_schedule(wait=10), JSONTraceHandler(), sys_prof_cpu=False)
        >>> with profiler.marker("preparing"):
        ...     numbers = list(range(10))
    """

    schedule: Callable[[State], ProfilerAction] = attrs.field(validator=attrs.validators.is_callable())
    trace_handlers: tuple[TraceHandler, ...] = attrs.field(converter=_to_handlers)
    sys_prof_cpu: bool = attrs.field(default=True, validator=is_flag)
    sys_prof_memory: bool = attrs.field(default=False, validator=is_flag)
    sys_prof_disk: bool = attrs.field(default=False, validator=is_flag)
    sys_prof_net: bool = attrs.field(default=False, validator=is_flag)
    sys_prof_stats_thread_interval_seconds: float = number(0.5, 0, above=True, meaning="It is in seconds.")
    torch_prof_folder: str | None = "{run_name}/torch_traces"
    torch_prof_filename: str = "rank{rank}.{batch}.pt.trace.json"
    torch_prof_remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json"
    torch_prof_memory_filename: str | None = None
    torch_prof_memory_remote_file_name: str | None = (
        "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.memory_trace.html"
    )
    torch_prof_overwrite: bool = False
    torch_prof_use_gzip: bool = False
    torch_prof_record_shapes: bool = False
    torch_prof_profile_memory: bool = True
    torch_prof_with_stack: bool = False
    torch_prof_with_flops: bool = True
    torch_prof_num_traces_to_keep: int = -1

    _options: dict[str, Any] = attrs.field(init=False, repr=False)
    _metrics: tuple[str, ...] = attrs.field(init=False, repr=False)
    _run: tuple[State, Logger] | None = transient(default=None)
    _open_handlers: tuple[TraceHandler, ...] = transient(default=())
    _profile: torch.profiler.profile | None = transient(default=None)
    _first_batch: int = transient(default=0)
    _phases: dict[str, record_function] = transient(factory=dict)
    # None outside active batches.
    _counters: list[Counter] | None = transient(default=None)
    _sampler: Sampler | None = transient(default=None)

    def __attrs_post_init__(self) -> None:
        self._metrics = tuple(name for setting, names in _METRICS.items() if getattr(self, setting) for name in names)
        if self._metrics:
            require_product("psutil", "system")
        options = {name: getattr(self, f"torch_prof_{name}") for name in _TORCH}
        writes_files = self.torch_prof_folder is not None
        handler = TorchProfiler(**(options if writes_files else {**options, "folder": "."}))
        self._options = handler.options
        if writes_files:
            self.trace_handlers = (*self.trace_handlers, handler)

    def marker(self, name: str, *, categories: Sequence[str] = ()) -> Marker:
        """Return a marker that records a part of a program: ``with profiler.marker("my part"): …``.

        Args:
            name: Its name in the trace.
            categories: Words to search for. Ranges of torch have a name only, so that these are a part of it:
                ``"mine/my part"`` for ``["mine"]``.
        """
        return Marker("/".join([*categories, name]), self._count)

    def init(self, state: State, logger: Logger) -> None:
        """Store the run."""
        self._run = state, logger

    def close(self, state: State, logger: Logger) -> None:
        """Pass what is recorded to the handlers and finish, also after an error."""
        self._stop()
        handlers, self._open_handlers = self._open_handlers, ()
        for handler in handlers:
            handler.close(state, logger)

    def wrap_call(self, event: Event, key: str, kind: str, call: Call) -> Call:
        """Record a call in active batches."""
        return self._recorded(f"{kind}/{key}", call)

    def wrap_event(self, event: Event, call: Call) -> Call:
        """Record an event and its phase in active batches, and step torch's profiler between two batches."""
        name = event.value
        phase = re.sub(r"(before|after)_|_(start|end)$", "", name)
        begins = phase not in _LONGER_THAN_A_BATCH and (event.is_before_event or name.endswith("_start"))
        ends = event.is_after_event or name.endswith("_end")
        recorded = self._recorded(f"event/{name}", call)

        def run() -> None:
            if event is Event.FIT_START:
                self._start()
            if begins and self._counters is not None:
                self._end_phases(phase)  # a batch that runs again, with less memory, has not ended it
                self._phases[phase] = record_function(phase)
                self._phases[phase].__enter__()  # type: ignore[no-untyped-call]
            recorded()
            if ends:
                self._end_phases(phase)
            if event is Event.BATCH_END:
                self._step()
            elif event is Event.FIT_END:
                self._stop()

        return run

    def _recorded(self, name: str, call: Call) -> Call:
        def run() -> None:
            if self._counters is None:
                call()
            else:
                with record_function(name):
                    call()

        return run

    def _end_phases(self, outermost: str) -> None:
        """End the phases from the innermost to this one."""
        while outermost in self._phases:
            self._phases.popitem()[1].__exit__(None, None, None)

    def _start(self) -> None:
        """Start torch's profiler for a fit."""
        if self._run is None:
            raise RuntimeError('The profiler has no run: the loop must run the event "init" before training.')
        state, logger = self._run
        if not self._open_handlers:
            for handler in self.trace_handlers:
                handler.open(state, logger)
            self._open_handlers = self.trace_handlers
        self._profile = torch.profiler.profile(
            schedule=lambda _: self.schedule(state).value, on_trace_ready=self._save, **self._options
        )
        self._profile.step_num = int(state.timestamp.count(TimeUnit.BATCH))
        self._profile.start()
        self._count_if_active(self._profile)

    def _step(self) -> None:
        """Apply the schedule's action for the next batch."""
        if self._profile is not None:
            self._profile.step()
            self._count_if_active(self._profile)

    def _stop(self) -> None:
        """Stop torch's profiler, which saves what is recorded."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if not self._phases and profile.step_num == self._first_batch:
            profile.on_trace_ready = None  # no batch has begun: a file would replace the one of the last cycle
        for phase in [*self._phases][:1]:
            self._end_phases(phase)
        profile.stop()
        self._end_counting()

    def _save(self, profile: torch.profiler.profile) -> None:
        """Pass the trace to the handlers."""
        counters = self._end_counting()
        assert self._run is not None
        state, logger = self._run
        trace = chrome_trace(profile, counters, state.rank)
        for handler in self.trace_handlers:
            handler.save(trace, profile, state, logger)
        profile.profiler = None  # else torch warns that it releases the events when the next cycle begins

    def _count_if_active(self, profile: torch.profiler.profile) -> None:
        """Start to count at the first active batch, and stop at the first that is not active."""
        if profile.current_action not in (ProfilerAction.ACTIVE.value, ProfilerAction.ACTIVE_AND_SAVE.value):
            self._end_counting()
        elif self._counters is None:
            self._counters, self._first_batch = [], profile.step_num
            if self._metrics:
                self._sampler = Sampler(self._sample, self.sys_prof_stats_thread_interval_seconds)

    def _end_counting(self) -> list[Counter]:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
            sampler.latest()  # warns of an error
        counters, self._counters = self._counters, None
        return counters or []

    def _count(self, name: str, values: Mapping[str, float]) -> None:
        if self._counters is not None:
            self._counters.append((time.time_ns(), name, values))

    def _sample(self) -> dict[str, float]:
        sample = {name: value for name, value in read_machine().items() if name.startswith(self._metrics)}
        for name, value in sample.items():
            self._count(f"system/{name}", {"value": value})
        return sample
