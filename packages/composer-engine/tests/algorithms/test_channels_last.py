"""ChannelsLast: only the memory format changes."""

import pytest
import torch

from composer.algorithms import ChannelsLast
from composer.core import Event, NoEffectWarning, Stage, explain


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


class TestLayout:
    def test_four_dimensional_weights_are_channels_last(self, conv_net, make_engine):
        """All four-dimensional tensors are in channels-last format."""
        model = conv_net()

        make_engine(model, ChannelsLast())

        assert all(is_channels_last(weight) for weight in model.parameters() if weight.ndim == 4)


class TestNoEffect:
    def test_warns_without_convolutions(self, watch, make_engine):
        """A model without convolutions gives a warning."""
        with pytest.warns(NoEffectWarning, match="Watched has no tensor with four dimensions"):
            make_engine(watch(), ChannelsLast())


def test_plan():
    """It runs once, after all other surgery."""
    entries = explain(ChannelsLast()).entries

    assert {event: [one.stage for one in entries[event]] for event in entries} == {Event.INIT: [Stage.LAYOUT]}
