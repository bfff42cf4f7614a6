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
    def test_trains_with_its_two_methods(self):
        """Forward and loss of a batch give gradients for the parameters."""
        model, batch = Doubler(), (torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))

        model.loss(model(batch), batch).backward()

        assert model.weight.grad == 2 * 2.0 * (1 + 9) / 2

    def test_eval_forward_computes_outputs(self):
        """Without outputs at hand, evaluation calls the model."""
        assert Doubler().eval_forward((torch.tensor([3.0]), None)) == 6.0

    def test_eval_forward_reuses_outputs(self):
        """Outputs at hand are returned as they are, a tensor without a single truth value too."""
        outputs = torch.zeros(3)

        assert Doubler().eval_forward((None, None), outputs) is outputs

    def test_has_no_metrics_by_default(self):
        """A model that names no metrics has none in either phase."""
        model = Doubler()

        assert (dict(model.get_metrics(is_train=True)), dict(model.get_metrics(is_train=False))) == ({}, {})

    def test_update_metric_has_to_be_written(self):
        """A metric without update_metric is answered with the method to write."""
        with pytest.raises(NotImplementedError, match=r"Doubler has to define update_metric\(self, batch, outputs, m"):
            Doubler().update_metric(None, None, MeanMetric())

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_are_their_own(self, duplicate):
        """A copy has the weights and shares none of them."""
        model = Doubler(5.0)

        other = duplicate(model)

        assert other.weight == 5.0
        assert other.weight is not model.weight

    def test_keeps_the_signature_of_init(self):
        """Help and completion show the arguments that the subclass declares."""
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
        """The error for a class without both has both."""

        class Empty(ComposerModel):
            pass

        with pytest.raises(TypeError, match=r"Empty .* forward\(self, batch\) and loss\(self, outputs, batch\)"):
            Empty()

    def test_without_super_init_before_a_layer(self):
        """Setting a layer first is answered with the line to add, not with an error of nn.Module."""

        class Hasty(Doubler):
            def __init__(self):
                self.layer = nn.Linear(1, 1)

        with pytest.raises(TypeError, match=r"^Hasty\.__init__ has to call super\(\)\.__init__\(\)"):
            Hasty()

    def test_without_super_init_and_without_layers(self):
        """Also where nothing fails yet: the model would have no parameters."""

        class Quiet(Doubler):
            def __init__(self):
                self.start = 1.0

        with pytest.raises(TypeError, match=r"^Quiet\.__init__ has to call"):
            Quiet()

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
        """Whatever of nn.Module is used too early, the answer is the same."""

        class Eager(Doubler):
            def __init__(self):
                use(self)

        with pytest.raises(TypeError, match=r"^Eager\.__init__ has to call super\(\)\.__init__\(\)"):
            Eager()

    def test_settings_before_super_init_are_fine(self):
        """As in any nn.Module, plain attributes may be set before super().__init__()."""

        class Settled(Doubler):
            def __init__(self):
                self.start = 4.0
                super().__init__(self.start)

        assert Settled().weight == 4.0

    def test_other_attribute_errors_pass(self):
        """An AttributeError of the user's own code arrives as it is."""

        class Mistaken(Doubler):
            def __init__(self):
                super().__init__()
                _ = self.wieght

        with pytest.raises(AttributeError, match="wieght"):
            Mistaken()

    def test_layer_that_forgets_super_init_is_told(self):
        """A layer that calls no super().__init__() fails as in torch, although the model around it does."""

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
        """One raised before super().__init__() is not lost."""

        class Unlucky(Doubler):
            def __init__(self):
                "text".no_such_method()

        with pytest.raises(AttributeError, match="no_such_method"):
            Unlucky()
