"""Blocks, towers, patches and output layers of a model, by its structure and sizes."""

import pytest
import torch
from torch import nn

from composer.functional.surgery.structure import (
    features,
    find_blocks,
    find_output_layers,
    find_patch_layers,
    is_norm,
)


class Encoder(nn.Module):
    """A patch layer, four blocks and a head, as a vision transformer."""

    def __init__(self, head=10):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, head)


def test_blocks_are_the_repeated_modules():
    """Blocks are named in their order, and their own layers are no blocks."""
    assert [name for name, _ in find_blocks(Encoder())] == [f"layers.{index}" for index in range(4)]


def test_patches_and_outputs():
    """The layer on images is no hidden one, and neither is the last layer."""
    model = Encoder()

    assert find_patch_layers(model) == {model.patches}
    assert find_output_layers(model) == {model.head}


def test_a_feature_extractor_has_no_output_layer_in_its_blocks():
    """No layer of a block is an output."""
    model = Encoder()
    model.head = nn.Identity()

    assert not find_output_layers(model) & {*model.layers.modules()}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)])
def test_norms(norm):
    """Norms of torch are recognized."""
    assert is_norm(norm)
    assert not is_norm(nn.Conv2d(3, 4, 1))


def test_features_of_a_transposed_layer():
    """Inputs come first, whatever the layout of the weight."""
    assert features(nn.Linear(3, 5)) == features(nn.ConvTranspose2d(3, 5, 2)) == features(nn.Conv2d(3, 5, 1)) == (3, 5)


def test_models_on_the_meta_device():
    """Nothing is computed."""
    with torch.device("meta"):
        model = Encoder()

    assert len(find_blocks(model)) == 4
