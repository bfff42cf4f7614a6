"""What torchmetrics have counted so far, as plain data and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["SavedMetric", "check_metrics", "load_metrics", "save_metrics"]


@attrs.frozen
class SavedMetric:
    """What one torchmetrics metric has counted.

    Args:
        updates: How many batches.
        state: Its states by name: tensors, and lists of tensors.
    """

    updates: int = attrs.field(validator=attrs.validators.ge(0))
    state: dict[str, Any]


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


def check_metrics(metrics: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return what does not fit the metrics in what :func:`save_metrics` returned."""
    return [
        f"{'.'.join(filter(None, (name, place, key)))}: must be {_kind(default)}, got {_kind(value)}."
        for name, metric in metrics.items()
        for place, part in _parts(metric).items()
        for key, value in saved.get(name, {}).get(place, {"state": {}})["state"].items()
        if (default := part._defaults.get(key)) is not None and not _fits(value, default)  # noqa: SLF001
    ]


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


def _fits(value: Any, default: Tensor | list[Any]) -> bool:
    if isinstance(default, Tensor):  # a single number may get another shape as it is counted
        return isinstance(value, Tensor) and (default.numel() == 1 or value.shape == default.shape)
    return isinstance(value, list) and all(isinstance(one, (Tensor, tuple)) for one in value)


def _kind(state: Any) -> str:
    return f"a tensor of shape {tuple(state.shape)}" if isinstance(state, Tensor) else f"a {type(state).__name__}"


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if device is None else copied.to(device)
    return [_copied(item, device) for item in value] if isinstance(value, list) else value
