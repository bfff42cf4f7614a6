"""The loss of a Transformers model for other labels than those of its forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORED", "next_tokens", "task_loss", "without_single_score"]

IGNORED = -100
"""The label of positions that do not count."""


def next_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits ``(N, L - 1, ...)`` of each position and the labels of the next position."""
    return logits[:, :-1], labels[:, 1:]


def without_single_score(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logits of one score ``(N, 1)`` as ``(N,)`` if the labels are one number per sample."""
    is_single = logits.ndim == labels.ndim + 1 and logits.shape[-1] == 1
    return logits.squeeze(-1) if is_single else logits


def task_loss(logits: Tensor, labels: Tensor, *, problem_type: str | None, shift: bool, reduction: str) -> Tensor:
    """Compute the loss as Transformers does, also for labels that are probabilities.

    Args:
        logits: Scores ``(N, ..., C)``.
        labels: Ids ``(N, ...)``, where -100 does not count; probabilities ``(N, ..., C)``, where rows of zeros do not
            count; or numbers for ``"regression"`` and ``"multi_label_classification"``.
        problem_type: The ``problem_type`` of the model's configuration.
        shift: Whether the label of a position belongs to the logits of the previous position.
        reduction: ``"mean"`` over all labels that count; or ``"none"``, the mean for each sample.

    Returns:
        A scalar, or ``(N,)``.

    Raises:
        ValueError: The shapes of labels and logits do not match.
    """
    logits = logits.float()
    if shift:
        logits, labels = next_tokens(logits, labels)
    if problem_type == "regression" or logits.shape[-1] == 1:
        losses = mse_loss(_like(labels, logits), labels.float(), reduction="none")
        counts = losses.new_ones(losses.shape)
    elif problem_type == "multi_label_classification":
        losses = binary_cross_entropy_with_logits(_like(labels, logits), labels.float(), reduction="none")
        counts = losses.new_ones(losses.shape)
    else:
        losses, counts = _cross_entropies(logits, labels)
    if reduction == "none":
        return losses.flatten(1).sum(1) / counts.flatten(1).sum(1) if losses.ndim > 1 else losses
    return losses.sum() / counts.sum()


def _cross_entropies(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss for each label, and which of them count."""
    rows = logits.reshape(-1, logits.shape[-1])
    if labels.shape == logits.shape:
        probabilities = labels.to(logits.dtype)
        losses = cross_entropy(rows, probabilities.reshape(rows.shape), reduction="none")
        return losses.reshape(logits.shape[:-1]), probabilities.sum(-1) > 0
    if labels.shape != logits.shape[:-1]:
        raise ValueError(_misfit(logits, labels))
    losses = cross_entropy(rows, labels.reshape(-1), ignore_index=IGNORED, reduction="none")
    return losses.reshape(labels.shape), labels != IGNORED


def _like(labels: Tensor, logits: Tensor) -> Tensor:
    logits = without_single_score(logits, labels)
    if logits.shape != labels.shape:
        raise ValueError(_misfit(logits, labels))
    return logits


def _misfit(logits: Tensor, labels: Tensor) -> str:
    return (
        f"The labels of shape {tuple(labels.shape)} do not fit the logits of shape {tuple(logits.shape)}: ids must "
        "have its shape without the last dimension, probabilities the same shape."
    )
