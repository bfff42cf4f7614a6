"""Norms of gradients, moments, weights and steps compared with float64 computations."""

import pytest
import torch

from composer.algorithms import SAM, GradientClipping
from composer.callbacks import OptimizerMonitor
from composer.core import Callback
from composer.loggers import InMemoryLogger
from fixtures import make_classifier, trained, vector_batches, weights
from fixtures.processes import run_processes

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
}


def fit(model, optimizer, callbacks, **options):
    """Train four batches, and return the logged values."""
    history = InMemoryLogger()
    settings = {"train_dataloader": vector_batches(4, size=6), "callbacks": callbacks, "loggers": history}
    trained(model=model, optimizers=optimizer, **settings | options)
    return history


class Witness(Callback):
    """Records gradients, weights and moments around each step, in 64 bits."""

    def __init__(self):
        self.steps = []

    def batch_start(self, state, logger):
        self.steps.append({"before": self.copies(state, lambda one: one)})

    def after_train_batch(self, state, logger):
        self.steps[-1]["grad"] = self.copies(state, lambda one: one.grad)

    def batch_end(self, state, logger):
        param_state = state.optimizers[0].state
        self.steps[-1]["after"] = self.copies(state, lambda one: one)
        self.steps[-1]["held"] = {
            name: {
                key: value.double().clone() for key, value in param_state.get(one, {}).items() if torch.is_tensor(value)
            }
            for name, one in state.model.named_parameters()
        }

    @staticmethod
    def copies(state, of):
        return {name: of(one).detach().double().clone() for name, one in state.model.named_parameters()}


def expected_of(step):
    """Return the expected metrics of a step."""
    metrics = {"l2_norm/grad/global": sum(one.pow(2).sum() for one in step["grad"].values()).sqrt()}
    for name, grad in step["grad"].items():
        update = step["before"][name] - step["after"][name]
        param_state = step["held"][name]
        metrics |= {
            f"l2_norm/grad/{name}": grad.pow(2).sum().sqrt(),
            f"l2_norm/param/{name}": step["after"][name].pow(2).sum().sqrt(),
            f"l2_norm/update/{name}": update.pow(2).sum().sqrt(),
            f"cosine/update_grad/{name}": (update * grad).sum() / update.norm() / grad.norm(),
        }
        moment = param_state.get("exp_avg", param_state.get("momentum_buffer"))
        if moment is not None:
            metrics[f"l2_norm/moment/{name}"] = moment.pow(2).sum().sqrt()
            metrics[f"cosine/moment_grad/{name}"] = (moment * grad).sum() / moment.norm() / grad.norm()
        if "exp_avg_sq" in param_state:
            metrics[f"l2_norm/second_moment_sqrt/{name}"] = param_state["exp_avg_sq"].sqrt().pow(2).sum().sqrt()
    return {name: float(value) for name, value in metrics.items()}


def monitored(history):
    return {name: values for name, values in history.data.items() if name.startswith(("l2_norm/", "cosine/"))}


class TestOptimizerMonitor:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_all_metrics(self, kind):
        """Norms and cosines match their definitions for the logged batch."""
        model, witness = make_classifier(train_metrics=[]), Witness()

        history = fit(model, OPTIMIZERS[kind](model.parameters()), [OptimizerMonitor(batch_log_interval=1), witness])

        expected = expected_of(witness.steps[2])
        logged = {name: values[2] for name, values in monitored(history).items()}
        assert set(logged) == set(expected)
        assert {name: float(value) for name, (_, value) in logged.items()} == pytest.approx(expected, rel=1e-4)
        assert {history.get_timeseries(name)["batch"][2] for name in logged} == {3}

    def test_interval(self):
        """Every second batch is measured, and logged at its number."""
        model, witness = make_classifier(train_metrics=[]), Witness()

        callbacks = [OptimizerMonitor(batch_log_interval=2), witness]
        history = fit(model, OPTIMIZERS["adam"](model.parameters()), callbacks)

        for name in ("l2_norm/grad/global", "l2_norm/update/module.0.weight"):
            logged = history.get_timeseries(name)
            assert logged["batch"] == [2, 4]
            assert logged[name] == pytest.approx([float(expected_of(witness.steps[step])[name]) for step in (1, 3)])

    def test_frozen_weights_are_not_copied(self):
        """Weights that the step does not change need no memory, also if the optimizer has them."""
        model, copied = make_classifier(), []
        model.module[0].requires_grad_(False)

        class Look(Callback):
            def before_forward(self, state, logger):
                copied.append(list(monitor._before))

        monitor = OptimizerMonitor(batch_log_interval=4)
        fit(model, OPTIMIZERS["sgd"](model.parameters()), [monitor, Look()])

        trained_weights = [one for one in model.parameters() if one.requires_grad]
        assert [len(one) for one in copied] == [0, 0, 0, len(trained_weights)]
        assert all(one is other for one, other in zip(copied[-1], trained_weights, strict=True))

    def test_gradients_are_those_after_clipping(self):
        """The gradients are those that the optimizers use."""
        model = make_classifier(train_metrics=[])
        clipping = GradientClipping(clipping_type="norm", clipping_threshold=1e-3)

        history = fit(
            model, OPTIMIZERS["sgd"](model.parameters()), OptimizerMonitor(batch_log_interval=1), algorithms=clipping
        )

        norms = history.get_timeseries("l2_norm/grad/global")["l2_norm/grad/global"]
        assert [float(norm) for norm in norms] == pytest.approx([1e-3] * 4, rel=1e-3)

    def test_microbatches_are_summed(self):
        """The gradient is that of the complete batch."""
        histories = []
        for size in (None, 2):
            model = make_classifier(train_metrics=[])
            histories.append(
                fit(
                    model,
                    OPTIMIZERS["sgd"](model.parameters()),
                    OptimizerMonitor(batch_log_interval=1),
                    device_train_microbatch_size=size,
                )
            )

        complete, split = ([float(value) for _, value in one.data["l2_norm/grad/global"]] for one in histories)
        assert split == pytest.approx(complete, rel=1e-5)

    def test_optimizer_with_closure(self):
        """With SAM the update is computed from the weights before the step, not from the perturbed weights."""
        model, witness = make_classifier(train_metrics=[]), Witness()

        history = fit(
            model,
            OPTIMIZERS["momentum"](model.parameters()),
            [OptimizerMonitor(batch_log_interval=1), witness],
            algorithms=SAM(rho=0.5),
        )

        name = "l2_norm/update/module.0.weight"
        expected = [expected_of(step)[name] for step in witness.steps]
        assert [float(value) for _, value in history.data[name]] == pytest.approx(expected, rel=1e-4)

    def test_does_not_change_training(self):
        """The weights are bit-identical with and without the monitor."""
        alone, monitored = make_classifier(train_metrics=[]), make_classifier(train_metrics=[])

        fit(alone, OPTIMIZERS["adamw"](alone.parameters()), [])
        fit(monitored, OPTIMIZERS["adamw"](monitored.parameters()), OptimizerMonitor(batch_log_interval=1))

        assert torch.equal(weights(alone), weights(monitored))


PROCESS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
from composer.callbacks import OptimizerMonitor
from composer.core import Engine, Logger, State
from composer.loggers import InMemoryLogger


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().clone()


def check(model, compute_gradients):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = State(model, optimizers=optimizer, callbacks=OptimizerMonitor(batch_log_interval=1))
    history = InMemoryLogger()
    engine = Engine(state, Logger(state, history))
    for event in ("init", "fit_start", "batch_start"):
        engine.run_event(event)
    before = {name: full(one) for name, one in model.named_parameters()}
    compute_gradients()
    reductions = []
    original = dist.all_reduce
    dist.all_reduce = lambda *arguments, **options: (reductions.append(1), original(*arguments, **options))
    engine.run_event("after_train_batch")
    optimizer.step()
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_batch(samples=4)
    engine.run_event("batch_end")
    dist.all_reduce = original
    assert len(reductions) == 1, reductions

    expected, squares = {}, 0.0
    for name, one in model.named_parameters():
        grad, moment = full(one.grad), full(optimizer.state[one]["exp_avg"])
        update, square = before[name] - full(one), full(optimizer.state[one]["exp_avg_sq"])
        squares += grad.pow(2).sum()
        expected |= {
            f"l2_norm/grad/{name}": grad.norm(),
            f"l2_norm/param/{name}": full(one).norm(),
            f"l2_norm/update/{name}": update.norm(),
            f"l2_norm/moment/{name}": moment.norm(),
            f"l2_norm/second_moment_sqrt/{name}": square.sqrt().norm(),
            f"cosine/update_grad/{name}": (update * grad).sum() / update.norm() / grad.norm(),
            f"cosine/moment_grad/{name}": (moment * grad).sum() / moment.norm() / grad.norm(),
        }
    expected["l2_norm/grad/global"] = squares.sqrt()
    found = {name: float(values[-1][1]) for name, values in history.data.items()}
    assert found.keys() == expected.keys(), (found, expected)
    for name, value in expected.items():
        assert abs(found[name] - value) <= 1e-4 * abs(value), (name, found[name], value)


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(4))
sharded = make()
fully_shard(sharded[0])
fully_shard(sharded)
check(sharded, lambda: sharded(rows).square().mean().backward())

# Beside whole parameters such that are in one place a replica, and in the other a shard.
mixed, mesh = make(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
mixed(rows).square().mean().backward()
gradient, placements = mixed[0].weight.grad, [Replicate(), Shard(0)]
mixed[0].weight = nn.Parameter(distribute_tensor(mixed[0].weight.detach(), mesh, placements))


def spread():
    mixed[0].weight.grad = distribute_tensor(gradient, mesh, placements)


check(mixed, spread)
print("equal")
"""


def test_sharded_over_two_processes(tmp_path):
    """Norms of sharded and replicated parameters equal those of complete ones."""
    program = tmp_path / "program.py"
    program.write_text(PROCESS)

    printed = run_processes(program, 2)

    assert [text.split()[-1] for text in printed] == ["equal"] * 2
