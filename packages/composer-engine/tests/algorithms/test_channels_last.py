"""ChannelsLast: only the memory format changes."""

import pytest
import torch
from torch import nn

from composer.algorithms import ChannelsLast
from composer.core import Event, NoEffectWarning, Stage, explain
from fixtures import full_copy, same_bits


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


class TestLayout:
    def test_four_dimensional_weights_are_channels_last(self, conv_net, make_engine):
        """All four-dimensional tensors are in channels-last format."""
        model = conv_net()

        make_engine(model, ChannelsLast())

        assert all(is_channels_last(weight) for weight in model.parameters() if weight.ndim == 4)

    def test_values_do_not_change(self, conv_net, make_engine):
        """The weights' values do not change."""
        model = conv_net()
        before = full_copy(model)

        make_engine(model, ChannelsLast())

        assert same_bits(full_copy(model), before)

    def test_activations_are_channels_last(self, conv_net, make_engine, images):
        """A convolution's output for a contiguous image is in channels-last format."""
        model = conv_net()

        make_engine(model, ChannelsLast())

        assert is_channels_last(model.layers[0](images[0]))

    def test_optimizer_updates_all_parameters(self, conv_net, make_engine, step, images):
        """The optimizer still refers to the model's parameters: one step changes each."""
        model = conv_net()
        engine = make_engine(model, ChannelsLast())
        before = full_copy(model)

        step(engine, images)

        assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert is_channels_last(model.layers[0].weight)


class TestNoEffect:
    def test_warns_without_convolutions(self, watch, make_engine):
        """A model without convolutions gives a warning."""
        with pytest.warns(NoEffectWarning, match="Watched has no tensor with four dimensions"):
            make_engine(watch(), ChannelsLast())

    def test_warns_if_already_channels_last(self, watch, make_engine):
        """A model that is already in channels-last format gives a warning that mentions this case."""
        model = watch(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))

        with pytest.warns(NoEffectWarning, match="or all of them are in this format already"):
            make_engine(model, ChannelsLast())


def test_plan():
    """It runs once, after all other surgery."""
    entries = explain(ChannelsLast()).entries

    assert {event: [one.stage for one in entries[event]] for event in entries} == {Event.INIT: [Stage.LAYOUT]}
