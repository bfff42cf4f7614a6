"""What is known of torch's losses: the targets that they take, and what their mean is taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from composer.functional import soft_cross_entropy
from composer.loss.binary_cross_entropy import binary_cross_entropy_with_logits

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["as_function", "call_loss", "count_terms", "needs_equal_shapes", "takes_logits"]

_TAKE_FLOATS = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
_FUNCTIONS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.huber_loss,
    functional.l1_loss,
    functional.mse_loss,
    functional.multilabel_soft_margin_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
_OF_LOGITS = nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss
_FUNCTIONS_OF_LOGITS = (
    binary_cross_entropy_with_logits,
    soft_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.multilabel_soft_margin_loss,
    functional.soft_margin_loss,
)


_SETTINGS = "weight", "ignore_index", "reduction", "label_smoothing"


def as_function(loss_fn: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Return the function that a loss calls, with its settings; a loss that is not known is returned itself."""
    modules = {nn.CrossEntropyLoss.forward: functional.cross_entropy, nn.NLLLoss.forward: functional.nll_loss}
    function = modules.get(getattr(type(loss_fn), "forward", None))  # type: ignore[arg-type]
    if function is not None:
        return function, {name: getattr(loss_fn, name) for name in _SETTINGS if hasattr(loss_fn, name)}
    return getattr(loss_fn, "func", loss_fn), dict(getattr(loss_fn, "keywords", {}))


def count_terms(loss_fn: Callable[..., Tensor], target: object) -> Tensor | None:
    """Return what a mean loss divides its sum by; None if the loss is not known to divide by other than samples.

    Those of class ids divide by the number of ids that are not ignored, or by the sum of the weights of their classes,
    and :func:`soft_cross_entropy` of probabilities by the rows that are not zeros. All other losses of torch divide by
    samples or elements, also with a ``weight`` or ``pos_weight``.
    """
    function, settings = as_function(loss_fn)
    is_known = function in (functional.cross_entropy, functional.nll_loss, soft_cross_entropy)
    if not is_known or settings.get("reduction", "mean") != "mean" or not isinstance(target, Tensor):
        return None
    if target.is_floating_point():
        has_rows = function is soft_cross_entropy and target.ndim > 1 and target.shape[1] > 1
        return target.detach().sum(1).count_nonzero() if has_rows else None
    counts, weight = target.ne(settings.get("ignore_index", -100)), settings.get("weight")
    if weight is None:
        return counts.sum()
    # The loss itself raises the error for an id that is no class.
    return torch.where(counts, weight.detach()[target.long().clamp(0, len(weight) - 1)], 0).sum()


def takes_logits(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss is known to take logits; another one may take probabilities."""
    return isinstance(loss_fn, _OF_LOGITS) or getattr(loss_fn, "func", loss_fn) in _FUNCTIONS_OF_LOGITS


def needs_equal_shapes(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss compares each output with the target in its place; torch's broadcast other shapes."""
    return isinstance(loss_fn, _TAKE_FLOATS) or getattr(loss_fn, "func", loss_fn) in _FUNCTIONS


def call_loss(loss_fn: Callable[..., Tensor], outputs: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call a loss; torch's losses of floats get integer targets in the shape of the scores in the type of the scores.

    They raise a ValueError for another shape. Metrics of several labels take integers. Every other loss gets the
    targets as they are and is called once: a second call would compute its terms, and draw its random numbers, twice in
    each step.
    """
    if not _has_label_for_each_score(outputs, target):
        shape = getattr(target, "shape", None)
        if needs_equal_shapes(loss_fn) and shape is not None and shape != getattr(outputs, "shape", shape):
            raise ValueError(f"Using a target size {tuple(shape)} for outputs of {tuple(outputs.shape)} broadcasts.")
        return loss_fn(outputs, target, *args, **kwargs)
    if needs_equal_shapes(loss_fn):
        return loss_fn(outputs, target.to(outputs.dtype), *args, **kwargs)
    try:
        return loss_fn(outputs, target, *args, **kwargs)
    except RuntimeError as error:
        error.add_note(f"The loss received targets of {target.dtype}. If it needs floats, convert them in it.")
        raise


def _has_label_for_each_score(outputs: object, target: object) -> bool:
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return False
    return outputs.shape == target.shape and outputs.is_floating_point() and not target.is_floating_point()
