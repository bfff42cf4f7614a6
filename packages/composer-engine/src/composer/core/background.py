"""Run one job at a time in a thread."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Background:
    """Run one job at a time in a thread; starting a second one waits for the first.

    An error is raised once, by the next method that is called. Exiting the program waits for the thread, and reports
    its error.

    Example:
        >>> background, saved = Background(), []
        >>> background.start(lambda: saved.append("ep1-ba5"))
        >>> background.wait()
        >>> saved
        ['ep1-ba5']
    """

    def __init__(self) -> None:
        self._job: Future[object] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._job is not None and not self._job.done()

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, then start this one.

        Raises:
            RuntimeError: No thread can be started; the job is not run.
            Exception: The previous job failed; the new one is not run.
        """
        self.wait()
        executor = ThreadPoolExecutor(1)
        self._job = executor.submit(job)
        executor.shutdown(wait=False)
        atexit.register(self.wait)

    def check(self) -> None:
        """Raise the error of a job that has finished with one; do not wait.

        Raises:
            Exception: The job failed.
        """
        if not self.is_busy:
            self.wait()

    def wait(self) -> None:
        """Wait until no job is running.

        Raises:
            Exception: The job failed.
        """
        if self._job is not None:
            wait([self._job])  # after Ctrl-C here, the next call waits for the job
            job, self._job = self._job, None
            atexit.unregister(self.wait)
            job.result()
