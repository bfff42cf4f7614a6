"""The data of an exact resume that is not in the state: the position in the data, metrics and generators."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch
from attrs.validators import ge, optional
from torch import Tensor

from composer.core import Timestamp
from composer.core.components import by_key
from composer.core.randomness import check_rng_state, derive_seed, load_rng_state, rng_state
from composer.core.serialization import from_data
from composer.distributed import (
    all_gather_object,
    broadcast_buffers,
    get_data_rank,
    get_global_rank,
    get_world_size,
)
from composer.distributed.environment import get_tensor_parallel_size
from composer.trainer.data.batches import check_place
from composer.trainer.evaluation.metrics import SavedMetric, check_metrics, load_metrics, merge_metrics, save_metrics
from composer.trainer.reproducibility import seed_all
from composer.trainer.resume.data_state import data_components
from composer.trainer.resume.own_state import OwnState, check_own_state, warn_of_misfits, without

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from composer.core import Logger, State
    from composer.trainer.data.settings import TrainingData

__all__ = ["ResumeState", "SavesProgress"]


def _check_one_number(_: object, field: attrs.Attribute[Any], value: Tensor) -> None:
    if value.numel() != 1:
        raise ValueError(f"{field.name} must be one number, got a tensor of shape {tuple(value.shape)}.")


@attrs.frozen
class _Saved:
    """The data of :meth:`ResumeState.to_data`."""

    clock_before: Timestamp
    data: list[dict[str, Any] | None]
    loggers: list[dict[str, dict[str, Any]]]
    metrics: list[dict[str, dict[str, SavedMetric]]]
    microbatch_size: int | None = attrs.field(validator=optional(ge(1)))
    own_state: list[dict[str, Any]]
    rng: list[dict[str, Any]]
    skipped_steps: Tensor = attrs.field(validator=_check_one_number)
    tensor_parallel: int = attrs.field(validator=ge(1))
    world_size: int = attrs.field(validator=ge(1))


_OF_EACH = ("data", "loggers", "metrics", "own_state", "rng")
"""The fields that are saved for each process, by rank."""

_ADDED: dict[str, Any] = {"own_state": [], "tensor_parallel": 1}
"""The fields that checkpoints of earlier releases do not have, with their defaults."""


def _is_as_before(saved: Mapping[str, Any]) -> bool:
    """Return whether as many processes saved, with the same samples in each."""
    before = saved["world_size"], saved.get("tensor_parallel", 1)
    return before == (get_world_size(), get_tensor_parallel_size())


def _data_world_size(saved: Mapping[str, Any]) -> int:
    size: int = saved["world_size"] // saved.get("tensor_parallel", 1)
    return size


@runtime_checkable
class SavesProgress(Protocol):
    """A callback that saves checkpoints; ``extra`` returns the data to save with the state."""

    extra: Callable[[], Mapping[str, Any]] | None

    def save(self, state: State) -> None:
        """Save now."""


class ResumeState:
    """Saves and restores the data of an exact resume that is not in the state.

    Args:
        state: The run.
        data: The training data.
        logger: Its destinations continue their runs in other products.
    """

    def __init__(self, state: State, data: TrainingData, logger: Logger) -> None:
        self._state, self._data, self._logger = state, data, logger
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=state.device)
        self._loaded: dict[str, Any] | None = None
        self._draws: dict[str, Any] | int | None = None
        self._own = OwnState()
        self._own_loaded: dict[str, Any] = {}

    def attach_to(self, callbacks: Iterable[object]) -> None:
        """Let the callbacks that save checkpoints save this data with the state."""
        for callback in callbacks:
            if isinstance(callback, SavesProgress):
                callback.extra = partial(self.to_data, reports=not getattr(callback, "weights_only", False))

    def to_data(self, *, reports: bool = True) -> dict[str, Any]:
        """Return plain data and tensors; all processes must call it.

        Args:
            reports: Whether to warn about state of the user's objects that cannot be saved.
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
            "tensor_parallel": get_tensor_parallel_size(),
            "world_size": get_world_size(),
        }
        # Until a loaded run is resumed, its data is the loaded one.
        return now if self._loaded is None else {**now, **self._loaded, "loggers": now["loggers"]}

    def check(self, saved: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
        """Return the problems of saved data; none if a run can continue from it.

        Args:
            saved: The data of :meth:`to_data`.
            ignored: The paths not to load; with ``"timestamp"`` the position in the run is not loaded.
        """
        names = [field.name for field in attrs.fields(_Saved)]
        missing = [name for name in names if name not in saved and name not in _ADDED]
        if missing:
            return [f"extra: {', '.join(missing)} missing; this checkpoint was not saved by a Trainer."]
        try:
            from_data({name: saved.get(name, _ADDED.get(name)) for name in names}, _Saved, "extra")
        except ValueError as error:
            return [str(error)]
        batches, size = self._data.batches, saved["world_size"]
        is_divided = size % saved.get("tensor_parallel", 1) == 0
        if not is_divided or any(len(saved[name]) != size for name in _OF_EACH if name in saved):
            return [f"extra: {', '.join(_OF_EACH)} must have an entry for each of world_size={size} processes."]
        # Each process checks the entries of all, so that all processes reject a checkpoint, or none.
        problems = []
        checks: dict[str, Callable[[Any, str], object]] = {
            "loggers": lambda runs, _: self._logger.check_state_dict(runs),
            "rng": lambda states, path: check_rng_state(states, self._state.device, path),
            "data": check_place,
            "own_state": check_own_state,
        }
        for path, part, check in (
            (f"extra.{name}[{rank}]", part, check)
            for name, check in checks.items()
            for rank, part in enumerate(saved.get(name, ()))
        ):
            try:
                check(part, path)
            except ValueError as error:
                problems.append(str(error) if str(error).startswith(path) else f"{path}: {error}")
        if problems or "timestamp" in ignored:
            return problems
        if _is_as_before(saved):
            problems += [
                f"extra.metrics[{rank}].{problem}"
                for rank in range(size)
                for problem in check_metrics(self._state.train_metrics, saved["metrics"][rank])
            ]
        if batches is None or (place := self._place(saved)) is None:
            return problems
        return [*problems, *batches.check_state_dict(place)]

    def _place(self, saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the position in the data to continue at; None if none was saved."""
        batches, is_as_before = self._data.batches, _is_as_before(saved)
        place: dict[str, Any] | None = saved["data"][get_global_rank() if is_as_before else 0]
        if place is None or batches is None:
            return place
        moved = batches.moved(place, _data_world_size(saved))
        if is_as_before:
            return place if moved is None else {**moved, "samples": place["samples"]}
        return {**(moved or place), "own_state": {}, "has_ended": False}

    def load(self, saved: Mapping[str, Any], *, ignored: Sequence[str] = ()) -> None:
        """Store saved data until training starts, because the training data may be given only then.

        Args:
            saved: The data of :meth:`to_data`.
            ignored: The paths not to load. With ``"timestamp"``, the data starts at the beginning of an epoch.
        """
        of_each = saved.get("own_state", [{}] * saved["world_size"])
        self._loaded = {**saved, "own_state": [without(own, ignored) for own in of_each]}
        if "timestamp" in ignored:
            self._loaded |= {"clock_before": self._state.timestamp.state_dict()}
            self._loaded |= {"data": [None] * saved["world_size"], "metrics": [{}] * saved["world_size"]}
        rank = get_global_rank()  # each process has its own files and runs
        self._logger.load_state_dict(saved["loggers"][rank] if rank < saved["world_size"] else {})

    def forget(self) -> None:
        """Discard loaded data."""
        self._loaded = self._draws = None
        self._own_loaded = {}

    def resume(self) -> None:
        """Restore data, metrics and clock, once."""
        saved, self._loaded = self._loaded, None
        if saved is None:
            return
        state, batches = self._state, self._data.batches
        state.previous_timestamp = Timestamp.from_state_dict(saved["clock_before"])
        if saved["microbatch_size"] is not None and state.auto_microbatching:
            state.device_train_microbatch_size = saved["microbatch_size"]
        is_as_before = _is_as_before(saved)
        place = self._place(saved)
        if batches is not None and place is not None:
            batches.load_state_dict(place)
        if is_as_before:
            load_metrics(state.train_metrics, saved["metrics"][get_global_rank()], state.device)
            self._draws = saved["rng"][get_global_rank()]
            self._own_loaded = saved["own_state"][get_global_rank()]
        else:
            different = saved["metrics"][:: saved.get("tensor_parallel", 1)]
            merged = merge_metrics(state.train_metrics, different, is_first=get_data_rank() == 0)
            load_metrics(state.train_metrics, merged, state.device)
            # Not those of the beginning, whose draws the run has used.
            words = state.rank_zero_seed, "resume", get_data_rank(), state.timestamp.batch
            self._draws = derive_seed(*words) % 2**32
            first = saved["data"][0]
            goes_on = batches is None or first is None or batches.moved(first, _data_world_size(saved)) is not None
            data = (
                "the epoch goes on with its next sample"
                if goes_on
                else "the current epoch may repeat samples and skip others, as the data is not split by a "
                "DistributedSampler"
            )
            warnings.warn(
                f"The checkpoint was saved by {saved['world_size']} processes, and {get_world_size()} resume from it: "
                f"random draws differ, plain attributes of components are not restored, and {data}. An exact resume "
                "requires the same number of processes and the same mesh.",
                UserWarning,
                stacklevel=2,
            )
        self.skipped_steps.copy_(saved["skipped_steps"])
        for optimizer in state.optimizers:
            # torch's schedulers warn if they step before an optimizer of this process has.
            setattr(optimizer, "_opt_called", True)  # noqa: B010

    def begin(self) -> None:
        """Restore the attributes of components and the global generators, as the last step before the first batch."""
        state, batches = self._state, self._data.batches
        data = () if batches is None else data_components(batches.spec.dataloader)
        of_others = [state.train_dataloader, state.scaler, *state.schedulers]
        self._own.watch(_components(state), leave_out=[*of_others, *(one for part in data for one in part.values())])
        own, self._own_loaded = self._own_loaded, {}
        warn_of_misfits(self._own.load(own, state.device))
        draws, self._draws = self._draws, None
        if isinstance(draws, int):
            seed_all(draws)
        elif draws is not None:
            load_rng_state(draws, state.device)


def _components(state: State) -> dict[str, Any]:
    """Return the components of a run by name, whose attributes may contain state."""
    optimizers = []
    for given in state.optimizers:
        optimizer: Any = given
        while isinstance(optimizer, torch.optim.Optimizer):
            optimizers.append(optimizer)
            optimizer = getattr(optimizer, "base_optimizer", None)
    components = {"model": state.model} | {f"optimizers.{key}": one for key, one in by_key(optimizers).items()}
    for kind, held in (("algorithms", state.algorithms), ("callbacks", state.callbacks)):
        components |= {f"{kind}.{state.component_key(one)}": one for one in held}
    for evaluator in state.evaluators:
        loader = evaluator.dataloader.dataloader
        loading, choosing = data_components(loader)
        found = choosing if getattr(loader, "num_workers", 0) else loading | choosing
        components |= {f"evaluators.{evaluator.label}.{name}": one for name, one in found.items()}
    return components
