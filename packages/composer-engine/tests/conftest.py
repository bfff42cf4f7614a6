"""What several tests need: a small model, and algorithms, callbacks and loggers that write down their calls."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from composer.core import Algorithm, Callback, LoggerDestination, State


@pytest.fixture(autouse=True)
def seeded():
    """Every test begins with the same random numbers, and one thread is enough."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def model():
    """Two layers, with their parameters named 0.weight, 0.bias, 1.weight, 1.bias."""
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


@pytest.fixture
def state(model):
    """A state with a model, an optimizer over all of it and ten epochs to go."""
    return State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="10ep")


@pytest.fixture
def calls():
    """What has been called, in order: (name, event)."""
    return []


@pytest.fixture
def make(calls):
    """Return makers of classes whose objects write down their calls."""

    def algorithm(name, runs_at=None, **attributes):
        """Return an algorithm of a new class."""

        def apply(self, event, state, logger):
            calls.append((name, event.value))

        return type(name, (Algorithm,), {"runs_at": runs_at or {}, "apply": apply, **attributes})()

    def callback(name, *hooks, base=Callback):
        """Return a callback of a new class that overrides some hooks."""

        def hook_named(event):
            return lambda self, state, logger: calls.append((name, event))

        return type(name, (base,), {event: hook_named(event) for event in hooks})()

    def destination(name, *hooks):
        """Return a logger destination of a new class that overrides some hooks."""
        return callback(name, *hooks, base=LoggerDestination)

    return SimpleNamespace(algorithm=algorithm, callback=callback, destination=destination)
