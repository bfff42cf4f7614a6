"""The moving average compared with torch and the formula."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composer import functional as cf
from fixtures import make_conv_net, randomize

if TYPE_CHECKING:
    from collections.abc import Callable

UPDATES = {"ema": lambda *both: cf.compute_ema(*both, 0.75), "swa": lambda *both: cf.compute_swa(*both, 3)}

# Buffers that are not averaged, each with its later values.
BUFFERS: dict[str, Callable[[], list[Tensor]]] = {
    "growing": lambda: [torch.ones(1, 2), torch.zeros(2, 2), torch.ones(3, 2)],
    "other dimensions": lambda: [torch.zeros(0), torch.ones(2, 2)],
    "float8": lambda: [torch.ones(4).to(torch.float8_e4m3fn), torch.zeros(4).to(torch.float8_e4m3fn)],
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()],
    "nested": lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(rows)]) for rows in (3, 4)],
}


def values(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors with the values of a tensor of any layout."""
    return list(tensor.unbind()) if tensor.is_nested else [tensor.to_dense().float()]


class TestComputeEma:
    def test_agrees_with_torch_over_several_steps(self):
        """Parameters and buffers equal swa_utils.get_ema_multi_avg_fn."""
        model = make_conv_net()
        actual = copy.deepcopy(model)
        reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        reference.update_parameters(model)

        for _ in range(3):
            randomize(model)
            cf.compute_ema(model, actual, smoothing=0.9)
            reference.update_parameters(model)

        expected = reference.module.state_dict()
        for name, tensor in actual.state_dict().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, expected[name])

    @pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.99, 1.0])
    def test_matches_the_formula(self, smoothing: float, device: torch.device):
        """Each value is smoothing * average + (1 - smoothing) * value; the model does not change."""
        model, average = make_conv_net().to(device), make_conv_net().to(device)
        randomize(model)
        values, averages = copy.deepcopy(model.state_dict()), copy.deepcopy(average.state_dict())

        cf.compute_ema(model, average, smoothing)

        for name, tensor in average.state_dict().items():
            if tensor.is_floating_point():
                expected = smoothing * averages[name] + (1 - smoothing) * values[name]
                torch.testing.assert_close(tensor, expected)
            assert torch.equal(model.state_dict()[name], values[name])

    def test_tied_weights_are_updated_once(self):
        """A tensor with two names is updated once."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        average = copy.deepcopy(model)
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(average[0].weight)

        cf.compute_ema(model, average, smoothing=0.75)

        torch.testing.assert_close(average[0].weight, torch.full((2, 2), 0.25))

    def test_mixed_dtypes(self):
        """Each dtype is averaged in its own precision, and the average may have a higher one than the model."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
        average = copy.deepcopy(model)
        average[1].float()
        expected = [0.5 * average[i].weight + 0.5 * (model[i].weight + 1) for i in range(2)]
        with torch.no_grad():
            for layer in model:
                layer.weight += 1

        cf.compute_ema(model, average, smoothing=0.5)

        assert average[1].weight.dtype == torch.float32
        torch.testing.assert_close(average[0].weight, expected[0])
        torch.testing.assert_close(average[1].weight, expected[1], atol=0.01, rtol=0.01)

    @pytest.mark.parametrize("kind", BUFFERS)
    @pytest.mark.parametrize("update", UPDATES)
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_buffers_without_an_average_are_copied(self, update: str, kind: str):
        """Sparse, nested, quantized and growing buffers are copied, also when they change again."""
        model, average = nn.Linear(2, 2), nn.Linear(2, 2)
        first, *later = BUFFERS[kind]()
        model.register_buffer("cache", first)
        average.register_buffer("cache", first.clone())

        for value in (first, *later):
            model.cache = value
            UPDATES[update](model, average)

            assert average.cache is not value
            assert average.cache.dtype == value.dtype
            for own, expected in zip(values(average.cache), values(value), strict=True):
                assert torch.equal(own, expected)

    @pytest.mark.parametrize("normalize", [spectral_norm, nn.utils.spectral_norm], ids=["parametrized", "hook"])
    @pytest.mark.parametrize("update", UPDATES)
    def test_vectors_of_a_spectral_norm_are_copied(self, update: str, normalize: Callable[[nn.Module], nn.Module]):
        """The average of unit vectors is none: they are those of the model, while weights are averaged."""
        torch.manual_seed(0)
        model = nn.Sequential(normalize(nn.Linear(8, 32)), nn.BatchNorm1d(32))
        average = copy.deepcopy(model)
        for buffer in model.buffers():
            buffer.data = -buffer.data - 1 if buffer.is_floating_point() else buffer.data + 1

        UPDATES[update](model, average)

        for (name, own), other in zip(average.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(own, other) is ("running" not in name), name
            assert own is not other

    @pytest.mark.parametrize("update", UPDATES)
    def test_average_on_the_cpu(self, update: str, device: torch.device):
        """The average may be on another device than the model, and is updated there."""
        model, average = nn.Linear(2, 2, bias=False).to(device), nn.Linear(2, 2, bias=False)
        expected = 0.75 * average.weight.detach() + 0.25 * model.weight.detach().cpu()

        UPDATES[update](model, average)

        assert average.weight.device.type == "cpu"
        torch.testing.assert_close(average.weight.detach(), expected)

    def test_other_names_raise(self):
        """The error states differing names and how to create an average."""
        with pytest.raises(ValueError, match=r"only model has 0.bias, only ema_model has 1.weight\. .*deepcopy"):
            cf.compute_ema(
                nn.Sequential(nn.Linear(2, 2)),
                nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)),
            )

    def test_other_shapes_raise(self):
        """Shapes that torch could broadcast also raise, before anything changes."""
        model, average = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width)) for width in (1, 3))
        before = copy.deepcopy(average.state_dict())

        with pytest.raises(ValueError, match=r"ema_model must have the shapes .* \(3, 2\) for \(1, 2\) as 1\.weight"):
            cf.compute_ema(model, average)

        assert all(torch.equal(tensor, before[name]) for name, tensor in average.state_dict().items())


class TestUpdateAverages:
    @given(seed=st.integers(0, 2**40), smoothing=st.floats(0, 1))
    def test_stays_between_average_and_value(self, seed: int, smoothing: float):
        """An average stays in the range of the averaged values."""
        generator = torch.Generator().manual_seed(seed)
        average, value = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
        low, high = torch.minimum(average, value), torch.maximum(average, value)

        cf.update_averages([average], [value], smoothing)

        assert (average >= low - 1e-12).all()
        assert (average <= high + 1e-12).all()


@pytest.mark.parametrize("fraction", [lambda model: model, copy.copy])
def test_model_as_its_own_average_raises(fraction):
    """An average that shares all tensors with the model raises."""
    model = nn.Linear(2, 2)
    average = fraction(model)

    with pytest.raises(ValueError, match="ema_model must have tensors of its own, got those of model"):
        cf.compute_ema(model, average)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_average_in_float32_of_weights_of_16_bits(dtype):
    """After three half-lives an eighth of the way is left; in 16 bits the average would not move at all."""
    model, average = nn.Linear(4, 4).to(dtype), nn.Linear(4, 4)
    for module, value in ((model, 1.5), (average, 1.0)):
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)

    for _ in range(3000):
        cf.compute_ema(model, average, smoothing=2 ** (-1 / 1000))

    assert average.weight.dtype == torch.float32
    assert average.weight.mean().item() == pytest.approx(1.5 - 0.5 / 8, rel=1e-4)


def test_saved_average_of_weights_of_16_bits():
    """A saved average continues bit for bit in the copy that the docstring names; one in 16 bits would round it."""
    model = nn.Linear(4, 4).bfloat16()
    average, loaded = copy.deepcopy(model).float(), copy.deepcopy(model).float()
    nn.init.normal_(model.weight)
    cf.compute_ema(model, average, smoothing=0.9)
    loaded.load_state_dict(average.state_dict())

    for module in (average, loaded):
        cf.compute_ema(model, module, smoothing=0.9)

    assert torch.equal(loaded.weight, average.weight)
    rounded = copy.deepcopy(model)
    rounded.load_state_dict(average.state_dict())
    assert not torch.equal(rounded.weight.float(), average.weight)
