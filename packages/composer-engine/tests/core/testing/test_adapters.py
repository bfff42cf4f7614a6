"""The contract of adapters: a host trains as the loop of the contract suite, and the checks find its faults."""

import contextlib
import copy
import io

import attrs
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer import functional as cf
from composer.core import Adapter, Algorithm, Event, Stage, State, served_fields
from composer.core.declarations import ALWAYS_SERVED, FIELDS, OPTIONAL_EVENTS
from composer.core.planning import build_plan
from composer.core.saving.codec import equal
from composer.core.saving.components import saved
from composer.core.testing import Training, seeded

SERVES = served_fields("Host")
BATCHES = 3


def loss_of(outputs, batch, reduction="mean"):
    return cross_entropy(outputs, batch[1], reduction=reduction)


def make_model():
    """Return two layers with a ReLU, which surgery replaces, the same each time."""
    with seeded("model"):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def make_data():
    """Return the batches of an epoch, the same each time."""
    with seeded("data"):
        return [(torch.rand(6, 4), torch.randint(3, (6,))) for _ in range(BATCHES)]


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Host:
    """A host that fulfils the contract, except for a fault."""

    def __init__(self, fault=None, serves=SERVES):
        self.fault, self.serves = fault, serves

    def has(self, fault):
        return self.fault == fault

    def serves_algorithm(self, algorithm):
        """Return whether the host declares to serve an algorithm."""
        try:
            build_plan([algorithm], serves=self.serves)
        except ValueError:
            return False
        return True

    def train(self, *algorithms, epochs=2, evaluate=lambda: None, checkpoint=None, model=None):
        """Train, and return the model, the adapter and the host's checkpoint."""
        model = make_model() if model is None else model
        optimizer, data = make_optimizer(model), make_data()
        served = SERVES if self.has("serves all") else self.serves
        adapter = Adapter(served, model, algorithms, forward=lambda batch: model(batch[0]), loss=loss_of)
        adapter.prepare(optimizer)
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
            if not self.has("optimizer without state"):
                optimizer.load_state_dict(checkpoint["optimizer"])
            if not self.has("state not loaded"):
                adapter.load_state_dict(checkpoint["algorithms"])
        adapter.begin_fit(max_duration=f"{epochs}ep", train_dataloader=data)
        for _ in range(1 if checkpoint else 0, epochs):
            if not self.has("late epoch"):
                adapter.begin_epoch()
            for batch in data:
                self.step(adapter, optimizer, batch)
                if self.has("late epoch"):
                    adapter.begin_epoch()
            adapter.end_epoch()
            self.evaluate(evaluate, adapter)
        adapter.end_fit()
        states = {"model": model, "optimizer": optimizer, "algorithms": adapter}
        return model, adapter, copy.deepcopy({name: one.state_dict() for name, one in states.items()})

    def step(self, adapter, optimizer, batch):
        changed = adapter.begin_batch(batch)
        if self.has("own batch"):
            changed = batch

        def closure():
            optimizer.zero_grad()
            loss = adapter.compute_loss(changed)
            if self.has("own loss"):
                loss = loss_of(adapter.state.model(changed[0]), changed)
            loss.backward()
            adapter.end_backward()
            if not self.has("late end of the gradients"):
                adapter.end_gradients()
            return loss.detach()

        if self.has("own optimizer"):
            closure()
            optimizer.step()
        else:
            adapter.optimizers[0].step(closure)
        if self.has("late end of the gradients"):
            adapter.end_gradients()
        if not self.has("no clock"):
            adapter.end_step()

    def evaluate(self, evaluate, adapter):
        if self.has("own weights"):
            evaluate()
        elif self.has("not restored"):
            self.context = adapter.evaluation()  # kept, as a context without references is closed
            self.context.__enter__()
            evaluate()
            self.context.__exit__(None, None, None)
        elif not self.has("no evaluation"):
            with adapter.evaluation():
                evaluate()


def train_by_suite(*algorithms, epochs=2):
    """Train by the loop of the contract suite, and return the weights."""
    model = make_model()
    options = {"forward": lambda batch: model(batch[0]), "loss_function": loss_of, "max_duration": f"{epochs}ep"}
    state = State(model, optimizers=make_optimizer(model), train_dataloader=make_data(), **options)
    Training(state, algorithms).run(epochs * BATCHES)
    return model.state_dict()


def probe(event, reads=(), writes=(), stage=Stage.AUGMENT):
    """Return a decorator that makes an algorithm from a function of itself and the state."""

    def make(apply):
        effects = {"runs_at": {event: stage}, "reads": {*reads}, "writes": {*writes}}
        name = apply.__name__.title()
        return type(name, (Algorithm,), effects | {"apply": lambda self, event, state, logger: apply(self, state)})

    return make


@probe(Event.INIT, reads=["model", "optimizers"], writes=["model", "optimizers"], stage=Stage.ARCHITECTURE)
def surgery(self, state):
    cf.replace_module_classes(state.model, {nn.ReLU: lambda *_: nn.PReLU()}, state.optimizers)


@probe(Event.AFTER_DATALOADER, reads=["batch.input"], writes=["batch.input"])
def noise(self, state):
    inputs = state.batch_get_item(0)
    state.batch_set_item(0, inputs + torch.rand(inputs.shape, generator=state.generator(self)))


@probe(Event.BEFORE_FORWARD, reads=["batch.input"], writes=["batch.input"])
def scaling(self, state):
    state.batch_set_item(0, state.batch_get_item(0) / 2)


@probe(Event.BEFORE_LOSS, reads=["batch.target", "outputs"], writes=["batch.target"], stage=Stage.LABEL)
def relabeling(self, state):
    targets = state.batch_get_item(1).clone()
    targets[:2] = state.outputs.argmax(1)[:2]
    state.batch_set_item(1, targets)


@probe(Event.AFTER_FORWARD, reads=["outputs"], writes=["outputs"], stage=Stage.LOSS)
def temperature(self, state):
    state.outputs = state.outputs / 2


@probe(Event.AFTER_LOSS, reads=["loss"], writes=["loss"], stage=Stage.LOSS)
def loss_weight(self, state):
    state.loss = state.loss * 2


@probe(Event.AFTER_TRAIN_BATCH, reads=["model"], writes=["gradients"], stage=Stage.GRADIENT)
def damping(self, state):
    for parameter in state.model.parameters():
        parameter.grad.mul_(0.5)


@probe(Event.AFTER_LOAD, reads=["optimizers"], writes=["optimizers"], stage=Stage.GRADIENT)
def two_passes(self, state):
    state.optimizers = [cf.SAMOptimizer(optimizer) for optimizer in state.optimizers]


@attrs.define(eq=False)
class Averaging(Algorithm):
    """Averages the last two weights for evaluation."""

    averages: dict = saved(factory=dict)

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}
    reads = {"model"}

    def apply(self, event, state, logger):
        for name, weight in state.model.state_dict().items():
            self.averages[name] = (weight + self.averages.get(name, weight)) / 2

    @contextlib.contextmanager
    def _exchanged(self, model):
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.averages)
        try:
            yield
        finally:
            model.load_state_dict(before)

    def evaluation_weights(self, state):
        return self._exchanged(state.model)


class Recorder(Algorithm):
    """Records the events with the clock."""

    def __init__(self):
        self.seen = []

    def match(self, event, state):
        return event not in OPTIONAL_EVENTS

    def apply(self, event, state, logger):
        clock = state.timestamp
        self.seen.append((event.value, int(clock.epoch), int(clock.batch), int(clock.sample)))


PROBES = [surgery, noise, scaling, temperature, relabeling, loss_weight, damping, two_passes, Averaging]


def check_events(host):
    """The events come in the order of the contract suite's loop, with the same clock."""
    recorder, expected = Recorder(), Recorder()
    host.train(recorder)
    train_by_suite(expected)
    # FIT_END runs after the last epoch, which the loop of the suite leaves open.
    declared = {event.value for event in {*host.serves.readable, *host.serves.writable} - {Event.FIT_END}}
    got, wanted = ([moment for moment in one.seen if moment[0] in declared] for one in (recorder, expected))
    assert got == wanted


def check_weights(host):
    """With each algorithm that the host serves, the weights are those of the contract suite's loop."""
    for algorithms in [[], *([make] for make in PROBES)]:
        if all(host.serves_algorithm(make()) for make in algorithms):
            model, adapter, _ = host.train(*(make() for make in algorithms))
            assert equal(model.state_dict(), train_by_suite(*(make() for make in algorithms))), algorithms
            assert adapter.state.timestamp.batch == 2 * BATCHES


def check_evaluation(host):
    """Evaluation sees the averages, and the training weights are restored, also after an error."""
    for fails in (False, True):
        model, averaging, seen = make_model(), Averaging(), []

        def evaluate(model=model, seen=seen, fails=fails):
            seen.append(copy.deepcopy(model.state_dict()))
            _ = 1 / (not fails)

        with contextlib.suppress(ZeroDivisionError):
            host.train(averaging, epochs=1, evaluate=evaluate, model=model)
        assert [equal(weights, averaging.averages) for weights in seen] == [True]
        assert equal(model.state_dict(), train_by_suite(epochs=1))


def check_resume(host):
    """A run that is resumed from the host's checkpoint gets the weights, averages and clock of one without a stop."""
    makes = [make for make in (surgery, noise, Averaging) if host.serves_algorithm(make())]
    first, second = ([make() for make in makes] for _ in range(2))
    model, adapter, _ = host.train(*first)
    _, stopped, checkpoint = host.train(*(make() for make in makes), epochs=1)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), stopped.state_dict())
    resumed, again, _ = host.train(*second, checkpoint=checkpoint)
    assert equal(resumed.state_dict(), model.state_dict())
    assert again.state.timestamp.batch == adapter.state.timestamp.batch
    assert all(equal(one.state_dict(), other.state_dict()) for one, other in zip(second, first, strict=True))


def check_rejections(host):
    """Each algorithm that needs more than the host serves is rejected before the model changes."""
    served = {*host.serves.readable, *host.serves.writable}
    missing = [("runs_at", event, None) for event in Event if event not in {*served, *OPTIONAL_EVENTS}]
    for verb, by_event in (("reads", host.serves.readable), ("writes", host.serves.writable)):
        for field in sorted(FIELDS - ALWAYS_SERVED):
            places = [event for event in served - OPTIONAL_EVENTS if field not in by_event.get(event, frozenset())]
            missing += [(verb, event, field) for event in sorted(places)[:1]]
    for verb, event, field in missing:
        algorithm = probe(event, **({} if field is None else {verb: [field]}))(lambda self, state: None)
        model = make_model()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="cannot run in Host"):
            host.train(algorithm(), model=model)
        assert equal(model.state_dict(), before)


CHECKS = [check_events, check_weights, check_evaluation, check_resume, check_rejections]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "missing",
    [
        {},
        {"not_writable": {"optimizers"}},
        {"not_readable": {"outputs"}},
        {"not_run": {Event.BEFORE_LOSS, Event.AFTER_LOSS}},
        {"not_writable": {"batch", "loss"}, "not_run": {Event.BEFORE_BACKWARD}},
    ],
)
def test_hosts(check, missing):
    """A host that calls all methods in their places fulfils the contract, also if it serves less."""
    check(Host(serves=served_fields("Host", **missing)))


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("late epoch", check_events),
        ("no clock", check_events),
        ("own batch", check_weights),
        ("own loss", check_weights),
        ("late end of the gradients", check_weights),
        ("own optimizer", check_weights),
        ("own weights", check_evaluation),
        ("no evaluation", check_evaluation),
        ("not restored", check_evaluation),
        ("state not loaded", check_resume),
        ("optimizer without state", check_resume),
    ],
)
def test_faults(fault, check):
    """Each fault of a host is found by its check."""
    with pytest.raises(AssertionError):
        check(Host(fault))


def test_a_host_that_rejects_nothing():
    """A host that passes other fields to the adapter than it declares is found."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_rejections(Host("serves all", served_fields("Host", not_writable={"optimizers"})))
