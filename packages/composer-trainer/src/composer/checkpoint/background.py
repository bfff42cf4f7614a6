"""Saving while the training goes on: one save at a time, whose failure is not lost."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Runs one job at a time in a thread; a second one waits until the first is done.

    So there is never more than one copy of a run in memory. An error is raised once, by whichever method is called
    next. When the program ends, the thread is waited for.

    Example:
        >>> background, saved = Background(), []
        >>> background.start(lambda: saved.append("ep1-ba5"))
        >>> background.wait()
        >>> saved
        ['ep1-ba5']
    """

    def __init__(self) -> None:
        self._job: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None and not self._job.done()

    def start(self, job: Callable[[], object]) -> None:
        """Run a job, after the one before.

        Raises:
            Exception: The job before has failed; the new one is not run.
        """
        self.wait()
        future = self._job = Future()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  (raised in the thread that waits)
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="checkpoint").start()

    def check(self) -> None:
        """Raise what a finished job has failed with; do not wait.

        Raises:
            Exception: The job has failed.
        """
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is under way.

        Raises:
            Exception: The job has failed.
        """
        job = self._job
        if job is not None:
            wait([job])  # Ctrl-C while this waits leaves the job to the next who waits
            self._job = None
            job.result()
