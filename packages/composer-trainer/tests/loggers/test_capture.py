"""What is printed is shown as before, and each line is noticed."""

import io
import sys

import pytest
import tqdm

from composer.loggers.capture import CapturedStream


@pytest.fixture
def screen():
    """Return what stands for the terminal."""
    return io.StringIO()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def capture(screen, lines, monkeypatch):
    """Return a function that puts a stream into the place of the terminal; pytest has its own there until the test."""

    def begin():
        monkeypatch.setattr(sys, "stdout", screen)
        stream = CapturedStream("stdout", lines.append)
        stream.install()
        return stream

    return begin


def test_shown_and_noticed(capture, screen, lines):
    """Lines come when they are whole, and everything is shown."""
    capture()

    print("one", end="")
    before = list(lines)
    print(" line\n\ntwo")

    assert before == []
    assert lines == ["one line", "two"]
    assert screen.getvalue() == "one line\n\ntwo\n"


def test_removed(capture, screen, lines):
    """Afterwards the terminal has its place back; half a line is a line."""
    captured = capture()

    print("half", end="")
    captured.remove()
    print("later")

    assert sys.stdout is screen
    assert lines == ["half"]


def test_last_drawing_of_a_bar(capture, lines):
    """What was drawn over is not noticed."""
    capture()

    for number in tqdm.tqdm(range(200), file=sys.stdout, mininterval=0):
        assert number >= 0
    print("done")

    assert len(lines) == 2
    assert lines[0].startswith("100%|")
    assert lines[1] == "done"


def test_memory_does_not_grow_with_a_bar(capture):
    """Of a line that is drawn again and again only the last drawing is kept."""
    captured = capture()

    for number in range(1000):
        sys.stdout.write(f"\r{number}%")

    assert captured._line == "\r999%"


def test_another_stream_in_its_place_stays(capture, monkeypatch):
    """What somebody else has put there is left alone."""
    captured = capture()
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)

    captured.remove()

    assert sys.stdout is other


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_in_any_order(screen, order, monkeypatch):
    """Two that are removed in any order leave the terminal as it was."""
    monkeypatch.setattr(sys, "stdout", screen)
    heard = [[], []]
    both = [CapturedStream("stdout", heard[number].append) for number in range(2)]
    for one in both:
        one.install()
    print("both")

    both[order[0]].remove()
    print("one")
    both[order[1]].remove()

    assert sys.stdout is screen
    assert heard[order[0]] == ["both"]
    assert heard[order[1]] == ["both", "one"]
    assert screen.getvalue() == "both\none\n"


def test_answers_as_the_stream_that_was_there(capture, screen):
    """Programs ask a stream what it is, and flush it."""
    capture()

    sys.stdout.flush()

    assert sys.stdout.isatty() is screen.isatty()
    with pytest.raises(io.UnsupportedOperation):
        sys.stdout.fileno()


def test_program_without_a_terminal(monkeypatch, lines):
    """Where there is no stream, none is put there."""
    monkeypatch.setattr(sys, "stdout", None)
    stream = CapturedStream("stdout", lines.append)

    stream.install()
    assert sys.stdout is None
    stream.remove()

    assert sys.stdout is None
