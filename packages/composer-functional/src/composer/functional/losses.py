"""Targets as class ids or as class probabilities, and the cross entropy for both."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from composer.functional.checks import check_interval, check_sizes, check_tensors, check_whole_numbers

_REDUCTIONS = frozenset({"none", "mean", "sum"})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def check_for_index_targets(targets: Tensor) -> bool:
    """Return whether the targets have an integer dtype, as class ids.

    Args:
        targets: Targets of any shape.

    Returns:
        ``True`` for int64, int32, int16, int8 and uint8.

    Raises:
        TypeError: ``targets`` is not a tensor.

    Example:
        >>> check_for_index_targets(torch.tensor([2, 0])), check_for_index_targets(torch.rand(2, 3))
        (True, False)
    """
    check_tensors(targets=targets)
    return targets.dtype in _INTEGERS


def infer_target_type(input: Tensor, targets: Tensor) -> Literal["indices", "probabilities"]:
    """Distinguish class ids from class probabilities by shape and dtype.

    Args:
        input: Logits of a model, shape ``(N, C, ...)``.
        targets: Class ids ``(N, ...)``, integers; or class probabilities with the shape of ``input``.

    Returns:
        ``"indices"`` or ``"probabilities"``.

    Raises:
        TypeError: ``input`` or ``targets`` is not a tensor.
        ValueError: ``targets`` is neither of them.

    Example:
        >>> infer_target_type(torch.rand(2, 3), torch.tensor([2, 0]))
        'indices'
        >>> infer_target_type(torch.rand(2, 3), torch.rand(2, 3))
        'probabilities'
    """
    # This runs at every step: the order of the checks is the fastest for class ids.
    check_tensors(input=input, targets=targets)
    scores, shape = input.shape, targets.shape
    if len(scores) < 2:
        raise ValueError(f"input must have shape (N, C, ...), got {tuple(scores)}. It holds scores of C classes.")
    if (
        len(shape) + 1 == len(scores)
        and targets.dtype in _INTEGERS
        and shape[0] == scores[0]
        and shape[1:] == scores[2:]
    ):
        return "indices"
    if shape == scores:
        return "probabilities"
    shape_of_ids = (scores[0], *scores[2:])
    raise ValueError(
        f"targets must be integer class ids of shape {shape_of_ids} or class probabilities of shape "
        f"{tuple(input.shape)}, got {targets.dtype} of shape {tuple(targets.shape)}."
        + (" Convert class ids by targets.long()." if shape == shape_of_ids else "")
    )


def ensure_targets_one_hot(input: Tensor, targets: Tensor, num_classes: int | None = None) -> Tensor:
    """Convert class ids to class probabilities; return probabilities unchanged.

    Args:
        input: Logits of a model, shape ``(N, C, ...)``.
        targets: Class ids ``(N, ...)``, or class probabilities ``(N, C, ...)``.
        num_classes: The number of classes; ``C`` of ``input`` if ``None``.

    Returns:
        Probabilities ``(N, C, ...)``: ``targets`` itself if they are floating point, else a new tensor in the dtype of
        ``input``, but at least float32. A negative class id, which is ignored, becomes zeros.

    Raises:
        ValueError: ``targets`` is neither class ids nor probabilities, or a class id is not below ``num_classes`` (on a
            GPU, CUDA raises a RuntimeError later).

    Example:
        >>> ensure_targets_one_hot(torch.rand(2, 3), torch.tensor([2, -100]))
        tensor([[0., 0., 1.],
                [0., 0., 0.]])
    """
    check_tensors(input=input)
    dtype = _at_least_float32(input)
    if infer_target_type(input, targets) == "probabilities":
        return targets if targets.is_floating_point() else targets.to(dtype)
    if num_classes is not None:
        check_sizes(num_classes=num_classes)
    return encode_one_hot(targets, input.shape[1] if num_classes is None else num_classes, dtype, "targets")


def encode_one_hot(ids: Tensor, num_classes: int, dtype: torch.dtype, name: str = "target") -> Tensor:
    """Return the one-hot encoding ``(N, C, ...)`` of class ids ``(N, ...)``; a negative id becomes zeros."""
    ids = ids.long().unsqueeze(1)
    one_hot = torch.zeros((ids.shape[0], num_classes, *ids.shape[2:]), dtype=dtype, device=ids.device)
    return scatter_ids(one_hot, ids, (ids >= 0).to(dtype), name)


def scatter_ids(output: Tensor, ids: Tensor, values: Tensor, name: str) -> Tensor:
    """Write values ``(N, 1, ...)`` at the class ids ``(N, 1, ...)``, or at 0 for negative ids, in place.

    Raises:
        ValueError: A class id is not below the number of classes; on a GPU, CUDA raises an error later.
    """
    try:
        return output.scatter_(1, ids.clamp(min=0), values)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise ValueError(unknown_class(name, ids, output.shape[1], "a negative one, which is ignored")) from error


def smooth_probabilities(probabilities: Tensor, smoothing: float) -> Tensor:
    """Distribute a part of the mass of each row ``(N, C, ...)`` over all classes; a row of zeros stays."""
    share = smoothing / probabilities.shape[1]
    return probabilities.mul(1 - smoothing).add_(probabilities.sum(1, keepdim=True), alpha=share)


def unknown_class(name: str, ids: Tensor, num_classes: int, other: str) -> str:
    """Return the error of an id that is no class."""
    span = f"ids from {int(ids.min())} to {int(ids.max())}"
    return f"{name} must hold class ids from 0 to {num_classes - 1}, or {other}, got {span}."


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy with class ids or with class probabilities, such as mixed and smoothed labels.

    Args:
        input: Logits, shape ``(N, C, ...)``.
        target: Class ids ``(N, ...)``, any integer dtype; or class probabilities ``(N, C, ...)``.
        weight: A weight for each class, shape ``(C,)``.
        ignore_index: The class id that does not count. It is not used for probabilities, where a row of zeros does not
            count, as :func:`ensure_targets_one_hot` and :func:`smooth_labels` encode ignored class ids.
        reduction: ``"none"``, ``"mean"`` (over the targets that count; ``nan`` without any) or ``"sum"``. As in torch,
            the mean is weighted by ``weight`` for class ids only.
        label_smoothing: The part of each label to distribute over all classes, as in torch; ids are not converted to
            probabilities for it, which would need the memory of the logits once more.

    Returns:
        The loss: a scalar, or with ``"none"`` one value per sample, shape ``(N, ...)``.

    Raises:
        TypeError: ``input`` or ``target`` is not a tensor, or ``weight`` neither a tensor nor ``None``.
        ValueError: ``target`` is neither class ids nor probabilities, a class id is out of range (on a GPU, CUDA
            raises a RuntimeError later), ``reduction`` is none of the three, or ``label_smoothing`` lies outside
            ``[0, 1]``.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> soft_cross_entropy(logits, torch.tensor([0, 1]))
        tensor(0.1269)
        >>> soft_cross_entropy(logits, torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
        tensor(0.3269)
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f'reduction must be "none", "mean" or "sum", got {reduction!r}.')
    if weight is not None:
        _check_weight(weight, input)
    if type(ignore_index) is not int:
        check_whole_numbers(ignore_index=ignore_index)
    if type(label_smoothing) is not float or label_smoothing != 0:
        check_interval("label_smoothing", label_smoothing, 0, 1, "It is the part of each label to distribute.")
    is_usual = (  # the usual case needs no function call
        isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and target.dtype is torch.int64
        and len(input.shape) == 2
        and input.shape[:1] == target.shape
    )
    if not is_usual and infer_target_type(input, target) == "probabilities":
        probabilities = target if target.is_floating_point() else target.to(_at_least_float32(input))
        if label_smoothing:
            probabilities = smooth_probabilities(probabilities, label_smoothing)
        if reduction != "mean":
            return cross_entropy(input, probabilities, weight, reduction=reduction)
        total = cross_entropy(input, probabilities, weight, reduction="sum")
        count = probabilities.detach().sum(1).count_nonzero()  # any(1) takes 25 times as long on a CPU
        # In float32, because bfloat16 represents integers only up to 256. Without any, gradients are 0, as with ids.
        mean = total / count.clamp(min=1).to(_at_least_float32(total))
        return mean.where(count > 0, torch.nan).to(total.dtype)
    ids = target if target.dtype is torch.int64 else target.long()
    try:
        return cross_entropy(
            input, ids, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    except IndexError as error:
        raise ValueError(unknown_class("target", ids, input.shape[1], f"ignore_index={ignore_index}")) from error


def _check_weight(weight: Tensor, input: Tensor) -> None:
    check_tensors(weight=weight, input=input)
    if not weight.is_floating_point() or weight.shape != input.shape[1:2]:
        raise ValueError(
            f"weight must hold a floating-point number for each class, shape {tuple(input.shape[1:2])}, "
            f"got {weight.dtype} of shape {tuple(weight.shape)}."
        )


def _at_least_float32(input: Tensor) -> torch.dtype:
    # Smoothed or mixed labels in bfloat16 would sum to 1 only to two digits; cross_entropy accepts float32 targets.
    return torch.promote_types(input.dtype, torch.float32)
