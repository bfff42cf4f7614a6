"""Stochastic weight averaging compared with torch and the mean."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from composer import functional as cf
from fixtures import make_conv_net, randomize


class TestComputeSwa:
    @pytest.mark.parametrize("use_buffers", [True, False])
    def test_agrees_with_torch_over_several_steps(self, use_buffers: bool):
        """Parameters and buffers equal swa_utils.AveragedModel."""
        model, actual = make_conv_net(), make_conv_net()
        reference = AveragedModel(model, use_buffers=use_buffers)
        num_averaged = 0

        for _ in range(4):
            randomize(model)
            num_averaged = cf.compute_swa(model, actual, num_averaged, use_buffers=use_buffers)
            reference.update_parameters(model)

        assert num_averaged == reference.n_averaged == 4
        expected = reference.module.state_dict()
        for name, tensor in actual.state_dict().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, expected[name])
            else:
                assert torch.equal(tensor, model.state_dict()[name])

    def test_first_update_copies(self):
        """Any content of the average is replaced, also NaN."""
        model, average = make_conv_net(), make_conv_net()
        nn.init.constant_(average[0].weight, torch.nan)

        cf.compute_swa(model, average, 0)

        assert all(torch.equal(tensor, average.state_dict()[name]) for name, tensor in model.state_dict().items())
        assert average[0].weight is not model[0].weight

    def test_buffers_can_be_copied(self):
        """With copied buffers, running statistics are the last model's, while weights are averaged."""
        model, average = make_conv_net(), make_conv_net()
        cf.compute_swa(model, average, 0)
        randomize(model)

        cf.compute_swa(model, average, 1, use_buffers=False)

        assert torch.equal(average[1].running_mean, model[1].running_mean)
        assert not torch.equal(average[1].weight, model[1].weight)

    def test_update_bn(self):
        """As in the docstring: update_bn computes the statistics of the averaged weights."""
        model, average = make_conv_net(), make_conv_net()
        for number in range(2):
            randomize(model)
            cf.compute_swa(model, average, number)
        batch = torch.randn(4, 3, 8, 8)

        update_bn([batch], average)

        torch.testing.assert_close(average[1].running_mean, average[0](batch).mean((0, 2, 3)))

    def test_low_precision_is_averaged_in_float32(self):
        """The mean of 400 weights in bfloat16 is that of their values."""
        model, average = nn.Linear(1, 1, bias=False).bfloat16(), nn.Linear(1, 1, bias=False).bfloat16()
        weights = (torch.rand(400) + 1).bfloat16()

        for number, weight in enumerate(weights.tolist()):
            nn.init.constant_(model.weight, weight)
            cf.compute_swa(model, average, number)

        torch.testing.assert_close(average.weight.detach().view(()), weights.float().mean())

    @given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), seed=st.integers(0, 2**40))
    def test_order_does_not_matter(self, values: list[float], seed: int):
        """The order of models does not matter up to rounding."""
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)).tolist()
        averages = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)]
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)

        for average, indices in zip(averages, (range(len(values)), order), strict=True):
            for number, index in enumerate(indices):
                nn.init.constant_(model.weight, values[index])
                cf.compute_swa(model, average, number)

        torch.testing.assert_close(averages[0].weight, averages[1].weight, rtol=1e-9, atol=1e-9)

    def test_other_shapes_raise(self):
        """They raise in any step, before anything changes, also if torch could broadcast them."""
        model, average = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width)) for width in (1, 3))
        before = copy.deepcopy(average.state_dict())

        for num_averaged in (0, 1):
            with pytest.raises(
                ValueError, match=r"swa_model must have the shapes .* \(3, 2\) for \(1, 2\) as 1\.weight"
            ):
                cf.compute_swa(model, average, num_averaged)

        assert all(torch.equal(tensor, before[name]) for name, tensor in average.state_dict().items())
