"""Gradient clipping compared with torch, timm and formulas; sharded in two processes, with unsharded gradients."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from composer import functional as cf

TYPES = ["norm", "value", "adaptive"]


def _network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Convolution, norm and linear layers, with gradients from large to tiny."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Conv1d(4, 3, 2), nn.Linear(5, 3)).to(dtype)
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (1 - place)
    return model


def _twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for own, other in zip(twin.parameters(), model.parameters(), strict=True):
        own.grad = None if other.grad is None else other.grad.clone()
    return twin


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def _parameter(weight: list[float], gradient: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(weight))
    parameter.grad = torch.tensor(gradient)
    return parameter


class TestSparse:
    @staticmethod
    def trained(*, sparse: bool) -> nn.Module:
        """An embedding, of which one row is used twice and one never, and a layer."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2))
        model(torch.tensor([1, 3, 1, 0, 2])).square().sum().backward()
        return model

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("threshold", [0.01, 100.0])
    def test_equals_dense_gradients(self, kind: str, threshold: float):
        """Each kind of clipping gives the gradients and the norm of the same embedding with dense gradients."""
        sparse, dense = self.trained(sparse=True), self.trained(sparse=False)

        norm = cf.apply_gradient_clipping(sparse, kind, threshold)

        expected = cf.apply_gradient_clipping(dense, kind, threshold)
        assert sparse[0].weight.grad.is_sparse
        torch.testing.assert_close(sparse[0].weight.grad.to_dense(), dense[0].weight.grad)
        torch.testing.assert_close(sparse[1].weight.grad, dense[1].weight.grad)
        assert norm is expected is None or torch.equal(norm, expected)


class TestNorm:
    @pytest.mark.parametrize("threshold", [0.1, 5.0, 1e4])
    def test_agrees_with_torch(self, threshold: float, device: torch.device):
        """Gradients and the returned norm equal torch.nn.utils.clip_grad_norm_."""
        model = _network().to(device)
        reference = _twin(model)

        norm = cf.apply_gradient_clipping(model, "norm", threshold)

        expected = nn.utils.clip_grad_norm_(reference.parameters(), threshold)
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(_gradients(model), _gradients(reference))

    def test_float16_norm_does_not_overflow(self):
        """The norm is computed in float32."""
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        parameter.grad = torch.full((4,), 6e4, dtype=torch.float16)

        norm = cf.apply_gradient_clipping(parameter, "norm", 2.0)

        assert norm.item() == pytest.approx(2 * 6e4, rel=1e-3)
        torch.testing.assert_close(parameter.grad, torch.ones(4, dtype=torch.float16), atol=2e-3, rtol=0)

    @given(seed=st.integers(0, 2**40), threshold=st.floats(1e-3, 1e3))
    def test_the_norm_is_at_most_the_threshold(self, seed: int, threshold: float):
        """Clipping preserves the direction."""
        parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        before = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        parameter.grad = before.clone()

        cf.apply_gradient_clipping(parameter, "norm", threshold)

        assert parameter.grad.norm() <= threshold * (1 + 1e-9)
        torch.testing.assert_close(parameter.grad / parameter.grad.norm(), before / before.norm())


class TestValue:
    @pytest.mark.parametrize("threshold", [0.01, 1.0, 100.0])
    def test_agrees_with_torch(self, threshold: float, device: torch.device):
        """Gradients equal torch.nn.utils.clip_grad_value_, and nothing is returned."""
        model = _network().to(device)
        expected = _twin(model)

        returned = cf.apply_gradient_clipping(model, "value", threshold)

        nn.utils.clip_grad_value_(expected.parameters(), threshold)
        assert returned is None
        assert all(map(torch.equal, _gradients(model), _gradients(expected)))


class TestAdaptive:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("threshold", [0.01, 0.5, 100.0])
    def test_agrees_with_timm(self, threshold: float, dtype: torch.dtype, device: torch.device):
        """Convolutions, linear layers and vectors are clipped as by timm's adaptive_clip_grad."""
        model = _network(dtype).to(device)
        expected = _twin(model)

        returned = cf.apply_gradient_clipping(model, "adaptive", threshold)

        from timm.utils.agc import adaptive_clip_grad

        adaptive_clip_grad(expected.parameters(), threshold)
        assert returned is None
        torch.testing.assert_close(_gradients(model), _gradients(expected))

    def test_each_row_has_its_limit(self):
        """Each row's limit is its weights' norm times the threshold."""
        weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
        weight.grad = torch.tensor([[0.0, 1.0], [0.0, 1.0]])

        cf.apply_gradient_clipping(weight, "adaptive", 0.5)

        torch.testing.assert_close(weight.grad, torch.tensor([[0.0, 1.0], [0.0, 0.5]]))

    def test_zero_weights(self):
        """Weights of zero have a minimum norm of 0.001."""
        bias = _parameter([0.0], [1.0])

        cf.apply_gradient_clipping(bias, "adaptive", 0.5)

        torch.testing.assert_close(bias.grad, torch.tensor([0.0005]))

    @given(seed=st.integers(0, 2**40), threshold=st.floats(1e-3, 10))
    def test_no_unit_is_above_its_limit(self, seed: int, threshold: float):
        """Units below their limit do not change."""
        generator = torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64))
        before = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        weight.grad = before.clone()

        cf.apply_gradient_clipping(weight, "adaptive", threshold)

        limits = threshold * weight.detach().norm(dim=1)
        assert (weight.grad.norm(dim=1) <= limits * (1 + 1e-9)).all()
        is_below = before.norm(dim=1) < limits * (1 - 1e-9)
        assert torch.equal(weight.grad[is_below], before[is_below])


@pytest.mark.parametrize("clipping_type", TYPES)
class TestEveryType:
    def test_zero_gradients(self, clipping_type: str):
        """There is no division by a norm of zero."""
        model = _network()
        for gradient in _gradients(model):
            gradient.zero_()

        cf.apply_gradient_clipping(model, clipping_type, 0.01)

        assert all(torch.equal(each, torch.zeros_like(each)) for each in _gradients(model))

    def test_parameters_without_gradient(self, clipping_type: str):
        """Frozen and unused parameters do not change."""
        model = _network()
        model[0].requires_grad_(False)
        for parameter in model[0].parameters():
            parameter.grad = None
        rest = _twin(model[1:])

        cf.apply_gradient_clipping(model, clipping_type, 0.01)
        cf.apply_gradient_clipping(rest, clipping_type, 0.01)

        assert model[0].weight.grad is None
        assert all(map(torch.equal, _gradients(model[1:]), _gradients(rest)))

    @pytest.mark.parametrize("form", [list, iter, tuple])
    def test_accepts_parameters(self, clipping_type: str, form: type):
        """Parameters are accepted instead of a model."""
        model = _network()
        complete = _twin(model)

        cf.apply_gradient_clipping(form(model.parameters()), clipping_type, 0.01)
        cf.apply_gradient_clipping(complete, clipping_type, 0.01)

        assert all(map(torch.equal, _gradients(model), _gradients(complete)))


class TestErrors:
    @pytest.mark.parametrize("clipping_type", TYPES)
    def test_before_the_backward_pass(self, clipping_type: str):
        """A model that requires gradients and has none raises."""
        with pytest.raises(
            ValueError, match=r"must have gradients to clip, got none for its 2 parameters\. Clip after"
        ):
            cf.apply_gradient_clipping(nn.Linear(2, 2), clipping_type, 1.0)

    def test_exhausted_generator(self):
        """A generator yields its parameters once."""
        parameters = _network().parameters()
        list(parameters)

        with pytest.raises(ValueError, match="model must have parameters, got an empty iterable"):
            cf.apply_gradient_clipping(parameters, "norm", 1.0)


CASES = [*TYPES, "norm returned", "with a plain parameter", "columns, adaptive", "columns, norm", "partial, value"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """By how much gradients that two processes share differ from those of one, for each case."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, __file__, str(folder)]
    processes = [subprocess.Popen([*command, rank], stderr=subprocess.PIPE, text=True) for rank in "01"]
    for process in processes:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    return json.loads((folder / "differences.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_sharded_gradients_are_clipped_like_unsharded_ones(case: str, sharded: dict[str, float]):
    """Two processes with shards give the result of one process."""
    assert sharded[case] < 1e-6


def _clip_independently(parameters: list[Tensor], clipping_type: str, threshold: float) -> Tensor | None:
    if clipping_type == "adaptive":
        for parameter in parameters:
            units = (parameter.detach().flatten(1), parameter.grad.flatten(1)) if parameter.ndim > 1 else (
                parameter.detach()[None], parameter.grad[None])  # fmt: skip
            limit = units[0].norm(dim=1).clamp(min=1e-3) * threshold
            units[1].mul_((limit / units[1].norm(dim=1)).clamp(max=1)[:, None])
        return None
    if clipping_type == "value":
        nn.utils.clip_grad_value_(parameters, threshold)
        return None
    return nn.utils.clip_grad_norm_(parameters, threshold)


def _compare_shards(folder: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    differences = {}

    def compare(case: str, parameters: list[Tensor], complete: list[Tensor]) -> None:
        pairs = [(own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad, other.grad)
                 for own, other in zip(parameters, complete, strict=True)]  # fmt: skip
        differences[case] = max((own - other).abs().max().item() for own, other in pairs)

    for clipping_type in [*TYPES, "with a plain parameter"]:
        model = _network()
        complete = list(_twin(model).parameters())
        gradients = _gradients(model)
        fully_shard(model, mesh=mesh)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        if clipping_type == "with a plain parameter":
            parameters.append(_parameter([1.0, 2.0], [300.0, 400.0]))
            complete.append(_parameter([1.0, 2.0], [300.0, 400.0]))
        used = clipping_type if clipping_type in TYPES else "norm"
        norm = cf.apply_gradient_clipping(parameters, used, 0.1)
        expected = _clip_independently(complete, used, 0.1)
        if clipping_type == "norm":
            differences["norm returned"] = (norm / expected - 1).abs().item()
        compare(clipping_type, parameters, complete)

    for clipping_type in ("adaptive", "norm"):
        weight, gradient = torch.randn(4, 6), torch.randn(4, 6)
        parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(1)])
        other = nn.Parameter(weight.clone())
        other.grad = gradient.clone()
        torch.distributed.broadcast(other.data, 0)
        torch.distributed.broadcast(other.grad, 0)
        cf.apply_gradient_clipping(parameter, clipping_type, 0.1)
        _clip_independently([other], clipping_type, 0.1)
        compare(f"columns, {clipping_type}", [parameter], [other])

    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh))
    parameter.grad = DTensor.from_local(torch.tensor([0.3, 0.04, 0.2 - 0.4 * rank]), mesh, [Partial()])
    other = _parameter([0.0] * 3, [0.1, 0.08, 0.0])
    cf.apply_gradient_clipping(parameter, "value", 0.1)
    compare("partial, value", [parameter], [other])

    if rank == 0:
        (folder / "differences.json").write_text(json.dumps(differences))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _compare_shards(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # a thread of gloo now and then aborts a process that ends in the usual way
