"""What torchmetrics have counted so far, as plain data and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["load_metrics", "save_metrics"]


def save_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of what the metrics have counted, by name.

    Metrics of other kinds than torchmetrics' are left out.

    Example:
        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> save_metrics({"sum": metric})["sum"]["updates"]
        1
    """
    return {
        name: {
            "updates": int(metric._update_count),  # noqa: SLF001  (torchmetrics has no other way)
            "state": {key: _copied(value) for key, value in metric.metric_state.items()},
        }
        for name, metric in metrics.items()
        if hasattr(metric, "metric_state")
    }


def load_metrics(metrics: Mapping[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Let the metrics go on from what :func:`save_metrics` returned; those that are not in it stay as they are."""
    for name, metric in metrics.items():
        if name in saved:
            for key, value in saved[name]["state"].items():
                setattr(metric, key, _copied(value, device))
            metric._update_count = saved[name]["updates"]  # noqa: SLF001
            metric._computed = None  # noqa: SLF001


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if device is None else copied.to(device)
    return [_copied(item, device) for item in value] if isinstance(value, list) else value
