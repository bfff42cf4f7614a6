"""Detectors of MMDetection, version 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.models.base import wrong_batch
from composer.models.detector import DetectionModel

if TYPE_CHECKING:
    from composer.models.phase_metrics import Metrics


class MMDetModel(DetectionModel):
    """A detector of MMDetection 3 with its metrics.

    The detector is built by ``MODELS.build(config)`` of MMDetection, which this module does not import. Batches are
    those of MMDetection's loaders, ``{"inputs": images, "data_samples": samples}``. The model's ``data_preprocessor``
    normalises, pads and stacks the images. The samples have ``gt_instances`` with ``bboxes`` and ``labels``.

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
        TypeError: ``model`` is not an ``nn.Module`` with the methods ``loss`` and ``predict``.
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
        if not isinstance(model, nn.Module) or not all(
            callable(getattr(model, name, None)) for name in ("loss", "predict")
        ):
            raise TypeError(
                "model must be a detector of MMDetection 3, with the methods loss and predict, got "
                f"{type(model).__name__}. Use MODELS.build(config)."
            )
        self.model: Any = model
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
        _check_keys(batch)
        data = self._prepared(batch)
        if self.training:
            return self.model.loss(data["inputs"], data["data_samples"])
        predicted = [sample.pred_instances for sample in self.model.predict(data["inputs"], data["data_samples"])]
        return [{"boxes": _as_tensor(each.bboxes), "scores": each.scores, "labels": each.labels} for each in predicted]

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

    @property
    def loss_needs_whole_batch(self) -> bool:
        """True: the heads of MMDetection divide their losses by the positive samples of the batch."""
        return True

    def _targets(self, batch: Mapping[str, Any]) -> list[Any]:
        _check_keys(batch)
        annotated = [sample.gt_instances for sample in batch["data_samples"]]
        return [{"boxes": _as_tensor(each.bboxes), "labels": each.labels} for each in annotated]

    def _prepared(self, batch: Mapping[str, Any]) -> Any:
        preprocessor = getattr(self.model, "data_preprocessor", None)
        if preprocessor is None:
            return batch
        # Its device changes only by its own .to, which nn.Module does not call for submodules.
        device = next(self.model.parameters()).device
        if preprocessor.device != device:
            preprocessor.to(device)
        return preprocessor(dict(batch), self.training)


def _check_keys(batch: Any) -> None:
    is_mapping = isinstance(batch, Mapping)
    if not is_mapping or not {"inputs", "data_samples"} <= batch.keys():
        expected = "of MMDetection 3, dictionaries with inputs and data_samples"
        raise (ValueError if is_mapping else TypeError)(wrong_batch(batch, "MMDetModel", expected))


def _as_tensor(boxes: Any) -> Tensor:
    """Return boxes as a tensor; MMDetection has a class for boxes."""
    return boxes if isinstance(boxes, Tensor) else boxes.tensor


def _total(loss: Any) -> Tensor:
    several: list[Tensor] = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    # The mean of each level's loss, then their sum, as in MMDetection's `parse_losses`.
    return torch.stack([each.mean() for each in several]).sum()
