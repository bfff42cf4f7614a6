"""The registry of losses by name."""

import pytest
import torch

import composer.loss
from composer.loss import DiceLoss, loss_registry


@pytest.mark.parametrize("name", ["soft_cross_entropy", "binary_cross_entropy_with_logits"])
def test_registry_has_the_functions_by_name(name):
    """A name selects the function, which returns a scalar."""
    loss = loss_registry[name](torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))

    assert loss_registry[name] is getattr(composer.loss, name)
    assert (loss.shape, loss.item() > 0) == ((), True)


def test_registry_is_extensible(monkeypatch):
    """A custom loss is found like the others."""
    monkeypatch.setitem(loss_registry, "dice", DiceLoss(softmax=True))

    assert 0 < loss_registry["dice"](torch.zeros(1, 2, 4), torch.zeros(1, 4, dtype=torch.long)) < 1
