"""The mean average precision of a detector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.utilities.distributed import gather_all_tensors


class MAP(MeanAveragePrecision):
    """The mean average precision and recall of boxes, as COCO defines them, computed by pycocotools.

    It is ``torchmetrics.detection.MeanAveragePrecision`` for a trainer: the values of each class also have names of
    their own, and processes may have different numbers of images. The 100 predictions with the highest scores of an
    image count, as in COCO, without a warning if there are more.

    Args:
        class_metrics: Whether to also compute precision and recall of each class.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
        process_group: The process group to gather over; all processes if None.
        dist_sync_fn: Replaces torchmetrics' function to gather a tensor; requires equal numbers of images.
        kwargs: Passed to ``MeanAveragePrecision``: ``box_format``, ``iou_type``, ``iou_thresholds``, ``backend``, …

    Raises:
        ModuleNotFoundError: pycocotools is not installed.

    Example:
        >>> metric = MAP()
        >>> box = torch.tensor([[10.0, 10.0, 50.0, 60.0]])
        >>> prediction = {"boxes": box, "scores": torch.tensor([0.9]), "labels": torch.tensor([1])}
        >>> metric.update([prediction], [{"boxes": box, "labels": torch.tensor([1])}])
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
            ValueError: An entry is missing, or has another shape or type.
        """
        super().update(preds, target)

    def compute(self) -> dict[str, Tensor]:
        """Return COCO's numbers by name; -1 where there is no object to measure.

        ``map`` and ``mar_100`` are means over the overlaps from 0.5 to 0.95. ``map_per_class`` and
        ``mar_100_per_class`` are -1, or with ``class_metrics`` one number for each class; then class 3's are also
        ``map_class_3`` and ``mar_100_class_3``.
        """
        values: dict[str, Tensor] = super().compute()
        classes = values.pop("classes").reshape(-1).tolist()
        if self.class_metrics:
            for name in [name for name in values if "per_class" in name]:  # none without any image
                named = zip(classes, values[name].reshape(-1), strict=True)
                values |= {name.replace("per_class", f"class_{label}"): value for label, value in named}
        return values

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any = None) -> None:
        """Gather the images of all processes.

        torchmetrics gathers tensor by tensor and would deadlock if processes have different numbers of images.
        """
        if dist_sync_fn not in {None, gather_all_tensors}:
            super()._sync_dist(dist_sync_fn, process_group)
            return
        group = process_group or self.process_group
        # On the CPU, because objects are pickled, and unpickled on a device of the sender's index.
        state = {name: [_to(item, "cpu") for item in getattr(self, name)] for name in self._reductions}
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, state, group=group)
        for name in state:
            setattr(self, name, [_to(item, self.device) for states in gathered for item in states[name]])


def _to(item: Any, device: torch.device | str) -> Any:
    """Move a tensor to a device; masks are tuples of bytes and do not move."""
    return item.to(device) if isinstance(item, Tensor) else item
