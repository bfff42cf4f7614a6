"""PatchDropout: training computes with a part of the patches."""

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from composer.algorithms import PatchDropout
from composer.core import Engine, NoEffectWarning, State


def test_training_sees_a_part_of_the_patches():
    """The blocks receive the class token and the kept patches in training, and all of them in evaluation."""
    model = VisionTransformer(8, 2, 1, 2, hidden_dim=8, mlp_dim=16)
    Engine(State(model), algorithms=PatchDropout(p=0.75)).run_event("init")
    seen = []
    model.encoder.layers.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model(torch.rand(2, 3, 8, 8))
    model.eval()(torch.rand(2, 3, 8, 8))

    assert seen == [1 + 4, 1 + 16]


def test_other_models_warn():
    """Without a vision transformer a warning says where to insert the layer."""
    engine = Engine(State(nn.Linear(2, 1)), algorithms=PatchDropout())

    with pytest.warns(NoEffectWarning, match=r"Insert cf\.PatchDropout\(p\) behind"):
        engine.run_event("init")
