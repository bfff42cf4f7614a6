"""What torchmetrics have counted so far, as plain data and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["load_metrics", "save_metrics"]


def save_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of what the metrics have counted, by name, and of those inside them by their place.

    Metrics of other kinds than torchmetrics' are left out.

    Example:
        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> save_metrics({"sum": metric})["sum"][""]["updates"]
        1
    """
    return {
        name: {
            place: {
                "updates": int(part._update_count),  # noqa: SLF001  (torchmetrics has no other way)
                "state": {key: _copied(value) for key, value in part.metric_state.items()},
            }
            for place, part in _parts(metric).items()
        }
        for name, metric in metrics.items()
    }


def load_metrics(metrics: Mapping[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Let the metrics go on from what :func:`save_metrics` returned; those that are not in it stay as they are."""
    for name, metric in metrics.items():
        for place, part in _parts(metric).items():
            counted = saved.get(name, {}).get(place)
            if counted is not None:
                for key in part.metric_state.keys() & counted["state"].keys():
                    setattr(part, key, _copied(counted["state"][key], device))
                part._update_count = counted["updates"]  # noqa: SLF001
                part._computed = None  # noqa: SLF001


def _parts(metric: Any) -> dict[str, Any]:
    """Return a metric and those that it wraps or collects, by their place in it."""
    modules = metric.named_modules() if isinstance(metric, nn.Module) else ()
    return {place: part for place, part in modules if hasattr(part, "_update_count")}


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if device is None else copied.to(device)
    return [_copied(item, device) for item in value] if isinstance(value, list) else value
