"""Printed lines are shown and captured."""

import contextlib
import io
import sys

import pytest
import tqdm

from composer.loggers.capture import CapturedStream


@pytest.fixture
def screen():
    """Return a replacement of the terminal."""
    return io.StringIO()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def capture(screen, lines):
    """Return a function that replaces the standard stream, which pytest has replaced before."""

    def begin():
        stack.enter_context(contextlib.redirect_stdout(screen))
        stream = CapturedStream("stdout", lines.append)
        stream.install()
        return stream

    with contextlib.ExitStack() as stack:
        yield begin


def test_lines_are_shown_and_captured(capture, screen, lines):
    """Complete lines are captured, and everything is shown."""
    capture()

    print("one", end="")
    before = list(lines)
    print(" line\n\ntwo")

    assert before == []
    assert lines == ["one line", "two"]
    assert screen.getvalue() == "one line\n\ntwo\n"


def test_removal_restores_the_stream(capture, screen, lines):
    """The stream is restored; an incomplete line is captured."""
    captured = capture()

    print("half", end="")
    captured.remove()
    print("later")

    assert sys.stdout is screen
    assert lines == ["half"]


def test_progress_bar(capture, lines):
    """A progress bar is not captured, the lines that it leaves above it are."""
    capture()

    for number in tqdm.tqdm(range(200), file=sys.stdout, mininterval=0):
        for _ in tqdm.tqdm(range(3), file=sys.stdout, mininterval=0, leave=False):
            pass
        if number == 100:
            tqdm.tqdm.write("half", file=sys.stdout)
    print("done")

    assert lines == ["half", "done"]


def test_replaced_stream_is_preserved(capture):
    """A stream that other code has set is not replaced."""
    captured = capture()
    other = io.StringIO()
    with contextlib.redirect_stdout(other):
        captured.remove()

        assert sys.stdout is other
