"""Merge the weights of checkpoints: soups, averages of a tail, and decays of the learning rate after the training."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointMismatchError
from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.manifest import EXTRA, MODEL, dictionary
from composer.checkpoint.reading import OpenCheckpoint, references
from composer.core.saving.codec import join_tensors
from composer.functional.checks import check_choice
from composer.functional.training.ema import average_dtype, is_statistic

Weights: TypeAlias = Sequence[float] | Callable[[int], Sequence[float]]

_FACTORS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda part: 1 - math.sqrt(part),
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
}


def merge_checkpoints(
    paths: Sequence[str | os.PathLike[str]], weights: Weights | None = None, *, statistics: str = "reject"
) -> dict[str, Tensor]:
    """Return a weighted mean of the weights of checkpoints: of one run, or of runs that began with the same weights.

    The mean of the last checkpoints of a run with a constant learning rate takes the place of a decay of the rate
    (WSM, arXiv:2507.17634; see :func:`decay_by_merging`); that of runs with other settings is a soup
    (arXiv:2203.05482). Trained parameters are averaged in at least 32 bits, under each of their names. What no
    optimizer trains, such as buffers and frozen weights, is that of the last checkpoint. Checkpoints without optimizers
    do not tell these apart: all their tensors in floating point are averaged.

    The weights are those of the training, also with ``EMA``, ``PostHocEMA`` and ``SWA`` (until SWA ends, when its
    average takes their place); with ``DiLoCo`` those after its last outer step. Checkpoints of
    ``Trainer(save_weights_only=True)`` have the weights used for evaluation instead. Factors of a product, such as
    those of LoRA, are averaged alone, which is not the mean of the products: ``merge_and_unload`` adapters before.

    Args:
        paths: A list of checkpoints, oldest first; each as for :func:`composer.checkpoint.load_checkpoint`.
        weights: A factor for each, of sum 1, or a function of their number that returns these; None for equal ones.
        statistics: What happens to the running statistics of batch normalization, which do not fit the mean of the
            weights: ``"reject"``, or ``"last"`` for those of the last checkpoint. ``torch.optim.swa_utils.update_bn``
            computes them again.

    Returns:
        Complete tensors by name, for ``model.load_state_dict``.

    Raises:
        TypeError: ``paths`` is a single path.
        CheckpointError: A checkpoint is incomplete or damaged, or has other tensors (``CheckpointMismatchError``).
        ValueError: The factors are not as many as the checkpoints, or their sum is not 1, or there are running
            statistics.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from composer.checkpoint import save_checkpoint
        >>> from composer.core import State
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 2, bias=False)
        >>> paths = []
        >>> for value in (0.0, 1.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     paths.append(save_checkpoint(State(model), f"{folder}/{value}"))
        >>> merge_checkpoints(paths, [0.25, 0.75])["weight"][0]
        tensor([0.7500, 0.7500])
    """
    check_choice("statistics", statistics, "reject", "last")
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"paths must be a list of checkpoints, got {paths!r}.")
    factors = _factors(len(paths), weights)
    last = open_checkpoint(paths[-1])
    merged = _weights(last)
    trained = _trained(dictionary(last.data().get("optimizers")))
    found = list(filter(is_statistic, merged))
    if found and statistics == "reject":
        raise ValueError(
            f"The checkpoints have running statistics of batch normalization, such as {found[0]!r}, which do not fit "
            'the mean of the weights. Pass statistics="last", and compute them again: '
            "torch.optim.swa_utils.update_bn(loader, model)."
        )
    totals = {
        name: tensor.to(dtype) * factors[-1]
        for name, tensor in merged.items()
        if (dtype := average_dtype(tensor.dtype)) is not None
        and not is_statistic(name)
        and (not trained or name in trained or _is_tied(tensor, [merged[one] for one in trained if one in merged]))
    }
    for path, factor in zip(paths[:-1], factors[:-1], strict=True):
        tensors = _weights(open_checkpoint(path))
        shapes = [{name: one.shape for name, one in each.items()} for each in (tensors, merged)]
        if shapes[0] != shapes[1]:
            other = next(iter({*shapes[0].items()} ^ {*shapes[1].items()}))[0]
            remedy = " DepthStacking may have added some between them: merge checkpoints of one depth."
            remedy = "" if shapes[0].keys() == shapes[1].keys() else remedy
            problem = f"its weights are not those of {last.path}: {other!r} differs.{remedy}"
            raise CheckpointMismatchError(path, [problem])
        for name, total in totals.items():
            total.add_(tensors[name].to(total.dtype), alpha=factor)
    return merged | {name: total.to(merged[name].dtype) for name, total in totals.items()}


def decay_by_merging(schedule: str | Callable[[float], float] = "1-sqrt") -> Callable[[int], list[float]]:
    """Return the factors of checkpoints whose mean is that of a run whose updates between them had decayed.

    With the factor ``d_j`` of the schedule in the middle of the time between the checkpoints ``j - 1`` and ``j``, it is
    ``weights_0 + sum_j d_j * (weights_j - weights_(j-1))``: what a decay would have given, if it had not changed the
    updates otherwise (arXiv:2507.17634).

    Args:
        schedule: ``"1-sqrt"``, ``"linear"``, ``"cosine"``, or a function of the elapsed part of the decay, from 0 to 1,
            which returns the factor of the learning rate.

    Returns:
        A function of the number of checkpoints, for :func:`merge_checkpoints`.

    Raises:
        ValueError: The name is unknown; later, there are fewer than two checkpoints.

    Example:
        >>> decay_by_merging("linear")(3)
        [0.25, 0.5, 0.25]
    """
    if not callable(schedule):
        check_choice("schedule", schedule, *_FACTORS)
    factor = schedule if callable(schedule) else _FACTORS[schedule]

    def factors(count: int) -> list[float]:
        if count < 2:
            raise ValueError(f"A decay by merging needs at least 2 checkpoints, got {count}.")
        steps = [1.0, *(factor((step - 0.5) / (count - 1)) for step in range(1, count)), 0.0]
        return [before - after for before, after in itertools.pairwise(steps)]

    return factors


def _factors(count: int, weights: Weights | None) -> list[float]:
    """Return the factors of a number of checkpoints."""
    if not count:
        raise ValueError("paths must name at least one checkpoint, got none.")
    given = [1 / count] * count if weights is None else weights(count) if callable(weights) else weights
    factors = [float(one) for one in given]
    if len(factors) != count or not math.isclose(sum(factors), 1, abs_tol=1e-6):
        raise ValueError(f"weights must be {count} factors whose sum is 1, got {factors}.")
    return factors


def _weights(opened: OpenCheckpoint) -> dict[str, Tensor]:
    """Return the weights of a checkpoint; with DiLoCo not those of one process, but those after the last outer step."""
    weights, averages = opened.tensors(MODEL), dict[str, Tensor]()
    for record in map(dictionary, opened.data().get("algorithms", ())):
        if record.get("name") == "DiLoCo":
            saved = dictionary(record.get("state")).get("averaged_weights", {})
            averages = join_tensors(saved, opened.tensors(EXTRA, names=references(saved)))
    trained = {name: weights[name] for name in averages if name in weights}
    for name, weight in weights.items() if trained else ():
        first = name if name in trained else next((one for one in trained if _is_tied(weight, [trained[one]])), name)
        weights[name] = averages.get(first, weight)
    return weights


def _is_tied(tensor: Tensor, trained: list[Tensor]) -> bool:
    """Return whether a tensor is another name of a trained parameter; optimizers hold only the first one."""
    return any(tensor.shape == one.shape and torch.equal(tensor, one) for one in trained)


def _trained(optimizers: dict[str, object]) -> set[str]:
    """Return the names of the parameters that saved optimizers hold."""
    groups = [group for saved in optimizers.values() for group in dictionary(saved).get("param_groups", ())]
    return {name for group in groups for name in dictionary(group).get("params", ())}
