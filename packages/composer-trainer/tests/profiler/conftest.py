"""Shared fixtures of the profiler's tests: small trainings, and reading of files."""

import json

import pytest
import torch

from composer import Trainer
from composer.algorithms import LabelSmoothing
from composer.core import Callback
from composer.models import ComposerClassifier


@pytest.fixture
def train(tmp_path):
    """Return a function that trains for some batches of an epoch of five, and returns the closed trainer."""

    def run(profiler, duration="8ba", callbacks=(), **options):
        torch.manual_seed(0)
        network = torch.nn.Linear(3, 2)
        data = [(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 5
        profilers = [] if profiler is None else [profiler]
        trainer = Trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=data,
            optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
            max_duration=duration,
            algorithms=options.pop("algorithms", LabelSmoothing()),
            callbacks=[*callbacks, *profilers],
            progress_bar=False,
            device="cpu",
            precision="fp32",
            run_name="mine",
            seed=17,
            **options,
        )
        with trainer:
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
    """Return a function that reads a trace, and checks that its spans nest and its times are plausible."""

    def from_file(path):
        trace = json.loads(path.read_text())
        for thread in {event["tid"] for event in trace["traceEvents"]}:
            check_nesting([e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == thread])
        return trace["traceEvents"]

    def check_nesting(spans):
        open_until = []
        for span in spans:
            begin, end = round(span["ts"] * 1000), round((span["ts"] + span["dur"]) * 1000)
            assert 0 <= begin <= end
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], span
            open_until.append(end)

    return from_file
