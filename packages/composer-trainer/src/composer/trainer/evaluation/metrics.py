"""Metrics: update, compute and log them, and save and restore their states.

The training metrics are in ``state.train_metrics``, and those of each evaluator, which are copies, in
``state.eval_metrics``. The functions use the interface of torchmetrics, and what it wraps or collects is saved by path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from composer.core import Batch, Logger, State
from composer.core.saving.codec import Record
from composer.distributed import all_gather_object, get_world_size
from composer.distributed.environment import data_group


@runtime_checkable
class SupportsMetrics(Protocol):
    """The methods that evaluation requires of a model."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs for the metrics; ``outputs`` if they are already computed."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics by name."""

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> Any:
        """Add a batch to a metric; what it returns is ``state.metric_outputs``."""


def metrics_of(model: SupportsMetrics, *, is_train: bool) -> Mapping[str, Any]:
    """Return the metrics of a model by name.

    Raises:
        TypeError: ``get_metrics`` returns no dictionary.
    """
    metrics = model.get_metrics(is_train=is_train)
    if not isinstance(metrics, (Mapping, nn.ModuleDict)):  # a MetricCollection is a ModuleDict
        raise TypeError(
            f"{type(model).__name__}.get_metrics must return a dictionary of metrics by name, such as "
            f"{{'accuracy': MulticlassAccuracy(10)}}, got {metrics!r}."
        )
    return metrics


def reduce_over_data(metrics: Iterable[Any]) -> None:
    """Let metrics be reduced over processes with different samples; those of a tensor-parallel group have the same."""
    if get_world_size() == 1:
        return
    group = data_group()
    for part in (part for metric in metrics for part in parts_of_metric(metric).values()):
        part.process_group = group or part.process_group
        if part.dist_sync_fn is None and _lists_of(part, reduced=True):
            part.dist_sync_fn = gather_state


def gather_state(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all processes, of which some may be empty; in torchmetrics these abort the processes.

    There, the list of a process without samples is an empty tensor of another type and number of dimensions.
    """
    kinds = all_gather_object((state.dtype, state.shape), group)
    dtype, filled = max(kinds, key=lambda kind: kind[1].numel())
    padded = torch.zeros(filled.numel(), dtype=dtype, device=state.device)
    padded[: state.numel()] = state.flatten()
    gathered = [torch.empty_like(padded) for _ in kinds]
    if filled.numel():
        torch.distributed.all_gather(gathered, padded, group)
    shapes = [shape if shape.numel() else (0, *filled[1:]) for _, shape in kinds]
    return [one[: math.prod(shape)].reshape(shape) for one, shape in zip(gathered, shapes, strict=True)]


def _lists_of(part: Any, *, reduced: bool) -> dict[str, int]:
    """Return the lengths of a metric's states that are lists, by name: those with a reduction, or those without."""
    lists = {key for key, default in part._defaults.items() if isinstance(default, list)}  # noqa: SLF001
    return {key: len(getattr(part, key)) for key in lists if (part._reductions[key] is not None) == reduced}  # noqa: SLF001


def _check_lists(name: str, part: Any) -> None:
    """Raise a ValueError in all processes if they have different numbers of tensors that are gathered one by one."""
    lengths = _lists_of(part, reduced=False)
    if lengths and part._sync_dist.__module__.startswith("torchmetrics."):  # noqa: SLF001  (others gather them at once)
        of_all = all_gather_object(lengths, part.process_group)
        if any(other != lengths for other in of_all):
            raise ValueError(
                f"The metric {name!r} ({type(part).__name__}) has lists without a reduction, which torchmetrics "
                f"gathers if all processes have as many elements, got {of_all}. Evaluate in one process, on samples "
                "divisible by processes times batch size, or by another metric, as composer.metrics.MAP for boxes."
            )


def update_train_metrics(state: State, batch: Batch) -> None:
    """Update the training metrics with the state's outputs for a batch."""
    with torch.no_grad():
        outputs = state.model.eval_forward(batch, state.outputs)
        for metric in state.train_metrics.values():
            state.model.update_metric(batch, outputs, metric)


def reset_metrics(metrics: Mapping[str, Any]) -> None:
    """Reset metrics."""
    for metric in metrics.values():
        metric.reset()


def log_train_metrics(state: State, logger: Logger) -> None:
    """Compute and log the training metrics."""
    state.train_metric_values = compute_metrics(state.train_metrics)
    log_values(logger, str(state.dataloader_label), state.train_metric_values)


def log_values(logger: Logger, label: str, values: Mapping[str, Any]) -> None:
    """Log computed metrics; a matrix or a long vector as a table and not as a series for each element."""
    named = {f"metrics/{label}/{name}": value for name, value in values.items()}
    tables = {name: value for name, value in named.items() if is_matrix(value)}
    logger.log_metrics({name: value for name, value in named.items() if name not in tables})
    for name, matrix in tables.items():
        columns = list(map(str, range(matrix.shape[-1])))
        logger.log_table(columns, matrix.reshape(-1, matrix.shape[-1]).tolist(), name)


def is_matrix(value: Any) -> bool:
    """Return whether a computed metric has more than one dimension and element, or more than 20 elements."""
    return isinstance(value, Tensor) and value.numel() > (1 if value.ndim > 1 else 20)


def compute_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the computed values by name; of a metric that returns several, ``name/part``, and ``name`` for ``""``.

    Raises:
        ValueError: Processes have different numbers of elements in lists without a reduction.
    """
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        for part in parts_of_metric(metric).values() if get_world_size() > 1 else ():
            _check_lists(name, part)
        value = metric.compute()
        parts = value if isinstance(value, Mapping) else {"": value}
        values |= {f"{name}/{part}".removesuffix("/"): one for part, one in parts.items()}
    return values


@attrs.frozen
class SavedMetric(Record):
    """The saved state of one metric of torchmetrics.

    Args:
        updates: The number of its updates.
        state: Its states by name: tensors, and lists of tensors.
    """

    updates: int = attrs.field(validator=attrs.validators.ge(0))
    state: dict[str, Any]


SavedMetrics = dict[str, dict[str, SavedMetric]]


def save_metrics(metrics: Mapping[str, Any]) -> SavedMetrics:
    """Return copies of the metrics' states by name, and by the path of each metric that they contain.

    Metrics that are not from torchmetrics are skipped.

    Example:
        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> save_metrics({"sum": metric})["sum"][""].updates
        1
    """
    return {
        name: {
            path: SavedMetric(
                int(part._update_count),  # noqa: SLF001  (torchmetrics has no other way)
                tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), part.metric_state),
            )
            for path, part in parts_of_metric(metric).items()
        }
        for name, metric in metrics.items()
    }


def check_metrics(metrics: Mapping[str, Any], saved: SavedMetrics) -> list[str]:
    """Return the problems of states that :func:`save_metrics` returned, if they do not fit the metrics."""
    return [
        f"{'.'.join(filter(None, (name, path, key)))}: must be {_kind(default)}, got {_kind(value)}."
        for name, metric in metrics.items()
        for path, part in parts_of_metric(metric).items()
        if (counted := saved.get(name, {}).get(path)) is not None
        for key, value in counted.state.items()
        if (default := part._defaults.get(key)) is not None and not _fits(value, default)  # noqa: SLF001
    ]


def load_metrics(metrics: Mapping[str, Any], saved: SavedMetrics, device: torch.device) -> None:
    """Restore states that :func:`save_metrics` returned; metrics without a saved state do not change."""
    for name, metric in metrics.items():
        for path, part in parts_of_metric(metric).items():
            counted = saved.get(name, {}).get(path)
            if counted is not None:
                state = tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), counted.state)
                for key in part.metric_state.keys() & state.keys():
                    setattr(part, key, state[key])
                part._update_count = counted.updates  # noqa: SLF001
                part._computed = None  # noqa: SLF001


def parts_of_metric(metric: Any) -> dict[str, Any]:
    """Return a metric and those that it wraps or collects, by their path."""
    modules = metric.named_modules() if isinstance(metric, nn.Module) else ()
    return {path: part for path, part in modules if hasattr(part, "_update_count")}


def _fits(value: Any, default: Tensor | list[Any]) -> bool:
    if isinstance(default, Tensor):  # the shape of a single number may change with its updates
        return isinstance(value, Tensor) and (default.numel() == 1 or value.shape == default.shape)
    return isinstance(value, list) and all(isinstance(one, (Tensor, tuple)) for one in value)


def _kind(state: Any) -> str:
    return f"a tensor of shape {tuple(state.shape)}" if isinstance(state, Tensor) else f"a {type(state).__name__}"
