"""Workers of loaders: what ends a run is decided by the process that trains, not by a signal that all processes get.

``timeout``, torchrun, batch systems and a terminal send SIGTERM or Ctrl-C to all processes of a job. Workers that end
then fail the batch that is to be finished. The orders of ``data/order.py`` start workers by it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from composer.distributed.process_group import let_tensors_go


def iterate(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader whose workers ignore Ctrl-C, and a SIGTERM unless this process sends it.

    The signals are blocked in a worker from its start, also in the programs that it runs, which ``kill()`` ends. A
    loader whose ``__iter__`` is a generator function starts its workers later, as torch does.

    Example:
        >>> list(iterate([1, 2]))
        [1, 2]
    """
    if not (getattr(loader, "num_workers", 0) and hasattr(signal, "sigwaitinfo")):  # not on macOS and Windows
        return iter(loader)
    context: Any = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # it starts with the first worker otherwise, and then unblocks the signals
    else:
        let_tensors_go()
    initialize = loader.worker_init_fn
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    loader.worker_init_fn = partial(_initialize, initialize)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = initialize
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def _initialize(initialize: Callable[[int], object] | None, worker: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a server that forks workers may have started before
    threading.Thread(target=_wait_for_parent, daemon=True).start()
    if initialize is not None:
        initialize(worker)


def _wait_for_parent() -> None:
    """End the worker when the process that started it terminates it, as torch does with one that hangs."""
    parent = multiprocessing.parent_process()
    while parent is None or signal.sigwaitinfo(_SIGNALS).si_pid != parent.pid:
        pass
    os._exit(0)
