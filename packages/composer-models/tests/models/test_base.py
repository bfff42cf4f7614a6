"""Tests of composer.models.ComposerModel."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from composer.models import ComposerModel


class Doubler(ComposerModel):
    """The smallest model: one weight, squared error."""

    def __init__(self, start: float = 2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))

    def forward(self, batch):
        return batch[0] * self.weight

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class TestComposerModel:
    def test_forward_and_loss_give_gradients(self):
        """Forward and loss of a batch give gradients for the parameters."""
        model, batch = Doubler(), (torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))

        model.loss(model(batch), batch).backward()

        assert model.weight.grad == 2 * 2.0 * (1 + 9) / 2

    def test_eval_forward_reuses_outputs(self):
        """Given outputs are returned unchanged, also tensors without a single truth value."""
        outputs = torch.zeros(3)

        assert Doubler().eval_forward((None, None), outputs) is outputs

    def test_update_metric_is_required(self):
        """A metric without update_metric raises an error that names the method."""
        with pytest.raises(NotImplementedError, match=r"Doubler has to define update_metric\(self, batch, outputs, m"):
            Doubler().update_metric(None, None, MeanMetric())

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_are_independent(self, duplicate):
        """A copy has equal weights and shares none."""
        model = Doubler(5.0)

        other = duplicate(model)

        assert other.weight == 5.0
        assert other.weight is not model.weight


class TestIncompleteSubclasses:
    def test_without_loss(self):
        """The error for a class without a loss has the name and signature of the method."""

        class Forgetful(ComposerModel):
            def forward(self, batch):
                return batch

        with pytest.raises(
            TypeError, match=r"^Forgetful cannot be trained before it defines loss\(self, outputs, batch\)\.$"
        ):
            Forgetful()

    def test_without_super_init_before_a_layer(self):
        """Setting a layer first raises an error with the line to add."""

        class LayerBeforeInit(Doubler):
            def __init__(self):
                self.layer = nn.Linear(1, 1)

        with pytest.raises(TypeError, match=r"^LayerBeforeInit\.__init__ has to call super\(\)\.__init__\(\)"):
            LayerBeforeInit()

    def test_unknown_argument(self):
        """The error has a note with the arguments of the class."""

        class Wide(Doubler):
            def __init__(self, width, depth=2):
                super().__init__()

        with pytest.raises(TypeError, match="unexpected keyword argument 'height'") as raised:
            Wide(1, height=3)

        assert raised.value.__notes__ == ["Its arguments are width, depth."]
