"""ALiBi biases and the replacements of position embeddings."""

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


def _reference_bias(slopes: list[float], queries: int, keys: int, start: int) -> torch.Tensor:
    """The bias computed element by element."""
    rows = [[[-slope * abs(start + i - j) for j in range(keys)] for i in range(queries)] for slope in slopes]
    return torch.tensor([rows])


class TestAlibiSlopes:
    def test_example_of_the_paper(self):
        """Eight heads have the slopes 1/2, 1/4, ..., 1/256."""
        assert cf.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]

    @pytest.mark.parametrize("num_heads", [*range(1, 18), 40])
    def test_equals_bloom(self, num_heads: int):
        """The slopes equal those of BLOOM, for any number of heads."""
        grows = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)

        torch.testing.assert_close(cf.alibi_slopes(num_heads), grows[:, 0, 1])

    def test_dtype_and_device(self, device: torch.device):
        """The slopes have the requested dtype and device."""
        slopes = cf.alibi_slopes(6, dtype=torch.float64, device=device)

        assert slopes.dtype == torch.float64
        assert slopes.device.type == device.type
        assert slopes[4].item() == pytest.approx(2**-1, abs=1e-15)

    @pytest.mark.parametrize("num_heads", [0, -2])
    def test_zero_heads_raise(self, num_heads: int):
        """At least one head is required."""
        with pytest.raises(ValueError, match=f"num_heads must be at least 1, got {num_heads}"):
            cf.alibi_slopes(num_heads)

    @pytest.mark.parametrize("num_heads", [2.0, True, "8", None, float("nan")])
    def test_invalid_number_of_heads_raises(self, num_heads: object):
        """The number of heads is an integer."""
        with pytest.raises(TypeError, match="num_heads must be an int, got"):
            cf.AlibiBias(num_heads)


class TestAlibiBias:
    def test_formula(self):
        """Each head's slope times the distance, in both directions, with the last query at the last key."""
        bias = cf.AlibiBias(4, causal=False)(3, 5)

        torch.testing.assert_close(bias, _reference_bias([2**-2, 2**-4, 2**-6, 2**-8], 3, 5, 2), rtol=0, atol=0)

    @given(queries=st.integers(1, 6), keys=st.integers(1, 9), start=st.integers(0, 9), heads=st.integers(1, 5))
    def test_offset_is_the_first_query_position(self, queries: int, keys: int, start: int, heads: int):
        """A number or a tensor gives the first query's position."""
        layer = cf.AlibiBias(heads, causal=False)

        by_number = layer(queries, keys, offset=start)
        by_tensor = layer(queries, keys, offset=torch.tensor(start))

        torch.testing.assert_close(by_number, _reference_bias(cf.alibi_slopes(heads).tolist(), queries, keys, start))
        assert torch.equal(by_number, by_tensor)

    def test_causal_without_a_mask(self):
        """Without a mask causal attention is masked here; a single query is the last one."""
        layer = cf.AlibiBias(2)

        probabilities = layer(4, 6).softmax(-1)

        ahead = torch.ones(4, 6, dtype=torch.bool).triu(diagonal=3)
        assert (probabilities[..., ahead] == 0).all()
        assert (probabilities[..., ~ahead] > 0).all()
        torch.testing.assert_close(layer(1, 6), cf.AlibiBias(2, causal=False)(1, 6))

    def test_boolean_mask(self):
        """Where the mask is false the bias is the dtype's minimum, causal or not."""
        mask = torch.rand(2, 1, 4, 4) > 0.4

        bias = cf.AlibiBias(2, causal=True)(4, 4, mask)

        plain = cf.AlibiBias(2, causal=False)(4, 4).expand(2, -1, -1, -1)
        everywhere = mask.expand(-1, 2, -1, -1)
        assert torch.equal(bias[everywhere], plain[everywhere])
        assert (bias[~everywhere] == torch.finfo(torch.float32).min).all()

    def test_additive_mask(self):
        """Numbers are added."""
        mask = torch.randn(3, 1, 1, 4)

        bias = cf.AlibiBias(2)(4, 4, mask)

        torch.testing.assert_close(bias, cf.AlibiBias(2, causal=False)(4, 4) + mask)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("boolean", [True, False])
    def test_fully_masked_queries_give_no_nan(self, dtype: torch.dtype, boolean: bool, device: torch.device):
        """The bias does not exceed the minimum of each dtype."""
        nothing = torch.zeros(1, 1, 2, 400, dtype=torch.bool, device=device)
        mask = nothing if boolean else torch.full(nothing.shape, torch.finfo(dtype).min, dtype=dtype, device=device)

        bias = cf.AlibiBias(1)(2, 400, mask, dtype=dtype, device=device)

        assert bias.dtype == dtype
        assert bias.device.type == device.type
        assert bias.isfinite().all()

    def test_near_keys_are_exact_in_bfloat16(self):
        """Distances are relative to the query, so that near keys of a long sequence stay distinct."""
        bias = cf.AlibiBias(8)(2, 3000, offset=2000, dtype=torch.bfloat16)

        assert bias[0, 0, 0, 1990:2001].tolist() == [-distance / 2 for distance in range(10, -1, -1)]

    def test_last_bias_is_cached(self):
        """All layers of a forward pass share one tensor."""
        layer = cf.AlibiBias(2)
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)

        first = layer(4, 4, mask)

        assert layer(4, 4, mask) is first
        layer.forget()
        assert layer(4, 4, mask) is not first

    def test_cache_is_invalidated(self):
        """Another or changed mask, length, position or dtype gives another bias."""
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
        """A bias cached in inference mode is not used where gradients are required."""
        layer = cf.AlibiBias(2)
        with torch.inference_mode():
            layer(4, 4, torch.ones(1, 1, 4, 4, dtype=torch.bool))
            layer(4, 4)

        scores = torch.randn(1, 2, 4, 4, requires_grad=True)
        (scores * layer(4, 4)).sum().backward()

        assert torch.equal(scores.grad, layer(4, 4))

    def test_cache_is_not_saved(self):
        """There are no parameters and buffers, and copies do not include the cache."""
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

    def test_compiles_to_one_graph(self):
        """In a graph the bias is computed from the lengths."""
        layer = cf.AlibiBias(3)
        mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()

        compiled = torch.compile(lambda mask: layer(4, 4, mask), fullgraph=True, backend="eager")

        torch.testing.assert_close(compiled(mask), layer(4, 4, mask))


class TestReplacements:
    def test_position_embeddings_are_zero(self):
        """Zeros have the module's dtype, for ids of any shape."""
        layer = NoPositionEmbedding(6).to(torch.bfloat16)
        tokens = torch.randn(2, 9, 6, dtype=torch.bfloat16)

        assert torch.equal(tokens + layer(torch.arange(9)[None]), tokens)
        assert (tokens + layer(torch.arange(9))).dtype == torch.bfloat16
        assert not layer.state_dict()
        assert not list(layer.parameters())

    def test_rotary_embeddings_are_the_identity(self):
        """Cosines are 1 and sines 0, in the shape of a rotary embedding."""
        cosines, sines = NoRotaryEmbedding(6)(torch.randn(2, 5, 12, dtype=torch.float64), torch.arange(5)[None])

        assert cosines.shape == sines.shape == (1, 5, 6)
        assert cosines.dtype == sines.dtype == torch.float64
        assert (cosines == 1).all()
        assert (sines == 0).all()
