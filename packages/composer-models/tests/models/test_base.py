"""Tests of composer.models.ComposerModel."""

import copy
import inspect
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

    def test_eval_forward_computes_outputs(self):
        """Without outputs, eval_forward calls the model."""
        assert Doubler().eval_forward((torch.tensor([3.0]), None)) == 6.0

    def test_eval_forward_reuses_outputs(self):
        """Given outputs are returned unchanged, also tensors without a single truth value."""
        outputs = torch.zeros(3)

        assert Doubler().eval_forward((None, None), outputs) is outputs

    def test_has_no_metrics_by_default(self):
        """By default there are no metrics in training or evaluation."""
        model = Doubler()

        assert (dict(model.get_metrics(is_train=True)), dict(model.get_metrics(is_train=False))) == ({}, {})

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

    def test_init_signature_is_preserved(self):
        """Introspection shows the subclass's arguments."""
        assert list(inspect.signature(Doubler).parameters) == ["start"]


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

    def test_without_forward_and_loss(self):
        """The error for a class without both has both signatures."""

        class Empty(ComposerModel):
            pass

        with pytest.raises(TypeError, match=r"Empty .* forward\(self, batch\) and loss\(self, outputs, batch\)"):
            Empty()

    def test_without_super_init_before_a_layer(self):
        """Setting a layer first raises an error with the line to add."""

        class LayerBeforeInit(Doubler):
            def __init__(self):
                self.layer = nn.Linear(1, 1)

        with pytest.raises(TypeError, match=r"^LayerBeforeInit\.__init__ has to call super\(\)\.__init__\(\)"):
            LayerBeforeInit()

    def test_without_super_init_and_without_layers(self):
        """It also raises without layers, where the model would have no parameters."""

        class NoInitNoLayers(Doubler):
            def __init__(self):
                self.start = 1.0

        with pytest.raises(TypeError, match=r"^NoInitNoLayers\.__init__ has to call"):
            NoInitNoLayers()

    @pytest.mark.parametrize(
        "use",
        [
            lambda model: model.add_module("layer", nn.Linear(1, 1)),
            lambda model: model.register_buffer("mean", torch.zeros(1)),
            lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(1))),
            lambda model: list(model.parameters()),
            lambda model: model.train(),
        ],
    )
    def test_without_super_init_before_any_use(self, use):
        """Any early use of nn.Module raises the same error."""

        class UseBeforeInit(Doubler):
            def __init__(self):
                use(self)

        with pytest.raises(TypeError, match=r"^UseBeforeInit\.__init__ has to call super\(\)\.__init__\(\)"):
            UseBeforeInit()

    def test_attributes_before_super_init(self):
        """Plain attributes may be set before super().__init__(), as in any nn.Module."""

        class AttributeBeforeInit(Doubler):
            def __init__(self):
                self.start = 4.0
                super().__init__(self.start)

        assert AttributeBeforeInit().weight == 4.0

    def test_other_attribute_errors_propagate(self):
        """An AttributeError of the user's code propagates."""

        class WrongAttribute(Doubler):
            def __init__(self):
                super().__init__()
                _ = self.wieght

        with pytest.raises(AttributeError, match="wieght"):
            WrongAttribute()

    def test_layer_without_super_init(self):
        """A layer without super().__init__() fails as in torch."""

        class Forgetful(nn.Module):
            def __init__(self):
                self.layer = nn.Linear(1, 1)

        class Outer(Doubler):
            def __init__(self):
                super().__init__()
                self.inner = Forgetful()

        with pytest.raises(AttributeError, match=r"before Module.__init__\(\) call"):
            Outer()

    def test_other_attribute_errors_before_super_init_are_the_cause(self):
        """They are the cause of the raised error."""

        class ErrorBeforeInit(Doubler):
            def __init__(self):
                "text".no_such_method()

        with pytest.raises(AttributeError, match="no_such_method"):
            ErrorBeforeInit()
