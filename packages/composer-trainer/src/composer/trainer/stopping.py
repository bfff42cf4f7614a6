"""Ctrl-C and SIGTERM: finish the batch and the training before the process exits.

``StopSignals`` owns the signal handlers for the time of a training, an evaluation or a prediction. A handler only
notes the signal; the loop asks after each batch, so that all processes stop after the same one. ``Run``, the evaluation
and the prediction call it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from composer.distributed import all_reduce_min, any_rank, get_world_size
from composer.distributed.samplers import NO_BATCH
from composer.loggers.interruption import without_traceback

if TYPE_CHECKING:
    from composer.core import State

_log = logging.getLogger(__name__)

T = TypeVar("T")


def agree_on_stop(state: State) -> None:
    """End the training here if one of several processes has called ``stop_training``; all processes must call this."""
    if state.gather is not None and any_rank(state.stop_reason is not None):
        end_here(state)


def end_here(state: State) -> None:
    """End the training at the present batch, as all processes have agreed; until then they only have a reason."""
    state.stop_reason = state.stop_reason or "another process called state.stop_training()"
    state.max_duration = state.timestamp.batch


class Stopped(RuntimeError):  # noqa: N818  (a signal is no error)
    """Raised to leave a training, an evaluation or a prediction that a signal has stopped."""


class StopSignals:
    """A context in which the first Ctrl-C or SIGTERM only sets :attr:`received`; a second Ctrl-C acts immediately.

    A further SIGTERM changes nothing: ``timeout`` and batch systems send several, and end a process by SIGKILL.

    At the end of the context, a received signal has its usual effect: Ctrl-C raises ``KeyboardInterrupt``, SIGTERM
    raises ``SystemExit(143)``, or the program's own handler is called. Signals are received only in the main thread of
    a process, and by the outer one of two contexts.

    A batch that hangs is not ended: torchrun and batch systems kill its process some time after the SIGTERM.

    Attributes:
        received: The signal that this process has received.
        is_agreed: Whether a process has received a signal and all know it. One process alone always does.
        has_stopped: Whether a signal has stopped what is in the context, and nothing else has ended it.

    Example:
        >>> with StopSignals() as signals:
        ...     signals.received is None
        True
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_agreed = self.has_stopped = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(one)
                is_inner = isinstance(getattr(handler, "__self__", None), StopSignals)
                if handler is not signal.SIG_IGN and not is_inner:  # ignored for example under nohup
                    self._before[one] = signal.SIG_DFL if handler is _ignore else handler
                    signal.signal(one, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Restore the former handlers, and call that of a received signal."""
        self.has_stopped = self.received is not None and (error is None or isinstance(error, Stopped))
        handler = self._before.get(self.received) if self.received is not None else None
        if self.has_stopped and self.received is signal.SIGTERM and not callable(handler):
            self._before[signal.SIGTERM] = _ignore  # the process is ending, and another one would cut it off
        for one, before in self._before.items():
            signal.signal(one, signal.SIG_DFL if before is None else before)
        self._before = {}
        if self.has_stopped and self.received is not None:
            if not callable(handler):
                raise SystemExit(128 + self.received) from None
            with without_traceback():
                handler(self.received, None)

    def check(self) -> None:
        """Raise :class:`Stopped` in all processes if one has received a signal; all must call it."""
        if any_rank(self.received is not None):
            self.is_agreed = True
        if self.is_agreed:
            raise Stopped(f"Stopped by {'another process' if self.received is None else self.received.name}.")

    def until_stopped(self, elements: Iterable[T]) -> Iterator[T]:
        """Yield the elements, and raise :class:`Stopped` in all processes once one has received a signal.

        All processes must iterate at the same time, though some may have fewer elements. Before each element they
        exchange one number between the hosts.

        Example:
            >>> list(StopSignals().until_stopped("ab"))
            ['a', 'b']
        """
        iterator, most = iter(elements), 1
        while most:
            element = next(iterator, NO_BATCH)
            most = -all_reduce_min(-2 if self.received is not None else -(element is not NO_BATCH))
            if most == 2:
                self.check()
            if element is not NO_BATCH:
                yield element

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        # Several processes agree in an exchange, and stay agreed if one receives its own signal after it.
        self.is_agreed = self.is_agreed or get_world_size() == 1
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        _log.warning("%s: stopping after this batch; Ctrl-C now stops immediately.", self.received.name)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that the process starts do not inherit it."""
