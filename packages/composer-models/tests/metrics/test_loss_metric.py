"""Tests of composer.metrics.LossMetric."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from composer.metrics import LossMetric


class TestLossMetric:
    @given(
        st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=20),
        st.integers(1, 20),
        st.sampled_from(["mean", "none"]),
    )
    def test_does_not_depend_on_batch_split(self, values, size, reduction):
        """Mean losses and per-sample losses average to the mean over all samples."""
        preds, targets = torch.tensor(values), torch.zeros(len(values))
        metric = LossMetric(lambda one, other: F.mse_loss(one, other, reduction=reduction))

        for part, truth in zip(preds.split(size), targets.split(size), strict=True):
            metric.update(part, truth)

        expected = sum(value * value for value in values) / len(values)
        assert metric.compute().item() == pytest.approx(expected, rel=1e-5, abs=1e-12)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_integer_labels_of_a_binary_cross_entropy(self, reduction):
        """Integers in the shape of the predictions are converted, as the loss of a model converts them."""
        metric = LossMetric(torch.nn.BCEWithLogitsLoss(reduction=reduction))
        preds, targets = torch.randn(4), torch.tensor([0, 1, 1, 0])

        metric.update(preds, targets)

        torch.testing.assert_close(metric.compute(), F.binary_cross_entropy_with_logits(preds, targets.float()))

    def test_weights_of_classes(self):
        """A cross entropy with class weights and ignored labels does not depend on the split into batches."""
        loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 0.5]), ignore_index=1)
        metric, preds, targets = LossMetric(loss), torch.randn(7, 3), torch.tensor([0, 1, 1, 2, 0, 2, 2])

        for rows in ([0, 3, 4], [1, 2], [5], [6]):
            metric.update(preds[rows], targets[rows])

        torch.testing.assert_close(metric.compute(), loss(preds, targets))

    def test_empty_batch_is_ignored(self):
        """The mean of no samples is nan, and is not counted."""
        metric = LossMetric(F.mse_loss)

        metric.update(torch.zeros(0), torch.zeros(0))
        metric.update(torch.zeros(2), torch.full((2,), 3.0))

        assert metric.compute() == 9.0

    def test_module_as_loss(self):
        """A loss module with non-tensor targets is supported; copies are independent."""
        metric = LossMetric(torch.nn.L1Loss())
        metric.update(torch.zeros(2), torch.ones(2))

        other = copy.deepcopy(metric)
        other.update(torch.zeros(2), torch.full((2,), 3.0))

        assert (metric.compute(), other.compute()) == (1.0, 2.0)

    def test_samples_are_counted_in_the_outputs(self):
        """If targets are not a tensor, the number of samples is that of the predictions."""
        metric = LossMetric(lambda preds, requested: (preds - requested["value"]).square().mean())

        metric.update(torch.zeros(3), {"value": 1.0})
        metric.update(torch.zeros(1), {"value": 3.0})

        assert metric.compute() == 3.0

    def test_unknown_number_of_samples_raises(self):
        """A mean over an unknown number of samples raises."""
        metric = LossMetric(lambda preds, targets: torch.tensor(1.0))

        with pytest.raises(TypeError, match=r"neither is a tensor, got dict and NoneType"):
            metric.update({}, None)

    def test_non_function_raises(self):
        """A string is not a loss function."""
        with pytest.raises(TypeError, match="loss_function must be callable, got"):
            LossMetric("mse")
