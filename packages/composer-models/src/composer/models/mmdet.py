"""Detectors of MMDetection, whichever of its two interfaces they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from composer.models.base import ComposerModel
from composer.models.detector import default_metrics, update_with_boxes
from composer.models.phase_metrics import as_collection, by_name

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer.models.phase_metrics import Metrics

__all__ = ["MMDetModel"]


class MMDetModel(ComposerModel):
    """A detector of MMDetection with its metrics.

    The detector is built with MMDetection, which this module does not import: ``MODELS.build(config)`` in version 3,
    ``build_detector(config)`` in version 2. Which of the two it is, is seen from its methods. Batches are what
    MMDetection's loaders yield:

    * version 3: ``{"inputs": images, "data_samples": samples}``. They go through the model's own ``data_preprocessor``,
      which normalises, pads and stacks the images. The samples bring ``gt_instances`` with ``bboxes`` and ``labels``.
    * version 2: ``{"img": tensor, "img_metas": dictionaries, "gt_bboxes": tensors, "gt_labels": tensors}``, without
      data containers.

    As in MMDetection, boxes are predicted in the coordinates of the original images, before they were resized, and the
    batch's boxes have to be in the same for evaluation.

    A detector computes its losses in its forward pass, and only while training; so there is no metric while training,
    and no loss in evaluation. A trainer has to be told how to count and split the batches, with
    :func:`~composer.models.count_detection_samples` and :func:`~composer.models.split_detection_batch`.

    Args:
        model: The detector, its weights initialised.
        val_metrics: A metric, a ``MetricCollection``, a list or a dict of metrics, each updated with
            ``(predictions, targets)``; an empty list for none. :class:`~composer.metrics.MAP` if ``None``.

    Raises:
        TypeError: ``model`` is no ``nn.Module`` with the methods of either version.
        ModuleNotFoundError: pycocotools, which ``MAP`` needs, is not installed.

    Example:
        >>> class Detector(nn.Module):  # stands for one of MMDetection's
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
        self.val_metrics = as_collection(default_metrics() if val_metrics is None else val_metrics, "val_metrics")

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Compute the losses of a batch while training, and predictions in evaluation.

        Args:
            batch: What MMDetection's loader yields.

        Returns:
            While training a dictionary of losses; in evaluation for each image a dictionary with ``boxes`` ``(n, 4)``
            as x1, y1, x2, y2, ``scores`` ``(n,)`` and ``labels`` ``(n,)``.

        Raises:
            TypeError: ``batch`` is no dictionary.
            ValueError: The batch lacks a part.
        """
        self._interface.check(batch)
        if self.training:
            return self._interface.losses(self.model, batch)
        return self._interface.predictions(self.model, batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the losses that the forward pass has computed.

        Args:
            outputs: What :meth:`forward` returned.
            batch: Not looked at.
            args: Not looked at.
            kwargs: Not looked at.

        Returns:
            Scalars by name, whose sum is minimised: all whose name has "loss" in it, as in MMDetection; of a list, one
            a level, the sum.

        Raises:
            TypeError: The outputs are predictions.
        """
        del batch, args, kwargs
        if not isinstance(outputs, Mapping):
            raise TypeError(
                "A detector computes its losses in the forward pass while training, and in evaluation only "
                f"predictions. Call model.train() before, or ask for no loss. The outputs are {type(outputs).__name__}."
            )
        return {name: _total(value) for name, value in outputs.items() if "loss" in name}

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Name the metrics of a phase; there are none while training, as there are no predictions.

        Args:
            is_train: Whether they are for training batches or for evaluation.

        Returns:
            Metrics by the name under which they are logged.
        """
        return {} if is_train else by_name(self.val_metrics, "val_metrics")

    def update_metric(self, batch: Mapping[str, Any], outputs: Any, metric: Metric) -> None:
        """Let a metric see one batch.

        Args:
            batch: What MMDetection's loader yields.
            outputs: Predictions, one dictionary an image.
            metric: Called as ``metric.update(predictions, targets)``.

        Raises:
            TypeError: The outputs are losses, or the metric takes no boxes.
            ValueError: The batch lacks a part.
        """
        self._interface.check(batch)
        update_with_boxes(metric, outputs, self._interface.targets(batch))


class _Interface(Protocol):
    """What a version of MMDetection calls what, and how its results look."""

    def check(self, batch: Any) -> None: ...
    def losses(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def predictions(self, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]: ...
    def targets(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]: ...


class _Version3:
    def check(self, batch: Any) -> None:
        _check_keys(batch, {"inputs", "data_samples"}, 3)

    def losses(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        data = self._prepared(model, batch, training=True)
        losses: Mapping[str, Any] = model.loss(data["inputs"], data["data_samples"])
        return losses

    def predictions(self, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        data = self._prepared(model, batch, training=False)
        found = [sample.pred_instances for sample in model.predict(data["inputs"], data["data_samples"])]
        return [{"boxes": _plain(one.bboxes), "scores": one.scores, "labels": one.labels} for one in found]

    def targets(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        given = [sample.gt_instances for sample in batch["data_samples"]]
        return [{"boxes": _plain(one.bboxes), "labels": one.labels} for one in given]

    def _prepared(self, model: Any, batch: Mapping[str, Any], *, training: bool) -> Mapping[str, Any]:
        preprocessor = getattr(model, "data_preprocessor", None)
        if preprocessor is None:
            return batch
        # It learns of a new device only by its own .to, which nn.Module does not call for the parts of a model.
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
        # The outer lists are for one image seen in several ways.
        results = model(return_loss=False, rescale=True, img=[images], img_metas=[batch["img_metas"]])
        return [self._prediction(result, images.device) for result in results]

    def _prediction(self, result: Any, device: torch.device) -> dict[str, Tensor]:
        """Turn an array ``(n, 5)`` of boxes and scores for each class into one prediction."""
        of_classes = result[0] if isinstance(result, tuple) else result  # the second is for masks
        found = [torch.as_tensor(one, dtype=torch.float32, device=device).reshape(-1, 5) for one in of_classes]
        labels = [torch.full((len(one),), label, device=device) for label, one in enumerate(found)]
        boxes = torch.cat(found)
        return {"boxes": boxes[:, :4], "scores": boxes[:, 4], "labels": torch.cat(labels)}

    def targets(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        pairs = zip(batch["gt_bboxes"], batch["gt_labels"], strict=True)
        return [{"boxes": boxes, "labels": labels} for boxes, labels in pairs]


def _interface_of(model: object) -> _Interface:
    if isinstance(model, nn.Module):
        if _offers(model, "loss", "predict"):
            return _Version3()
        if _offers(model, "forward_train", "simple_test"):
            return _Version2()
    raise TypeError(
        "model must be a detector of MMDetection, with the methods loss and predict (version 3) or forward_train and "
        f"simple_test (version 2), got {type(model).__name__}. MODELS.build(config) or build_detector(config) makes it."
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


def _plain(boxes: Any) -> Tensor:
    """Return the boxes' tensor, also of MMDetection's own class of boxes."""
    tensor: Tensor = boxes if isinstance(boxes, Tensor) else boxes.tensor
    return tensor


def _total(loss: Any) -> Tensor:
    several: list[Tensor] = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    return torch.stack([one.mean() for one in several]).sum()
