"""Dropout with masks that are drawn once."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf


def _layer(iters: int = 12, epochs: int = 2, p: float = 0.5, sigma: int = 8, tau: int = 2) -> cf.GyroDropout:
    return cf.GyroDropout(iters, epochs, p, sigma, tau)


def _reference_hash(word: int) -> int:
    """The hash computed with Python integers."""
    word = ((word ^ word >> 16) * 0x21F0AAAD) % 2**32
    word = ((word ^ word >> 15) * 0x735A2D97) % 2**32
    return word ^ word >> 15


def _reference_mask(seed: int, number: int, neurons: int, p: float) -> list[bool]:
    key = _reference_hash(seed ^ number * 0x9E3779B1 % 2**32)
    return [_reference_hash(key ^ neuron * 0x9E3779B1 % 2**32) >= p * 2**32 for neuron in range(neurons)]


class TestGyroDropout:
    def test_masks_match_the_definition(self):
        """For each pass and sample, the mask is the one of the definition."""
        layer = _layer(p=0.3, sigma=7, tau=3)
        seed = layer.seed.item()
        x = torch.randn(5, 16).double()

        for step in range(25):
            output = layer(x)

            numbers = [(step // 11 * 3 + sample * 3 // 5) % 7 for sample in range(5)]
            masks = torch.tensor([_reference_mask(seed, number, 16, 0.3) for number in numbers])
            torch.testing.assert_close(output, torch.where(masks, x / 0.7, 0))

    @pytest.mark.parametrize("shape", [(5, 6), (5, 4, 6), (5, 6, 2, 2)])
    def test_dropout_mask(self, shape: tuple[int, ...]):
        """The mask of the last pass in training has a row for each sample; before the first it is empty."""
        layer = _layer(iters=4)
        empty = layer.dropout_mask.shape

        for _ in range(5):
            output = layer(torch.ones(shape))
            kept = output.transpose(1, -1) if len(shape) == 4 else output
            expected = kept.flatten(1, -2)[:, 0] if len(shape) > 2 else kept
            assert torch.equal(layer.dropout_mask, expected > 0)

        layer.eval()(torch.ones(2, 3))
        assert layer.dropout_mask.shape == (5, 6)
        assert empty == (0, 0)

    def test_each_mask_has_one_period_in_the_planned_training(self):
        """In iters_per_epoch * max_epoch passes each of sigma masks is used equally long."""
        layer = _layer(iters=10, epochs=4, sigma=8, tau=2)
        x = torch.ones(2, 64)

        passes = [tuple(map(tuple, layer(x).tolist())) for _ in range(40)]

        counts = {mask: sum(mask in each for each in passes) for each in passes for mask in each}
        assert layer.period == 10
        assert list(counts.values()) == [10] * 8
        assert layer(x).tolist() == [list(mask) for mask in passes[0]]

    def test_masks_look_random(self):
        """The dropped fraction is p for each mask and neuron, and masks and neurons are uncorrelated."""
        masks = (cf.GyroDropout(1, 1, 0.3, 512, 512)(torch.ones(512, 1000)) > 0).float()

        assert abs(masks.mean() - 0.7) < 0.003
        assert masks.mean(1).std() == pytest.approx((0.21 / 1000) ** 0.5, rel=0.15)
        assert masks.mean(0).std() == pytest.approx((0.21 / 512) ** 0.5, rel=0.15)
        for rows in (masks[:300], masks.T[:300]):
            correlation = torch.corrcoef(rows).fill_diagonal_(0)
            assert correlation.std() == pytest.approx(rows.shape[1] ** -0.5, rel=0.1)
            assert correlation.abs().max() < 6 * rows.shape[1] ** -0.5

    def test_layers_have_different_masks(self):
        """Layers draw their seeds from the global generator."""
        x = torch.ones(2, 64)
        outputs = []
        for _ in range(2):
            torch.manual_seed(3)
            outputs.append((_layer()(x), _layer()(x)))

        assert torch.equal(outputs[0][0], outputs[1][0])
        assert torch.equal(outputs[0][1], outputs[1][1])
        assert not torch.equal(*outputs[0])

    def test_evaluation_is_the_identity(self):
        """In evaluation the input is returned, and the pass is not counted."""
        layer = _layer().eval()
        x = torch.randn(4, 6)

        assert layer(x) is x
        assert layer.position == 0

    def test_resume(self):
        """Another layer that loads a state dict continues with the same masks."""
        layer, again = _layer(), _layer()
        x = torch.ones(4, 32)
        for _ in range(7):
            layer(x)

        again.load_state_dict(copy.deepcopy(layer.state_dict()))

        assert all(torch.equal(again(x), layer(x)) for _ in range(30))

    def test_positions_of_a_sequence_share_the_mask(self):
        """A neuron is dropped at all positions."""
        output = _layer()(torch.ones(4, 10, 32))

        assert torch.equal(output, output[:, :1].expand(4, 10, 32))
        assert output[0, 0].unique().tolist() == [0, 2]

    def test_complete_channels_are_dropped(self):
        """With four dimensions the neurons are those of dimension 1."""
        output = _layer()(torch.ones(4, 32, 3, 5))

        assert torch.equal(output, output[:, :, :1, :1].expand(4, 32, 3, 5))
        assert output[0, :, 0, 0].unique().tolist() == [0, 2]

    @given(samples=st.integers(0, 9), sigma=st.integers(1, 9), data=st.data())
    def test_shape_dtype_and_range(self, samples: int, sigma: int, data):
        """For any number of samples and masks, each entry is dropped or scaled; the input is not modified."""
        tau = data.draw(st.integers(1, sigma))
        for dtype in (torch.float64, torch.bfloat16):
            x = torch.ones(samples, 7, dtype=dtype)

            output = _layer(sigma=sigma, tau=tau)(x)

            assert (output.shape, output.dtype) == (x.shape, dtype)
            assert set(output.flatten().tolist()) <= {0.0, 2.0}
            assert x.eq(1).all()

    def test_compiles_to_one_graph(self, device: torch.device):
        """One graph serves all passes, with the same masks."""
        graphs: list[torch.fx.GraphModule] = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        layer = _layer().to(device)
        twin = copy.deepcopy(layer)
        x = torch.randn(4, 6, device=device)
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=count)

        assert all(torch.equal(compiled(x), twin(x)) for _ in range(20))
        assert len(graphs) == 1
