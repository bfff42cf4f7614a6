"""Any loss function as a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer.functional.checks import check_callables
from composer.loss._calling import call_loss, count_terms
from composer.metrics._mean import MeanMetricBase

__all__ = ["LossMetric"]


class LossMetric(MeanMetricBase):
    """The mean of a loss function over all samples, whatever the split into batches.

    Args:
        loss_function: Called as ``loss_function(preds, targets)``. Returns the mean over the samples, which is then
            weighted by their number; or a value for each sample, as with ``reduction="none"``. torch's cross entropy
            and negative log-likelihood are weighted by the labels that are not ignored, and by the weights of their
            classes. A loss of torch that takes floats, such as ``nn.BCEWithLogitsLoss``, gets integers of the shape of
            ``preds`` as such.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Raises:
        TypeError: ``loss_function`` is not callable.

    Example:
        >>> import torch
        >>> metric = LossMetric(torch.nn.functional.mse_loss)
        >>> metric.update(torch.zeros(3), torch.ones(3))
        >>> metric.update(torch.zeros(1), torch.full((1,), 3.0))
        >>> metric.compute()
        tensor(3.)
    """

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        check_callables(loss_function=loss_function)
        self.loss_function = loss_function

    def update(self, preds: Any, targets: Any) -> None:
        """Add a batch.

        Args:
            preds: The first argument of the loss function.
            targets: The second argument. The first dimension of one of the two is the number of samples.

        Raises:
            TypeError: The loss is a mean, and neither argument is a tensor with a first dimension.
        """
        loss = call_loss(self.loss_function, preds, targets).detach().float()
        if loss.ndim:
            self.add(loss.sum(), loss.numel())
        elif (terms := count_terms(self.loss_function, targets)) is not None:
            self.add(torch.where(terms == 0, 0, loss * terms), terms)
        elif num_samples := _num_samples(preds, targets):
            self.add(loss * num_samples, num_samples)


def _num_samples(preds: Any, targets: Any) -> int:
    for batch in (targets, preds):
        if isinstance(batch, Tensor) and batch.ndim:
            return len(batch)
    raise TypeError(
        "The samples of a mean loss are counted in preds or targets, and neither is a tensor, got "
        f"{type(preds).__name__} and {type(targets).__name__}. Let loss_function return a value for each sample."
    )
