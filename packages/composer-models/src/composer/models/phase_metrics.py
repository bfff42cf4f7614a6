"""The metrics of training and of evaluation, in whatever form they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    Metrics: TypeAlias = "Metric | MetricCollection | Sequence[Metric] | Mapping[str, Metric]"

__all__ = ["as_collection", "by_name"]


def as_collection(metrics: Metrics | nn.ModuleDict, name: str) -> MetricCollection | nn.ModuleDict:
    """Return the metrics as one module, which moves to a device together with the model.

    Without any, torchmetrics is not imported for it: that takes a second, and 137 MiB where torchvision is there.

    Args:
        metrics: A metric, a ``MetricCollection``, or a list or dictionary of metrics; may be empty.
        name: What the argument is called.

    Raises:
        TypeError: There is something else in it.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> list(as_collection([MeanMetric()], "val_metrics"))
        ['MeanMetric']
    """
    if isinstance(metrics, (list, tuple, dict, nn.ModuleDict)) and not metrics:  # the last is what this returns
        return nn.ModuleDict()
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415 (takes a second)

    if isinstance(metrics, MetricCollection):
        return metrics
    several = [metrics] if isinstance(metrics, Metric) else metrics
    found = list(several.values()) if isinstance(several, Mapping) else several
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, (Metric, MetricCollection)) for one in found):
        got = [type(one).__name__ for one in found] if isinstance(found, (list, tuple)) else type(metrics).__name__
        raise TypeError(
            f"{name} must be a torchmetrics Metric, a MetricCollection, or a list or dict of metrics, got {got}."
        )
    # Groups share state when updated together; a trainer updates each metric by itself.
    return MetricCollection(dict(several) if isinstance(several, Mapping) else list(found), compute_groups=False)


def by_name(metrics: object, name: str) -> dict[str, Metric]:
    """Return the metrics by the names under which they are logged.

    Args:
        metrics: What :func:`as_collection` returned, or what the attribute has been set to since.
        name: The attribute's name.

    Raises:
        TypeError: It is neither a metric nor a ``MetricCollection``.
    """
    if isinstance(metrics, nn.ModuleDict) and not metrics:
        return {}
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415 (takes a second)

    if isinstance(metrics, Metric):
        return {type(metrics).__name__: metrics}
    if isinstance(metrics, MetricCollection):
        return dict(metrics.items())
    raise TypeError(
        f"{name} must be a torchmetrics Metric or MetricCollection, got {type(metrics).__name__}. "
        f"Set it to MetricCollection(...)."
    )
