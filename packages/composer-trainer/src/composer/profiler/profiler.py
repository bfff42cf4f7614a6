"""The profiler: record some batches of a run, and pass the events to handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.core import Callback, Event, Logger, State, TimeUnit
from composer.profiler.recording import PHASES, Marker, Recording, TraceHandler
from composer.profiler.schedule import ProfilerAction
from composer.profiler.system_metrics import SystemMetrics
from composer.profiler.torch_profiler import TorchProfiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from composer.core.interval import Call

__all__ = ["Profiler"]

_BEGINS = {begin: phase for phase, (begin, _) in PHASES.items()}
_ENDS = {end: phase for phase, (_, end) in PHASES.items()}
_ACTIVE = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)


class Profiler(Callback):
    """Record how the time of some batches is spent; pass it to a trainer as ``profiler=``.

    In the active batches of the schedule it records every event, the phases of the loop between events (``forward``,
    ``backward``, ``dataloader``, …), every call of an algorithm, callback, subscription or logger, and the parts marked
    by :meth:`marker`, each with its epoch and batch; counters of the machine; and, with torch's profiler, every
    operation. A recorded batch starts at the end of the previous one, so that an evaluation belongs to the next batch.
    In skipped batches the only cost is one call of the schedule.

    The events are passed to the handlers when the schedule returns ``ACTIVE_AND_SAVE``, when training ends, and after
    an error.

    Args:
        schedule: ``f(state) -> ProfilerAction``, called before each batch; see :func:`cyclic_schedule`.
        trace_handlers: One or several handlers of the events, such as :class:`JSONTraceHandler`.
        sys_prof_cpu: Whether to record the CPU usage. This and the next three require psutil.
        sys_prof_memory: Whether to record the memory in use.
        sys_prof_disk: Whether to record disk reads and writes.
        sys_prof_net: Whether to record network traffic.
        sys_prof_stats_thread_interval_seconds: Seconds between two records of the machine.
        torch_prof_folder: Folder of the traces of torch's profiler; None disables it.
        torch_prof_filename: This and the other ``torch_prof_*`` arguments are passed to :class:`TorchProfiler`.

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

    def __init__(
        self,
        schedule: Callable[[State], ProfilerAction],
        trace_handlers: TraceHandler | Sequence[TraceHandler],
        sys_prof_cpu: bool = True,
        sys_prof_memory: bool = False,
        sys_prof_disk: bool = False,
        sys_prof_net: bool = False,
        sys_prof_stats_thread_interval_seconds: float = 0.5,
        torch_prof_folder: str | None = "{run_name}/torch_traces",
        torch_prof_filename: str = "rank{rank}.{batch}.pt.trace.json",
        torch_prof_remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        torch_prof_memory_filename: str | None = None,
        torch_prof_memory_remote_file_name: (
            str | None
        ) = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.memory_trace.html",
        torch_prof_overwrite: bool = False,
        torch_prof_use_gzip: bool = False,
        torch_prof_record_shapes: bool = False,
        torch_prof_profile_memory: bool = True,
        torch_prof_with_stack: bool = False,
        torch_prof_with_flops: bool = True,
        torch_prof_num_traces_to_keep: int = -1,
    ) -> None:
        if not callable(schedule):
            raise TypeError(
                f"schedule must be a function f(state) -> ProfilerAction, such as cyclic_schedule(), got {schedule!r}."
            )
        self.schedule = schedule
        self.trace_handlers = (trace_handlers,) if isinstance(trace_handlers, TraceHandler) else tuple(trace_handlers)
        for handler in self.trace_handlers:
            if not isinstance(handler, TraceHandler):
                raise TypeError(
                    f"trace_handlers must be TraceHandler objects, such as JSONTraceHandler(), got {handler!r}."
                )
        self.system_metrics = SystemMetrics(
            cpu=sys_prof_cpu,
            memory=sys_prof_memory,
            disk=sys_prof_disk,
            net=sys_prof_net,
            interval=sys_prof_stats_thread_interval_seconds,
        )
        self.torch_profiler = None
        if torch_prof_folder is not None:
            self.torch_profiler = TorchProfiler(
                folder=torch_prof_folder,
                filename=torch_prof_filename,
                remote_file_name=torch_prof_remote_file_name,
                memory_filename=torch_prof_memory_filename,
                memory_remote_file_name=torch_prof_memory_remote_file_name,
                overwrite=torch_prof_overwrite,
                use_gzip=torch_prof_use_gzip,
                record_shapes=torch_prof_record_shapes,
                profile_memory=torch_prof_profile_memory,
                with_stack=torch_prof_with_stack,
                with_flops=torch_prof_with_flops,
                num_traces_to_keep=torch_prof_num_traces_to_keep,
            )
        self._run: tuple[State, Logger] | None = None
        self._recording: Recording | None = None
        self._action = ProfilerAction.SKIP
        self._is_open = False

    def marker(self, name: str, categories: Sequence[str] = ()) -> Marker:
        """Return a marker that records a part of a program: ``with profiler.marker("my part"): …``.

        Args:
            name: Its name in the trace.
            categories: Words to filter by.
        """
        return Marker(name, ("marker", *categories), lambda: self._recording)

    def init(self, state: State, logger: Logger) -> None:
        """Store the run."""
        self._run = state, logger

    def close(self, state: State, logger: Logger) -> None:
        """Pass the recording to the handlers and finish, also after an error."""
        self._end(state, logger)
        if self._is_open:
            self._is_open = False
            for handler in self.trace_handlers:
                handler.close(state, logger)

    def wrap_call(self, event: Event, key: str, kind: str, call: Call) -> Call:
        """Record a call in active batches."""
        # The action of the first batch is known only while FIT_START runs.
        if self._action is ProfilerAction.SKIP and event is not Event.FIT_START:
            return call
        name, categories = f"{kind}/{key}", (kind, event.value)

        def run() -> None:
            recording = self._recording
            if recording is None:
                call()
            else:
                recording.run(name, categories, call)

        return run

    def wrap_event(self, event: Event, call: Call) -> Call:
        """Record an event in active batches, and call the schedule between two batches."""
        run = call if self._action is ProfilerAction.SKIP else self._recorded(event, call)
        if event is Event.FIT_START:
            recorded = self._recorded(event, call)

            def first() -> None:
                self._begin(*self._of_run())
                recorded()

            return first
        after = {Event.BATCH_END: self._follow, Event.EPOCH_END: self._locate, Event.FIT_END: self._end}.get(event)
        if after is None:
            return run

        def then() -> None:
            run()
            after(*self._of_run())

        return then

    def _recorded(self, event: Event, call: Call) -> Call:
        name, begins, ends = f"event/{event.value}", _BEGINS.get(event), _ENDS.get(event)

        def run() -> None:
            recording = self._recording
            if recording is None:
                call()
                return
            if begins is not None:
                recording.begin_phase(begins)
            recording.run(name, ("event",), call)
            if ends is not None:
                recording.end_phase(ends)

        return run

    def _of_run(self) -> tuple[State, Logger]:
        if self._run is None:
            raise RuntimeError('The profiler has no run: the loop must run the event "init" before training.')
        return self._run

    def _begin(self, state: State, logger: Logger) -> None:
        if not self._is_open:
            for handler in self.trace_handlers:
                handler.open(state, logger)
            if self.torch_profiler is not None:
                self.torch_profiler.open(state)
            self._is_open = True
        self._follow(state, logger)

    def _follow(self, state: State, logger: Logger) -> None:
        """Apply the schedule's action for the next batch."""
        before, action = self._action, self.schedule(state)
        if action is before is ProfilerAction.SKIP:
            return
        if before is ProfilerAction.ACTIVE_AND_SAVE or action not in _ACTIVE:
            self._save(state, logger)
        self._take(action, state)
        if self.torch_profiler is not None:
            self.torch_profiler.follow(action, state, logger)
        if action in _ACTIVE:
            if self._recording is None:
                self._recording = Recording(in_torch=self.torch_profiler is not None)
                self.system_metrics.start(self._recording)
            self._locate(state, logger)

    def _take(self, action: ProfilerAction, state: State) -> None:
        before, self._action = self._action, action
        if (before is ProfilerAction.SKIP) is not (action is ProfilerAction.SKIP):
            # Assigning the list makes the engine rebuild its calls: none is wrapped while batches are skipped.
            state.callbacks = [*state.callbacks]

    def _locate(self, state: State, logger: Logger) -> None:
        """Set the epoch and batch of the events recorded from here on, both from 0."""
        if self._recording is not None:
            clock = state.timestamp
            self._recording.args = {"epoch": clock.count(TimeUnit.EPOCH), "batch": clock.count(TimeUnit.BATCH)}

    def _save(self, state: State, logger: Logger) -> None:
        """Pass the recording to the handlers, if there is one."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self.system_metrics.stop()
        events = recording.finished()
        if self.torch_profiler is not None:
            self.torch_profiler.finish(state, logger)
        for handler in self.trace_handlers:
            handler.save(events, state, logger)

    def _end(self, state: State, logger: Logger) -> None:
        """Pass on the recording, and stop."""
        self._save(state, logger)
        self._take(ProfilerAction.SKIP, state)
        if self.torch_profiler is not None:
            self.torch_profiler.follow(ProfilerAction.SKIP, state, logger)
