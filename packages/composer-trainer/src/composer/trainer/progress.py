"""What a run needs to go on exactly where it stopped, beside its state: the place in the data, and all draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from composer.core import Timestamp
from composer.core.model_state import numbered
from composer.distributed import all_gather_object, broadcast_buffers, get_global_rank, get_world_size
from composer.trainer.data_state import data_components
from composer.trainer.metric_state import load_metrics, save_metrics
from composer.trainer.own_state import OwnState, is_own_state, warn_of_misfits, without
from composer.trainer.randomness import load_rng_state, rng_state

if TYPE_CHECKING:
    from composer.core import Logger, State
    from composer.trainer.training_data import TrainingData

__all__ = ["Progress", "SavesProgress"]


def _is_clock(value: Any) -> bool:
    try:
        Timestamp.from_state_dict(value)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_draws(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("torch"), Tensor) and isinstance(one.get("python"), Mapping)
        for one in value
    )


def _are_metrics(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and all(map(_is_metric, one.values())) for one in value
    )


def _is_metric(parts: Any) -> bool:
    return isinstance(parts, Mapping) and all(
        isinstance(part, Mapping) and type(part.get("updates")) is int and isinstance(part.get("state"), Mapping)
        for part in parts.values()
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "clock_before": _is_clock,
    "data": lambda value: isinstance(value, list) and all(one is None or isinstance(one, Mapping) for one in value),
    "loggers": lambda value: isinstance(value, list) and all(isinstance(one, Mapping) for one in value),
    "metrics": _are_metrics,
    "microbatch_size": lambda value: value is None or _is_count(value),
    "own_state": lambda value: isinstance(value, list) and all(map(is_own_state, value)),
    "rng": _are_draws,
    "skipped_steps": lambda value: isinstance(value, Tensor) and value.numel() == 1,
    "world_size": _is_count,
}


_OF_EACH = ("data", "loggers", "metrics", "own_state", "rng")
"""What is saved for each process, by rank."""

_ADDED = ("own_state",)
"""What checkpoints of earlier releases do not have."""


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
        self._own = OwnState()
        self._own_loaded: dict[str, Any] = {}

    def to_data(self, *, reports: bool = True) -> dict[str, Any]:
        """Return it as plain data and tensors; all processes have to call it.

        Args:
            reports: Whether to warn of state of the user's own that cannot be saved.
        """
        state, batches = self._state, self._data.batches
        broadcast_buffers(state.model)
        own = {
            "data": None if batches is None else batches.state_dict(),
            "loggers": self._logger.state_dict(),
            "metrics": save_metrics(state.train_metrics),
            "own_state": self._own.to_data(),
            "rng": rng_state(state.device),
        }
        if reports and get_global_rank() == 0:
            self._own.report()
            if batches is not None:
                batches.own_state.report()
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

    def check(self, saved: Mapping[str, Any]) -> list[str]:
        """Return why a run cannot go on from what was saved; nothing if it can."""
        missing = [name for name in _CHECKS if name not in saved and name not in _ADDED]
        if missing:
            return [f"extra: {', '.join(missing)} missing; this checkpoint was not saved by a Trainer."]
        wrong = [name for name, is_right in _CHECKS.items() if name in saved and not is_right(saved[name])]
        if wrong:
            return [f"extra: {', '.join(wrong)}: not as a Trainer saves it."]
        batches, size = self._data.batches, saved["world_size"]
        if any(len(saved[name]) != size for name in _OF_EACH if name in saved):
            return [f"extra: {', '.join(_OF_EACH)} must have an entry for each of world_size={size} processes."]
        place = saved["data"][_rank_in(size)]
        return [] if batches is None or place is None else batches.check_state_dict(place)

    def load(self, saved: Mapping[str, Any], *, ignored: Sequence[str] = ()) -> None:
        """Keep what was saved until training goes on: data and loaders may only then be there.

        Args:
            saved: What :meth:`to_data` returned.
            ignored: The paths of what was not loaded. If the run's own clock is kept, its data begin with an epoch.
        """
        of_each = saved.get("own_state", [{}] * saved["world_size"])
        self._loaded = {**saved, "own_state": [without(own, ignored) for own in of_each]}
        if "timestamp" in ignored:
            self._loaded |= {"clock_before": self._state.timestamp.state_dict()}
            self._loaded |= {"data": [None] * saved["world_size"], "metrics": [{}] * saved["world_size"]}
        rank = get_global_rank()  # each process has files and runs of its own; nothing was saved for further ones
        self._logger.load_state_dict(saved["loggers"][rank] if rank < saved["world_size"] else {})

    def forget(self) -> None:
        """Go on from the beginning."""
        self._loaded = self._draws = None
        self._own_loaded = {}

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
            batches.load_state_dict(place if is_as_before else {**place, "own_state": {}})
        if is_as_before:
            load_metrics(state.train_metrics, saved["metrics"][get_global_rank()], state.device)
            self._draws = saved["rng"][get_global_rank()]
            self._own_loaded = saved["own_state"][get_global_rank()]
        else:
            warnings.warn(
                f"The checkpoint was saved by {saved['world_size']} processes, and {get_world_size()} go on from it: "
                "training metrics count anew, random draws are others, what components keep in plain attributes is not "
                "restored, and an epoch that was begun may repeat samples "
                "and leave out others. Exactly the same run needs as many processes.",
                UserWarning,
                stacklevel=2,
            )
        self.skipped_steps.copy_(saved["skipped_steps"])
        for optimizer in state.optimizers:
            # torch's schedulers warn if they step before an optimizer of this process has.
            setattr(optimizer, "_opt_called", True)  # noqa: B010

    def begin(self) -> None:
        """Restore what components keep in attributes, and the global generators: last of all before the first batch."""
        state, batches = self._state, self._data.batches
        data = () if batches is None else data_components(batches.spec.dataloader)
        of_others = [state.train_dataloader, state.scaler, *state.schedulers]
        self._own.watch(_components(state), leave_out=[*of_others, *(one for part in data for one in part.values())])
        own, self._own_loaded = self._own_loaded, {}
        warn_of_misfits(self._own.load(own, state.device))
        draws, self._draws = self._draws, None
        if draws is not None:
            load_rng_state(draws, state.device)


def _components(state: State) -> dict[str, Any]:
    """Return the components of a run by name, whose attributes may be state."""
    optimizers = []
    for given in state.optimizers:
        optimizer: Any = given
        while isinstance(optimizer, torch.optim.Optimizer):
            optimizers.append(optimizer)
            optimizer = getattr(optimizer, "base_optimizer", None)
    keys = numbered(type(optimizer).__name__ for optimizer in optimizers)
    components = {"model": state.model} | {f"optimizers.{key}": one for key, one in zip(keys, optimizers, strict=True)}
    for kind, held in (("algorithms", state.algorithms), ("callbacks", state.callbacks)):
        components |= {f"{kind}.{state.component_key(one)}": one for one in held}
    for evaluator in state.evaluators:
        loader = evaluator.dataloader.dataloader
        loading, choosing = data_components(loader)
        found = choosing if getattr(loader, "num_workers", 0) else loading | choosing
        components |= {f"evaluators.{evaluator.label}.{name}": one for name, one in found.items()}
    return components
