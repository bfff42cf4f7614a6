"""SAM compared with the paper's formula, a naive loop and the wrapped optimizers."""

from __future__ import annotations

import copy
import inspect
import math
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from composer import functional as cf

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "several groups": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1),
}
if "Muon" in dir(torch.optim):  # it takes matrices only
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=0.01)


def _network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def _batch(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator, dtype=dtype), torch.randint(3, (8,), generator=generator)


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> Callable[[], Tensor]:
    inputs, targets = _batch(step, next(model.parameters()).dtype)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    return closure


def _naive_sam(model: nn.Module, optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor], rho: float) -> None:
    """Algorithm 1 of the paper, tensor by tensor."""
    closure()
    in_optimizer = [each for group in optimizer.param_groups for each in group["params"]]
    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in in_optimizer))
    before = [each.detach().clone() for each in in_optimizer]
    for each in in_optimizer:
        each.data = each.data + rho * each.grad / (norm + 1e-12)
    closure()
    for each, weight in zip(in_optimizer, before, strict=True):
        each.data = weight
    optimizer.step()


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


class TestStep:
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_agrees_with_a_naive_loop(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        """It agrees for each of torch's optimizers, over several steps."""
        actual, expected = _network(), _network()
        optimizer = cf.SAMOptimizer(make(list(actual.parameters())), rho=0.3)
        plain = make(list(expected.parameters()))

        for step in range(3):
            optimizer.step(_closure(actual, optimizer, step))
            _naive_sam(expected, plain, _closure(expected, plain, step), rho=0.3)

        torch.testing.assert_close(_weights(actual), _weights(expected), rtol=1e-10, atol=1e-12)
        assert not _equal(_weights(actual), _weights(_network()))

    def test_worked_example(self, device: torch.device):
        """For the loss w² / 2 the gradient is the weights, and the perturbation points outward."""
        weight = nn.Parameter(torch.tensor([3.0, 4.0], device=device, dtype=torch.float64))
        optimizer = cf.SAMOptimizer(torch.optim.SGD([weight], lr=0.1), rho=0.5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum() / 2
            loss.backward()
            return loss

        loss = optimizer.step(closure)

        assert loss.item() == 12.5
        expected = torch.tensor([3.0 - 0.1 * 3.3, 4.0 - 0.1 * 4.4], device=device, dtype=torch.float64)
        torch.testing.assert_close(weight.detach(), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_weights_are_restored_exactly(self, dtype: torch.dtype):
        """The weights before the perturbation are restored, although x + e - e is not x."""
        model = _network(dtype)
        before = _weights(model)
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), rho=3.0)

        optimizer.step(_closure(model, optimizer))

        assert _equal(_weights(model), before)

    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_rho_zero_is_the_wrapped_optimizer(self, make: Callable[..., torch.optim.Optimizer]):
        """With rho=0 results are bit-identical, with one gradient per step."""
        actual, expected = _network(), _network()
        optimizer, plain = cf.SAMOptimizer(make(list(actual.parameters())), rho=0), make(list(expected.parameters()))
        calls = 0

        def counted(closure: Callable[[], Tensor]) -> Tensor:
            nonlocal calls
            calls += 1
            return closure()

        for step in range(3):
            closure = _closure(actual, optimizer, step)
            optimizer.step(lambda closure=closure: counted(closure))
            _closure(expected, plain, step)()
            plain.step()

        assert _equal(_weights(actual), _weights(expected))
        assert calls == 3

    def test_interval(self):
        """Every third step computes two gradients; the others are those of the wrapped optimizer."""
        model, twin = _network(), _network()
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, interval=3)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        calls = []

        for step in range(6):
            closure, twin_closure = _closure(model, optimizer, step), _closure(twin, plain, step)
            optimizer.step(lambda closure=closure, step=step: (calls.append(step), closure())[1])
            if step in {2, 5}:
                _naive_sam(twin, plain, twin_closure, rho=0.3)
            else:
                twin_closure()
                plain.step()

        assert calls == [0, 1, 2, 2, 3, 4, 5, 5]
        torch.testing.assert_close(_weights(model), _weights(twin))

    def test_returns_the_first_loss(self):
        """The loss at the unperturbed weights is returned."""
        model = _network()
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=1.0)
        inputs, targets = _batch()
        expected = cross_entropy(model(inputs), targets)

        loss = optimizer.step(_closure(model, optimizer))

        assert torch.equal(loss, expected)

    def test_microbatches_in_a_closure(self):
        """Two halves give the step of the complete batch."""
        halved, complete = _network(), _network()
        optimizers = [cf.SAMOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), 0.3) for each in (halved, complete)]
        inputs, targets = _batch()

        def closure() -> float:
            optimizers[0].zero_grad()
            for part in (slice(0, 4), slice(4, 8)):
                (cross_entropy(halved(inputs[part]), targets[part]) / 2).backward()
            return 0.0

        optimizers[0].step(closure)
        optimizers[1].step(_closure(complete, optimizers[1]))

        torch.testing.assert_close(_weights(halved), _weights(complete))

    def test_frozen_parameters(self):
        """Parameters without gradient do not change and do not contribute to the norm."""
        model, twin = _network(), _network()
        model[0].requires_grad_(False)
        twin[0].requires_grad_(False)
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)
        plain = torch.optim.SGD(twin[2].parameters(), lr=0.1)

        optimizer.step(_closure(model, optimizer))
        _naive_sam(twin, plain, _closure(twin, plain), rho=0.3)

        torch.testing.assert_close(_weights(model), _weights(twin))

    def test_sparse_gradients(self):
        """An embedding with sparse gradients takes the same steps as one with dense gradients."""
        weights = {}
        for sparse in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2))
            optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)

            def closure(model: nn.Module = model, optimizer: cf.SAMOptimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.tensor([1, 3, 1, 0])).square().sum()
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(closure)
            weights[sparse] = list(model.parameters())

        torch.testing.assert_close(weights[True], weights[False])

    def test_failing_closure_restores_the_weights(self):
        """An error at the perturbed weights restores the original ones."""
        model = _network()
        before = _weights(model)
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3)
        closure, calls = _closure(model, optimizer), []

        def failing() -> Tensor:
            calls.append(0)
            if len(calls) == 2:
                assert not _equal(_weights(model), before)
                raise KeyboardInterrupt
            return closure()

        with pytest.raises(KeyboardInterrupt):
            optimizer.step(failing)

        assert _equal(_weights(model), before)


class TestScaler:
    def _step(
        self, model: nn.Module, optimizer: cf.SAMOptimizer, scaler: torch.amp.GradScaler, *, unscales: bool
    ) -> None:
        inputs, targets = _batch(dtype=torch.float32)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            return loss

        optimizer.step(closure, scaler)
        scaler.update()

    @pytest.mark.parametrize("unscales", [True, False])
    @pytest.mark.parametrize("interval", [1, 2])
    def test_equals_the_step_without_a_scaler(self, interval: int, unscales: bool):
        """A power of two as scale gives bit-identical results, wherever the gradients are unscaled."""
        scaled, plain = _network(torch.float32), _network(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizers = [
            cf.SAMOptimizer(torch.optim.Adam(each.parameters(), lr=0.01), 0.3, interval=interval)
            for each in (scaled, plain)
        ]

        for _ in range(4):
            self._step(scaled, optimizers[0], scaler, unscales=unscales)
            optimizers[1].step(_closure(plain, optimizers[1]))

        torch.testing.assert_close(_weights(scaled), _weights(plain))
        assert scaler.get_scale() == 2.0**12

    @pytest.mark.parametrize("bad_call", [1, 2])
    @pytest.mark.parametrize("unscales", [True, False])
    def test_non_finite_gradients_skip_the_step(self, bad_call: int, unscales: bool):
        """In either pass weights and state do not change, the scale is halved, and no pass uses non-finite weights."""
        model = _network(torch.float32)
        before, calls = _weights(model), []
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = cf.SAMOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), rho=0.3)
        inputs, targets = _batch(dtype=torch.float32)

        def closure() -> Tensor:
            calls.append(all(weight.isfinite().all() for weight in model.parameters()))
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            scaler.scale(loss * (math.inf if len(calls) == bad_call else 1.0)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            return loss

        optimizer.step(closure, scaler)
        scaler.update()

        assert calls == [True] * bad_call
        assert _equal(_weights(model), before)
        assert not optimizer.state
        assert scaler.get_scale() == 2.0

    def test_scaler_step_raises(self):
        """scaler.step would skip unscaling; the error states the correct call, which then works."""
        model = _network(torch.float32)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler.scale(model(_batch(dtype=torch.float32)[0]).sum()).backward()

        with pytest.raises(RuntimeError, match=r"Call optimizer\.step\(closure, scaler\) and then scaler\.update\(\)"):
            scaler.step(optimizer, _closure(model, optimizer))
        with pytest.raises(RuntimeError, match=r"Call optimizer\.step\(closure, scaler\) and then scaler\.update\(\)"):
            scaler.step(optimizer)

        scaler.update()
        before = _weights(model)
        self._step(model, optimizer, scaler, unscales=False)
        assert not _equal(_weights(model), before)


class TestAsAnOptimizer:
    def _make(self, **settings: object) -> tuple[nn.Module, torch.optim.Optimizer, cf.SAMOptimizer]:
        model = _network()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, base, cf.SAMOptimizer(base, **settings)

    def test_shares_groups_state_and_defaults(self):
        """A change through one optimizer is visible in both."""
        model, base, optimizer = self._make()
        optimizer.step(_closure(model, optimizer))

        optimizer.param_groups[0]["lr"] = 0.3

        assert isinstance(optimizer, torch.optim.Optimizer)
        assert base.param_groups[0]["lr"] == 0.3
        assert optimizer.state is base.state
        assert model[0].weight in base.state
        assert optimizer.defaults is base.defaults

    def test_state_dict_equals_the_wrapped_one(self):
        """The names are equal, and the groups contain the step count."""
        model, base, optimizer = self._make()
        for step in range(2):
            optimizer.step(_closure(model, optimizer, step))

        saved, plain = optimizer.state_dict(), base.state_dict()

        assert saved.keys() == plain.keys() == {"state", "param_groups"}
        assert saved["state"].keys() == {0, 1, 2, 3}
        assert saved["param_groups"][0].pop("sam_steps") == 2
        fresh = torch.optim.SGD(_network().parameters(), lr=0.1, momentum=0.9).state_dict()
        assert saved["param_groups"] == fresh["param_groups"]

    @pytest.mark.parametrize("wrap_first", [True, False])
    def test_resume_is_bit_identical(self, wrap_first: bool):
        """A loaded state gives bit-identical results in the same interval, loaded before or after wrapping."""
        model, _, optimizer = self._make(rho=0.3, interval=2)
        for step in range(3):
            optimizer.step(_closure(model, optimizer, step))
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        resumed, base, other = self._make(rho=0.3, interval=2)
        resumed.load_state_dict(weights)

        (other if wrap_first else base).load_state_dict(saved)
        other = other if wrap_first else cf.SAMOptimizer(base, rho=0.3, interval=2)

        for step in range(3, 6):
            optimizer.step(_closure(model, optimizer, step))
            other.step(_closure(resumed, other, step))
        assert _equal(_weights(model), _weights(resumed))

    def test_loads_the_state_of_an_unwrapped_optimizer(self):
        """The step count is zero, and momentum is restored."""
        model = _network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _closure(model, plain)()
        plain.step()
        other, _, optimizer = self._make(interval=2)

        optimizer.load_state_dict(plain.state_dict())

        momentum = optimizer.state[other[0].weight]["momentum_buffer"]
        assert torch.equal(momentum, plain.state[model[0].weight]["momentum_buffer"])

    def test_unwrapped_optimizer_loads_the_state(self):
        """The plain optimizer continues with it."""
        model, _, optimizer = self._make()
        optimizer.step(_closure(model, optimizer))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        plain.load_state_dict(optimizer.state_dict())

        _closure(model, plain)()
        plain.step()
        assert plain.state_dict()["state"].keys() == {0, 1, 2, 3}

    @pytest.mark.parametrize("outer", [True, False])
    def test_schedulers(self, outer: bool):
        """A scheduler on either optimizer changes the learning rate."""
        model, base, optimizer = self._make()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer if outer else base, 1, gamma=0.5)

        optimizer.step(_closure(model, optimizer))
        scheduler.step()

        assert optimizer.param_groups[0]["lr"] == base.param_groups[0]["lr"] == 0.05

    @pytest.mark.parametrize("scheduled", [True, False])
    def test_signature_requires_a_closure(self, scheduled: bool):
        """The closure argument has no default, which loops can inspect."""
        _, _, optimizer = self._make()
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)

        parameter = inspect.signature(optimizer.step).parameters["closure"]

        assert parameter.default is inspect.Parameter.empty

    def test_add_param_group(self):
        """A new group is trained too."""
        model, base, optimizer = self._make()
        extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
        closure = _closure(model, optimizer)

        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        optimizer.step(lambda: (closure(), extra.sum().backward()))

        assert len(base.param_groups) == 2
        assert extra.item() == pytest.approx(0.5)

    def test_copies_and_pickles(self):
        """A copy has its own weights, state and settings."""
        model, _, optimizer = self._make(rho=0.2, interval=3)
        optimizer.step(_closure(model, optimizer))

        for created in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert (created.rho, created.epsilon, created.interval) == (0.2, 1e-12, 3)
            assert created.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
            assert created.param_groups[0]["params"][0] is not model[0].weight
            created.register_step_pre_hook(lambda *_: None)

    def test_surgery_afterwards(self):
        """New parameters replace the old ones and receive their state."""
        model, base, optimizer = self._make()
        optimizer.step(_closure(model, optimizer))
        momentum = base.state[model[2].weight]["momentum_buffer"]
        old, new = model[2], nn.Linear(6, 3, dtype=torch.float64)
        model[2] = new

        cf.update_params_in_optimizer(old.named_parameters(), new.named_parameters(), optimizer)

        assert optimizer.state[new.weight]["momentum_buffer"] is momentum
        before = new.weight.detach().clone()
        optimizer.step(_closure(model, optimizer))
        assert not torch.equal(new.weight, before)
        assert old.weight not in base.state

    def test_distributed_state_dicts(self):
        """State dicts of torch.distributed have the names of the unwrapped optimizer, and load."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

            model, base, optimizer = self._make()
            before = _weights(model)
            names = get_optimizer_state_dict(model, base)["state"].keys()
            fresh, _, other = self._make()
            optimizer.step(_closure(model, optimizer))
            saved = get_optimizer_state_dict(model, optimizer)
            assert not _equal(_weights(model), before)
            set_optimizer_state_dict(fresh, other, saved)

        assert saved["state"].keys() == {*names} | {name for name, _ in model.named_parameters()}
        assert other.param_groups[0]["sam_steps"] == 1
        momenta = [each.state[net[2].bias]["momentum_buffer"] for each, net in ((optimizer, model), (other, fresh))]
        assert torch.equal(*momenta)


class TestErrors:
    @pytest.mark.parametrize("arguments", [(), (None,), (3,)])
    def test_step_without_closure(self, arguments: tuple[object, ...]):
        """The error states the reason and the correct call; nothing changes."""
        model = _network()
        before = _weights(model)
        optimizer = cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(_batch()[0]).sum().backward()

        with pytest.raises(TypeError, match=r"closure must be a function .* optimizer\.step\(closure\)"):
            optimizer.step(*arguments)

        assert _equal(_weights(model), before)


def test_sharded_step_equals_the_unsharded_one(tmp_path: Path):
    """Two processes with sharded weights give the result of one process."""
    command = [sys.executable, __file__, str(tmp_path)]

    processes = [subprocess.Popen([*command, rank], stderr=subprocess.PIPE, text=True) for rank in "01"]

    for process in processes:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors


def _compare_shards(folder: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    model, complete = _network(), _network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = cf.SAMOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), rho=0.3)
    plain = torch.optim.Adam(complete.parameters(), lr=0.01)
    for step in range(3):
        optimizer.step(_closure(model, optimizer, step))
        _naive_sam(complete, plain, _closure(complete, plain, step), rho=0.3)
    for own, other in zip(model.parameters(), complete.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor().detach(), other.detach(), rtol=1e-9, atol=1e-10)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _compare_shards(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # a thread of gloo now and then aborts a process that ends in the usual way
