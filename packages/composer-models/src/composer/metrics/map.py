"""The mean average precision of a detector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.utilities.distributed import gather_all_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAP"]


class MAP(MeanAveragePrecision):
    """The mean average precision and recall of boxes, as COCO defines them, computed by pycocotools.

    It is ``torchmetrics.detection.MeanAveragePrecision`` for a trainer: all its values are scalars with names of their
    own, and processes may have seen different numbers of images. Of an image's predictions the 100 with the highest
    scores count, as in COCO, without a warning where there are more.

    Args:
        class_metrics: Whether to compute precision and recall of each class too.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
        process_group: The processes to gather over; all if None.
        dist_sync_fn: Gathers a tensor in place of torchmetrics' function; it needs equal numbers of images.
        kwargs: Handed on to ``MeanAveragePrecision``: ``box_format``, ``iou_type``, ``iou_thresholds``, ``backend``, …

    Raises:
        ModuleNotFoundError: pycocotools is not installed.

    Example:
        >>> metric = MAP()
        >>> box = torch.tensor([[10.0, 10.0, 50.0, 60.0]])
        >>> found = {"boxes": box, "scores": torch.tensor([0.9]), "labels": torch.tensor([1])}
        >>> metric.update([found], [{"boxes": box, "labels": torch.tensor([1])}])
        >>> metric.compute()["map"]
        tensor(1.)
    """

    def __init__(
        self,
        class_metrics: bool = False,
        dist_sync_on_step: bool = False,
        process_group: Any = None,
        dist_sync_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            super().__init__(
                class_metrics=class_metrics,
                dist_sync_on_step=dist_sync_on_step,
                process_group=process_group,
                dist_sync_fn=dist_sync_fn,
                **kwargs,
            )
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'MAP needs pycocotools: pip install "composer-models[detection]". A detector can be trained without, '
                "with val_metrics=[]."
            ) from error
        self.warn_on_many_detections = False

    def update(self, preds: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:
        """Add a batch.

        Args:
            preds: For each image ``boxes`` ``(n, 4)`` as x1, y1, x2, y2 in pixels, ``scores`` ``(n,)`` and ``labels``
                ``(n,)``.
            target: For each image ``boxes`` ``(m, 4)`` and ``labels`` ``(m,)``; also ``iscrowd`` and ``area``.

        Raises:
            ValueError: Something is missing, or has another shape or type.
        """
        super().update(preds, target)

    def compute(self) -> dict[str, Tensor]:
        """Return COCO's numbers by name, each a scalar; -1 where there is nothing to measure.

        ``map`` and ``mar_100`` are means over the overlaps from 0.5 to 0.95. With ``class_metrics``, class 3's are
        ``map_class_3`` and ``mar_100_class_3``.
        """
        values = super().compute()
        classes = values.pop("classes").reshape(-1).tolist()
        scalars = {name: value for name, value in values.items() if "per_class" not in name}
        if self.class_metrics:
            for name in sorted(values.keys() - scalars.keys()):
                of_classes = values[name].reshape(-1)
                scalars |= {
                    name.replace("per_class", f"class_{label}"): value
                    for label, value in zip(classes, of_classes, strict=True)
                }
        return scalars

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any = None) -> None:
        """Gather what all processes have seen, image after image.

        torchmetrics gathers tensor by tensor and would wait for ever where one process has more images than another.
        """
        if dist_sync_fn not in {None, gather_all_tensors}:
            super()._sync_dist(dist_sync_fn, process_group)
            return
        group = process_group or self.process_group
        mine = {name: [_to(item, "cpu") for item in getattr(self, name)] for name in self._reductions}
        everyones: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everyones, mine, group=group)
        for name in mine:
            setattr(self, name, [_to(item, self.device) for theirs in everyones for item in theirs[name]])


def _to(item: Any, device: torch.device | str) -> Any:
    """Move a tensor; masks are tuples of bytes and stay."""
    return item.to(device) if isinstance(item, Tensor) else item
