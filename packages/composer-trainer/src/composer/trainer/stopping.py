"""Ctrl-C and SIGTERM: finish the batch and the training before the process exits.

``StopSignals`` owns the signal handlers for the time of a training, an evaluation or a prediction. A handler only
notes the signal; the loop asks after each batch, so that all processes stop after the same one. ``BatchLimit`` ends a
process whose batch hangs. ``Run``, the evaluation and the prediction call it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from composer.distributed import all_reduce_min, any_rank, get_world_size
from composer.distributed.failures import lost_processes, report_failure
from composer.distributed.samplers import END

if TYPE_CHECKING:
    from composer.core import State

_log = logging.getLogger(__name__)

_BATCH_SECONDS = 20.0
"""How long a batch may take after a SIGTERM: less than the 30 seconds after which torchrun and SLURM kill a process."""

_LOST_SECONDS = 1.0
"""How long it may take after another process has ended. The batch's collectives failed when that process closed its
connections, which is earlier, so that only a process that hangs is still computing."""

_STDERR = 2

T = TypeVar("T")


def agree_on_stop(state: State) -> None:
    """End the training here if one of several processes has called ``stop_training``; all processes must call this."""
    if state.gather is not None and any_rank(state.stop_reason is not None):
        end_here(state)


def end_here(state: State) -> None:
    """End the training at the present batch, as all processes have agreed."""
    state.stop_reason = state.stop_reason or "another process called state.stop_training()"
    state.max_duration = state.timestamp.batch


class Stopped(RuntimeError):  # noqa: N818  (a signal is no error)
    """Raised to leave a training, an evaluation or a prediction that a signal has stopped."""


class BatchLimit:
    """Ends the process if a batch takes too long after a SIGTERM.

    The exit code is 143, and the stacks of all threads are printed before.

    Args:
        batch: Returns the number of the current batch; None between batches, which may take any time.
    """

    def __init__(self, batch: Callable[[], int | None]) -> None:
        self._batch = batch
        self.ended = threading.Event()

    def watch(self) -> None:
        """Watch the batches, in a thread, until :attr:`ended` is set."""
        batch, began, lost = self._batch(), time.monotonic(), None
        while not self.ended.wait(0.1):
            current, now = self._batch(), time.monotonic()
            if current is None or current != batch:
                batch, began, lost = current, now, None
            elif now - began > _BATCH_SECONDS:
                self.abort(f"batch {batch} did not end within {_BATCH_SECONDS:.0f} seconds after a SIGTERM")
            elif lost_processes():
                lost = lost or now
                if now - lost > _LOST_SECONDS:
                    self.abort(f"batch {batch} did not end after a SIGTERM and the end of another process")

    def abort(self, reason: str) -> None:
        """Print the stacks, report the failure to the other processes, and end this one."""
        # Not print(), which may wait for a lock that a blocked thread holds.
        os.write(_STDERR, f"{reason}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  (documented)
        error = TimeoutError(reason)
        error.add_note("".join(["The stack of the main thread:\n", *traceback.format_stack(frame)]))
        report_failure(error)
        # sys.exit() would only end this thread.
        os._exit(128 + signal.SIGTERM)


class StopSignals:
    """A context in which the first Ctrl-C or SIGTERM only sets :attr:`received`; a second Ctrl-C acts immediately.

    A further SIGTERM changes nothing: ``timeout`` and batch systems send several, and end a process by SIGKILL.

    At the end of the context, a received signal has its usual effect: Ctrl-C raises ``KeyboardInterrupt``, SIGTERM
    raises ``SystemExit(143)``, or the program's own handler is called. Signals are received only in the main thread of
    a process, and by the outer one of two contexts.

    A batch that does not end within 20 seconds after a SIGTERM, or within a second after another process has ended,
    ends the process with exit code 143, after the stacks of all threads have been printed. With several processes this
    includes main threads that are blocked outside of Python.

    Args:
        batch: Returns the number of the current batch; None between batches.

    Attributes:
        received: The signal that this process has received.
        is_agreed: Whether a process has received a signal and all know it. One process alone always does.
        has_stopped: Whether a signal has stopped what is in the context, and nothing else has ended it.

    Example:
        >>> with StopSignals() as signals:
        ...     signals.received is None
        True
    """

    def __init__(self, batch: Callable[[], int | None] = lambda: None) -> None:
        self.received: signal.Signals | None = None
        self.is_agreed = self.has_stopped = False
        self._before: dict[signal.Signals, Any] = {}
        self._limit = BatchLimit(batch)
        self._wakeup: socket.socket | None = None

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        self._limit.ended.clear()
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(one)
                is_inner = isinstance(getattr(handler, "__self__", None), StopSignals)
                if handler is not signal.SIG_IGN and not is_inner:  # ignored for example under nohup
                    self._before[one] = signal.signal(one, self._receive)
            if get_world_size() > 1 and signal.SIGTERM in self._before:
                self._listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Restore the former handlers, and call that of a received signal."""
        self._restore_handlers()
        before, self._before = self._before, {}
        self._limit.ended.set()
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
            self._wakeup = None
        if self.received is not None and (error is None or isinstance(error, Stopped)):
            self.has_stopped = True
            handler = before.get(self.received)
            if not callable(handler):
                raise SystemExit(128 + self.received) from None
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
            element = next(iterator, END)
            most = -all_reduce_min(-2 if self.received is not None else -(element is not END))
            if most == 2:
                self.check()
            if element is not END:
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
        # Otherwise the thread that reads the signals watches.
        if self.received is signal.SIGTERM and self._wakeup is None:
            threading.Thread(target=self._limit.watch, name="stopping", daemon=True).start()
        _log.warning("%s: stopping after this batch; Ctrl-C now stops immediately.", self.received.name)

    def _restore_handlers(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)

    def _listen(self) -> None:
        """Start a thread that reads received signals, because a blocked main thread does not call its handlers."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # that of an event loop, for example
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._wakeup = writer
        listening = weakref.ref(self)  # the registration is for the life of the process

        def detach() -> None:
            if (signals := listening()) is not None:
                signals._stop_listening()  # noqa: SLF001

        os.register_at_fork(after_in_child=detach)
        threading.Thread(target=self._read, args=(reader,), name="stopping", daemon=True).start()

    def _stop_listening(self) -> None:
        """Detach a forked process, which would report its own signals to this one."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)

    def _read(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                if signal.SIGTERM in numbers:
                    self._limit.watch()
