"""What a checkpoint contains of a run: the contract between saving and loading.

The data of ``state.json`` is what ``state_to_save`` of ``core/saving/saved_state.py`` returns, encoded by the codec,
with the names of tensors in their place, and beside it:

- ``model``: what the model's state has besides tensors; its weights are in ``model.safetensors``.
- ``optimizers``: their state, with the tensors in ``optimizers.safetensors``.
- ``extra``: what the caller saves, as a Trainer its ``ResumeState``. Its tensors, and those of algorithms and
  callbacks, are in ``extra.safetensors``. What belongs to the first process is in it, under ``process``, with a
  :class:`SavedPlace`. Each other process has it in a file of its own, and reads only that.
- ``environment``, which is compared and not loaded, and ``integrations``, which functions of Hugging Face read: what
  the run was made of.

A checkpoint of weights has only what the model is evaluated with, and the settings of its algorithms. What a user
leaves out of a checkpoint, or does not load, are paths in this data.
"""

from __future__ import annotations

import fnmatch
import math
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

import attrs
import torch
from attrs.validators import ge, matches_re, optional
from torch import Tensor

from composer.checkpoint.manifest import EXTRA, MODEL, OPTIMIZERS
from composer.core import State, split_tensors
from composer.core.checks import abridged
from composer.core.saving import saved_state
from composer.core.saving.codec import Record, plain

IgnoreKeys: TypeAlias = str | Sequence[str] | Callable[[dict[str, Any]], object] | None
"""Patterns such as ``"optimizers/*"``, or a function that removes from its argument, a dictionary, what to ignore."""
BESIDE_STATE = ("extra", "environment", "integrations", "modules")
"""The names in the data of what is no part of the state; earlier releases saved the last one."""
FIRST_PROCESS, OWN_PROCESS = "process", "own"
"""The names in ``extra`` of what belongs to the first process, and to this one if it is not the first."""


def contents_of(
    state: State, extra: Mapping[str, Any] | None, ignore_keys: IgnoreKeys, *, weights_only: bool
) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """Return the data of ``state.json``, and the tensors of each kind of file, by name.

    Args:
        state: The run.
        extra: More to save, by name.
        ignore_keys: What not to save.
        weights_only: Whether to save only the weights that the model has, and what describes them.

    Raises:
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
    """
    saved = saved_state.state_to_save(state) | {"model": state.get_model_state_dict()}
    if not weights_only:
        saved |= {"optimizers": state.get_optim_state_dict(), "extra": dict(extra or {})}
    remove_ignored(saved, ignore_keys)
    if weights_only:
        names = ("version", "model", "algorithms", "timestamp", "run_name")
        saved = {name: saved[name] for name in names if name in saved}
        # Their settings, by which algorithms that the weights need are constructed again; not their progress.
        saved["algorithms"] = [{**record, "state": {}} for record in saved.get("algorithms", [])]
    get_metadata = getattr(state.model, "get_metadata", None)
    saved |= {
        "environment": environment(state.device),
        "integrations": plain(get_metadata(), "integrations") if callable(get_metadata) else {},
    }
    return _split_files(saved)


def _split_files(saved: dict[str, Any]) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """Return a saved state as JSON data and the tensors of each file."""
    has_model = "model" in saved
    model = saved.pop("model", {})
    weights = {name: plain(value, f"model.{name}") for name, value in model.items() if isinstance(value, Tensor)}
    # The model comes first: tensors that share memory are saved once, under the first name.
    others = {name: value for name, value in model.items() if name not in weights}
    data, tensors = split_tensors({"model": others, **saved})
    files: dict[str, dict[str, Tensor]] = {MODEL: weights} if has_model else {}
    for name, tensor in tensors.items():
        files.setdefault(OPTIMIZERS if name.startswith("optimizers.") else EXTRA, {})[name] = tensor
    return data, files


def metric_values(state: State, measured: Collection[str] | None = None) -> dict[str, float | None]:
    """Return the values of metrics that are single numbers, of some labels or all; None for one that is not finite."""
    values = [(state.dataloader_label or "train", name, value) for name, value in state.train_metric_values.items()]
    only_label = next(iter(state.eval_metrics), "eval") if len(state.eval_metrics) < 2 else None
    for label, of_label in dict(state.eval_metric_values).items():  # without its further keys
        if isinstance(of_label, Mapping):
            values += [(label, name, value) for name, value in of_label.items()]
        elif only_label is not None:  # a metric without the label of an evaluator
            values.append((only_label, label, of_label))
    numbers = {
        f"metrics/{label}/{name}": float(value)
        for label, name, value in values
        if measured is None or label in measured
        if (isinstance(value, (int, float)) and not isinstance(value, bool))
        or (isinstance(value, Tensor) and value.numel() == 1)
    }
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def environment(device: torch.device) -> dict[str, Any]:
    """Return the software and hardware that the bits of a run on a device depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "composer-trainer": version("composer-trainer"),
        "machine": platform.machine(),
        "platform": sys.platform,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def changed_environment(saved: Mapping[str, Any], device: torch.device) -> str:
    """Return which software and hardware differs that the bits of a training depend on."""
    names, now = ("torch", "composer-trainer", "device", "machine"), environment(device)
    return "; ".join(
        abridged(f"{name} was {saved[name]}, and is {now[name]}")
        for name in names
        if saved.get(name, now[name]) != now[name]
    )


def reject_fsdp1(model: object) -> None:
    """Raise a NotImplementedError if a model is wrapped by FSDP 1; all processes have to call it."""
    if not isinstance(model, torch.nn.Module):
        return
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it, nothing can be wrapped
    is_wrapped = fsdp is not None and any(
        isinstance(module, fsdp.FullyShardedDataParallel)
        and module.sharding_strategy is not fsdp.ShardingStrategy.NO_SHARD
        for module in model.modules()
    )
    if is_wrapped:
        raise NotImplementedError(
            "Checkpoints of models that are wrapped by FSDP 1 (FullyShardedDataParallel) are not supported. Shard the "
            "model with torch.distributed.fsdp.fully_shard, or by parallelism_config={'fsdp': {}} of the Trainer."
        )


def check_ignore_keys(ignore_keys: object, name: str = "ignore_keys") -> None:
    """Raise a TypeError if ``ignore_keys`` is neither None, strings nor a function; the error calls it by ``name``."""
    if ignore_keys is None or isinstance(ignore_keys, str) or callable(ignore_keys):
        return
    if not isinstance(ignore_keys, Collection) or not all(isinstance(pattern, str) for pattern in ignore_keys):
        raise TypeError(f"{name} must be strings such as 'optimizers/*', or a function, got {ignore_keys!r}.")


def remove_ignored(saved: dict[str, Any], ignore_keys: IgnoreKeys) -> tuple[str, ...]:
    """Remove from a saved state what is to be ignored, and return the paths of what was removed.

    Args:
        saved: A saved state; changed in place.
        ignore_keys: Patterns of paths as of file names, such as ``"model/head.*"``, ``"optimizers/*"``,
            ``"algorithms/EMA"``, ``"timestamp"``; or a function that changes the dictionary.

    Raises:
        TypeError: ``ignore_keys`` is neither.

    Example:
        >>> saved = {"model": {"body.weight": 1, "head.weight": 2}, "timestamp": {}}
        >>> remove_ignored(saved, "model/head.*"), saved
        (('model/head.weight',), {'model': {'body.weight': 1}, 'timestamp': {}})
    """
    if ignore_keys is None:
        return ()
    before, version = _paths(saved), saved.get("version")
    if callable(ignore_keys):
        saved["state"] = saved  # where functions for MosaicML Composer look for it
        ignore_keys(saved)
        saved.pop("state", None)
    else:
        check_ignore_keys(ignore_keys)
        patterns = [ignore_keys] if isinstance(ignore_keys, str) else ignore_keys
        # Patterns of MosaicML Composer begin with it.
        patterns = [pattern.removeprefix("state/") for pattern in patterns]
        for path in before:
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                _remove(saved, path)
    if version is not None:  # without it, nothing could be read
        saved.setdefault("version", version)
    after = _paths(saved)
    removed = [path for path in before if path not in after]
    return tuple(path for path in removed if path.rpartition("/")[0] not in removed)


def pop_not_needed(saved: dict[str, Any], *, weights_only: bool) -> dict[str, Any]:
    """Remove from a saved state what is not needed to load it, if only the weights are wanted, and return that."""
    return {name: saved.pop(name) for name in [*saved] if weights_only and name not in ("model", "algorithms")}


def _paths(saved: Mapping[str, Any]) -> dict[str, None]:
    paths: dict[str, None] = {}
    for name, value in saved.items():
        paths[name] = None
        if isinstance(value, Mapping) and name != "timestamp":
            paths |= {f"{name}/{inner}": None for inner in value}
        elif isinstance(value, list):
            paths |= {f"{name}/{one['key']}": None for one in value if isinstance(one, Mapping) and "key" in one}
    return paths


def _remove(saved: dict[str, Any], path: str) -> None:
    name, _, inner = path.partition("/")
    if not inner or name not in saved:
        saved.pop(name, None)
    elif isinstance(saved[name], list):
        saved[name] = [one for one in saved[name] if not (isinstance(one, Mapping) and one.get("key") == inner)]
    elif isinstance(saved[name], dict):
        saved[name].pop(inner, None)


@attrs.frozen
class SavedObjects(Record):
    """The states of objects by name, and those of the generators that are their attributes by path."""

    states: dict[str, Any] = attrs.field(factory=dict)
    generators: dict[str, dict[str, Any]] = attrs.field(factory=dict)


@attrs.frozen
class SavedPlace(Record):
    """The place of a process in the training data, as ``Batches`` of the Trainer saves and loads it.

    Attributes:
        epoch: The number of the epoch.
        place: The place of the next batch in it.
        global_batch_size: The number of samples in a batch of all processes, if the place is a number of samples.
        sizes: The known sizes of the data.
        order: A digest of the order up to the place, which differs if the order is another in a resumed run. None if
            it cannot be another.
        loader: What ``StatefulOrder`` saves of a loader that saves itself.
        objects: The objects that the loader consists of, as they were at the start of the epoch, if it has begun.
        has_ended: Whether the last batch was a copy, as this process had no further own batch, and others had.
        as_sampler: Whether the order is the sampler's own, as in a checkpoint of MosaicML Composer.
    """

    epoch: int = attrs.field(validator=ge(0))
    place: int = attrs.field(validator=ge(0))
    global_batch_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    sizes: dict[str, int] = attrs.field(factory=dict)
    order: str | None = attrs.field(default=None, validator=optional(matches_re(r"[0-9a-f]+")))
    loader: Any = None
    objects: SavedObjects = attrs.field(factory=SavedObjects)
    has_ended: bool = False
    as_sampler: bool = False
