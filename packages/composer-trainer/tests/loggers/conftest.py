"""A loop of events like the trainer's, without a model."""

import datetime as dt
import json
import os
import subprocess
import sys

import pytest
import torch

from composer.core import Engine, Logger, State


class Loop:
    """By default two epochs of three batches; batch ``k`` has loss ``k`` and takes half a second by the clock."""

    def __init__(self, *destinations, batches=3, max_duration="2ep", **options):
        self.batches = batches
        self.state = State(model=None, max_duration=max_duration, **options)
        self.state.set_dataloader(None, "train", batches)
        self.logger = Logger(self.state, destinations)
        self.engine = Engine(self.state, self.logger)
        try:
            for event in ("init", "before_load", "after_load"):
                self.engine.run_event(event)
        except Exception:
            self.engine.close()
            raise

    def fit(self, epochs=2, evaluate=False):
        self.engine.run_event("fit_start")
        for _ in range(epochs):
            self.engine.run_event("epoch_start")
            for _ in range(self.batches):
                self.batch()
            self.state.previous_timestamp = self.state.timestamp
            self.state.timestamp = self.state.timestamp.to_next_epoch()
            self.engine.run_event("epoch_end")
            if evaluate:
                self.evaluate()
            self.engine.run_event("epoch_checkpoint")
        self.engine.run_event("fit_end")
        return self

    def batch(self, **metrics):
        state = self.state
        self.engine.run_event("batch_start")
        number = int(state.timestamp.batch)
        loss = torch.tensor(float(number))
        self.logger.log_metrics({"loss/train/total": loss, "time/batch": number, **metrics})
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples=4, duration=dt.timedelta(seconds=0.5))
        self.engine.run_event("batch_end")

    def evaluate(self, label="eval", accuracy=0.75):
        training = self.state.dataloader, self.state.dataloader_label, self.state.dataloader_len
        self.engine.run_event("eval_before_all")
        self.state.set_dataloader(None, label, 2)
        self.engine.run_event("eval_start")
        for _ in range(2):
            self.engine.run_event("eval_batch_start")
            self.engine.run_event("eval_batch_end")
        self.logger.log_metrics({f"metrics/{label}/Accuracy": torch.tensor(accuracy)})
        self.engine.run_event("eval_end")
        self.state.set_dataloader(*training)
        self.engine.run_event("eval_after_all")


@pytest.fixture
def make_loop():
    """Return a function that creates a loop with some destinations; it is closed at the end."""
    loops = []

    def make(*destinations, **options):
        loops.append(Loop(*destinations, **options))
        return loops[-1]

    yield make
    for loop in loops:
        loop.engine.close()


class UnreadTensor(torch.Tensor):
    """A number on an asynchronous device that counts synchronizations."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in {"item", "tolist", "__float__", "__bool__"}:
            cls.reads += 1
        result = super().__torch_function__(function, types, args, kwargs or {})
        return False if function == torch.Tensor.is_cpu.__get__ else result


@pytest.fixture
def unread():
    """Return a function that creates a number which counts its synchronizations in ``.reads``."""

    class Counted(UnreadTensor):
        reads = 0

    def make(number):
        return torch.tensor(float(number)).as_subclass(Counted)

    make.counter = Counted
    return make


TRAINING = """
import json, sys, warnings
import torch
from composer.core import Callback
from composer.loggers import *
from fixtures import make_loader, small_run

warnings.simplefilter("error", RuntimeWarning)  # as a destination that fails is reported


def make_trainer(*loggers, epochs=2, **options):
    memory = InMemoryLogger()
    options = {"eval_dataloader": make_loader(), "seed": 3, "run_name": "the-run", "train_metrics": None} | options
    return small_run(max_duration=f"{epochs}ep", loggers=[*loggers, memory], **options), memory


def series(memory, name):
    return [[int(clock.batch), value] for clock, value in memory.data[name]]


def report_facts(**facts):
    print("FACTS" + json.dumps(facts))


"""


@pytest.fixture(scope="session")
def run_in_subprocess():
    """Return a function that runs a program in a new process and folder, and returns the facts from it.

    Products that change others when they are imported do so there. The program has ``make_trainer(*loggers)`` for a
    training of two epochs of five batches, ``series(memory, name)`` for what was logged, and ``report_facts(**facts)``.
    """

    def run(program, folder, **environment):
        done = subprocess.run(
            [sys.executable, "-c", TRAINING + program],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        facts = [line for line in done.stdout.splitlines() if line.startswith("FACTS")]
        return json.loads(facts[-1].removeprefix("FACTS"))

    return run
