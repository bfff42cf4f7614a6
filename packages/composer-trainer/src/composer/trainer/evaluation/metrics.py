"""Training metrics: update, compute and log them, and save and restore their states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from composer.distributed.collectives import data_group
from composer.distributed.environment import get_data_rank, get_data_world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from composer.core import Batch, Logger, State

__all__ = [
    "SavedMetric",
    "SupportsMetrics",
    "check_metrics",
    "compute_metrics",
    "load_metrics",
    "log_train_metrics",
    "merge_metrics",
    "metrics_of",
    "reduce_over_data",
    "save_metrics",
    "update_train_metrics",
]


@runtime_checkable
class SupportsMetrics(Protocol):
    """The methods that evaluation requires of a model."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs for the metrics; ``outputs`` if they are already computed."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics by name."""

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric."""


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
    group = data_group()
    if group is not None:
        for metric in metrics:
            for part in _parts(metric).values():
                part.process_group = group


def update_train_metrics(state: State, batch: Batch) -> None:
    """Update the training metrics with the state's outputs for a batch."""
    with torch.no_grad():
        outputs = state.model.eval_forward(batch, state.outputs)
        for metric in state.train_metrics.values():
            state.model.update_metric(batch, outputs, metric)


def log_train_metrics(state: State, logger: Logger) -> None:
    """Compute and log the training metrics."""
    state.train_metric_values = compute_metrics(state.train_metrics)
    logger.log_metrics(
        {f"metrics/{state.dataloader_label}/{name}": value for name, value in state.train_metric_values.items()}
    )


def compute_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the computed values by name; a metric that returns several values has ``name/part`` for each."""
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        values |= (
            {f"{name}/{part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return values


@attrs.frozen
class SavedMetric:
    """The saved state of one metric of torchmetrics.

    Args:
        updates: The number of its updates.
        state: Its states by name: tensors, and lists of tensors.
    """

    updates: int = attrs.field(validator=attrs.validators.ge(0))
    state: dict[str, Any]


def save_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the metrics' states by name, and by the path of each metric that they contain.

    Metrics that are not from torchmetrics are skipped.

    Example:
        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> save_metrics({"sum": metric})["sum"][""]["updates"]
        1
    """
    return {
        name: {
            path: {
                "updates": int(part._update_count),  # noqa: SLF001  (torchmetrics has no other way)
                "state": tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), part.metric_state),
            }
            for path, part in _parts(metric).items()
        }
        for name, metric in metrics.items()
    }


def check_metrics(metrics: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return the problems of states that :func:`save_metrics` returned, if they do not fit the metrics."""
    return [
        f"{'.'.join(filter(None, (name, path, key)))}: must be {_kind(default)}, got {_kind(value)}."
        for name, metric in metrics.items()
        for path, part in _parts(metric).items()
        for key, value in saved.get(name, {}).get(path, {"state": {}})["state"].items()
        if (default := part._defaults.get(key)) is not None and not _fits(value, default)  # noqa: SLF001
    ]


def load_metrics(metrics: Mapping[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Restore states that :func:`save_metrics` returned; metrics without a saved state do not change."""
    for name, metric in metrics.items():
        for path, part in _parts(metric).items():
            counted = saved.get(name, {}).get(path)
            if counted is not None:
                state = tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), counted["state"])
                for key in part.metric_state.keys() & state.keys():
                    setattr(part, key, state[key])
                part._update_count = counted["updates"]  # noqa: SLF001
                part._computed = None  # noqa: SLF001


def merge_metrics(
    metrics: Mapping[str, Any], saved: Sequence[Mapping[str, Any]], *, is_first: bool
) -> dict[str, dict[str, Any]]:
    """Return the states of metrics for another number of processes, which together contain all counted samples.

    The reductions of torchmetrics over the new processes return the same values as over the former ones. Totals and
    concatenations are in the first process, and the others begin with none; maxima and means are in all.
    Lists and tensors without a reduction are distributed. A metric whose states cannot be divided in that way is reset,
    with a warning: a list without a reduction must have the same number of elements in all processes, and tensors
    without one are merged for fewer processes only if they are those of PearsonCorrCoef.

    Args:
        metrics: The metrics by name.
        saved: What :func:`save_metrics` returned in each process with other samples, in the order of their ranks.
        is_first: Whether this is the first process, which warns.

    Example:
        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> merged = merge_metrics({"sum": metric}, [save_metrics({"sum": metric})] * 2, is_first=True)
        >>> merged["sum"][""]["state"]["sum_value"]
        tensor(6.)
    """
    rank, world_size = get_data_rank(), get_data_world_size()
    merged: dict[str, dict[str, Any]] = {}
    for name, metric in metrics.items():
        for path, part in _parts(metric).items():
            records = [of_rank[name][path] for of_rank in saved if path in of_rank.get(name, {})]
            if not records:
                continue
            state, problem = _share(part, [record["state"] for record in records], rank, world_size)
            updates = sum(record["updates"] for record in records)
            if problem:
                state, updates = dict(part._defaults), 0  # noqa: SLF001
                if is_first:
                    called = ".".join(filter(None, (name, path)))
                    warnings.warn(
                        f"Training metric {called!r} ({type(part).__name__}) is reset and counts only what follows, "
                        f"as its state {problem!r} of {len(records)} processes cannot be divided among {world_size}; "
                        "an exact value requires as many processes as before.",
                        UserWarning,
                        stacklevel=2,
                    )
            own = updates // world_size + (rank < updates % world_size)
            merged.setdefault(name, {})[path] = {"updates": own, "state": state}
    return merged


def _share(part: Any, records: list[dict[str, Any]], rank: int, world_size: int) -> tuple[dict[str, Any], str]:
    """Return the states of a metric in one process, and the name of one that cannot be divided, equal in all."""
    state: dict[str, Any] = {}
    stacked: dict[str, list[Tensor]] = {}
    for key, reduce in part._reductions.items():  # noqa: SLF001
        if not all(key in record for record in records):
            continue
        values, default = [record[key] for record in records], part._defaults[key]  # noqa: SLF001
        share: Any
        if isinstance(default, list):
            share = _share_of_list(reduce, values, rank, world_size)
        elif callable(reduce):
            share = _share_of_tensor(reduce, values, default, rank, world_size)
        else:
            stacked[key], share = values, default
        if share is None:
            return {}, key
        state[key] = share
    if stacked and len(records) > world_size and stacked.keys() - {"max_abs_dev_x", "max_abs_dev_y"} != _PEARSON:
        return {}, next(iter(stacked))
    own = {key: values[rank::world_size] for key, values in stacked.items()}
    if stacked and len(records) > rank:
        state |= _merged_moments(own) if len(records) > world_size else {key: value for key, (value,) in own.items()}
    return state, ""


def _share_of_list(reduce: Any, values: list[list[Any]], rank: int, world_size: int) -> list[Any] | None:
    """Return the elements of a list in one process; None if they cannot be divided."""
    if len(values) == world_size:
        return values[rank]
    elements = [one for value in values for one in value]
    if getattr(reduce, "__name__", "") == "dim_zero_cat":
        # An empty tensor, because torchmetrics gathers an empty list as floats of one dimension.
        return elements if rank == 0 else [one.reshape(-1, *one.shape[1:])[:0] for one in elements[:1]]
    count, rest = divmod(len(elements), world_size)
    return None if rest else elements[rank * count : (rank + 1) * count]  # torchmetrics gathers them one by one


def _share_of_tensor(reduce: Any, values: list[Tensor], default: Tensor, rank: int, world_size: int) -> Tensor | None:
    """Return a tensor for one process, such that ``reduce`` over all returns the same result; None if there is none."""
    try:
        # A single number may have got another shape with the first update.
        *values, default = torch.broadcast_tensors(*values, default.to(values[0].device))  # type: ignore[no-untyped-call]
        before = reduce(torch.stack(values))
        more = [default] * (world_size - 1)
        for shares in ([before, *more], [before] * world_size, [*values, *more][:world_size]):
            if all(one.shape == default.shape for one in shares):
                now = reduce(torch.stack(shares))
                if now.shape == before.shape and torch.allclose(now.double(), before.double(), equal_nan=True):
                    return shares[rank]
    except Exception:  # noqa: BLE001  (a function of the user may support only some numbers of processes)
        return None
    return None


_PEARSON = {"mean_x", "mean_y", "var_x", "var_y", "corr_xy", "n_total"}
"""The states of PearsonCorrCoef; newer releases of torchmetrics have two maxima besides."""


def _merged_moments(values: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Merge counts, means and sums of products about the means (Chan et al. 1982) of several parts of the samples."""
    # Releases of torchmetrics differ in which of the states of one output have a dimension.
    parts = {key: torch.stack([one.double().flatten() for one in of_each]) for key, of_each in values.items()}
    counts = parts["n_total"]
    total = counts.sum(dim=0)
    means = {x: (counts * parts[f"mean_{x}"]).sum(dim=0) / total.clamp(min=1) for x in "xy"}
    off = {x: parts[f"mean_{x}"] - means[x] for x in "xy"}
    merged = {"n_total": total, "mean_x": means["x"], "mean_y": means["y"]}
    for key, x, y in (("var_x", "x", "x"), ("var_y", "y", "y"), ("corr_xy", "x", "y")):
        merged[key] = (parts[key] + counts * off[x] * off[y]).sum(dim=0)
    merged |= {key: part.amax(dim=0) for key, part in parts.items() if key not in merged}
    return {key: value.to(values[key][0].dtype).reshape(values[key][0].shape) for key, value in merged.items()}


def _parts(metric: Any) -> dict[str, Any]:
    """Return a metric and those that it wraps or collects, by their path."""
    modules = metric.named_modules() if isinstance(metric, nn.Module) else ()
    return {path: part for path, part in modules if hasattr(part, "_update_count")}


def _fits(value: Any, default: Tensor | list[Any]) -> bool:
    if isinstance(default, Tensor):  # the shape of a single number may change with its updates
        return isinstance(value, Tensor) and (default.numel() == 1 or value.shape == default.shape)
    return isinstance(value, list) and all(isinstance(one, (Tensor, tuple)) for one in value)


def _kind(state: Any) -> str:
    return f"a tensor of shape {tuple(state.shape)}" if isinstance(state, Tensor) else f"a {type(state).__name__}"
