"""Shared fixtures of the profiler's tests: small trainings, and reading of files."""

import gzip
import json

import pytest

from composer.algorithms import LabelSmoothing
from composer.core import Callback, LoggerDestination
from fixtures import small_run


@pytest.fixture
def make_trainer():
    """Return a function that creates a trainer for some batches of epochs of five."""

    def make(profiler, duration="8ba", callbacks=(), **options):
        options = {"algorithms": LabelSmoothing(), "train_metrics": None, "run_name": "mine", "seed": 17} | options
        return small_run(max_duration=duration, callbacks=callbacks, profiler=profiler, **options)

    return make


@pytest.fixture
def train(make_trainer):
    """Return a function that trains for some batches of epochs of five, and returns the closed trainer."""

    def run(profiler, duration="8ba", callbacks=(), **options):
        with make_trainer(profiler, duration, callbacks, **options) as trainer:
            trainer.fit()
        return trainer

    return run


@pytest.fixture
def watch():
    """Return a function that creates callbacks which call a function at an event."""

    def make(event, function):
        def hook(self, state, logger):
            function(state)

        return type("Watch", (Callback,), {event: hook})()

    return make


@pytest.fixture
def read():
    """Return a function that reads the ranges of a trace's training thread, sorted, and checks that they nest."""

    def from_file(path):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        spans = [e for e in events if e.get("cat") == "user_annotation"]
        for thread in {(span["pid"], span["tid"]) for span in spans}:
            check_nesting([span for span in spans if (span["pid"], span["tid"]) == thread])
        return events

    def check_nesting(spans):
        open_until = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            begin, end = round(span["ts"] * 1000), round((span["ts"] + span["dur"]) * 1000)
            assert 0 <= begin <= end
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], span
            open_until.append(end)

    return from_file


@pytest.fixture
def spans(read):
    """Return a function that returns the ranges of a trace, in the order in which they begin."""

    def of_file(path):
        found = [event for event in read(path) if event.get("cat") == "user_annotation"]
        return sorted(found, key=lambda span: (span["ts"], -span["dur"]))

    return of_file


@pytest.fixture
def names(spans):
    """Return a function that returns the names of the ranges of a trace, in the order in which they begin."""
    return lambda path: [span["name"] for span in spans(path)]


@pytest.fixture
def uploads():
    """Return a logger that stores the names of the files uploaded to it."""

    class Uploads(LoggerDestination):
        def __init__(self):
            self.names = []

        def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
            assert file_path.stat().st_size > 1000
            self.names.append(remote_file_name)

        def can_upload_files(self):
            return True

    return Uploads()
