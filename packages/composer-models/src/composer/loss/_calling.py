"""Losses by name, and what is known of torch's: the targets that they take, and what their mean is taken over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from composer.functional import soft_cross_entropy
from composer.loss.binary_cross_entropy import binary_cross_entropy_with_logits

loss_registry: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
"""Loss functions ``f(input, target)`` by name, for programs whose settings are strings; add your own."""

_FUNCTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.HuberLoss: functional.huber_loss,
    nn.L1Loss: functional.l1_loss,
    nn.MSELoss: functional.mse_loss,
    nn.MultiLabelSoftMarginLoss: functional.multilabel_soft_margin_loss,
    nn.NLLLoss: functional.nll_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.SoftMarginLoss: functional.soft_margin_loss,
}
"""Losses of torch as modules, with the functions that they call."""
_OF_CLASSES = functional.cross_entropy, functional.nll_loss, soft_cross_entropy
"""Those whose targets are class ids; all others of torch compare each output with the target in its place."""
_OF_LOGITS = (
    binary_cross_entropy_with_logits,
    soft_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.multilabel_soft_margin_loss,
    functional.soft_margin_loss,
)
_OF_LABELS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.multilabel_soft_margin_loss,
)
"""Those whose targets have 0 or 1 for each of several labels."""
_SETTINGS = "weight", "ignore_index", "reduction", "label_smoothing"


def as_function(loss_fn: Any) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Return the function that a loss calls, with its settings; a loss that is not known is returned itself."""
    function, module = _function_of(loss_fn)
    if module is None:
        return function, dict(getattr(loss_fn, "keywords", {}))
    is_changed = type(loss_fn).forward is not module.forward
    settings = {name: getattr(loss_fn, name) for name in _SETTINGS if hasattr(loss_fn, name)}
    return loss_fn if is_changed else function, settings


def keep_settings(loss_fn: object) -> None:
    """Leave the class weights of torch's losses out of saved models: they are settings, which a program may change."""
    for module in loss_fn.modules() if isinstance(loss_fn, nn.Module) else ():
        for name in ("weight", "pos_weight") if _module_of(type(module)) else ():  # type: ignore[arg-type]  # hashable
            if isinstance(value := getattr(module, name, None), Tensor):
                module.register_buffer(name, value, persistent=False)


def in_float32(values: Tensor) -> Tensor:
    """Return floating-point values in float32 at least, and others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values


def is_sum(loss_fn: Any) -> bool:
    """Return whether a loss is a sum and not a mean, as its setting ``reduction`` states."""
    function, settings = as_function(loss_fn)
    if function is binary_cross_entropy_with_logits:  # usually sums over classes, and divides by samples
        return not settings.get("scale_by_batch_size", True) and settings.get("reduction", "sum") == "sum"
    reduction: str = settings.get("reduction", getattr(loss_fn, "reduction", "mean"))
    return reduction == "sum"


def count_terms(loss_fn: Callable[..., Tensor], target: object) -> Tensor | None:
    """Return what a mean loss divides its sum by; None if the loss is not known to divide by other than samples.

    Those of class ids divide by the number of ids that are not ignored, or by the sum of the weights of their classes,
    and :func:`soft_cross_entropy` of probabilities by the rows that are not zeros. All other losses of torch divide by
    samples or elements, also with a ``weight`` or ``pos_weight``.
    """
    function, settings = as_function(loss_fn)
    if function not in _OF_CLASSES or settings.get("reduction", "mean") != "mean" or not isinstance(target, Tensor):
        return None
    if target.is_floating_point():
        has_rows = function is soft_cross_entropy and target.ndim > 1 and target.shape[1] > 1
        return target.detach().sum(1).count_nonzero() if has_rows else None
    counts, weight = target.long().ne(settings.get("ignore_index", -100)), settings.get("weight")
    if weight is None:
        return counts.sum()
    # The loss itself raises the error for an id that is no class.
    return torch.where(counts, weight.detach()[target.long().clamp(0, len(weight) - 1)], 0).sum()


def takes_logits(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss is known to take logits; another one may take probabilities."""
    return _function_of(loss_fn)[0] in _OF_LOGITS


def takes_labels(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss is one of torch whose targets have 0 or 1 for each label, of which several may be 1."""
    return _function_of(loss_fn)[0] in _OF_LABELS


def needs_equal_shapes(loss_fn: Callable[..., Tensor]) -> bool:
    """Return whether a loss compares each output with the target in its place; torch's broadcast other shapes."""
    function = _function_of(loss_fn)[0]
    return function not in _OF_CLASSES and function in _FUNCTIONS.values()


def call_loss(loss_fn: Callable[..., Tensor], outputs: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call a loss; torch's losses of floats get integer targets in the shape of the scores in the type of the scores.

    They raise a ValueError for another shape. Metrics of several labels take integers. Every other loss gets the
    targets as they are and is called once: a second call would compute its terms, and draw its random numbers, twice in
    each step. A module with the attribute ``reduction`` is copied for another one.
    """
    if "reduction" in kwargs and isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        loss_fn = copy.copy(loss_fn)
        setattr(loss_fn, "reduction", kwargs.pop("reduction"))  # noqa: B010  (mypy takes it for a tensor)
    shape, has_labels = getattr(target, "shape", None), False
    if isinstance(outputs, Tensor) and isinstance(target, Tensor) and outputs.shape == shape:
        has_labels = outputs.is_floating_point() and not target.is_floating_point()
    if needs_equal_shapes(loss_fn):
        if shape is not None and shape != getattr(outputs, "shape", shape):
            raise ValueError(f"Using a target size {tuple(shape)} for outputs of {tuple(outputs.shape)} broadcasts.")
        target, has_labels = (target.to(outputs.dtype) if has_labels else target), False
    try:
        return loss_fn(outputs, target, *args, **kwargs)
    except RuntimeError as error:
        if has_labels:
            error.add_note(f"The loss received targets of {target.dtype}. If it needs floats, convert them in it.")
        raise


def _function_of(loss_fn: Any) -> tuple[Callable[..., Tensor], type[nn.Module] | None]:
    """Return the function of torch that a loss calls or derives from, or itself, and the module in the table."""
    module = _module_of(type(loss_fn))  # type: ignore[arg-type]  # a class is hashable
    return getattr(loss_fn, "func", loss_fn) if module is None else _FUNCTIONS[module], module


@lru_cache(maxsize=64)  # it is needed in each step
def _module_of(kind: type) -> type[nn.Module] | None:
    return next((one for one in kind.__mro__ if one in _FUNCTIONS), None)
