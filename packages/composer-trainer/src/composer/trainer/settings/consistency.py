"""Comparison of settings between processes, which must all run the same training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer.checkpoint.saver import CheckpointSaver
from composer.core import State, Time
from composer.core.interval import Interval
from composer.distributed import all_gather_object

__all__ = ["check_same_run", "check_same_values"]


def check_same_run(state: State, max_duration: Time, labels: Sequence[str]) -> None:
    """Reject runs that differ between processes: they would wait for each other forever, or train other weights.

    All processes must call it.

    Args:
        state: The run.
        max_duration: How long it will train.
        labels: The labels of its evaluators.

    Raises:
        ValueError: The duration, the evaluators, the algorithms, the optimizers or the intervals of saving differ.
    """
    savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
    check_same_values(
        {
            "max_duration": str(max_duration),
            "eval_dataloader": [*labels],
            "algorithms": [state.component_key(algorithm) for algorithm in state.algorithms],
            "optimizers": [_settings_of(optimizer) for optimizer in state.optimizers],
            "save_folder and save_interval": [_interval_of(saver) for saver in savers],
        }
    )


def check_same_values(values: Mapping[str, Any]) -> None:
    """Reject arguments that differ between processes.

    All processes must call it.

    Args:
        values: Plain data by the names of the arguments.

    Raises:
        ValueError: A value differs.
    """
    by_rank = all_gather_object(values)
    for rank, other in enumerate(by_rank):
        for name, value in by_rank[0].items():
            if other[name] != value:
                raise ValueError(
                    f"{name} must be the same in every process, got {value} in process 0 and {other[name]} in process "
                    f"{rank}. Construct the Trainer and call fit() with the same arguments, whatever the rank."
                )


def _settings_of(optimizer: Any) -> str:
    """Return an optimizer's class and the numbers of its parameter groups."""
    kinds = (bool, int, float, str)
    groups = [{name: one for name, one in group.items() if isinstance(one, kinds)} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} with {groups}"


def _interval_of(saver: CheckpointSaver) -> str:
    interval = saver.save_interval
    return f"every {interval.every}" if isinstance(interval, Interval) else "as its own method decides"
