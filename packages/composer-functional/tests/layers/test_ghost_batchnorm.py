"""Ghost batch normalization compared with torch's layer on chunks of the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import batch_norm

from composer import functional as cf

LAYERS = {
    "features": (cf.GhostBatchNorm1d, nn.BatchNorm1d, ()),
    "sequences": (cf.GhostBatchNorm1d, nn.BatchNorm1d, (5,)),
    "images": (cf.GhostBatchNorm2d, nn.BatchNorm2d, (4, 3)),
    "volumes": (cf.GhostBatchNorm3d, nn.BatchNorm3d, (2, 3, 2)),
}


@pytest.fixture(params=["in turns", "one call"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Normalize ghost batches of equal sizes as on a CPU, or as on other devices."""
    devices = ("cpu",) if request.param == "in turns" else ()
    monkeypatch.setattr("composer.functional.layers.ghost_batchnorm._IN_TURNS", devices)


def _normalize_chunks(plain: nn.Module, chunks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize each chunk by torch's layer; return outputs and the chunks' statistics averaged by samples."""
    samples = sum(len(chunk) for chunk in chunks)
    outputs, mean, variance = [], 0.0, 0.0
    for chunk in chunks:
        layer = copy.deepcopy(plain)
        layer.momentum = 1.0
        outputs.append(layer(chunk))
        mean = mean + layer.running_mean * len(chunk) / samples
        variance = variance + layer.running_var * len(chunk) / samples
    return torch.cat(outputs), mean, variance


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("samples", "sizes"), [(8, [4, 4]), (10, [4, 3, 3]), (12, [4, 4, 4]), (5, [3, 2])])
def test_equals_torch_on_chunks(name: str, samples: int, sizes: list[int]):
    """Outputs equal torch's layer on each chunk; running statistics move once, towards their average."""
    ghost_class, plain_class, shape = LAYERS[name]
    plain = plain_class(6, momentum=0.3, eps=0.01).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    layer = ghost_class.from_batchnorm(copy.deepcopy(plain), 0, ghost_batch_size=4)
    batch = torch.randn(samples, 6, *shape, dtype=torch.float64) * 3 + 1
    expected, mean, variance = _normalize_chunks(plain, list(batch.split(sizes)))

    output = layer(batch)

    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(layer.running_mean, 0.3 * mean)
    torch.testing.assert_close(layer.running_var, 0.7 + 0.3 * variance)
    assert layer.num_batches_tracked == 1


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_torch_on_chunks(name: str):
    """Gradients of input, weight and bias equal those of torch's layer on each chunk."""
    ghost_class, plain_class, shape = LAYERS[name]
    layer, plain = ghost_class(6, 4).double(), plain_class(6).double()
    batch = torch.randn(10, 6, *shape, dtype=torch.float64, requires_grad=True)
    factors = torch.randn_like(batch)

    def gradients(module: nn.Module, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((output * factors).sum(), [batch, module.weight, module.bias])

    chunked = torch.cat([plain(chunk) for chunk in batch.split([4, 3, 3])])
    for actual, expected in zip(gradients(layer, layer(batch)), gradients(plain, chunked), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("way")
def test_memory_format_is_kept():
    """Of images with the channels last, the output has them last, too, and the same values."""
    layer, images = cf.GhostBatchNorm2d(6, 4).double(), torch.randn(12, 6, 4, 3).double()

    output = layer(images.to(memory_format=torch.channels_last))

    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output.contiguous(), layer(images))


def test_one_call_for_all_ghost_batches(monkeypatch: pytest.MonkeyPatch):
    """Elsewhere than on a CPU, torch's function is called once, with the channels of all ghost batches."""
    calls = []

    def counted(input, *args, **kwargs):
        calls.append(input.shape)
        return batch_norm(input, *args, **kwargs)

    monkeypatch.setattr("composer.functional.layers.ghost_batchnorm._IN_TURNS", ())
    monkeypatch.setattr("composer.functional.layers.ghost_batchnorm.batch_norm", counted)

    cf.GhostBatchNorm2d(6, 4)(torch.rand(12, 6, 4, 3))

    assert calls == [(4, 18, 4, 3)]


class TestGhostBatchNorm:
    @given(samples=st.integers(2, 40), ghost_batch_size=st.integers(2, 50))
    @settings(deadline=None)
    def test_ghost_batches_are_balanced(self, samples: int, ghost_batch_size: int):
        """Each ghost batch has mean 0; their sizes differ by at most one."""
        count = -(-samples // ghost_batch_size)
        sizes = [len(part) for part in torch.arange(samples).tensor_split(count)]
        batch = torch.randn(samples, 2, 3)

        output = cf.GhostBatchNorm1d(2, ghost_batch_size)(batch)

        assert max(sizes) <= ghost_batch_size
        for part in output.split(sizes):
            assert part.mean((0, 2)).abs().max() < 1e-5

    @pytest.mark.parametrize("samples", [1, 3, 4])
    def test_small_batch_is_one_ghost_batch(self, samples: int):
        """It is bit-identical to torch's layer, including running statistics."""
        layer, plain = cf.GhostBatchNorm2d(3, ghost_batch_size=4), nn.BatchNorm2d(3)
        images = torch.randn(samples, 3, 4, 4)

        output, expected = layer(images), plain(images)

        assert torch.equal(output, expected)
        assert torch.equal(layer.running_var, plain.running_var)
        assert layer.num_batches_tracked == 1

    def test_evaluation_equals_torch(self):
        """In evaluation the batch is not split, and outputs are bit-identical to torch's."""
        layer, plain = cf.GhostBatchNorm2d(3, ghost_batch_size=2), nn.BatchNorm2d(3)
        layer(torch.randn(6, 3, 4, 4))
        plain.load_state_dict(layer.state_dict())
        images = torch.randn(6, 3, 4, 4)

        assert torch.equal(layer.eval()(images), plain.eval()(images))

    def test_half_precision_inputs(self):
        """Like torch's layer, it uses float32 weights and statistics for half-precision inputs."""
        layer = cf.GhostBatchNorm2d(3, 2)
        images = torch.randn(4, 3, 5, 5, dtype=torch.bfloat16)
        expected = torch.cat([nn.BatchNorm2d(3)(images[:2]), nn.BatchNorm2d(3)(images[2:])])

        output = layer(images)

        assert torch.equal(output, expected)
        assert layer.running_mean.dtype == torch.float32

    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_half_precision_statistics(self, momentum: float | None, device: torch.device):
        """Under autocast, statistics in bfloat16 differ by rounding from those that float32 gives."""
        settings = {"momentum": momentum, "device": device}
        layer, expected = (
            cf.GhostBatchNorm2d(3, 2, dtype=torch.bfloat16, **settings),
            cf.GhostBatchNorm2d(3, 2, **settings),
        )
        images = torch.randn(5, 3, 8, 8, device=device) * 3 + 1

        with torch.autocast(device.type, torch.bfloat16):
            layer(images.bfloat16())
        expected(images)

        torch.testing.assert_close(layer.running_mean.float(), expected.running_mean, rtol=0.02, atol=0.01)
        torch.testing.assert_close(layer.running_var.float(), expected.running_var, rtol=0.02, atol=0.01)

    def test_state_dict_equals_torch(self):
        """Checkpoints are compatible with torch's layer."""
        layer, plain = cf.GhostBatchNorm2d(3), nn.BatchNorm2d(3)

        assert list(layer.state_dict()) == list(plain.state_dict())
        assert isinstance(layer, nn.BatchNorm2d)

    def test_swa_update_bn(self):
        """Torch's update_bn finds the layer, and averages over the batches."""
        layer = cf.GhostBatchNorm1d(3, ghost_batch_size=2)
        layer.running_mean.fill_(7)
        batches = [torch.randn(4, 3), torch.randn(4, 3)]

        torch.optim.swa_utils.update_bn(batches, layer)

        torch.testing.assert_close(layer.running_mean, torch.cat(batches).mean(0))

    @pytest.mark.parametrize(("samples", "size"), [(3, 2), (4, 1)])
    def test_ghost_batch_with_one_value_raises(self, samples: int, size: int):
        """One value has no variance; statistics do not change, and the error states the remedy."""
        layer = cf.GhostBatchNorm1d(3, size)

        with pytest.raises(ValueError, match=rf"got {samples} samples of shape \(3,\) and {size}\. Take a larger one"):
            layer(torch.rand(samples, 3))

        assert layer.num_batches_tracked == 0
