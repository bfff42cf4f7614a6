"""The biases of ALiBi, and what stands where positions were embedded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from composer import functional as cf
from composer.functional.layers.alibi import NoPositionEmbedding, NoRotaryEmbedding


def _by_hand(slopes: list[float], queries: int, keys: int, start: int) -> torch.Tensor:
    """The bias, number by number."""
    rows = [[[-slope * abs(start + i - j) for j in range(keys)] for i in range(queries)] for slope in slopes]
    return torch.tensor([rows])


class TestAlibiSlopes:
    def test_the_papers_example(self):
        """Eight heads have the slopes 1/2, 1/4, ..., 1/256."""
        assert cf.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]

    @pytest.mark.parametrize("num_heads", [*range(1, 18), 40])
    def test_as_bloom(self, num_heads: int):
        """They are those of BLOOM, which has any number of heads."""
        grows = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)

        torch.testing.assert_close(cf.alibi_slopes(num_heads), grows[:, 0, 1])

    def test_dtype_and_device(self, device: torch.device):
        """They come as they are asked for."""
        slopes = cf.alibi_slopes(6, dtype=torch.float64, device=device)

        assert slopes.dtype == torch.float64
        assert slopes.device.type == device.type
        assert slopes[4].item() == pytest.approx(2**-1, abs=1e-15)

    @pytest.mark.parametrize("num_heads", [0, -2])
    def test_no_heads_are_refused(self, num_heads: int):
        """An attention has a head."""
        with pytest.raises(ValueError, match=f"num_heads must be at least 1, got {num_heads}"):
            cf.alibi_slopes(num_heads)

    @pytest.mark.parametrize("num_heads", [2.0, True, "8", None, float("nan")])
    def test_what_is_no_number_of_heads_is_refused(self, num_heads: object):
        """Heads are counted."""
        with pytest.raises(TypeError, match="num_heads must be an int, got"):
            cf.AlibiBias(num_heads)


class TestAlibiBias:
    def test_formula(self):
        """Each head's slope times the distance, to both sides, with the last query at the last key."""
        bias = cf.AlibiBias(4, causal=False)(3, 5)

        torch.testing.assert_close(bias, _by_hand([2**-2, 2**-4, 2**-6, 2**-8], 3, 5, 2), rtol=0, atol=0)

    @given(queries=st.integers(1, 6), keys=st.integers(1, 9), start=st.integers(0, 9), heads=st.integers(1, 5))
    def test_offset_says_where_queries_begin(self, queries: int, keys: int, start: int, heads: int):
        """A number or a tensor gives the first query's place."""
        layer = cf.AlibiBias(heads, causal=False)

        by_number = layer(queries, keys, offset=start)
        by_tensor = layer(queries, keys, offset=torch.tensor(start))

        torch.testing.assert_close(by_number, _by_hand(cf.alibi_slopes(heads).tolist(), queries, keys, start))
        assert torch.equal(by_number, by_tensor)

    def test_causal_without_a_mask(self):
        """Nobody looks ahead if no mask is there to forbid it; a single query is the last one."""
        layer = cf.AlibiBias(2)

        probabilities = layer(4, 6).softmax(-1)

        ahead = torch.ones(4, 6, dtype=torch.bool).triu(diagonal=3)
        assert (probabilities[..., ahead] == 0).all()
        assert (probabilities[..., ~ahead] > 0).all()
        torch.testing.assert_close(layer(1, 6), cf.AlibiBias(2, causal=False)(1, 6))

    def test_boolean_mask(self):
        """Where the mask is false the lowest number stands, elsewhere the bias, causal or not."""
        mask = torch.rand(2, 1, 4, 4) > 0.4

        bias = cf.AlibiBias(2, causal=True)(4, 4, mask)

        plain = cf.AlibiBias(2, causal=False)(4, 4).expand(2, -1, -1, -1)
        everywhere = mask.expand(-1, 2, -1, -1)
        assert torch.equal(bias[everywhere], plain[everywhere])
        assert (bias[~everywhere] == torch.finfo(torch.float32).min).all()

    def test_mask_of_numbers(self):
        """Numbers are added."""
        mask = torch.randn(3, 1, 1, 4)

        bias = cf.AlibiBias(2)(4, 4, mask)

        torch.testing.assert_close(bias, cf.AlibiBias(2, causal=False)(4, 4) + mask)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("boolean", [True, False])
    def test_queries_that_see_nothing_give_no_nan(self, dtype: torch.dtype, boolean: bool, device: torch.device):
        """The lowest number of each dtype is kept, though the bias would take it lower."""
        nothing = torch.zeros(1, 1, 2, 400, dtype=torch.bool, device=device)
        mask = nothing if boolean else torch.full(nothing.shape, torch.finfo(dtype).min, dtype=dtype, device=device)

        bias = cf.AlibiBias(1)(2, 400, mask, dtype=dtype, device=device)

        assert bias.dtype == dtype
        assert bias.device.type == device.type
        assert bias.isfinite().all()

    def test_near_keys_are_exact_in_bfloat16(self):
        """Distances count from the query, so that the nearest keys of a long sequence keep their differences."""
        bias = cf.AlibiBias(8)(2, 3000, offset=2000, dtype=torch.bfloat16)

        assert bias[0, 0, 0, 1990:2001].tolist() == [-distance / 2 for distance in range(10, -1, -1)]

    def test_the_last_bias_is_kept_until_forgotten(self):
        """All layers of a forward pass get one tensor."""
        layer = cf.AlibiBias(2)
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)

        first = layer(4, 4, mask)

        assert layer(4, 4, mask) is first
        layer.forget()
        assert layer(4, 4, mask) is not first

    def test_what_differs_is_computed_anew(self):
        """Another mask, a mask that was changed, another length, place or dtype gives another bias."""
        layer = cf.AlibiBias(2)
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        first = layer(4, 4, mask)
        mask[..., 0] = False

        changed = layer(4, 4, mask)

        assert not torch.equal(first, changed)
        assert torch.equal(layer(4, 4, mask.clone().fill_(True)), first)
        assert layer(4, 4, mask, offset=1)[0, 0, 0, 1] == 0
        assert layer(4, 4, mask, dtype=torch.float64).dtype == torch.float64
        assert layer(3, 4).shape == (1, 2, 3, 4)
        assert layer(4, 5).shape == (1, 2, 4, 5)

    def test_training_follows_evaluation_in_inference_mode(self):
        """What was kept in inference mode is not used where gradients are wanted."""
        layer = cf.AlibiBias(2)
        with torch.inference_mode():
            layer(4, 4, torch.ones(1, 1, 4, 4, dtype=torch.bool))
            layer(4, 4)

        scores = torch.randn(1, 2, 4, 4, requires_grad=True)
        (scores * layer(4, 4)).sum().backward()

        assert torch.equal(scores.grad, layer(4, 4))

    def test_nothing_to_save(self):
        """There are no parameters and no buffers, and copies do not carry the last bias."""
        layer = cf.AlibiBias(2)
        bias = layer(64, 64)

        copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))

        assert not layer.state_dict()
        assert not [*layer.parameters(), *layer.buffers()]
        assert len(pickle.dumps(layer)) < 2000
        for each in copies:
            assert torch.equal(each(64, 64), bias)
        assert layer(64, 64) is bias
        assert str(layer) == "AlibiBias(num_heads=2, causal=True)"

    def test_compiles_without_a_break(self):
        """In a graph the bias is computed from the lengths."""
        layer = cf.AlibiBias(3)
        mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()

        compiled = torch.compile(lambda mask: layer(4, 4, mask), fullgraph=True, backend="eager")

        torch.testing.assert_close(compiled(mask), layer(4, 4, mask))


class TestStandIns:
    def test_positions_add_nothing(self):
        """Zeros come in the dtype of the module, for ids of any shape."""
        layer = NoPositionEmbedding(6).to(torch.bfloat16)
        tokens = torch.randn(2, 9, 6, dtype=torch.bfloat16)

        assert torch.equal(tokens + layer(torch.arange(9)[None]), tokens)
        assert (tokens + layer(torch.arange(9))).dtype == torch.bfloat16
        assert not layer.state_dict()
        assert not list(layer.parameters())

    def test_angles_turn_nothing(self):
        """Cosines are 1 and sines 0, in the shape that a rotary embedding gives."""
        cosines, sines = NoRotaryEmbedding(6)(torch.randn(2, 5, 12, dtype=torch.float64), torch.arange(5)[None])

        assert cosines.shape == sines.shape == (1, 5, 6)
        assert cosines.dtype == sines.dtype == torch.float64
        assert (cosines == 1).all()
        assert (sines == 0).all()
