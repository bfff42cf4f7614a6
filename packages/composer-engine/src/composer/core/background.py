"""Run functions in threads; waiting for a thread ends when the thread ends, for whatever reason."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")
# How often a task that is waited for checks whether its thread is still alive.
_SECONDS_BETWEEN_CHECKS = 1.0


class ThreadError(RuntimeError):
    """A thread could not be started, or ended without a result."""


class Task(Generic[T]):
    """Run a function in a new thread, which starts when the task is constructed.

    ``threading.Thread.start`` waits for a signal from the new thread, and blocks forever if the thread dies for lack of
    memory before it sends one. A task never waits longer than its thread lives.

    Args:
        call: The function.

    Raises:
        ThreadError: No thread can be started.

    Example:
        >>> Task(lambda: 6 * 7).result()
        42
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._outcome: Future[T] = Future()
        alive: set[None] = set()  # only the thread refers to it, from its start to its end
        self._alive = weakref.ref(alive)
        self.process = os.getpid()
        try:
            _thread.start_new_thread(_run, (call, self._outcome, alive))
        except (RuntimeError, MemoryError) as error:
            raise ThreadError(
                "no thread can be started, as the limit on processes or on memory is reached: raise it (ulimit -u, "
                "ulimit -v), or end other processes."
            ) from error

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended or is about to; always true in a process forked after the start."""
        return self._outcome.done() or self._alive() is None or self.process != os.getpid()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended, at most ``seconds`` if given, and return whether it has."""
        while not self.is_over and seconds != 0:
            step = _SECONDS_BETWEEN_CHECKS if seconds is None else min(seconds, _SECONDS_BETWEEN_CHECKS)
            wait([self._outcome], timeout=step)
            seconds = None if seconds is None else seconds - step
        return self.is_over

    def result(self) -> T:
        """Wait for the function, and return its result or raise its exception.

        Raises:
            ThreadError: The thread ended without running the function, because it had no memory.
        """
        self.wait()
        if not self._outcome.done():
            raise ThreadError("its thread ended before it had begun: there is no memory left.")
        return self._outcome.result()


def _run(call: Callable[[], T], outcome: Future[T], _alive: object) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  (raised in the thread that waits)
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


@cache
def _unfinished() -> set[Background]:
    """Return those that have a job, for which the program waits: Python waits only for threads of ``threading``."""
    unfinished: set[Background] = set()

    def wait_for_all() -> None:
        with contextlib.ExitStack() as stack:  # also if one fails
            for background in unfinished:
                stack.callback(background.wait)

    atexit.register(wait_for_all)
    return unfinished


class Background:
    """Run one job at a time in a thread; starting a second one waits for the first.

    An error is raised once, by the next method that is called. Exiting the program waits for the thread.

    Example:
        >>> background, saved = Background(), []
        >>> background.start(lambda: saved.append("ep1-ba5"))
        >>> background.wait()
        >>> saved
        ['ep1-ba5']
    """

    def __init__(self) -> None:
        self._job: Task[object] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._job is not None and not self._job.is_over

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, then start this one.

        Raises:
            ThreadError: No thread can be started; the job is not run.
            Exception: The previous job failed; the new one is not run.
        """
        self.wait()
        self._job = Task(job)
        _unfinished().add(self)

    def check(self) -> None:
        """Raise the error of a job that has finished with one; do not wait.

        Raises:
            Exception: The job failed.
        """
        if self._job is not None and self._job.is_over:
            self.wait()

    def wait(self) -> None:
        """Wait until no job is running.

        Raises:
            ThreadError: The job was not run, because there is no memory left.
            Exception: The job failed.
        """
        job = self._job
        if job is not None:
            job.wait()  # after Ctrl-C here, the next call waits for the job
            self._job = None
            _unfinished().discard(self)
            if job.process == os.getpid():  # a forked process does not have its parent's thread
                job.result()
