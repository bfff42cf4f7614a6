"""Saving a run: a snapshot of its state as the contents of files, and one checkpoint written from it."""

from __future__ import annotations

import datetime
import fnmatch
import gc
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.finding import Folder, open_folder
from composer.checkpoint.manifest import EXTRA, MODEL, OPTIMIZERS, STATE, Manifest, write_json
from composer.checkpoint.tensor_file import CopyMemory, PackedTensors, pack_tensors
from composer.core import State, TimeUnit, evaluation_weights, split_tensors
from composer.core.checks import shortened
from composer.core.naming import fill_in
from composer.core.serialization import plain
from composer.distributed.sharding import is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "IgnoreKeys",
    "Snapshot",
    "checkpoint_name",
    "environment",
    "filled_in",
    "ignored_keys",
    "module_classes",
    "refuse_sharded",
    "save_checkpoint",
    "take_snapshot",
    "write_snapshot",
]

IgnoreKeys: TypeAlias = str | Sequence[str] | Callable[[dict[str, Any]], object] | None
"""Patterns such as ``"optimizers/*"``, or a function that removes from its argument, a dictionary, what to ignore."""


def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    overwrite: bool = False,
) -> str:
    """Save a run as a checkpoint, and return where it is when it is all there.

    Args:
        state: The run.
        path: The checkpoint's folder or address, such as ``"runs/{run_name}/ep{epoch}-ba{batch}"``.
        extra: More to save, by name: plain data and tensors. :func:`load_checkpoint` gives it back.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them. See :func:`composer.core.evaluation_weights`.
        ignore_keys: What not to save: patterns of paths such as ``"optimizers/*"``, or a function that takes it out of
            the dictionary that it is given.
        overwrite: Whether to replace another checkpoint of the name. One of this run at this very moment is left as it
            is, and one that is damaged is replaced, in any case.

    Raises:
        NotImplementedError: The model is sharded.
        NotSerializableError: Something is neither data nor a tensor; it is said where.
        CheckpointSaveError: It could not be written. What was there before is as it was.

    Example:
        >>> import tempfile, torch
        >>> state = State(torch.nn.Linear(2, 2))
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/ep{epoch}-ba{batch}")
        >>> path[-7:], sorted(os.listdir(path))
        ('ep0-ba0', ['manifest.json', 'model.safetensors', 'state.json'])
    """
    text = filled_in(os.fspath(path), state).rstrip("/")
    parent, _, name = text.rpartition("/")
    folder = open_folder(parent or ("/" if text.startswith("/") else "."))
    snapshot = take_snapshot(state, extra, weights_only=weights_only, ignore_keys=ignore_keys, copy=False)
    folder.make()
    write_snapshot(folder, checkpoint_name(name, state), snapshot, overwrite=overwrite)
    return folder.at(name)


def checkpoint_name(pattern: str, state: State, parameter: str = "A checkpoint's name") -> str:
    """Return the name of a checkpoint at this moment.

    Args:
        pattern: Text in which ``{run_name}``, ``{rank}``, ``{epoch}``, ``{batch}``, ``{iteration}``, ``{sample}``,
            ``{token}``, ``{batch_in_epoch}`` and so on are filled in.
        state: The run.
        parameter: Whose value the pattern is, for the error.

    Raises:
        ValueError: There is something else in braces, or it cannot be the name of a folder.

    Example:
        >>> checkpoint_name("ep{epoch}-ba{batch}", State(model=None))
        'ep0-ba0'
    """
    name = filled_in(pattern, state, parameter)
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"{parameter} must be the name of a folder, without '/' and not beginning with '.', got {shortened(name)}."
        )
    return name


def filled_in(pattern: str, state: State, parameter: str = "A checkpoint's path") -> str:
    """Return a text with the run's name and clock filled in.

    Raises:
        ValueError: Something else is in braces, or it is no name at all.
    """
    clock = state.timestamp
    values = {
        "run_name": state.run_name,
        "rank": state.rank,
        **{name: int(value) for name, value in clock.state_dict().items() if not name.endswith("_wct")},
        "total_wct": clock.total_wct.total_seconds(),
    }
    return fill_in(pattern, values, parameter)


def write_snapshot(folder: Folder, name: str, snapshot: Snapshot, *, overwrite: bool) -> Manifest:
    """Write what was taken of a run, unless it is there already.

    Raises:
        CheckpointSaveError: It could not be written, or there is another checkpoint of the name.
    """
    there = None if overwrite else _there_already(folder, name, snapshot.manifest)
    return folder.write(name, snapshot) if there is None else there


def _there_already(folder: Folder, name: str, wanted: Manifest) -> Manifest | None:
    """Return the manifest of the same moment's checkpoint, None if there is none that is whole."""
    if not folder.exists(name):
        return None
    try:
        there = folder.manifest(name)
        folder.check(name, there)
    except CheckpointError:
        return None
    if _moment(there) != _moment(wanted):
        raise CheckpointSaveError(
            folder.at(name),
            f"there is one already, of run {there.run_name!r} at batch {there.timestamp.count(TimeUnit.BATCH)}. "
            "Say overwrite (save_overwrite=True of a Trainer) to replace it, or choose another folder or run_name.",
        )
    return there


def _moment(manifest: Manifest) -> tuple[Any, ...]:
    counts = {name: value for name, value in manifest.timestamp.state_dict().items() if not name.endswith("_wct")}
    return (manifest.run_name, manifest.weights_only, counts)


@attrs.frozen(eq=False)
class Snapshot:
    """A checkpoint that is not written yet; later changes of the run do not touch it.

    Args:
        data: What :data:`STATE` is to say.
        tensors: The contents of the other files by name.
        manifest: What they hold; its ``files`` are filled in when they are written.
    """

    data: Any
    tensors: dict[str, PackedTensors]
    manifest: Manifest

    def files(self) -> dict[str, tuple[memoryview, ...]]:
        """Return the contents of all files by name, each in pieces."""
        pieces = {name: packed.pieces for name, packed in self.tensors.items()}
        return pieces | {STATE: (memoryview(write_json(self.data, sort=False)),)}


def refuse_sharded(model: object) -> None:
    """Refuse a model whose weights are sharded (DTensors, as FSDP2 makes them); all processes have to call it.

    Raises:
        NotImplementedError: It is sharded.
    """
    if isinstance(model, torch.nn.Module) and is_sharded(model):
        raise NotImplementedError(
            "Checkpoints of sharded models are not supported yet. Get the full weights with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
            "StateDictOptions(full_state_dict=True, cpu_offload=True)), and save those."
        )


def take_snapshot(
    state: State,
    extra: Mapping[str, Any] | None = None,
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    copy: bool = True,
    memory: CopyMemory | None = None,
) -> Snapshot:
    """Return a run as it is now: its tensors are copied to the CPU, once.

    Args:
        state: The run.
        extra: More to save, by name: plain data and tensors, such as the position in the data.
        weights_only: Whether to take only the weights that the model is evaluated with, and what describes them.
        ignore_keys: What to leave out.
        copy: Whether the run may go on before the snapshot is written.
        memory: Where the copy may go; it is given back by whoever has written the snapshot.

    Raises:
        NotImplementedError: The model is sharded.
        NotSerializableError: Something is neither data nor a tensor; it is said where.
    """
    refuse_sharded(state.model)
    with _no_collection():
        if not weights_only:
            return _take(state, extra, weights_only=False, ignore_keys=ignore_keys, copy=copy, memory=memory)
        with evaluation_weights(state) as may_differ:
            copy = copy or may_differ
            return _take(state, None, weights_only=True, ignore_keys=ignore_keys, copy=copy, memory=memory)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put off the collection of garbage: thousands of small objects would set it off, and it can outlast the copy."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _take(
    state: State,
    extra: Mapping[str, Any] | None,
    *,
    weights_only: bool,
    ignore_keys: IgnoreKeys,
    copy: bool,
    memory: CopyMemory | None,
) -> Snapshot:
    saved = state.state_dict() | {"model": state.get_model_state_dict()}
    if not weights_only:
        saved["optimizers"] = state.get_optim_state_dict()
    saved |= {"extra": plain(dict(extra or {}), "extra")}
    metrics = _metric_values(state)
    ignored_keys(saved, ignore_keys)
    if weights_only:
        saved = {
            name: saved[name] for name in ("version", "model", "algorithms", "timestamp", "run_name") if name in saved
        }
        saved["algorithms"] = [{**record, "state": {}} for record in saved.get("algorithms", [])]
    saved |= {
        "environment": environment(state),
        "integrations": _integrations(state.model),
        "modules": module_classes(state.model),
    }
    data, tensors = _packed(saved, copy=copy, memory=memory)
    manifest = Manifest(
        files={},
        timestamp=state.timestamp,
        run_name=state.run_name,
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        weights_only=weights_only,
        versions={name: saved["environment"][name] for name in ("python", "torch", "composer-trainer")},
        metrics=metrics,
    )
    return Snapshot(data, tensors, manifest)


def _packed(saved: dict[str, Any], *, copy: bool, memory: CopyMemory | None) -> tuple[Any, dict[str, PackedTensors]]:
    """Return a saved state as data and files of tensors."""
    held = saved.pop("model", None)
    weights = {name: plain(value, f"model.{name}") for name, value in (held or {}).items() if isinstance(value, Tensor)}
    others = {name: value for name, value in (held or {}).items() if name not in weights}
    # The model's come first: a tensor that is there twice goes by its first name, and weights are loaded alone, too.
    data, tensors = split_tensors({"model": others, **saved})
    of_optimizers = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizers.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in of_optimizers}
    groups = {MODEL: None if held is None else weights, OPTIMIZERS: of_optimizers or None, EXTRA: rest or None}
    return data, {
        name: pack_tensors(group, copy=copy, memory=memory) for name, group in groups.items() if group is not None
    }


def ignored_keys(saved: dict[str, Any], ignore_keys: IgnoreKeys) -> tuple[str, ...]:
    """Take out of a saved state what is to be ignored, and return the paths of what was taken out.

    Args:
        saved: A saved state; changed in place.
        ignore_keys: Patterns of paths, in the manner of file names, such as ``"model/head.*"``, ``"optimizers/*"``,
            ``"algorithms/EMA"``, ``"timestamp"``; or a function that changes the dictionary itself.

    Raises:
        TypeError: ``ignore_keys`` is something else.

    Example:
        >>> saved = {"model": {"body.weight": 1, "head.weight": 2}, "timestamp": {}}
        >>> ignored_keys(saved, "model/head.*"), saved
        (('model/head.weight',), {'model': {'body.weight': 1}, 'timestamp': {}})
    """
    if ignore_keys is None:
        return ()
    before = _paths(saved)
    if callable(ignore_keys):
        ignore_keys(saved)
    else:
        patterns = [ignore_keys] if isinstance(ignore_keys, str) else list(ignore_keys)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"ignore_keys must be texts such as 'optimizers/*', or a function, got {ignore_keys!r}.")
        patterns = [pattern.removeprefix("state/") for pattern in patterns]
        for path in before:
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                _take_out(saved, path)
    after = _paths(saved)
    gone = [path for path in before if path not in after]
    return tuple(path for path in gone if path.rpartition("/")[0] not in gone)


def _paths(saved: Mapping[str, Any]) -> dict[str, None]:
    paths: dict[str, None] = {}
    for name, value in saved.items():
        paths[name] = None
        if isinstance(value, Mapping) and name != "timestamp":
            paths |= {f"{name}/{inner}": None for inner in value}
        elif isinstance(value, list):
            paths |= {f"{name}/{one['key']}": None for one in value if isinstance(one, Mapping) and "key" in one}
    return paths


def _take_out(saved: dict[str, Any], path: str) -> None:
    name, _, inner = path.partition("/")
    if not inner or name not in saved:
        saved.pop(name, None)
    elif isinstance(saved[name], list):
        saved[name] = [one for one in saved[name] if not isinstance(one, Mapping) or one.get("key") != inner]
    elif isinstance(saved[name], dict):
        saved[name].pop(inner, None)


def _metric_values(state: State) -> dict[str, float | None]:
    train = state.dataloader_label or "train"
    found = {f"metrics/{train}/{name}": value for name, value in state.train_metric_values.items()}
    only_label = next(iter(state.eval_metrics), "eval") if len(state.eval_metrics) < 2 else None
    for label, values in state.eval_metric_values.items():
        if isinstance(values, Mapping):
            found |= {f"metrics/{label}/{name}": value for name, value in values.items()}
        elif only_label is not None:  # a metric by its name alone
            found[f"metrics/{only_label}/{label}"] = values
    numbers = {name: _number(value) for name, value in found.items()}
    return {name: number for name, number in numbers.items() if number is not ...}


def _number(value: Any) -> Any:
    """Return a metric's value as a float; None if it is not finite, ``...`` if it is no single number."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.numel() != 1):
        return ...
    if not isinstance(value, (int, float, Tensor)):
        return ...
    number = float(value)
    return number if math.isfinite(number) else None


def environment(state: State) -> dict[str, Any]:
    """Return what a run's bits depend on beside its settings: software and hardware."""
    cuda = state.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "composer-trainer": version("composer-trainer"),
        "machine": platform.machine(),
        "platform": sys.platform,
        "device": torch.cuda.get_device_name(state.device) if cuda else str(state.device),
    }


def module_classes(model: Any) -> dict[str, str]:
    """Return the class of each module of the bare model, by name.

    Example:
        >>> module_classes(torch.nn.Sequential(torch.nn.ReLU()))
        {'': 'Sequential', '0': 'ReLU'}
    """
    if not isinstance(model, torch.nn.Module):
        return {}
    return {name: type(module).__name__ for name, module in model.named_modules()}


def _integrations(model: Any) -> dict[str, Any]:
    get_metadata = getattr(model, "get_metadata", None)
    if not callable(get_metadata):
        return {}
    metadata: dict[str, Any] = plain(get_metadata(), "integrations")
    return metadata
