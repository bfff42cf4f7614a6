"""Background threads: no unlimited waits, one save at a time, and failures are raised."""

import atexit
import os
import signal
import subprocess
import sys
import threading

import pytest

from composer.core import background as module
from composer.core.background import Background, Task, ThreadError

AT_THE_END = """
import time
from composer.core.background import Background

Background().start(lambda: (time.sleep(0.2), print("saved", flush=True)))
"""
FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12, of forks beside threads
from composer.core.background import Background

background, go = Background(), threading.Event()
background.start(go.wait)
child = os.fork()
if not child:
    background.check()
    sys.exit(7)
status = os.waitpid(child, 0)[1]
go.set()
print(os.waitstatus_to_exitcode(status))
"""


def fail():
    raise OSError("full")


def run(program, *arguments, timeout=120):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def no_threads():
    """Prevent threads from starting: no memory has room for their stacks."""
    threading.stack_size(2**60)
    yield
    threading.stack_size(0)


@pytest.fixture
def dead_threads(dead_threads, monkeypatch):
    """Let threads end before their first line, and check soon that they have."""
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_CHECKS", 0.01)


class TestTask:
    def test_result(self):
        """The function's return value is returned to the waiting caller."""
        assert Task(threading.get_ident).result() != threading.get_ident()

    def test_no_thread(self, no_threads):
        """A thread that cannot be started raises an error at once."""
        with pytest.raises(ThreadError, match=r"no thread can be started.*ulimit -u"):
            Task(fail)

    def test_dead_thread(self, dead_threads):
        """A thread that ends without a result is no longer waited for."""
        task = Task(fail)

        with pytest.raises(ThreadError, match="its thread ended before it had begun"):
            task.result()

        assert task.is_over

    def test_wait_times_out(self):
        """A wait with a timeout ends when it is over."""
        go = threading.Event()
        task = Task(lambda: go.wait(10))

        was_over = task.wait(0.01)
        go.set()

        assert not was_over
        assert task.wait(10)


class TestBackground:
    @pytest.mark.parametrize("threads", ["no_threads", "dead_threads"])
    def test_no_thread(self, threads, request, monkeypatch):
        """A job without a thread fails: nothing is waited for, and the next job runs."""
        request.getfixturevalue(threads)
        background, done = Background(), []

        def run_job():
            background.start(lambda: done.append(1))
            background.wait()

        with pytest.raises(ThreadError):
            run_job()
        monkeypatch.undo()
        threading.stack_size(0)

        background.wait()
        background.start(lambda: done.append(2))
        background.wait()

        assert done == [2]

    def test_program_exit_waits(self):
        """A program waits for the job when it exits."""
        done = run(AT_THE_END)

        assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr

    def test_nothing_is_left_of_jobs(self):
        """Any number of jobs have one callback for the exit of the program."""
        Background().wait()
        counts = []
        for _ in range(3):
            background = Background()
            background.start(lambda: None)
            background.wait()
            counts.append(atexit._ncallbacks())

        assert counts[0] == counts[2]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
    def test_forked_process_does_not_wait(self):
        """A process forked during a job does not have its thread and does not wait for it."""
        done = run(FORK, timeout=60)

        assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")

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
