"""Ctrl-C and SIGTERM: finish the batch and the training before the process exits."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["StopSignals"]

_log = logging.getLogger(__name__)


class StopSignals:
    """A context in which the first Ctrl-C or SIGTERM only sets :attr:`received`; a second one acts immediately.

    At the end of the context, a received signal has its usual effect: Ctrl-C raises ``KeyboardInterrupt``, SIGTERM
    raises ``SystemExit(143)``, or the program's own handler is called. Signals are received only in the main thread of
    a process.

    Example:
        >>> with StopSignals() as signals:
        ...     signals.received is None
        True
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(one) is not signal.SIG_IGN:  # for example under nohup
                    self._before[one] = signal.signal(one, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Restore the former handlers, and call that of a received signal."""
        self._restore_handlers()
        if self.received is not None and error is None:
            handler = self._before.get(self.received)
            if not callable(handler):
                raise SystemExit(128 + self.received)
            handler(self.received, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        before = dict(self._before)
        self._restore_handlers()
        self._before = before
        _log.warning("%s: training stops after this batch; a second one stops it at once.", self.received.name)

    def _restore_handlers(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
