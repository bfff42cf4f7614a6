"""What a run needs to go on exactly where it stopped, beside its state: the place in the data, and all draws."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch
from attrs.validators import ge, optional
from torch import Tensor

from composer.core import Timestamp
from composer.core.conversion import from_data
from composer.distributed import all_gather_object, broadcast_buffers, get_global_rank, get_world_size
from composer.trainer.batches import Place  # noqa: TC001  (the converter reads it at run time)
from composer.trainer.metric_state import SavedMetric, check_metrics, load_metrics, save_metrics
from composer.trainer.randomness import check_rng_state, load_rng_state, rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from composer.core import Logger, State
    from composer.trainer.training_data import TrainingData

__all__ = ["Progress", "SavesProgress"]


def _check_one_number(_: object, field: attrs.Attribute[Any], value: Tensor) -> None:
    if value.numel() != 1:
        raise ValueError(f"{field.name} must be one number, got a tensor of shape {tuple(value.shape)}.")


@attrs.frozen
class _Saved:
    """What :meth:`Progress.to_data` returns, as a checkpoint may hold it."""

    clock_before: Timestamp
    data: list[Place | None]
    loggers: list[dict[str, dict[str, Any]]]
    metrics: list[dict[str, dict[str, SavedMetric]]]
    microbatch_size: int | None = attrs.field(validator=optional(ge(1)))
    rng: list[dict[str, Any]]
    skipped_steps: Tensor = attrs.field(validator=_check_one_number)
    world_size: int = attrs.field(validator=ge(1))


_OF_EACH = ("data", "loggers", "metrics", "rng")
"""What is saved for each process, by rank."""


def _rank_in(world_size: int) -> int:
    """Return whose part to go on from: this process's own, or, if others have saved, that of rank 0."""
    return get_global_rank() if world_size == get_world_size() else 0


@runtime_checkable
class SavesProgress(Protocol):
    """A callback that saves checkpoints: it is given what belongs into them beside the state."""

    extra: Callable[[], Mapping[str, Any]] | None

    def save(self, state: State) -> None:
        """Save now."""


class Progress:
    """Tells and takes what belongs to a place in a run and is not in its state.

    Args:
        state: The run.
        data: What it trains on.
        logger: Whose destinations go on in the runs of other products that they have begun.
    """

    def __init__(self, state: State, data: TrainingData, logger: Logger) -> None:
        self._state, self._data, self._logger = state, data, logger
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=state.device)
        self._loaded: dict[str, Any] | None = None
        self._draws: dict[str, Any] | None = None

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data and tensors; all processes have to call it."""
        state, batches = self._state, self._data.batches
        broadcast_buffers(state.model)
        own = {
            "data": None if batches is None else batches.state_dict(),
            "loggers": self._logger.state_dict(),
            "metrics": save_metrics(state.train_metrics),
            "rng": rng_state(state.device),
        }
        of_all = all_gather_object(own)
        now = {
            **{name: [one[name] for one in of_all] for name in own},
            "clock_before": state.previous_timestamp.state_dict(),
            "microbatch_size": state.device_train_microbatch_size if state.auto_microbatching else None,
            "skipped_steps": self.skipped_steps,
            "world_size": get_world_size(),
        }
        # What was loaded and is still to be gone on from is the run's place, and not that of data not yet begun.
        return now if self._loaded is None else {**now, **self._loaded, "loggers": now["loggers"]}

    def check(self, saved: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
        """Return why a run cannot continue from what was saved; nothing if it can.

        Args:
            saved: What :meth:`to_data` returned.
            ignored: What is not loaded, by path; with ``"timestamp"`` nothing of the place in the run is.
        """
        names = [field.name for field in attrs.fields(_Saved)]
        missing = [name for name in names if name not in saved]
        if missing:
            return [f"extra: {', '.join(missing)} missing; this checkpoint was not saved by a Trainer."]
        try:
            from_data({name: saved[name] for name in names}, _Saved, "extra")
        except ValueError as error:
            return [str(error)]
        batches, size = self._data.batches, saved["world_size"]
        if any(len(saved[name]) != size for name in _OF_EACH):
            return [f"extra: {', '.join(_OF_EACH)} must have an entry for each of world_size={size} processes."]
        # Each process checks the entries of all, so that all of them refuse a checkpoint, or none does.
        problems = [problem for rank in range(size) for problem in self._check_rank(saved, rank)]
        if "timestamp" in ignored:
            return problems
        if size == get_world_size():
            problems += [
                f"extra.metrics[{rank}].{problem}"
                for rank in range(size)
                for problem in check_metrics(self._state.train_metrics, saved["metrics"][rank])
            ]
        place = saved["data"][_rank_in(size)]
        return problems if batches is None or place is None else [*problems, *batches.check_state_dict(place)]

    def _check_rank(self, saved: Mapping[str, Any], rank: int) -> list[str]:
        problems = []
        try:
            self._logger.check_state_dict(saved["loggers"][rank])
        except ValueError as error:
            problems.append(f"extra.loggers[{rank}]: {error}")
        try:
            check_rng_state(saved["rng"][rank], self._state.device, f"extra.rng[{rank}]")
        except ValueError as error:
            problems.append(str(error))
        return problems

    def load(self, saved: Mapping[str, Any], *, begins_anew: bool = False) -> None:
        """Keep what was saved until training goes on: data and loaders may only then be there.

        Args:
            saved: What :meth:`to_data` returned.
            begins_anew: Whether the run's own clock has been kept, so that its data begin with an epoch.
        """
        self._loaded = dict(saved)
        if begins_anew:
            self._loaded |= {"clock_before": self._state.timestamp.state_dict()}
            self._loaded |= {"data": [None] * saved["world_size"], "metrics": [{}] * saved["world_size"]}
        rank = get_global_rank()  # each process has files and runs of its own; nothing was saved for further ones
        self._logger.load_state_dict(saved["loggers"][rank] if rank < saved["world_size"] else {})

    def forget(self) -> None:
        """Go on from the beginning."""
        self._loaded = self._draws = None

    def resume(self) -> None:
        """Bring data, metrics and clock to where they were, once."""
        saved, self._loaded = self._loaded, None
        if saved is None:
            return
        state, batches = self._state, self._data.batches
        state.previous_timestamp = Timestamp.from_state_dict(saved["clock_before"])
        if saved["microbatch_size"] is not None and state.auto_microbatching:
            state.device_train_microbatch_size = saved["microbatch_size"]
        is_as_before = saved["world_size"] == get_world_size()
        place = saved["data"][_rank_in(saved["world_size"])]
        if batches is not None and place is not None:
            batches.load_state_dict(place)
        if is_as_before:
            load_metrics(state.train_metrics, saved["metrics"][get_global_rank()], state.device)
            self._draws = saved["rng"][get_global_rank()]
        else:
            warnings.warn(
                f"The checkpoint was saved by {saved['world_size']} processes, and {get_world_size()} go on from it: "
                "training metrics count anew, random draws are others, and an epoch that was begun may repeat samples "
                "and leave out others. Exactly the same run needs as many processes.",
                UserWarning,
                stacklevel=2,
            )
        self.skipped_steps.copy_(saved["skipped_steps"])
        for optimizer in state.optimizers:
            # torch's schedulers warn if they step before an optimizer of this process has.
            setattr(optimizer, "_opt_called", True)  # noqa: B010

    def resume_draws(self) -> None:
        """Bring the global generators to where they were, once: last of all before the first batch."""
        draws, self._draws = self._draws, None
        if draws is not None:
            load_rng_state(draws, self._state.device)
