"""The profiler: run torch's profiler in some batches of a run, with ranges for its events and components."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import attrs
import torch
from torch.profiler import record_function

from composer.core import Callback, Event, Logger, State, TimeUnit
from composer.core.checks import is_flag
from composer.core.interval import Call
from composer.core.saving.components import transient
from composer.profiler.json_trace_handler import TraceHandler
from composer.profiler.schedule import ProfilerAction

# Phases longer than a batch have no range: it would overlap the range that torch records for each step.
_LONGER_THAN_A_BATCH = ("fit", "iteration", "epoch")
_ACTIVE = (ProfilerAction.ACTIVE.value, ProfilerAction.ACTIVE_AND_SAVE.value)


def _to_handlers(given: TraceHandler | Sequence[TraceHandler]) -> tuple[TraceHandler, ...]:
    handlers = (given,) if isinstance(given, TraceHandler) else tuple(given)
    for handler in handlers:
        if not isinstance(handler, TraceHandler):
            raise TypeError(f"trace_handlers must be TraceHandlers, such as JSONTraceHandler(), got {handler!r}.")
    return handlers


@attrs.define(eq=False)
class Profiler(Callback):
    """Record how the time of some batches is spent; pass it to a trainer as ``profiler=``.

    It runs one :class:`torch.profiler.profile`. In the active batches of the schedule, the trace has every operation,
    also on the GPU, inside ranges for every event, for the phases of the loop between events (``forward``,
    ``backward``, ``dataloader``, …), and for every call of an algorithm, callback, subscription or logger; add your own
    by :meth:`marker`. A batch is the range ``ProfilerStep#7``, counted from 0, from the end of the previous batch, so
    that an evaluation belongs to the next batch. In skipped batches it costs some 30 µs, most of it for torch's step.

    The profile is passed to the handlers after each batch for which the schedule returned ``ACTIVE_AND_SAVE``, and when
    training ends or raises an error. As in torch, a schedule that stops without ``ACTIVE_AND_SAVE`` discards the
    recording, with a warning.

    Args:
        schedule: ``f(state) -> ProfilerAction``, called before each batch; see :func:`cyclic_schedule`.
        trace_handlers: One or several handlers of the traces, such as :class:`JSONTraceHandler`.
        torch_prof_record_shapes: This and the next three are arguments of :class:`torch.profiler.profile`, without the
            prefix ``torch_prof_``: whether to record the shapes of operations' inputs.
        torch_prof_profile_memory: Whether to record allocations and releases.
        torch_prof_with_stack: Whether to record the call stack of operations.
        torch_prof_with_flops: Whether to estimate the floating point operations of matrix products and convolutions.

    Raises:
        TypeError: ``schedule`` is not a function, or a handler is not a :class:`TraceHandler`.

    Example:
        >>> from composer.profiler import JSONTraceHandler, cyclic_schedule
        >>> profiler = Profiler(cyclic_schedule(wait=10), JSONTraceHandler("traces"), torch_prof_with_stack=True)
    """

    schedule: Callable[[State], ProfilerAction] = attrs.field(validator=attrs.validators.is_callable())
    trace_handlers: tuple[TraceHandler, ...] = attrs.field(converter=_to_handlers)
    torch_prof_record_shapes: bool = attrs.field(default=False, validator=is_flag)
    torch_prof_profile_memory: bool = attrs.field(default=True, validator=is_flag)
    torch_prof_with_stack: bool = attrs.field(default=False, validator=is_flag)
    torch_prof_with_flops: bool = attrs.field(default=True, validator=is_flag)

    _run: tuple[State, Logger] | None = transient(default=None)
    _profile: torch.profiler.profile | None = transient(default=None)
    _first_batch: int = transient(default=0)
    _phases: dict[str, record_function] = transient(factory=dict)
    _is_active: bool = transient(default=False)
    _has_opened: bool = transient(default=False)

    def marker(self, name: str) -> record_function:
        """Return a context manager, also a decorator, that records a range: :class:`torch.profiler.record_function`.

        Example:
            >>> profiler = Profiler(lambda state: ProfilerAction.SKIP, [])
            >>> with profiler.marker("augmentation"):
            ...     pass
        """
        return record_function(name)

    def init(self, state: State, logger: Logger) -> None:
        """Store the run."""
        self._run = state, logger

    def close(self, state: State, logger: Logger) -> None:
        """Pass what is recorded to the handlers, also after an error."""
        self._stop()
        self._has_opened = False

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
            if begins and self._is_active:
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
            if not self._is_active:
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
        if not self._has_opened:
            self._has_opened = True
            for handler in self.trace_handlers:
                handler.open(state, logger)
        self._profile = torch.profiler.profile(
            schedule=lambda _: self.schedule(state).value,
            on_trace_ready=self._save,
            record_shapes=self.torch_prof_record_shapes,
            profile_memory=self.torch_prof_profile_memory,
            with_stack=self.torch_prof_with_stack,
            with_flops=self.torch_prof_with_flops,
        )
        self._profile.step_num = int(state.timestamp.count(TimeUnit.BATCH))
        self._profile.start()
        self._note_action(self._profile)

    def _step(self) -> None:
        """Apply the schedule's action for the next batch."""
        if self._profile is not None:
            self._profile.step()
            self._note_action(self._profile)

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
        self._is_active = False

    def _save(self, profile: torch.profiler.profile) -> None:
        """Pass the profile to the handlers."""
        self._is_active = False
        assert self._run is not None
        for handler in self.trace_handlers:
            handler.save(profile, *self._run)
        profile.profiler = None  # else torch warns that it releases the events when the next cycle begins

    def _note_action(self, profile: torch.profiler.profile) -> None:
        """Note whether the next batch is active, and which is the first of a sequence."""
        was_active, self._is_active = self._is_active, profile.current_action in _ACTIVE
        if self._is_active and not was_active:
            self._first_batch = profile.step_num
