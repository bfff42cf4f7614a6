"""Detectors of MMDetection, versions 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.models.detector import DetectionModel

if TYPE_CHECKING:
    from composer.models.phase_metrics import Metrics

__all__ = ["MMDetModel"]


class MMDetModel(DetectionModel):
    """A detector of MMDetection with its metrics.

    The detector is built with MMDetection, which this module does not import: ``MODELS.build(config)`` in version 3,
    ``build_detector(config)`` in version 2. Its methods determine the version. Batches are those of MMDetection's
    loaders:

    * version 3: ``{"inputs": images, "data_samples": samples}``. The model's ``data_preprocessor`` normalises, pads and
      stacks the images. The samples have ``gt_instances`` with ``bboxes`` and ``labels``.
    * version 2: ``{"img": tensor, "img_metas": dictionaries, "gt_bboxes": tensors, "gt_labels": tensors}``, without
      data containers.

    As in MMDetection, predicted boxes have the coordinates of the original images, before resizing, and for evaluation
    the boxes of the batch must have the same coordinates.

    A detector computes its losses in the forward pass, and only in training; so there are no metrics in training, and
    no loss in evaluation. A trainer needs :func:`~composer.models.count_detection_samples` and
    :func:`~composer.models.split_detection_batch` to count and split the batches.

    Args:
        model: The detector, its weights initialised.
        val_metrics: A metric, a ``MetricCollection``, a list or a dict of metrics, each updated with
            ``(predictions, targets)``; an empty list for none. :class:`~composer.metrics.MAP` if ``None``.

    Raises:
        TypeError: ``model`` is not an ``nn.Module`` with the methods of either version.
        ModuleNotFoundError: pycocotools, which ``MAP`` needs, is not installed.

    Example:
        >>> class Detector(nn.Module):  # in place of one of MMDetection's detectors
        ...     def loss(self, inputs, data_samples):
        ...         return {"loss_cls": inputs.mean(), "loss_bbox": [inputs.sum(), inputs.sum()], "acc": inputs.max()}
        ...     def predict(self, inputs, data_samples, rescale=True):
        ...         return data_samples
        >>> model, batch = MMDetModel(Detector()), {"inputs": torch.ones(1, 3, 2, 2), "data_samples": [None]}
        >>> model.loss(model(batch), batch)
        {'loss_cls': tensor(1.), 'loss_bbox': tensor(24.)}
    """

    def __init__(self, model: nn.Module, val_metrics: Metrics | None = None) -> None:
        super().__init__()
        self._interface = _interface_of(model)
        self.model = model
        self._set_metrics(val_metrics)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Compute the losses of a batch in training, and predictions in evaluation.

        Args:
            batch: A batch of MMDetection's loader.

        Returns:
            In training a dictionary of losses; in evaluation for each image a dictionary with ``boxes`` ``(n, 4)``
            as x1, y1, x2, y2, ``scores`` ``(n,)`` and ``labels`` ``(n,)``.

        Raises:
            TypeError: ``batch`` is not a dictionary.
            ValueError: The batch lacks a part.
        """
        self._interface.check(batch)
        if self.training:
            return self._interface.losses(self.model, batch)
        return self._interface.predictions(self.model, batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the losses that the forward pass has computed: all entries with "loss" in the name, as in MMDetection.

        Args:
            outputs: The result of :meth:`forward`.
            batch: Not used.
            args: Not used.
            kwargs: Not used.

        Returns:
            Scalars by name, whose sum is minimised; a list of losses, one per level, is summed.

        Raises:
            TypeError: The outputs are predictions.
        """
        losses = super().loss(outputs, batch, *args, **kwargs)
        return {name: _total(value) for name, value in losses.items() if "loss" in name}

    def _targets(self, batch: Mapping[str, Any]) -> list[Any]:
        self._interface.check(batch)
        return self._interface.targets(batch)


class _Version3:
    def check(self, batch: Any) -> None:
        _check_keys(batch, {"inputs", "data_samples"}, 3)

    def losses(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        data = self._prepared(model, batch, training=True)
        losses: Mapping[str, Any] = model.loss(data["inputs"], data["data_samples"])
        return losses

    def predictions(self, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        data = self._prepared(model, batch, training=False)
        predicted = [sample.pred_instances for sample in model.predict(data["inputs"], data["data_samples"])]
        return [{"boxes": _as_tensor(each.bboxes), "scores": each.scores, "labels": each.labels} for each in predicted]

    def targets(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        annotated = [sample.gt_instances for sample in batch["data_samples"]]
        return [{"boxes": _as_tensor(each.bboxes), "labels": each.labels} for each in annotated]

    def _prepared(self, model: Any, batch: Mapping[str, Any], *, training: bool) -> Mapping[str, Any]:
        preprocessor = getattr(model, "data_preprocessor", None)
        if preprocessor is None:
            return batch
        # Its device changes only by its own .to, which nn.Module does not call for submodules.
        device = next(model.parameters()).device
        if preprocessor.device != device:
            preprocessor.to(device)
        prepared: Mapping[str, Any] = preprocessor(dict(batch), training)
        return prepared


class _Version2:
    def check(self, batch: Any) -> None:
        _check_keys(batch, {"img", "img_metas", "gt_bboxes", "gt_labels"}, 2)

    def losses(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        losses: Mapping[str, Any] = model(return_loss=True, **batch)
        return losses

    def predictions(self, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        images = batch["img"]
        # The outer lists are for test-time augmentation.
        results = model(return_loss=False, rescale=True, img=[images], img_metas=[batch["img_metas"]])
        return [self._prediction(result, images.device) for result in results]

    def _prediction(self, result: Any, device: torch.device) -> dict[str, Tensor]:
        """Convert an array ``(n, 5)`` of boxes and scores for each class to one prediction."""
        of_classes = result[0] if isinstance(result, tuple) else result  # the second part is for masks
        rows = [torch.as_tensor(each, dtype=torch.float32, device=device).reshape(-1, 5) for each in of_classes]
        labels = [torch.full((len(each),), label, device=device) for label, each in enumerate(rows)]
        boxes = torch.cat(rows)
        return {"boxes": boxes[:, :4], "scores": boxes[:, 4], "labels": torch.cat(labels)}

    def targets(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        pairs = zip(batch["gt_bboxes"], batch["gt_labels"], strict=True)
        return [{"boxes": boxes, "labels": labels} for boxes, labels in pairs]


def _interface_of(model: object) -> _Version3 | _Version2:
    if isinstance(model, nn.Module):
        if _offers(model, "loss", "predict"):
            return _Version3()
        if _offers(model, "forward_train", "simple_test"):
            return _Version2()
    raise TypeError(
        "model must be a detector of MMDetection, with the methods loss and predict (version 3) or forward_train and "
        f"simple_test (version 2), got {type(model).__name__}. Use MODELS.build(config) or build_detector(config)."
    )


def _offers(model: nn.Module, *names: str) -> bool:
    return all(callable(getattr(model, name, None)) for name in names)


def _check_keys(batch: Any, keys: set[str], version: int) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"MMDetModel takes batches of MMDetection {version}, dictionaries with {', '.join(sorted(keys))}, got "
            f"{type(batch).__name__}."
        )
    missing = sorted(keys - batch.keys())
    if missing:
        raise ValueError(
            f"A batch for a detector of MMDetection {version} must have {', '.join(sorted(keys))}, got "
            f"{', '.join(sorted(map(str, batch)))}: {', '.join(missing)} is missing."
        )


def _as_tensor(boxes: Any) -> Tensor:
    """Return boxes as a tensor; MMDetection has a class for boxes."""
    tensor: Tensor = boxes if isinstance(boxes, Tensor) else boxes.tensor
    return tensor


def _total(loss: Any) -> Tensor:
    several: list[Tensor] = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    # The mean of each level's loss, then their sum, as in MMDetection's `parse_losses`.
    return torch.stack([each.mean() for each in several]).sum()
