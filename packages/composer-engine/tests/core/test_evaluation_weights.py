"""Evaluation weights of optimizers and algorithms are swapped in and out."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer.algorithms import EMA, SWA
from composer.core import Engine, State, Timestamp, evaluation_weights
from composer.functional import SAMOptimizer


class Switching(torch.optim.SGD):
    """Has separate evaluation weights, as schedule-free optimizers do; switching back rounds."""

    def eval(self):
        self._scale(1 / 3, train_mode=False)

    def train(self):
        self._scale(3.0, train_mode=True)

    @torch.no_grad()
    def _scale(self, factor, *, train_mode):
        for group in self.param_groups:
            if group.get("train_mode", True) != train_mode:
                for parameter in group["params"]:
                    parameter.mul_(factor)
            group["train_mode"] = train_mode


@pytest.fixture
def model():
    """A layer whose weights are not multiples of three."""
    return nn.Linear(3, 2, bias=False)


def averaging(algorithm, model, optimizers=()):
    """Return an engine whose algorithm has averaged the model's weights and zeros in equal parts."""
    engine = Engine(State(model, optimizers=optimizers, max_duration="10ba"), algorithms=algorithm)
    trained = model.weight.detach().clone()
    engine.run_event("fit_start")
    for batch, weight in enumerate((torch.zeros_like(trained), trained), start=1):
        nn.init.zeros_(model.weight).data.copy_(weight)
        engine.state.timestamp = Timestamp(batch=batch)
        engine.run_event("batch_end")
    return engine


def averages():
    """Return algorithms that evaluate with the mean of all weights."""
    return [EMA(half_life=None, smoothing=0.5), SWA(swa_start="0ba", swa_end="9ba", update_interval="1ba")]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, SAMOptimizer])
def test_optimizer_with_averages(model, wrap):
    """Such an optimizer evaluates with its averages, also if wrapped; training continues with bit-identical results."""
    optimizer = Switching(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    with evaluation_weights(State(model, optimizers=wrap(optimizer))) as may_differ:
        within = model.weight.detach().clone()

    assert may_differ
    assert torch.equal(within, before * (1 / 3))
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["train_mode"]


def test_optimizer_already_in_evaluation_mode(model):
    """An optimizer in evaluation mode stays in it."""
    optimizer = Switching(model.parameters(), lr=0.1)
    optimizer.eval()
    before = model.weight.detach().clone()

    with evaluation_weights(State(model, optimizers=optimizer)):
        within = model.weight.detach().clone()

    assert torch.equal(within, before)
    assert torch.equal(model.weight, before)
    assert not optimizer.param_groups[0]["train_mode"]


@pytest.mark.parametrize("algorithm", averages(), ids=repr)
def test_algorithm_with_averages(model, algorithm):
    """Within the block the model has the averages of EMA or SWA, and afterwards its training weights."""
    state, before = averaging(algorithm, model).state, model.weight.detach().clone()

    with evaluation_weights(state) as may_differ:
        within = model.weight.detach().clone()

    assert may_differ
    assert torch.equal(within, before / 2)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("algorithm", [*averages(), None], ids=repr)
def test_without_averages(model, algorithm):
    """Before averaging starts the training weights are evaluated, and reported as such."""
    before = model.weight.detach().clone()

    with evaluation_weights(State(model, algorithms=algorithm)) as may_differ:
        within = model.weight.detach().clone()

    assert not may_differ
    assert torch.equal(within, before)


@pytest.mark.parametrize("algorithm", averages(), ids=repr)
def test_nested_blocks(model, algorithm):
    """Blocks may be nested, around and within an evaluation by events: the outermost one decides."""
    engine, before = averaging(algorithm, model), model.weight.detach().clone()
    recorded = []

    with evaluation_weights(engine.state):
        engine.run_event("eval_start")
        with evaluation_weights(engine.state):
            recorded.append(model.weight.detach().clone())
        recorded.append(model.weight.detach().clone())
        engine.run_event("eval_end")
        recorded.append(model.weight.detach().clone())
    after = model.weight.detach().clone()
    engine.run_event("eval_start")
    with evaluation_weights(engine.state):
        pass
    recorded.append(model.weight.detach().clone())

    assert all(torch.equal(weights, before / 2) for weights in recorded)
    assert torch.equal(after, before)


@pytest.mark.parametrize("algorithm", averages(), ids=repr)
def test_failed_evaluation(model, algorithm):
    """After a failed evaluation the model has the training weights of a schedule-free optimizer."""
    engine = averaging(algorithm, model, Switching(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()

    def fail():
        with evaluation_weights(engine.state):
            engine.run_event("eval_start")
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert torch.equal(model.weight, before)


def test_failing_optimizer(model):
    """If an optimizer fails to switch, those that have switched are restored."""

    class Failing(Switching):
        def eval(self):
            super().eval()
            raise KeyError

    optimizer = Failing(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    with pytest.raises(KeyError), evaluation_weights(State(model, optimizers=optimizer)):
        pass

    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["train_mode"]


@pytest.fixture
def mesh():
    """A device mesh of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_optimizer_of_a_sharded_model(mesh):
    """After an evaluation that leaves weights unsharded, a sharded model uses its training weights."""
    model = nn.Linear(3, 2)
    batch = torch.rand(4, 3)
    before = model(batch).detach()
    bias, weight = model.bias.detach() / 3, model.weight.detach() / 3
    fully_shard(model, mesh=mesh)
    optimizer = Switching(model.parameters(), lr=0.1)

    with torch.no_grad():
        trained = model(batch)
        with evaluation_weights(State(model, optimizers=optimizer)):
            within = model(batch)
        after = model(batch)

    assert torch.equal(trained, before)
    torch.testing.assert_close(within, batch @ weight.T + bias)
    assert torch.equal(after, before)


def test_optimizer_in_nested_blocks(model):
    """The inner of two blocks also reports that the weights are not the training weights."""
    state = State(model, optimizers=Switching(model.parameters(), lr=0.1))

    with evaluation_weights(state), evaluation_weights(state) as may_differ:
        pass

    assert may_differ


def test_algorithm_precedes_optimizer(model):
    """If both have averages, those of the algorithm are evaluated."""
    optimizer = Switching(model.parameters(), lr=0.1)
    engine = averaging(EMA(half_life=None, smoothing=0.5), model, SAMOptimizer(optimizer))
    before = model.weight.detach().clone()

    with evaluation_weights(engine.state):
        within = model.weight.detach().clone()

    assert torch.equal(within, before / 2)
    assert torch.equal(model.weight, before)
