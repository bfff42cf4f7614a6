"""Parts of attention: heads, their norms, and mixed values, by their formulas; in models: surgery/test_attention.py."""

import pytest
import torch
from torch import nn

from composer.functional.layers.attention import FirstValues, Heads, MixedValues, NormalizedHeads


@pytest.mark.parametrize("axis", [None, -3, -2])
def test_heads_are_joined_as_they_were(axis):
    """Splitting and joining returns the features; query, key and value of a fused layer are where the layout says."""
    heads, features = Heads(4, axis), torch.randn(2, 5, 24)
    parts = heads.split(features)

    assert torch.equal(heads.join(parts), features)
    assert len(parts) == (1 if axis is None else 3)
    if axis == -3:  # all queries come first
        assert torch.equal(parts[0].flatten(-2), features[..., :8])
    if axis == -2:  # those of each head
        assert torch.equal(parts[0][..., 1, :], features[..., 12:16])


def test_norm_of_heads():
    """Each head is divided by its own root mean square."""
    layer = NormalizedHeads(nn.Identity(), Heads(4), 1, eps=1e-6)
    nn.init.normal_(layer.norms[0].weight)
    features = torch.randn(3, 8)

    heads = features.view(3, 2, 4)
    expected = layer.norms[0].weight * heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    torch.testing.assert_close(layer(features), expected.flatten(1))


def test_values_are_mixed():
    """Those of the first layer with a weight, and its own with another; the first layer stores its own."""
    first, later = MixedValues(nn.Identity(), Heads(4), None), MixedValues(nn.Identity(), Heads(4), 0.25)
    one, two, pass_ = torch.randn(3, 8), torch.randn(3, 8), FirstValues()
    first.first = later.first = pass_

    assert torch.equal(first(one), one)
    torch.testing.assert_close(later(two), 0.75 * two + 0.25 * one)
    with pytest.raises(RuntimeError, match="got no first_values"):
        later(two)
