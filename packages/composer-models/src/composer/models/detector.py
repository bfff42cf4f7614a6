"""Object detection: models, and functions for their batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.functional.checks import check_modules, check_sizes
from composer.functional.nested import rebuild
from composer.models.base import ComposerModel, pair_of
from composer.models.phase_metrics import as_collection, by_name

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer.models.phase_metrics import Metrics


class DetectionModel(ComposerModel):
    """Base of models that compute losses in the forward pass in training, and predictions in evaluation."""

    def _set_metrics(self, val_metrics: Metrics | None) -> None:
        if val_metrics is None:
            from composer.metrics import MAP  # noqa: PLC0415 (imports torchmetrics)

            val_metrics = MAP()
        self.val_metrics = as_collection(val_metrics, "val_metrics")

    @abstractmethod
    def _targets(self, batch: Any) -> list[Any]:
        """Return the targets of a batch, one dictionary per image."""

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the losses that the forward pass has computed.

        Args:
            outputs: The result of :meth:`forward`.
            batch: Not used.
            args: Not used.
            kwargs: Not used.

        Returns:
            Scalars by name, whose sum is minimised.

        Raises:
            TypeError: The outputs are predictions.
        """
        if not isinstance(outputs, Mapping):
            raise TypeError(
                "A detector computes its losses in the forward pass in training, and in evaluation only predictions. "
                f"Call model.train() before the forward pass. The outputs are {type(outputs).__name__}."
            )
        return dict(outputs)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics of a phase; none in training, where there are no predictions.

        Args:
            is_train: Whether the metrics are for training or for evaluation.

        Returns:
            Metrics by the name under which they are logged.
        """
        return {} if is_train else by_name(self.val_metrics, "val_metrics")

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Update a metric with one batch.

        Args:
            batch: A batch, see :meth:`forward`.
            outputs: Predictions, one dictionary per image.
            metric: Called as ``metric.update(predictions, targets)``.

        Raises:
            TypeError: The outputs are losses, or the metric takes no boxes.
            ValueError: The batch lacks a part.
        """
        targets = self._targets(batch)
        if isinstance(outputs, Mapping):
            raise TypeError(
                "Metrics of a detector need predictions, got losses: call model.eval() before "
                "model.eval_forward(batch)."
            )
        try:
            metric.update(outputs, targets)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"{type(metric).__name__} cannot be updated with lists of boxes ({error}). "
                "For a detector use composer.metrics.MAP or another metric of torchmetrics.detection."
            ) from error


class ComposerDetector(DetectionModel):
    """A module with the interface of torchvision's detectors, with metrics.

    Batches are pairs ``(images, targets)``: a list of images ``(3, H, W)`` in ``[0, 1]``, which may differ in size, and
    for each a dictionary with ``boxes`` ``(n, 4)`` as x1, y1, x2, y2 in pixels, and ``labels`` ``(n,)``; with ``masks``
    or ``keypoints`` if the module learns those. :func:`collate_detection` or ``tuple(zip(*samples))`` creates such
    batches, which a trainer counts and splits by the key ``boxes``. An image without objects has boxes ``(0, 4)``
    or ``(0,)``.

    The module computes its losses in the forward pass, and only in training: then the outputs are a dictionary of
    losses, which ``loss()`` returns. In evaluation the outputs are predictions. So there are no metrics in training,
    and no loss in evaluation.

    Args:
        module: Called as ``module(images, targets)`` in training and ``module(images)`` in evaluation.
        val_metrics: A metric, a ``MetricCollection``, a list or a dict of metrics, each updated with
            ``(predictions, targets)``; an empty list for none. :class:`~composer.metrics.MAP` if ``None``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or the metrics contain another type.
        ModuleNotFoundError: pycocotools, which ``MAP`` needs, is not installed.

    Example:
        >>> import torch, torchvision
        >>> small = {"weights_backbone": None, "num_classes": 2, "min_size": 64, "max_size": 64}
        >>> model = ComposerDetector(torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(**small))
        >>> target = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 24.0]]), "labels": torch.tensor([1])}
        >>> batch = [torch.rand(3, 64, 64)], [target]
        >>> sorted(model.loss(model(batch), batch))
        ['loss_box_reg', 'loss_classifier', 'loss_objectness', 'loss_rpn_box_reg']
        >>> sorted(model.eval()(batch)[0])
        ['boxes', 'labels', 'scores']
    """

    def __init__(self, module: nn.Module, val_metrics: Metrics | None = None) -> None:
        super().__init__()
        check_modules(module=module)
        self.module = module
        self._set_metrics(val_metrics)

    def forward(self, batch: tuple[Sequence[Tensor], Sequence[Mapping[str, Tensor]]] | Sequence[Tensor]) -> Any:
        """Compute the losses of a batch in training, and predictions in evaluation.

        Args:
            batch: A pair ``(images, targets)``; for predictions also the images alone, or ``(images,)``.

        Returns:
            In training a dictionary of scalars; in evaluation for each image a dictionary with ``boxes``,
            ``scores`` and ``labels``.

        Raises:
            TypeError: ``batch`` is not a pair of lists, or boxes or labels are no tensors.
            ValueError: The number of targets differs from that of images, a target lacks boxes or labels or has others
                than ``(n, 4)`` and integers, or a label is out of range.
        """
        if not self.training and (images := _images_alone(batch)) is not None:
            return self.module(images)
        images, targets = _images_and_targets(batch)
        if not self.training:
            return self.module(images)
        try:
            return self.module(images, targets)
        except IndexError as error:
            raise ValueError(
                f"A label does not fit the detector: {error} Its num_classes must be greater than every label; in "
                "most of torchvision's detectors class 0 is the background."
            ) from error

    def count_loss_terms(self, batch: tuple[Sequence[Tensor], Sequence[Mapping[str, Tensor]]]) -> Tensor | None:
        """Count the objects of a batch, if the losses are divided by their number and not by that of the images.

        Args:
            batch: A pair ``(images, targets)``.

        Returns:
            The number of objects for SSD and FCOS; None for other detectors. These two divide by the places that are
            assigned to objects, so that the losses of microbatches add up to that of the batch nearly, not exactly.
        """
        if not self._is_one_of("SSD", "FCOS"):
            return None
        boxes = [target["boxes"] for target in self._targets(batch)]
        return torch.full((), sum(map(len, boxes)), device=boxes[0].device)

    @property
    def loss_needs_whole_batch(self) -> bool:
        """Whether losses are divided by a number of the batch that only the forward pass finds.

        So are those of SSD and FCOS, and the losses of masks and keypoints.
        """
        return self._is_one_of("SSD", "FCOS", "MaskRCNN", "KeypointRCNN")

    def _is_one_of(self, *names: str) -> bool:
        return any(cls.__name__ in names for cls in type(self.module).__mro__)

    def _targets(self, batch: Any) -> list[Any]:
        return list(_images_and_targets(batch)[1])


def collate_detection(samples: Sequence[tuple[Any, ...]]) -> tuple[list[Any], ...]:
    """Collate samples of different sizes: ``DataLoader(dataset, collate_fn=collate_detection)``.

    Args:
        samples: Pairs ``(image, target)``.

    Returns:
        A list of images and a list of targets.

    Example:
        >>> collate_detection([("image 0", {"boxes": 0}), ("image 1", {"boxes": 1})])
        (['image 0', 'image 1'], [{'boxes': 0}, {'boxes': 1}])
    """
    return tuple(list(parts) for parts in zip(*samples, strict=True))


def count_detection_samples(batch: Any) -> int:
    """Return the number of images: ``DataSpec(loader, get_num_samples_in_batch=count_detection_samples)``.

    Args:
        batch: A tuple, list or dictionary of parts with one item per image, such as ``(images, targets)`` or
            ``{"inputs": …, "data_samples": …}``; or the images alone.

    Raises:
        TypeError: ``batch`` is of another type.
        ValueError: The parts differ in length.

    Example:
        >>> import torch
        >>> count_detection_samples(([torch.rand(3, 8, 8), torch.rand(3, 9, 9)], [{}, {}]))
        2
    """
    images = _images_alone(batch)
    if images is not None:
        return len(images)
    lengths = {len(part) for part in _parts(batch)}
    if len(lengths) != 1:
        raise ValueError(f"Every part of a batch must have one item per image, got lengths {sorted(lengths)}.")
    return lengths.pop()


def split_detection_batch(batch: Any, microbatch_size: int) -> list[Any]:
    """Split a batch image by image: ``DataSpec(loader, split_batch=split_detection_batch)``.

    Args:
        batch: As for :func:`count_detection_samples`.
        microbatch_size: The number of images in a part; the last part may have fewer.

    Returns:
        The parts, each with the structure of the batch.

    Example:
        >>> split_detection_batch((["a", "b", "c"], [0, 1, 2]), 2)
        [(['a', 'b'], [0, 1]), (['c'], [2])]
    """
    check_sizes(microbatch_size=microbatch_size)
    starts = range(0, count_detection_samples(batch), microbatch_size)
    return [rebuild(batch, [part[start : start + microbatch_size] for part in _parts(batch)]) for start in starts]


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (tuple, list)):
        return list(batch)
    raise TypeError(f"A batch for detection must be a tuple, list or dictionary of parts, got {type(batch).__name__}.")


def _images_alone(batch: Any) -> Any:
    """Return the images of a batch without targets: a tensor, a list of tensors, or one of these in a tuple or list."""
    if isinstance(batch, (tuple, list)) and len(batch) == 1 and not _is_image(batch[0]):
        batch = batch[0]
    is_list = isinstance(batch, (tuple, list)) and all(map(_is_image, batch))
    return batch if is_list or (isinstance(batch, Tensor) and batch.ndim == 4) else None


def _is_image(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 3


def _images_and_targets(batch: Any) -> tuple[Any, Any]:
    """Check a batch and return its parts."""
    remedy = "DataLoader(collate_fn=collate_detection) creates both."
    images, targets = pair_of(batch, "ComposerDetector", "(images, targets)", remedy)
    if not isinstance(images, (tuple, list)) and not (isinstance(images, Tensor) and images.ndim == 4):
        raise TypeError(f"Images must be a list of tensors (3, H, W), got {type(images).__name__}. {remedy}")
    if not isinstance(targets, (tuple, list)) or len(targets) != len(images):
        got = f"{len(targets)}" if isinstance(targets, (tuple, list)) else type(targets).__name__
        raise ValueError(f"There must be a list of targets, one for each of the {len(images)} images, got {got}.")
    for place, target in enumerate(targets):
        if not isinstance(target, Mapping) or not {"boxes", "labels"} <= target.keys():
            got = f"the keys {sorted(target)}" if isinstance(target, Mapping) else type(target).__name__
            raise ValueError(f"Every target must be a dictionary with 'boxes' (n, 4) and 'labels' (n,), got {got}.")
        for name, part in [(name, target[name]) for name in ("boxes", "labels")]:
            if not isinstance(part, Tensor):
                raise TypeError(f"{name!r} must be tensors, got {type(part).__name__} for image {place}.")
    targets = [target if len(target["boxes"]) else _without_objects(target) for target in targets]
    for place, target in enumerate(targets):
        boxes, labels = target["boxes"], target["labels"]
        if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.is_floating_point():
            raise ValueError(
                "Every target must have 'boxes' (n, 4) and 'labels' (n,) of integers; that of the image "
                f"{place} has boxes {tuple(boxes.shape)} and labels {tuple(labels.shape)} of {labels.dtype}."
            )
    return images, targets


def _without_objects(target: Any) -> dict[str, Any]:
    """Return the target of an image without objects, whose ``torch.tensor([])`` has another shape or dtype."""
    return {**target, "boxes": target["boxes"].reshape(0, 4), "labels": target["labels"].long()}
