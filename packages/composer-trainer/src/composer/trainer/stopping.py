"""Ctrl-C and SIGTERM: the batch ends, callbacks see the end of the training, and then the process goes."""

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
    """While it is entered, the first Ctrl-C or SIGTERM only sets :attr:`received`; a second one acts at once.

    When it is left, a signal that came does what it would have done: Ctrl-C raises ``KeyboardInterrupt``, SIGTERM
    ``SystemExit(143)``, or calls the handler that the program had set. Only a process's main thread can listen to
    signals; in others nothing is received.

    Example:
        >>> with StopSignals() as signals:
        ...     signals.received is None
        True
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Listen."""
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(one) is not signal.SIG_IGN:  # as of a program that nohup has started
                    self._before[one] = signal.signal(one, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Let signals do what they did before, and the one that came do it now."""
        self._listen_no_more()
        if self.received is not None and error is None:
            self._act(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        before = dict(self._before)
        self._listen_no_more()
        self._before = before
        _log.warning("%s: training stops after this batch; a second one stops it at once.", self.received.name)

    def _listen_no_more(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)

    def _act(self, received: signal.Signals) -> None:
        handler = self._before.get(received)
        if callable(handler):
            handler(received, None)
        else:
            raise SystemExit(128 + received)
