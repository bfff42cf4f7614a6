"""One save at a time, whose failure is not lost."""

import signal
import threading

import pytest

from composer.checkpoint.background import Background


def fail():
    raise OSError("full")


class TestBackground:
    def test_goes_on_meanwhile(self):
        """Starting a job does not wait for it; waiting does."""
        background, go, done = Background(), threading.Event(), []

        background.start(lambda: (go.wait(10), done.append(1)))
        was_busy, before = background.is_busy, list(done)
        go.set()
        background.wait()

        assert (was_busy, before, done, background.is_busy) == (True, [], [1], False)

    def test_second_waits_for_the_first(self):
        """Two jobs never run at once."""
        background, order = Background(), []

        for number in range(3):
            background.start(lambda number=number: order.extend([number, number]))
        background.wait()

        assert order == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize("method", ["wait", "check", "start"])
    def test_failure_is_raised_once(self, method):
        """Whichever is called next raises the failure, and the one after that does not."""
        background = Background()
        background.start(fail)
        while background.is_busy:
            pass

        with pytest.raises(OSError, match="full"):
            getattr(background, method)(*[fail] * (method == "start"))

        background.check()
        background.wait()

    def test_check_does_not_wait(self):
        """Looking for a failure does not wait for what is under way."""
        background, go = Background(), threading.Event()
        background.start(lambda: go.wait(10))

        background.check()

        assert background.is_busy
        go.set()
        background.wait()

    def test_ctrl_c_while_waiting(self):
        """Who stops waiting has not ended the job: it is waited for the next time, and its failure is not lost."""
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
