"""A small model that records its inputs, and a plain loop that runs algorithms by events."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer.core import Engine, State

SAMPLES, CLASSES = 8, 3


class Watched(nn.Module):
    """Layers that record inputs, targets and outputs; the loss accepts class ids and probabilities."""

    def __init__(self, layers, input=0, target=1, loss=cross_entropy):
        super().__init__()
        self.layers = layers
        self.seen = SimpleNamespace(inputs=[], targets=[], outputs=[])
        self._get = [key[0] if isinstance(key, tuple) else _getter(key) for key in (input, target)]
        self._loss = loss

    def forward(self, batch):
        inputs = self._get[0](batch)
        self.seen.inputs.append(inputs.detach().clone())
        return self.layers(inputs)

    def loss(self, outputs, batch):
        targets = self._get[1](batch)
        self.seen.targets.append(targets.clone())
        self.seen.outputs.append(outputs.detach().clone())
        return self._loss(outputs, targets)


def _getter(key):
    return lambda batch: getattr(batch, key) if hasattr(batch, "_fields") and isinstance(key, str) else batch[key]


@pytest.fixture
def watch():
    """Return a function that creates a recording model from layers, by default a linear one."""

    def make(layers=None, **options):
        return Watched(nn.Linear(SAMPLES, CLASSES) if layers is None else layers, **options)

    return make


@pytest.fixture
def conv_net(watch):
    """Return a function that creates a model for images with a strided convolution, a max pool and a norm."""

    def make():
        layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )
        return watch(layers)

    return make


@pytest.fixture
def norm_net(watch):
    """Return a function that creates a model with floating-point and integer buffers."""
    return lambda: watch(nn.Sequential(nn.Linear(SAMPLES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))


@pytest.fixture
def make_engine():
    """Return a function that creates an engine with SGD and momentum, after INIT and FIT_START."""

    def make(model, *algorithms, start=True, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = Engine(State(model=model, optimizers=optimizer, **options), algorithms=list(algorithms))
        for event in ("init", "before_load", "after_load", "fit_start") if start else ():
            engine.run_event(event)
        return engine

    return make


@pytest.fixture
def batch():
    """Eight samples with one feature each, so that the partners of mixed samples can be inferred, and class ids."""
    return torch.eye(SAMPLES), torch.arange(SAMPLES) % CLASSES


@pytest.fixture
def images():
    """Eight images and their class ids."""
    return torch.randn(SAMPLES, 3, 8, 8), torch.arange(SAMPLES) % CLASSES


@pytest.fixture
def one_hot():
    """Return a function that converts class ids to one-hot rows."""
    return lambda ids: torch.eye(CLASSES)[ids]


@pytest.fixture
def soft_loss():
    """Return the formula of the mean cross entropy with class probabilities."""
    return lambda outputs, targets: -(targets * outputs.log_softmax(1)).sum(1).mean()


@pytest.fixture
def step():
    """Return a function that runs one training step with all its events in order."""

    def run(engine, batch):
        state, event = engine.state, engine.run_event
        state.batch, state.microbatch = batch, 0
        for name in ("after_dataloader", "batch_start", "before_train_batch"):
            event(name)
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        event("before_forward")
        state.outputs = state.model(state.batch)
        event("after_forward")
        event("before_loss")
        state.loss = state.model.loss(state.outputs, state.batch)
        event("after_loss")
        event("before_backward")
        losses = state.loss.values() if isinstance(state.loss, dict) else state.loss
        (losses if isinstance(losses, torch.Tensor) else sum(losses)).backward()
        event("after_backward")
        event("after_train_batch")
        for optimizer in state.optimizers:
            optimizer.step()
        state.timestamp = state.timestamp.to_next_batch(samples=SAMPLES)
        event("batch_end")
        return state

    return run


@pytest.fixture
def end_epoch():
    """Return a function that ends an epoch."""

    def run(engine):
        engine.state.timestamp = engine.state.timestamp.to_next_epoch()
        engine.run_event("epoch_end")

    return run


@pytest.fixture
def sizes_over_a_training():
    """Return a function that returns the batch's size in each batch, by default of ten."""

    def run(algorithm, batch, size_of, epochs=10):
        state = State(model=None, max_duration=f"{epochs}ba")
        engine = Engine(state, algorithms=algorithm)
        sizes = []
        for _ in range(epochs):
            state.batch = batch()
            engine.run_event("after_dataloader")
            sizes.append(size_of(state.batch))
            state.timestamp = state.timestamp.to_next_batch(samples=2)
        return sizes

    return run
