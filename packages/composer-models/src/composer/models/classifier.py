"""A classifier around any module that maps inputs to one score per class."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn

from composer.functional import soft_cross_entropy
from composer.functional.checks import check_sizes
from composer.loss._calling import count_terms, takes_labels, takes_logits
from composer.models.base import compute_loss, known_cross_entropy
from composer.models.phase_metrics import (
    PairModel,
    check_one_label,
    class_ids,
    is_one_score,
    to_probabilities,
    two_scores,
    update_metric,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmetrics import Metric

    from composer.models.phase_metrics import Metrics


class ComposerClassifier(PairModel):
    """A module with a classification loss and metrics.

    Batches are pairs ``(input, target)``: the module is called with ``input``; ``target`` holds class ids ``(N, ...)``
    or class probabilities ``(N, C, ...)``, as mixing and smoothing produce them. For predictions batches may also be
    the input tensor, or a tuple or list of the input alone. A metric with ``num_classes`` is updated with the most
    probable class.

    The default metrics are the accuracy for training, and the accuracy and the cross entropy for evaluation, with the
    names ``MulticlassAccuracy`` and ``CrossEntropy``. The accuracy is the fraction of correct samples. Ids that
    ``loss_fn`` ignores count in none of them.

    Samples may have several labels: then ``target`` ``(N, C, ...)`` has 0 or 1 for each, and the loss is a binary cross
    entropy of torch or ``nn.MultiLabelSoftMarginLoss``. With these, the default metrics are ``MultilabelAccuracy``, the
    fraction of correct labels, and for evaluation also ``MultilabelF1Score``. Metrics of samples with one class, which
    are the default with every other loss, raise an error for such targets.

    A module for two classes may return one score ``(N, 1, ...)`` or ``(N,)``, the logit of class 1. Then the default
    loss is the binary cross entropy, of class ids or of probabilities of class 1 in the shape of the scores, and the
    default metrics are as above, with these names, as in MosaicML Composer: the accuracy of two classes is the binary
    one. With the default loss, LabelSmoothing smooths class ids. MixUp and CutMix blend
    probabilities of class 1 in floating point; for class ids they need ``interpolate_loss=True``, or two scores, as of
    ``nn.Linear(..., 2)``.

    Args:
        module: Maps inputs to scores ``(N, C, ...)``, or to one score per sample.
        num_classes: ``C``; 2 with one score. Inferred from the module if ``None``: its attribute ``num_classes``, or
            the output size of its last ``nn.Linear``.
        train_metrics: A metric, a ``MetricCollection``, a list or a dict of metrics; an empty list for none.
        val_metrics: The same for evaluation. Metrics that are also in ``train_metrics`` are copied, because each phase
            accumulates separately.
        loss_fn: Called as ``loss_fn(outputs, target)``; returns a scalar. Losses of torch that take floats, such as
            ``nn.BCEWithLogitsLoss``, get integer targets in the shape of the scores, which metrics of several labels
            require, as floats. :meth:`count_loss_terms` counts what torch's losses are means of; override it for a
            ``loss_fn`` of your own that is a mean over anything but samples.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, ``loss_fn`` is not callable, or the metrics contain another type.
        ValueError: ``num_classes`` is not positive; or the default metrics need it and it cannot be inferred.

    Example:
        >>> import torch
        >>> model = ComposerClassifier(torch.nn.Linear(8, 3))
        >>> batch = torch.rand(4, 8), torch.tensor([0, 1, 2, 0])
        >>> model.loss(model(batch), batch).shape, model.num_classes
        (torch.Size([]), 3)
        >>> list(model.get_metrics(is_train=False))
        ['CrossEntropy', 'MulticlassAccuracy']
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: Metrics | None = None,
        val_metrics: Metrics | None = None,
        loss_fn: Callable[..., Tensor] = soft_cross_entropy,
    ) -> None:
        super().__init__(module, loss_fn)
        if num_classes is not None:
            check_sizes(num_classes=num_classes)
        width = _find_num_classes(module)
        self.num_classes = (2 if width == 1 else width) if num_classes is None else num_classes
        # A module for two classes may return one score.
        has_labels = takes_labels(loss_fn) and ((self.num_classes or 0) > 2 or width == self.num_classes == 2)
        default: Callable[..., Metrics] = (
            _label_metrics if has_labels else partial(_class_metrics, ignore_index=self.loss_ignore_index)
        )
        if train_metrics is None:
            train_metrics = default(self.num_classes, is_train=True)
        if val_metrics is None:
            val_metrics = default(self.num_classes, is_train=False)
        self._set_metrics(train_metrics, val_metrics)

    @property
    def _loss_fn(self) -> Callable[..., Tensor]:
        """``loss_fn``, under the name that it has for subclasses in MosaicML Composer."""
        return self.loss_fn

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ``_loss_fn`` is ``loss_fn``, which may be a module."""
        super().__setattr__("loss_fn" if name == "_loss_fn" else name, value)

    def loss(self, outputs: Tensor, batch: tuple[Any, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of the outputs, given the batch's targets.

        Args:
            outputs: Scores ``(N, C, ...)``.
            batch: A pair ``(input, target)``.
            args: Passed to ``loss_fn``.
            kwargs: Passed to ``loss_fn``.

        Returns:
            A scalar.

        Raises:
            TypeError: ``batch`` is not a pair.
            ValueError: A target is a class without a score.
        """
        _, target = self._pair(batch)
        if is_one_score(outputs):
            if self.loss_fn is soft_cross_entropy:
                outputs, target = two_scores(outputs, target)
            elif takes_labels(self.loss_fn) and target.ndim == outputs.ndim - 1:
                outputs = outputs.squeeze(1)
        return compute_loss(
            self.loss_fn, outputs, target, *args, smoothing=self._label_smoothing, has_binary_default=True, **kwargs
        )

    def count_loss_terms(self, batch: tuple[Any, Tensor]) -> Tensor | None:
        """Count the targets that the loss is the mean of, if it is a cross entropy or negative log-likelihood.

        With the default loss, several processes count one target ``(N,)`` or ``(N, C)`` of each sample, as counting
        takes an exchange in each step. Pass ``loss_fn=nn.CrossEntropyLoss()`` if some of these are ignored.

        Args:
            batch: A pair ``(input, target)``.

        Returns:
            The number of class ids that are not ignored, or the sum of the weights of their classes; the number of
            rows of probabilities that are not zeros; None for samples, as with a ``loss_fn`` of your own.
        """
        target = self._pair(batch)[1]
        is_connected = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        # The processes exchange their numbers of samples in few steps only, because nearly all batches have the usual
        # number. Whether labels are ignored, they would have to exchange in each step, which takes the thread that
        # trains 0.2 ms with gloo, also if the exchange runs beside the forward and backward passes.
        is_one_per_sample = target.ndim == 1 or (target.ndim == 2 and target.is_floating_point())
        if self.loss_fn is soft_cross_entropy and is_connected and is_one_per_sample:
            return None
        return count_terms(known_cross_entropy(self.loss_fn) or self.loss_fn, target)

    def update_metric(self, batch: tuple[Any, Tensor], outputs: Tensor, metric: Metric) -> None:
        """Update a metric with one batch.

        Args:
            batch: A pair ``(input, target)``.
            outputs: Scores ``(N, C, ...)``.
            metric: Called as ``metric.update(outputs, target)``. If it has ``num_classes`` and ``target`` holds
                probabilities, it is called with the most probable classes. With one score per sample, such a metric
                and ``CrossEntropy`` are called with the scores of both classes, other metrics with ``(N,)``. If it has
                ``num_labels``, targets in floating point are rounded to 0 or 1. If
                ``loss_fn`` is a loss of logits of torch or of this library, metrics of torchmetrics that compute
                probabilities are called with these. With another ``loss_fn`` they take scores for probabilities if
                those of a batch are all between 0 and 1.

        Raises:
            TypeError: ``batch`` is not a pair.
            ValueError: The metric has another number of classes than the scores, or is one of samples with one class,
                and the targets have several labels.
        """
        _, target = self._pair(batch)
        from composer.metrics.scores import CrossEntropy  # noqa: PLC0415 (imports torchmetrics, which is imported by now)

        num_classes = getattr(metric, "num_classes", None)
        if is_one_score(outputs):
            if num_classes == 2 or isinstance(metric, CrossEntropy):
                outputs, target = two_scores(outputs, target)
            elif target.ndim == outputs.ndim - 1:
                outputs = outputs.squeeze(1)
        if num_classes is not None:
            target = class_ids(outputs, target, metric)
        elif isinstance(metric, CrossEntropy):
            check_one_label(metric, outputs, target)
        elif getattr(metric, "num_labels", None) is not None and target.is_floating_point():
            target = (target > 0.5).long()
        if takes_logits(self.loss_fn):
            outputs = to_probabilities(metric, outputs, target)
        update_metric(metric, outputs, target)


def _find_num_classes(module: nn.Module) -> int | None:
    """Return the number of scores, or ``None`` if the module does not determine it."""
    widths = [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)]
    named = getattr(module, "num_classes", None)
    candidates = set(widths[-1:]) | ({named} if isinstance(named, int) else set())
    return candidates.pop() if len(candidates) == 1 else None


def _class_metrics(num_classes: int | None, *, ignore_index: int, is_train: bool) -> Metric | dict[str, Metric]:
    if num_classes is None:
        raise ValueError(
            "num_classes cannot be inferred from the module: it has neither a num_classes nor an nn.Linear, or they "
            "differ. Pass num_classes=, or both train_metrics= and val_metrics=."
        )
    if num_classes == 1:
        raise ValueError(
            "num_classes is 1, for which accuracy and cross entropy are constant. Pass num_classes=2 if one score "
            "distinguishes two classes; or both train_metrics= and val_metrics=, [] for none."
        )
    from composer.metrics.scores import CrossEntropy, MulticlassAccuracy  # noqa: PLC0415 (imports torchmetrics)

    accuracy = MulticlassAccuracy(num_classes, ignore_index)
    return accuracy if is_train else {"MulticlassAccuracy": accuracy, "CrossEntropy": CrossEntropy(ignore_index)}


def _label_metrics(num_labels: int, *, is_train: bool) -> Metric | list[Metric]:
    from torchmetrics.classification import MultilabelAccuracy, MultilabelF1Score  # noqa: PLC0415 (takes a second)

    # Validating values would synchronise with the device at every batch; the loss checks them anyway.
    accuracy = MultilabelAccuracy(num_labels, validate_args=False)
    return accuracy if is_train else [accuracy, MultilabelF1Score(num_labels, validate_args=False)]
