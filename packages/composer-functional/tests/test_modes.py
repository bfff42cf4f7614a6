"""The modes of a model's modules."""

from __future__ import annotations

import pytest
from torch import nn

from composer.functional.modes import kept_modes


@pytest.mark.parametrize("training", [True, False])
def test_each_module_keeps_its_mode(training: bool):
    """Each module has its former mode after the block."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout())).train(training)
    model[1][0].train(not training)
    modes = [module.training for module in model.modules()]

    with kept_modes(model):
        model.train(not training)

    assert [module.training for module in model.modules()] == modes
    assert set(modes) == {True, False}
