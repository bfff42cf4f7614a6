"""A model around any module that predicts numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from composer.loss._calling import needs_equal_shapes
from composer.models.phase_metrics import PairModel, update_metric

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmetrics import Metric

    from composer.models.phase_metrics import Metrics


class ComposerRegressor(PairModel):
    """A module with the loss and the metrics of a regression.

    Batches are pairs ``(input, target)``: the module is called with ``input``, which may be several tensors in a tuple
    or dictionary; ``target`` has the numbers to predict, in the shape of the module's output. Outputs ``(N, 1)`` fit
    targets ``(N,)``, and the reverse: loss and metrics get both as ``(N,)``, in float32 or a wider type.
    For predictions batches may also be the input tensor, or a tuple or list of the input alone.

    The loss is the mean squared error. The default metrics are ``MeanAbsoluteError`` for training, and it and
    ``MeanSquaredError`` for evaluation.

    Args:
        module: Maps inputs to predictions ``(N, ...)``.
        train_metrics: A metric, a ``MetricCollection``, a list or a dict of metrics; an empty list for none.
        val_metrics: The same for evaluation. Metrics that are also in ``train_metrics`` are copied, because each phase
            accumulates separately.
        loss_fn: Called as ``loss_fn(outputs, target)``; returns a scalar. With a loss of your own, such as that of
            several quantiles, outputs and targets may have different shapes. If it is a mean over anything but
            elements, such as a weighted one, override :meth:`~composer.models.ComposerModel.count_loss_terms`.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, ``loss_fn`` is not callable, or the metrics contain another type.

    Example:
        >>> model = ComposerRegressor(nn.Linear(8, 1))
        >>> batch = torch.rand(4, 8), torch.rand(4)
        >>> model.loss(model(batch), batch).shape
        torch.Size([])
        >>> list(model.get_metrics(is_train=False))
        ['MeanAbsoluteError', 'MeanSquaredError']
    """

    def __init__(
        self,
        module: nn.Module,
        train_metrics: Metrics | None = None,
        val_metrics: Metrics | None = None,
        loss_fn: Callable[..., Tensor] = mse_loss,
    ) -> None:
        super().__init__(module, loss_fn)
        if train_metrics is None or val_metrics is None:
            from torchmetrics import MeanAbsoluteError, MeanSquaredError  # noqa: PLC0415 (takes a second)

            train_metrics = [MeanAbsoluteError()] if train_metrics is None else train_metrics
            val_metrics = [MeanAbsoluteError(), MeanSquaredError()] if val_metrics is None else val_metrics
        self._set_metrics(train_metrics, val_metrics)

    def loss(self, outputs: Tensor, batch: tuple[Any, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of the predictions, given the batch's targets.

        Args:
            outputs: Predictions ``(N, ...)``.
            batch: A pair ``(input, target)``.
            args: Passed to ``loss_fn``.
            kwargs: Passed to ``loss_fn``.

        Returns:
            A scalar.

        Raises:
            TypeError: ``batch`` is not a pair.
            ValueError: Predictions and targets have different shapes, and the loss is one of torch that compares them
                in their places.
        """
        outputs, target = _aligned(outputs, self._pair(batch)[1])
        if needs_equal_shapes(self.loss_fn) and outputs.shape != target.shape:
            raise ValueError(
                f"The targets must have the shape {tuple(outputs.shape)} of the outputs, got {tuple(target.shape)}. "
                "Change the size of the module's last layer or the targets, or pass a loss_fn that takes both."
            )
        return self.loss_fn(outputs, target, *args, **kwargs)

    def update_metric(self, batch: tuple[Any, Tensor], outputs: Tensor, metric: Metric) -> None:
        """Update a metric with one batch.

        Args:
            batch: A pair ``(input, target)``.
            outputs: Predictions ``(N, ...)``.
            metric: Called as ``metric.update(outputs, target)``.

        Raises:
            TypeError: ``batch`` is not a pair.
        """
        update_metric(metric, *_aligned(outputs, self._pair(batch)[1]))


def _aligned(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the same type, as the backward pass of torch's losses requires; one number as (N,)."""
    for name, value in (("outputs", outputs), ("targets", target)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"ComposerRegressor takes one tensor of {name}, got {type(value).__name__}. For several heads "
                "use ComposerMultiTask, with a ComposerRegressor for each; or concatenate their outputs and targets in "
                "the module and the data by torch.cat."
            )
    if {outputs.shape[1:], target.shape[1:]} == {(), (1,)}:
        outputs, target = outputs.flatten(), target.flatten()
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.to(dtype), target.to(dtype)
