"""The Dice loss for segmentation (Milletari et al. 2016, arXiv:1606.04797)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer.functional import ensure_targets_one_hot
from composer.functional.checks import check_choice

_SMOOTHING = 1e-5


class DiceLoss(nn.Module):
    """One minus the Dice coefficient of prediction and target, for each sample and class.

    ``loss = 1 - (2 sum(p * t) + e) / (sum(p) + sum(t) + e)``, summed over the pixels, with ``e = 1e-5``

    Unlike the cross entropy it gives a small object as much weight as a large one. Sums are in single precision.

    Ignored pixels are excluded from all sums: those with a negative class id and, with ``softmax``, those whose
    probabilities are all zero, as :func:`composer.functional.smooth_labels` encodes ignored class ids. Without
    ``softmax`` such a row is a pixel without a class, and counts.

    Args:
        sigmoid: Whether ``input`` holds logits to which a sigmoid is applied, for each class independently.
        softmax: Whether ``input`` holds logits to which a softmax over the classes is applied.
        squared_pred: Whether to square predictions and targets in the divisor.
        jaccard: Whether to divide by the union instead, ``sum(p) + sum(t) - sum(p * t)``, without the factor 2.
        batch: Whether to sum over the samples as well: one coefficient per class, not per sample and class.
        ignore_absent_classes: Whether a class that is not in the target (of the sample, or of the batch with
            ``batch=True``) has no loss and does not count in the mean.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. A sample whose pixels are all ignored has a loss of 0 and does
            not count in the mean.

    Raises:
        ValueError: Both ``sigmoid`` and ``softmax`` are set, or ``reduction`` is none of the three.

    Example:
        >>> import torch
        >>> dice = DiceLoss(softmax=True)
        >>> dice(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))  # the mean of 1/3 and 1
        tensor(0.6667)
    """

    def __init__(
        self,
        sigmoid: bool = False,
        softmax: bool = False,
        squared_pred: bool = False,
        jaccard: bool = False,
        batch: bool = False,
        ignore_absent_classes: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        if sigmoid and softmax:
            raise ValueError("sigmoid and softmax are both True; only one of them can be applied to the input.")
        check_choice("reduction", reduction, "none", "mean", "sum")
        self.sigmoid = sigmoid
        self.softmax = softmax
        self.squared_pred = squared_pred
        self.jaccard = jaccard
        self.batch = batch
        self.ignore_absent_classes = ignore_absent_classes
        self.reduction = reduction

    @property
    def loss_needs_whole_batch(self) -> bool:
        """Whether the loss is no mean over samples: it sums over them, or counts the classes of the batch."""
        return self.reduction == "mean" and (self.batch or self.ignore_absent_classes)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            input: Probabilities, or logits with ``sigmoid`` or ``softmax``; shape ``(N, C, ...)``.
            target: Class ids ``(N, ...)``, of which negative ones are ignored; or probabilities ``(N, C, ...)``.

        Returns:
            A scalar; with ``"none"`` one for each sample and class, shape ``(N, C)``, or ``(C,)`` with ``batch=True``.

        Raises:
            ValueError: ``target`` is neither class ids nor probabilities, or ``softmax`` is over one class.
        """
        truth = ensure_targets_one_hot(input, target).float()
        counts = self._counts(target, truth)
        prediction = self._probabilities(input.float()).where(counts, 0)
        pixels = [axis for axis in range(input.ndim) if axis != 1 and (axis > 0 or self.batch)]
        overlap = _sum(prediction * truth, pixels)
        present = _sum(truth if self.ignore_absent_classes else counts.expand_as(truth), pixels) > 0
        if self.squared_pred:
            prediction, truth = prediction.square(), truth.square()
        whole = _sum(prediction, pixels) + _sum(truth, pixels)
        if self.jaccard:
            whole = 2 * (whole - overlap)  # twice the union, because the numerator below is twice the overlap
        loss = 1 - (2 * overlap + _SMOOTHING) / (whole + _SMOOTHING)
        return self._reduced(loss, present)

    def _counts(self, target: Tensor, truth: Tensor) -> Tensor:
        """Return where pixels are not ignored, shape ``(N, 1, ...)``."""
        if target.shape != truth.shape:  # class ids, which were encoded
            return target.unsqueeze(1) >= 0
        return truth.sum(1, keepdim=True) > 0 if self.softmax else torch.ones_like(truth[:, :1], dtype=torch.bool)

    def _probabilities(self, input: Tensor) -> Tensor:
        if self.softmax:
            if input.shape[1] == 1:
                raise ValueError("softmax over one class is always 1; use sigmoid=True for a single class.")
            return input.softmax(dim=1)
        return input.sigmoid() if self.sigmoid else input

    def _reduced(self, loss: Tensor, present: Tensor) -> Tensor:
        if self.ignore_absent_classes:
            loss = loss * present
        if self.reduction == "none":
            return loss
        if self.reduction == "sum":
            return loss.sum()
        return loss.sum() / present.sum().clamp(min=1)


def _sum(values: Tensor, axes: list[int]) -> Tensor:
    # torch takes an empty list of axes for all of them.
    return values.sum(dim=axes) if axes else values
