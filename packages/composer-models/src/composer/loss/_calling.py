"""Call a loss with targets of the type that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import OutOfMemoryError, Tensor, nn
from torch.nn.functional import huber_loss, mse_loss

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_loss"]

# Of the Huber loss, and in torch 2.7 of the squared error, only the backward pass raises an error for integers.
_TAKE_FLOATS = nn.BCELoss, nn.BCEWithLogitsLoss, nn.HuberLoss, nn.MSELoss


def call_loss(loss_fn: Callable[..., Tensor], outputs: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call a loss; one that raises for integer targets in the shape of the scores gets them in the type of the scores.

    Metrics of several labels take integers, as do losses such as ``nn.MultiLabelMarginLoss``, but binary cross
    entropies of torch take floats. A cross entropy would take several labels of a sample as probabilities that sum to
    1, and its error is raised.
    """
    if not _has_label_for_each_score(outputs, target):
        return loss_fn(outputs, target, *args, **kwargs)
    if isinstance(loss_fn, _TAKE_FLOATS) or getattr(loss_fn, "func", loss_fn) in (huber_loss, mse_loss):
        return loss_fn(outputs, target.to(outputs.dtype), *args, **kwargs)
    try:
        return loss_fn(outputs, target, *args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, OutOfMemoryError) or "class probabilities" in str(error):
            raise
        return loss_fn(outputs, target.to(outputs.dtype), *args, **kwargs)


def _has_label_for_each_score(outputs: object, target: object) -> bool:
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return False
    return outputs.shape == target.shape and outputs.is_floating_point() and not target.is_floating_point()
