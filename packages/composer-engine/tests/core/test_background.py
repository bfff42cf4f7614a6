"""Background threads: one save at a time, and failures are raised."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from composer.core.background import Background

AT_THE_END = """
import time
from composer.core.background import Background

Background().start(lambda: (time.sleep(0.2), print("saved", flush=True)))
Background().start(lambda: open("/no/folder/file", "w"))
"""


def fail():
    raise OSError("full")


def run(program, *arguments, timeout=120):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


class TestBackground:
    def test_program_exit(self):
        """A program waits for its jobs when it exits, and reports an error that nothing has waited for."""
        done = run(AT_THE_END)

        assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
        assert "No such file or directory: '/no/folder/file'" in done.stderr

    def test_nothing_is_left_of_jobs(self):
        """After its last job nothing refers to a background, also no callback for the exit of the program."""
        background = Background()
        background.start(lambda: None)
        background.wait()
        reference = weakref.ref(background)
        del background
        gc.collect()

        assert reference() is None

    def test_start_does_not_block(self):
        """Starting a job does not wait for it; waiting does."""
        background, go, done = Background(), threading.Event(), []

        background.start(lambda: (go.wait(10), done.append(1)))
        was_busy, before = background.is_busy, list(done)
        go.set()
        background.wait()

        assert (was_busy, before, done, background.is_busy) == (True, [], [1], False)

    def test_jobs_run_one_at_a_time(self):
        """Two jobs never run at the same time."""
        background, order = Background(), []

        for number in range(3):
            background.start(lambda number=number: order.extend([number, number]))
        background.wait()

        assert order == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize("method", ["wait", "check", "start"])
    def test_failure_is_raised_once(self, method):
        """The next call raises the failure, later ones do not."""
        background = Background()
        background.start(fail)
        while background.is_busy:
            pass

        with pytest.raises(OSError, match="full"):
            getattr(background, method)(*[fail] * (method == "start"))

        background.check()
        background.wait()

    def test_check_does_not_block(self):
        """Checking for a failure does not wait for the running job."""
        background, go = Background(), threading.Event()
        background.start(lambda: go.wait(10))

        background.check()

        assert background.is_busy
        go.set()
        background.wait()

    def test_interrupt_while_waiting(self):
        """An interrupted wait does not end the job: the next wait waits for it and raises its failure."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        background, go = Background(), threading.Event()
        background.start(lambda: (go.wait(10), fail()))
        interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            background.wait()
        signal.signal(signal.SIGINT, before)
        was_busy = background.is_busy
        go.set()

        with pytest.raises(OSError, match="full"):
            background.wait()

        assert was_busy
