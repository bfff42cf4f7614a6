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


def _reference_bias(slopes: list[float], queries: int, keys: int, start: int) -> torch.Tensor:
    """The bias computed element by element."""
    rows = [[[-slope * abs(start + i - j) for j in range(keys)] for i in range(queries)] for slope in slopes]
    return torch.tensor([rows])


class TestAlibiSlopes:
    @pytest.mark.parametrize("num_heads", [*range(1, 18), 40])
    def test_equals_bloom(self, num_heads: int):
        """The slopes equal those of BLOOM, for any number of heads."""
        grows = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)

        torch.testing.assert_close(cf.alibi_slopes(num_heads), grows[:, 0, 1])


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
