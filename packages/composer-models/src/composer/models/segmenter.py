"""A model that assigns a class to every pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.functional import soft_cross_entropy
from composer.loss._calling import as_function, count_terms, is_sum, takes_labels, takes_logits
from composer.loss.dice import DiceLoss
from composer.models.base import compute_loss, known_cross_entropy
from composer.models.phase_metrics import (
    PairModel,
    class_ids,
    fits_one_score,
    is_one_score,
    to_probabilities,
    two_scores,
    update_metric,
)

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer.models.phase_metrics import Metrics


class ComposerSegmenter(PairModel):
    """A module with the loss and the metrics of semantic segmentation.

    Batches are pairs ``(images, masks)``: the module is called with ``images`` ``(N, 3, H, W)``; ``masks`` hold class
    ids ``(N, H, W)`` or class probabilities ``(N, C, H, W)``. The loss is the cross entropy, averaged over the pixels.

    A module may return scores, or a dictionary with scores ``"out"``, and ``"aux"`` of a second head, as torchvision's
    modules do. In training, the outputs of a model with a second head are the dictionary, and the loss of the second
    head is added, which helps the first layers learn. Otherwise the outputs are the scores.

    The default metrics are :class:`~composer.metrics.MIoU` for training, and MIoU and the cross entropy for evaluation.

    For two classes the module may return one score ``(N, 1, H, W)``, the logit of class 1. The loss and metrics of
    classes get the scores of both classes, ``0`` and the logit; the binary cross entropies of torch get the scores and
    masks of the pixels that count, and binary metrics all of them, ``(N, H, W)``.

    Args:
        module: Maps images to scores ``(N, C, H, W)``, or to a dictionary of them.
        num_classes: ``C``, including the background; 2 with one score. Inferred from the module's last ``nn.Conv2d`` if
            ``None``.
        ignore_index: The id of pixels that do not count in loss and metrics; 255 in torchvision's Pascal VOC. If
            ``None``, that of ``loss_fn``, or -1.
        aux_weight: The weight of the second head's loss.
        train_metrics: A metric, a ``MetricCollection``, a list or a dict of metrics; an empty list for none.
        val_metrics: The same for evaluation. Metrics that are also in ``train_metrics`` are copied, because each phase
            accumulates separately.
        loss_fn: Called as ``loss_fn(scores, masks)`` instead of the cross entropy; the masks include ignored pixels.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or the metrics contain another type.
        ValueError: ``num_classes`` is less than 2, or cannot be inferred.

    Example:
        >>> import torch
        >>> model = ComposerSegmenter(nn.Conv2d(3, 2, kernel_size=1))
        >>> batch = torch.rand(4, 3, 8, 8), torch.randint(2, (4, 8, 8))
        >>> model.loss(model(batch), batch).shape, model.num_classes
        (torch.Size([]), 2)
        >>> list(model.get_metrics(is_train=False))
        ['CrossEntropy', 'MIoU']
    """

    _pair_names = "(images, masks)"
    _has_labels = False  # until masks of one score have a 1: the host waits for a device to check them

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        ignore_index: int | None = None,
        aux_weight: float = 0.5,
        train_metrics: Metrics | None = None,
        val_metrics: Metrics | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        if ignore_index is None:
            ignore_index = int(as_function(loss_fn)[1].get("ignore_index", -1))
        super().__init__(module, partial(soft_cross_entropy, ignore_index=ignore_index) if loss_fn is None else loss_fn)
        self.num_classes = _find_num_classes(module) if num_classes is None else num_classes
        if self.num_classes < 2:
            raise ValueError(
                f"num_classes must be at least 2, got {self.num_classes}. The background is a class too; a module with "
                "one score of each pixel, the logit of class 1, has 2."
            )
        self.ignore_index = ignore_index
        self.aux_weight = aux_weight
        default = _default_metrics(self.num_classes, ignore_index)
        train_metrics = default["MIoU"] if train_metrics is None else train_metrics
        self._set_metrics(train_metrics, default if val_metrics is None else val_metrics)

    def forward(self, batch: tuple[Tensor, Tensor] | tuple[Tensor] | Tensor) -> Any:
        """Compute the scores of the batch's images.

        Args:
            batch: A pair ``(images, masks)``; or without masks the images, or ``(images,)``.

        Returns:
            Scores (logits) ``(N, C, H, W)``; in training, of a model with two heads ``{"out": scores, "aux": scores}``.

        Raises:
            TypeError: ``batch`` is none of these.
        """
        outputs = super().forward(batch)
        if not isinstance(outputs, Mapping):
            return outputs
        return dict(outputs) if self.training and "aux" in outputs else outputs["out"]

    def loss(self, outputs: Any, batch: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of the outputs, given the batch's masks.

        Args:
            outputs: The result of :meth:`forward`.
            batch: A pair ``(images, masks)``.
            args: Passed to the loss function.
            kwargs: Passed to the loss function.

        Returns:
            A scalar.

        Raises:
            TypeError: ``batch`` is not a pair.
            ValueError: The shape of the masks does not match the scores, or a class id has no score.
        """
        _, masks = self._pair(batch)
        if not isinstance(outputs, Mapping):
            return self._loss_of(outputs, masks, *args, **kwargs)
        main = self._loss_of(outputs["out"], masks, *args, **kwargs)
        return main + self.aux_weight * self._loss_of(outputs["aux"], masks, *args, **kwargs)

    def count_loss_terms(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        """Count the pixels that the loss is the mean of.

        Args:
            batch: A pair ``(images, masks)``.

        Returns:
            The number of pixels that are not ignored, or the sum of the weights of their classes; with
            :class:`~composer.loss.DiceLoss` the number of samples with such pixels; None with a ``loss_fn`` that is no
            cross entropy, binary cross entropy or negative log-likelihood of torch.
        """
        images, masks = self._pair(batch)
        return self._count_terms(masks, getattr(images, "ndim", 4))

    def _count_terms(self, masks: Tensor, ndim: int) -> Tensor | None:
        """Count what the loss is the mean of, given the number of dimensions of the scores."""
        loss_fn = self.loss_fn
        has_classes = masks.ndim >= max(4, ndim) and masks.shape[1] > 1
        if not masks.is_floating_point():  # a volume without a channel has as many dimensions as class ids of it
            has_classes = has_classes and masks.shape[1] == self.num_classes
        if isinstance(loss_fn, DiceLoss):
            if loss_fn.reduction != "mean" or loss_fn.loss_needs_whole_batch:
                return None
            if not has_classes:
                counts = (masks.float() != self.ignore_index) & (masks >= 0)
            else:
                counts = masks.sum(1) > 0 if loss_fn.softmax else torch.ones_like(masks, dtype=torch.bool)
            return counts.flatten(1).any(1).sum()
        # The mean of several scores is over all their elements.
        if not has_classes and takes_labels(self.loss_fn) and not is_sum(self.loss_fn):
            return masks.float().ne(self.ignore_index).sum()
        return count_terms(known_cross_entropy(self.loss_fn) or self.loss_fn, masks)

    def _loss_of(self, scores: Tensor, masks: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        remedy = f", and {self.ignore_index} is ignored. Set ignore_index= for another, of loss_fn if you pass one."
        share: Tensor | None = None
        adds_pixels = getattr(self.loss_fn, "sigmoid", None) is True  # as of DiceLoss, and no module
        has_labels = adds_pixels or takes_labels(self.loss_fn)
        if is_one_score(scores) and has_labels and fits_one_score(masks, scores):
            counts = masks.float() != self.ignore_index  # 255 of uint8 equals -1 in torch
            if not self._has_labels:
                labels = masks[counts]
                if bool(((labels < 0) | (labels > 1)).any()):
                    limits = f"{labels.min():g} to {labels.max():g}"
                    raise ValueError(f"Masks of one score must be 0 or 1, got {limits}{remedy}")
                self._has_labels = bool(labels.any())
            if adds_pixels:  # a pixel of 0 adds nothing to a sum
                terms = self._count_terms(masks, scores.ndim)
                share = None if terms is None else terms.clamp(min=1) / len(masks)
                scores, masks = scores.where(counts.reshape(scores.shape), -1000.0), masks.where(counts, 0)
                masks = masks.reshape(scores.shape)
            else:
                certain = 1000.0 if takes_logits(self.loss_fn) else 1.0  # without a loss at a pixel of 1
                scores, masks = scores.reshape(masks.shape).where(counts, certain), masks.where(counts, 1)
                share = None if is_sum(self.loss_fn) else counts.sum().clamp(min=1) / counts.numel()
        elif is_one_score(scores):
            scores, masks = two_scores(scores, masks)
        loss = compute_loss(
            self.loss_fn, scores, masks, *args, smoothing=self._label_smoothing, remedy=remedy, **kwargs
        )
        return loss if share is None else loss / share

    def eval_forward(self, batch: tuple[Tensor, Tensor], outputs: Any | None = None) -> Tensor:
        """Compute the scores that metrics are updated with.

        Args:
            batch: A pair ``(images, masks)``.
            outputs: The result of :meth:`forward` for this batch, if it has been computed already.

        Returns:
            Scores ``(N, C, H, W)`` of the first head.
        """
        outputs = self(batch) if outputs is None else outputs
        scores: Tensor = outputs["out"] if isinstance(outputs, Mapping) else outputs
        return scores

    def update_metric(self, batch: tuple[Tensor, Tensor], outputs: Tensor, metric: Metric) -> None:
        """Update a metric with one batch.

        Args:
            batch: A pair ``(images, masks)``.
            outputs: Scores ``(N, C, H, W)``.
            metric: Called as ``metric.update(outputs, masks)``. If it has ``num_classes`` and ``masks`` are
                probabilities, it is called with the most probable classes. With one score for each pixel, such a metric
                and ``CrossEntropy`` get the scores of both classes, others probabilities ``(N, H, W)``.

        Raises:
            TypeError: ``batch`` is not a pair.
            ValueError: The metric has another number of classes than the scores, or a pixel has several classes.
        """
        _, masks = self._pair(batch)
        from composer.metrics.scores import CrossEntropy  # noqa: PLC0415 (imports torchmetrics, which is imported by now)

        has_classes = getattr(metric, "num_classes", None) is not None
        if is_one_score(outputs):
            if has_classes or isinstance(metric, CrossEntropy):
                outputs, masks = two_scores(outputs, masks)
            else:
                masks = masks.squeeze(1) if masks.ndim == outputs.ndim else masks
                outputs = to_probabilities(metric, outputs.squeeze(1))
        if has_classes:
            masks = class_ids(outputs, masks, metric)
        update_metric(metric, outputs, masks)


def _find_num_classes(module: nn.Module) -> int:
    widths = [layer.out_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    if not widths:
        raise ValueError("num_classes cannot be inferred from the module, which has no nn.Conv2d. Pass num_classes=.")
    return max(widths[-1], 2)  # one score is that of class 1 of two


def _default_metrics(num_classes: int, ignore_index: int) -> dict[str, Metric]:
    from composer.metrics import CrossEntropy, MIoU  # noqa: PLC0415 (imports torchmetrics)

    return {"MIoU": MIoU(num_classes, ignore_index), "CrossEntropy": CrossEntropy(ignore_index)}
