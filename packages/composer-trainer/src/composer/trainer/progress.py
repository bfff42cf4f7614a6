"""What a run needs to go on exactly where it stopped, beside its state: the place in the data, and all draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from composer.core import Timestamp
from composer.distributed import all_gather_object, broadcast_buffers, get_global_rank, get_world_size
from composer.trainer.metric_state import load_metrics, save_metrics
from composer.trainer.randomness import load_rng_state, rng_state

if TYPE_CHECKING:
    from composer.core import Logger, State
    from composer.trainer.training_data import TrainingData

__all__ = ["Progress", "SavesProgress"]

_PARTS = ("clock_before", "data", "loggers", "metrics", "microbatch_size", "rng", "skipped_steps", "world_size")


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
        return {
            "clock_before": state.previous_timestamp.state_dict(),
            "data": None if batches is None else batches.state_dict(),
            "loggers": self._logger.state_dict(),
            "metrics": save_metrics(state.train_metrics),
            "microbatch_size": state.device_train_microbatch_size if state.auto_microbatching else None,
            "rng": all_gather_object(rng_state(state.device)),
            "skipped_steps": self.skipped_steps,
            "world_size": get_world_size(),
        }

    def check(self, saved: Mapping[str, Any]) -> list[str]:
        """Return why a run cannot go on from what was saved; nothing if it can."""
        missing = [name for name in _PARTS if name not in saved]
        if missing:
            return [f"extra: {', '.join(missing)} missing; this checkpoint was not saved by a Trainer."]
        batches, place = self._data.batches, saved["data"]
        if not isinstance(saved["rng"], list) or not all(
            isinstance(saved[name], Mapping) for name in ("metrics", "loggers")
        ):
            return ["extra: rng must be a list, metrics and loggers dictionaries."]
        return [] if batches is None or place is None else batches.check_state_dict(place)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Keep what was saved until training goes on: data and loaders may only then be there."""
        self._loaded = dict(saved)
        self._logger.load_state_dict(saved["loggers"])

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
        if batches is not None and saved["data"] is not None:
            batches.load_state_dict(saved["data"])
        load_metrics(state.train_metrics, saved["metrics"], state.device)
        self.skipped_steps.copy_(saved["skipped_steps"])
        for optimizer in state.optimizers:
            # torch's schedulers warn if they step before an optimizer of this process has.
            setattr(optimizer, "_opt_called", True)  # noqa: B010
        if saved["world_size"] == get_world_size():
            self._draws = saved["rng"][get_global_rank()]

    def resume_draws(self) -> None:
        """Bring the global generators to where they were, once: last of all before the first batch."""
        draws, self._draws = self._draws, None
        if draws is not None:
            load_rng_state(draws, self._state.device)
