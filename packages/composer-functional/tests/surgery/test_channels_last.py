"""Channels last applied to models."""

from __future__ import annotations

import torch
from torch import nn

from composer import functional as cf


class TestApplyChannelsLast:
    def test_changes_four_dimensional_tensors_only(self):
        """Four-dimensional tensors change their strides; values and parameter objects do not change."""
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(2, 2, 3), nn.Linear(4, 4))
        model.register_buffer("mean", torch.rand(1, 3, 4, 4))
        parameters = list(model.parameters())
        values = [parameter.clone() for parameter in parameters]

        report = cf.apply_channels_last(model)

        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert model.mean.is_contiguous(memory_format=torch.channels_last)
        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        assert all(torch.equal(new, old) for new, old in zip(parameters, values, strict=True))
        assert [entry.paths for entry in report] == [("",), ("0",)]

    def test_activations_are_channels_last(self):
        """From the first convolution on, outputs are channels last."""
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

        cf.apply_channels_last(model)

        assert model(torch.rand(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
