"""Shared fixtures: a small model, and algorithms, callbacks and loggers that record their calls."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from composer.core import Algorithm, Callback, LoggerDestination, State


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts with the same seed and one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def model():
    """Two layers, with their parameters named 0.weight, 0.bias, 1.weight, 1.bias."""
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


@pytest.fixture
def state(model):
    """A state with a model, an optimizer of all its parameters and ten epochs."""
    return State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="10ep")


@pytest.fixture
def calls():
    """The recorded calls in order: (name, event)."""
    return []


@pytest.fixture
def make(calls):
    """Return functions that create classes whose instances record their calls."""

    def algorithm(name, runs_at=None, **attributes):
        """Return an instance of a new algorithm class."""

        def apply(self, event, state, logger):
            calls.append((name, event.value))

        return type(name, (Algorithm,), {"runs_at": runs_at or {}, "apply": apply, **attributes})()

    def callback(name, *hooks, base=Callback):
        """Return an instance of a new callback class that overrides some hooks."""

        def hook_named(event):
            return lambda self, state, logger: calls.append((name, event))

        return type(name, (base,), {event: hook_named(event) for event in hooks})()

    def destination(name, *hooks):
        """Return an instance of a new destination class that overrides some hooks."""
        return callback(name, *hooks, base=LoggerDestination)

    return SimpleNamespace(algorithm=algorithm, callback=callback, destination=destination)
