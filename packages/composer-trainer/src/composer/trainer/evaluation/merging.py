"""Metrics of other numbers of processes: divide saved states, so that together they contain all counted samples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer.distributed.environment import get_data_rank, get_data_world_size
from composer.trainer.evaluation.metrics import SavedMetric, SavedMetrics, parts_of_metric

_PEARSON = {"mean_x", "mean_y", "var_x", "var_y", "corr_xy", "n_total"}
"""The states of PearsonCorrCoef; newer releases of torchmetrics have two maxima besides."""


def merge_metrics(metrics: Mapping[str, Any], saved: Sequence[SavedMetrics], *, is_first: bool) -> SavedMetrics:
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
        >>> from composer.trainer.evaluation.metrics import save_metrics
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> merged = merge_metrics({"sum": metric}, [save_metrics({"sum": metric})] * 2, is_first=True)
        >>> merged["sum"][""].state["sum_value"]
        tensor(6.)
    """
    rank, world_size = get_data_rank(), get_data_world_size()
    merged: SavedMetrics = {}
    for name, metric in metrics.items():
        for path, part in parts_of_metric(metric).items():
            records = [of_rank[name][path] for of_rank in saved if path in of_rank.get(name, {})]
            if not records:
                continue
            state, problem = _share(part, [record.state for record in records], rank, world_size)
            updates = sum(record.updates for record in records)
            if problem:
                state, updates = dict(part._defaults), 0  # noqa: SLF001
                if is_first:
                    called = ".".join(filter(None, (name, path)))
                    warnings.warn(
                        f"Training metric {called!r} ({type(part).__name__}) is reset and counts only what follows, "
                        f"as its state {problem!r} of {len(records)} processes cannot be divided among {world_size}; "
                        "an exact value requires as many processes as before.",
                        stacklevel=2,
                    )
            own = updates // world_size + (rank < updates % world_size)
            merged.setdefault(name, {})[path] = SavedMetric(own, state)
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
