"""Distillation: train a student on the scores of a teacher (Hinton et al. 2015, arXiv:1503.02531)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from composer.functional.checks import check_choice, check_float_tensors, check_interval
from composer.functional.losses import infer_target_type, soft_cross_entropy


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    temperature: float = 4.0,
    weight: float = 0.5,
    kind: str = "kl",
    ignore_index: int = -100,
) -> Tensor:
    """Compute the loss of a student: that of the targets (hard) and that of a teacher's scores (soft).

    ``(1 - weight) * cross_entropy(s, targets) + weight * soft`` with the logits ``s`` of the student and ``t`` of the
    teacher. ``"kl"`` (Hinton et al. 2015, arXiv:1503.02531) is ``T**2 * KL(softmax(t / T) || softmax(s / T))``; the
    factor keeps the size of the gradients when the temperature ``T`` changes. ``"mse"`` (Kim et al. 2021,
    arXiv:2105.08919) is ``mean((s - t)**2)`` over the classes, without a temperature. Both losses are means over the
    targets that count.

    Args:
        student_logits: Logits of the student, shape ``(N, C, ...)``, floating point; computed with in float32 or more.
        teacher_logits: Logits of the teacher, the same shape. Gradients are not computed for them.
        targets: Class ids ``(N, ...)`` or class probabilities ``(N, C, ...)``.
        temperature: The number that the logits are divided by, more than 0; higher ones show more of the small scores.
        weight: The weight of the teacher, in ``[0, 1]``.
        kind: ``"kl"`` or ``"mse"``.
        ignore_index: The class id that does not count, for both losses; rows of zeros do not count, either.

    Returns:
        The loss, a scalar; ``nan`` if no target counts.

    Raises:
        TypeError: Logits are not floating point, or ``temperature`` or ``weight`` is not a number.
        ValueError: The logits have different shapes, as with a teacher of other classes; ``targets`` do not fit; or a
            setting is out of range.

    Example:
        >>> student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0]])
        >>> distillation_loss(student, teacher, torch.tensor([0]), temperature=2.0)
        tensor(0.3371)
    """
    check_float_tensors(student_logits=student_logits, teacher_logits=teacher_logits)
    check_interval("weight", weight, 0, 1, "It is the weight of the teacher.")
    is_ids = infer_target_type(student_logits, targets) == "indices"
    counts = targets != ignore_index if is_ids else targets.sum(1) > 0
    losses = soft_losses(student_logits, teacher_logits, temperature, kind)
    hard = soft_cross_entropy(student_logits.to(losses.dtype), targets, ignore_index=ignore_index)
    return torch.lerp(hard, mean_where(losses, counts), weight)


def soft_losses(student: Tensor, teacher: Tensor, temperature: float, kind: str) -> Tensor:
    """Return the loss of the teacher's scores for each target, shape ``(N, ...)``; see :func:`distillation_loss`.

    Raises:
        ValueError: The shapes differ, or a setting is out of range.
    """
    check_interval("temperature", temperature, 0, torch.inf, "It divides logits.", open_low=True, open_high=True)
    check_choice("kind", kind, "kl", "mse")
    if student.shape != teacher.shape:
        raise ValueError(
            f"teacher_logits must have the shape (N, C, ...) of student_logits, {tuple(student.shape)}, got "
            f"{tuple(teacher.shape)}. Choose a teacher of the same C classes, in the same order."
        )
    if student.ndim == 1:  # one logit for each sample
        student, teacher = student[:, None], teacher[:, None]
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    student, teacher = student.to(dtype), teacher.detach().to(dtype)
    if kind == "mse":
        return (student - teacher).square().mean(1)
    if student.shape[1] == 1:  # the logit of the second of two classes
        student, teacher = (torch.cat([torch.zeros_like(one), one], 1) for one in (student, teacher))
    log_student, log_teacher = ((one / temperature).log_softmax(1) for one in (student, teacher))
    return kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(1) * temperature**2


def mean_where(values: Tensor, counts: Tensor | None) -> Tensor:
    """Return the mean of the values that count, without waiting for the device; of all for None. Of nothing it is 0.

    Args:
        values: Shape ``(N, ..., D, ...)``.
        counts: Booleans of the first dimensions of ``values``.
    """
    if counts is None:
        return values.mean()
    values = values.flatten(counts.ndim).mean(-1) if values.ndim > counts.ndim else values
    return values.where(counts, 0).sum() / counts.sum().clamp(min=1)
