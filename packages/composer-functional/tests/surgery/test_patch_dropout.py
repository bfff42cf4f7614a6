"""Patch dropout applied to vision transformers of three libraries."""

from __future__ import annotations

import re

import pytest
import timm
import torch
import transformers
from torch import nn
from torchvision.models import VisionTransformer

from composer import functional as cf


def timm_vit(**settings):
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, **settings)


def timm_deit():
    return timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, depth=2)


def torchvision_vit():
    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, dropout=0.0)


def transformers_vit(kind):
    config = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config))


# The model, and the tokens in front of its 16 patches.
MODELS = {
    "timm's ViT": (timm_vit, 1),
    "timm's ViT without a class token": (lambda: timm_vit(class_token=False, global_pool="avg"), 0),
    "timm's distilled DeiT": (timm_deit, 2),
    "torchvision's ViT": (torchvision_vit, 1),
    "ViT": (lambda: transformers_vit("ViT"), 1),
    "DeiT": (lambda: transformers_vit("DeiT"), 2),
    "Dinov2": (lambda: transformers_vit("Dinov2"), 1),
}


def tokens_of(model):
    """Return how many tokens the first block receives."""
    seen = []
    block = next(module for name, module in model.named_modules() if re.search(r"(blocks|layers?)\.\w*0$", name))
    handle = block.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].shape[1]), with_kwargs=True
    )
    model(torch.rand(2, 3, 32, 32))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", MODELS)
class TestModels:
    def test_tokens(self, name):
        """In training the blocks receive a quarter of 16 patches and all other tokens, in evaluation all tokens."""
        make, prefix = MODELS[name]
        model = make()
        report = cf.apply_patch_dropout(model, p=0.75)

        assert len(report) == 1
        assert tokens_of(model.train()) == prefix + 4
        assert tokens_of(model.eval()) == prefix + 16

    def test_weights_and_outputs_of_evaluation(self, name):
        """State dict and outputs of evaluation do not change, and a second call changes nothing."""
        model = MODELS[name][0]().eval()
        images, before = torch.rand(2, 3, 32, 32), list(model.state_dict())
        expected = model(images)
        cf.apply_patch_dropout(model)

        assert list(model.state_dict()) == before
        torch.testing.assert_close(model(images), expected, rtol=0, atol=0)
        assert not cf.apply_patch_dropout(model)


def test_first_token_keeps_its_position_embedding():
    """What the blocks receive are tokens of the complete sequence, with their position embeddings."""
    model, seen = torchvision_vit().train(), []
    model.encoder.layers.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    images = torch.rand(1, 3, 32, 32)
    model(images)
    cf.apply_patch_dropout(model, 0.5)
    model(images)

    everything, part = (tokens[0].detach() for tokens in seen)
    distances = torch.cdist(part, everything)
    assert (distances.min(dim=1).values < 1e-5).all()
    assert distances[0].argmin() == 0


def test_models_that_drop_patches_already():
    """A model of timm with its own patch dropout does not change."""
    assert not cf.apply_patch_dropout(timm_vit(patch_drop_rate=0.5))


def test_other_models():
    """A model without a vision transformer does not change."""
    assert not cf.apply_patch_dropout(nn.Sequential(nn.Dropout(0.1), nn.Identity()))
