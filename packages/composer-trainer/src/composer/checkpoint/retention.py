"""Which checkpoints to keep: the last ones, and the best ones by a metric.

The saver calls :func:`delete_old` after each save. Only complete checkpoints of the same run are deleted, never the
one just saved or a later one, and none with files of the user in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from composer.checkpoint.finding import FoundCheckpoint, find_checkpoints, progress
from composer.checkpoint.folder import Folder
from composer.core import Timestamp
from composer.core.checks import NamesArguments, integer, one_of
from composer.core.evaluator import nearest_metric

__all__ = ["KeepBest", "check_keep_last", "delete_old", "expired", "own_checkpoints"]


@attrs.frozen
class KeepBest(NamesArguments):
    """Keep the checkpoints with the best values of a metric, in addition to the last ones.

    Args:
        metric: The name under which the metric is logged: ``"metrics/eval/MulticlassAccuracy"``.
        count: The number of checkpoints.
        mode: Whether the largest (``"max"``) or the smallest (``"min"``) values are the best.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> KeepBest("metrics/eval/CrossEntropy", count=3, mode="min")
        KeepBest(metric='metrics/eval/CrossEntropy', count=3, mode='min')
    """

    metric: str = attrs.field()
    count: int = integer(1, 1, meaning="It is the number of checkpoints to keep.")
    mode: Literal["max", "min"] = attrs.field(default="max", validator=one_of("max", "min"))

    @metric.validator
    def _check_metric(self, _: object, metric: object) -> None:
        if not isinstance(metric, str) or not metric:
            raise (ValueError if metric == "" else TypeError)(
                f"metric must be the name of a metric as it is logged, such as 'metrics/eval/Accuracy', got {metric!r}."
            )

    def best(self, checkpoints: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Return the best of some checkpoints, the earlier of equal ones; never one without a finite value."""
        values = [(self.value(checkpoint), checkpoint) for checkpoint in checkpoints]
        known = [(value, checkpoint) for value, checkpoint in values if value is not None]
        sign = -1 if self.mode == "max" else 1
        return [checkpoint for _, checkpoint in sorted(known, key=lambda item: sign * item[0])[: self.count]]

    def improves(self, value: float, best: list[float]) -> bool:
        """Return whether a value is among the best, and if so insert it into them; the best is the first.

        Example:
            >>> best = [0.9, 0.8]
            >>> KeepBest("metrics/eval/Accuracy", count=2).improves(0.85, best), best
            (True, [0.9, 0.85])
        """
        sign = -1 if self.mode == "max" else 1
        is_new = len(best) < self.count or sign * value < sign * best[-1]
        if is_new:
            best[:] = sorted([*best, value], key=lambda one: sign * one)[: self.count]
        return is_new

    def value(self, checkpoint: FoundCheckpoint) -> float | None:
        """Return a checkpoint's value of the metric; None if it has none."""
        return None if checkpoint.manifest is None else checkpoint.manifest.metrics.get(self.metric)


def expired(
    checkpoints: Sequence[FoundCheckpoint], keep_last: int, keep_best: KeepBest | None = None
) -> list[FoundCheckpoint]:
    """Return which checkpoints to delete; never the last complete one, and no incomplete one.

    Args:
        checkpoints: The existing checkpoints, the oldest first.
        keep_last: The number of the last checkpoints to keep; -1 keeps all.
        keep_best: The best checkpoints to keep in addition.
    """
    if keep_last < 0:
        return []
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.is_complete]
    to_keep = complete[-max(keep_last, 1) :] + (keep_best.best(complete) if keep_best else [])
    return [checkpoint for checkpoint in complete if checkpoint not in to_keep]


def own_checkpoints(folder: Folder, run_name: str, until: Timestamp, *, weights_only: bool) -> list[FoundCheckpoint]:
    """Return the checkpoints of a run in a folder, complete ones or those of weights, the oldest first.

    Those later than the clock ``until`` are left out: they are of an earlier training, or damaged.
    """
    return [
        one
        for one in find_checkpoints(folder)
        if one.manifest is not None
        and (one.manifest.run_name, one.manifest.weights_only) == (run_name, weights_only)
        and progress(one.manifest.timestamp) <= progress(until)
    ]


def check_keep_last(name: str, keep_last: object) -> None:
    """Raise a ValueError if ``keep_last`` is no number of checkpoints to keep; the error calls it by ``name``."""
    if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last == 0 or keep_last < -1:
        raise ValueError(
            f"{name} must be -1 (all) or at least 1, as the last complete checkpoint is never deleted, "
            f"got {keep_last!r}."
        )


def _warn_if_metric_is_unknown(keep_best: KeepBest, checkpoints: Iterable[FoundCheckpoint], folder: Folder) -> None:
    """Warn if the checkpoints have other metrics of the same evaluation, and not the one to keep the best by."""
    found = {name for one in checkpoints if one.manifest is not None for name in one.manifest.metrics}
    similar = sorted(name for name in found if name.rpartition("/")[0] == keep_best.metric.rpartition("/")[0])
    if similar and keep_best.metric not in similar:
        hint = nearest_metric(keep_best.metric, similar)
        warnings.warn(
            f"{keep_best} keeps none, as no checkpoint in {folder} has that metric{hint}",
            UserWarning,
            stacklevel=3,
        )


def delete_old(
    folder: Folder, own: Sequence[FoundCheckpoint], keep_last: int, keep_best: KeepBest | None = None
) -> list[str]:
    """Delete the checkpoints that need not be kept, and return their names.

    Folders that are not a complete checkpoint, or contain other files, are not deleted.

    Args:
        folder: Where they are.
        own: What :func:`own_checkpoints` returned.
        keep_last: The number of the last ones to keep; -1 keeps all.
        keep_best: The best ones to keep in addition.

    Raises:
        CheckpointSaveError: One cannot be deleted.
    """
    names = [one.name for one in expired(own, keep_last, keep_best) if not folder.foreign(one.name)]
    if names and keep_best is not None:
        _warn_if_metric_is_unknown(keep_best, own, folder)
    for name in names:
        folder.delete(name)
    return names
