"""Checkpoints that are one file, which ``torch.load(weights_only=True)`` reads: those whose names end in ``.pt``.

The file is made of the draft of an ordinary checkpoint when all processes have written theirs, and replaces an older
one of the name at once. It has the data and the tensors of the draft as one dictionary: ``"run"`` and ``"processes"``
for a resume, and ``"state"`` and ``"rng"`` in the form of MosaicML Composer. The manifest is one more record of the
archive, after all bytes of which it has the checksum.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import xxhash
from torch import Tensor

from composer.checkpoint.contents import BESIDE_STATE, FIRST_PROCESS, OWN_PROCESS, pop_not_needed
from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.folders import Folder, LocalFolder, is_remote, local_path, open_folder, sync_folder
from composer.checkpoint.layout import join_process, kind_of
from composer.checkpoint.loading import ONLY_WEIGHTS, SavedRun
from composer.checkpoint.manifest import (
    EXTRA,
    MANIFEST,
    MODEL,
    OPTIMIZERS,
    PROCESS_FILES,
    FileRecord,
    Manifest,
    dictionary,
)  # fmt: skip
from composer.checkpoint.reading import OpenCheckpoint
from composer.checkpoint.saver import CheckpointSaver
from composer.checkpoint.saving import save
from composer.core import State, join_tensors
from composer.core.files import FileName
from composer.core.former import warn_former
from composer.core.saving.codec import to_data
from composer.core.saving.records import from_data
from composer.core.saving.secrets import without_secret_urls
from composer.distributed import get_global_rank, get_world_size
from composer.functional.dtensors import is_sharded

SUFFIX = ".pt"
_LATEST = f"latest-rank0{SUFFIX}"
_FORMAT = "composer-checkpoint-file"
_SHARED = ("model", "optimizers")
"""What is read of ``state``, in which programs change it; all else of it is a view of ``run``."""
_HAS_AVERAGES = "ema_weights_active"
"""In the state of EMA, whether the model of the file has its averages, and ``ema_model`` the trained weights."""
_CHUNK, _MAGIC = 1 << 20, b"PK\3\4"
_RECORDS = MODEL
"""The name in the manifest of the bytes before it, one of those that a manifest may have."""


def content_of(opened: OpenCheckpoint, path: str) -> dict[str, Any]:
    """Return the content of a checkpoint that is or will be at a path: one dictionary of plain data and tensors."""
    run = join_tensors(opened.data(), opened.tensors(EXTRA) | opened.tensors(OPTIMIZERS))
    run["model"] = opened.tensors(MODEL) | run.get("model", {})
    files = sorted(name for name in opened.manifest.files if kind_of(name) == PROCESS_FILES)
    others = [join_process(opened.content(file), f"{opened.path}/{file}") for file in files]
    content = to_data({"run": run, "processes": others, "weights_only": opened.manifest.weights_only})
    first = dictionary(content["run"].get("extra")).get(FIRST_PROCESS)
    generators = [one["rng"] for one in (first, *content["processes"]) if "rng" in dictionary(one)]
    parts = _as_composer(content["run"], path)
    state = {name: part if name in _SHARED else _with_tuples(part) for name, part in parts.items()}
    content["run"] = {name: part for name, part in content["run"].items() if name not in _SHARED}
    return {"format": _FORMAT, "state": state, "rng": generators, **content}


def _as_composer(run: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return what is saved of a run in the form in which programs for MosaicML Composer read it."""
    state = {name: part for name, part in run.items() if name not in BESIDE_STATE} | {"callbacks": {}}
    if "timestamp" in state:
        state["timestamp"] = {"Timestamp": state["timestamp"]}
    for kind in ("schedulers", "callbacks"):
        state[kind] = {record["key"]: dict(record["state"]) for record in run.get(kind, ())}
    own = [(path, run["timestamp"])] if "timestamp" in run else []
    state["callbacks"].setdefault("CheckpointSaver", {}).setdefault("all_saved_checkpoints_to_timestamp", own)
    state["algorithms"] = []
    for record in run.get("algorithms", ()):
        settings = ", ".join(f"{name}={value!r}" for name, value in record["settings"].items())
        of_one = {**record["state"], "repr": f"{record['name']}({settings})"}
        if record["name"] == "EMA" and of_one.get("averaged_weights"):
            state["model"], trained = _with_averages(state.get("model", {}), of_one["averaged_weights"])
            exchanged = {"named_parameters_dict": trained, "named_buffers_dict": {}}
            of_one |= {"ema_model": exchanged, _HAS_AVERAGES: True}
        state["algorithms"].append((record["key"], of_one))
    versions = dictionary(run.get("environment"))
    of_composer = {"composer_version": versions.get("composer-trainer")}
    state["metadata"] = {"composer_env_info": of_composer, "torch_version": versions.get("torch")}
    state["integrations"] = dict(run.get("integrations", {}))
    if saved := dictionary(state["integrations"].get("huggingface")):
        model, tokenizer = saved["model"], dictionary(saved.get("tokenizer")).get("files", {})
        config = {**_as_content("config.json", model["files"].get("config.json", "{}")), "class": model["class"]}
        contents = {name: _as_content(name, text) for name, text in tokenizer.items()}
        state["integrations"]["huggingface"] = {**saved, "model": {**model, "config": config}, "tokenizer": contents}
    return state


def _with_averages(model: dict[str, Any], averages: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model with averages as its weights, and the weights in their place, also by names of tied ones."""
    weights = {name: model[name] for name in averages if name in model}
    first = {name: name if name in weights else _name_of(weight, weights) for name, weight in model.items()}
    averaged = {name: averages[one].to(model[name].dtype) for name, one in first.items() if one is not None}
    return model | averaged, {name: model[name] for name in averaged}


def _name_of(weight: Any, weights: Mapping[str, Tensor]) -> str | None:
    """Return the name of an equal weight, which is the first one of a tied weight."""
    names = weights if isinstance(weight, Tensor) else ()
    same = (name for name in names if weights[name].shape == weight.shape and torch.equal(weights[name], weight))
    return next(same, None)


def _exchange_back(state: Mapping[str, Any], run: dict[str, Any]) -> None:
    """Give a run its trained weights, and EMA the averages of the file, which a program may have changed."""
    own = {record.get("key"): dictionary(record.get("state")) for record in run.get("algorithms", ())}
    for key, saved in state.get("algorithms", ()):
        if saved.get(_HAS_AVERAGES):
            model, averages = run["model"], own[key]["averaged_weights"]
            for name in averages.keys() & model.keys():
                if not torch.equal(model[name], averages[name].to(model[name].dtype)):
                    averages[name] = model[name]
            run["model"] = model | saved["ema_model"]["named_parameters_dict"]


def _with_tuples(data: Any) -> Any:
    """Return data in which tuples are not encoded."""
    if isinstance(data, dict):
        tuples = data.keys() == {"$tuple"}
        return tuple(map(_with_tuples, data["$tuple"])) if tuples else {key: _with_tuples(data[key]) for key in data}
    return type(data)(map(_with_tuples, data)) if isinstance(data, (list, tuple)) else data


def _as_content(name: str, text: Any) -> dict[str, Any]:
    """Return the content of a file of Transformers: of JSON its data, of ``.txt`` a list of its lines."""
    suffix = Path(name).suffix
    lines = text.splitlines() if suffix == ".txt" else text
    return {"file_extension": suffix, "content": json.loads(text) if suffix == ".json" else lines}


def saved_run(content: Any, path: str, *, weights_only: bool) -> SavedRun | None:
    """Return what :func:`content_of` returned as what is loaded; None if it is the content of another file.

    Raises:
        CheckpointError: It is damaged, or has only weights where more is wanted.
    """
    if dictionary(content).get("format") != _FORMAT:
        return None
    if content.get("weights_only") and not weights_only:
        raise CheckpointError(path, ONLY_WEIGHTS)
    shared = {name: part for name, part in dictionary(content.get("state")).items() if name in _SHARED}
    try:
        data = from_data({**content["run"], **shared}, dict[str, Any], path)
        _exchange_back(content["state"], data)
        processes = from_data(content["processes"], list[Any], path)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, f"is not the state of a checkpoint: {error}") from None
    others = pop_not_needed(data, weights_only=weights_only)
    rank, are_as_many = get_global_rank(), len(processes) + 1 == get_world_size()
    if rank and are_as_many and FIRST_PROCESS in (extra := dictionary(data.get("extra"))):
        extra[OWN_PROCESS] = processes[rank - 1]
    return SavedRun(path, data, not_needed=others)


@attrs.frozen
class FileFolder(LocalFolder):
    """A local folder in which checkpoints whose names end in ``.pt`` are files, and others are folders.

    Args:
        path: The folder.
        replaces: Whether a checkpoint also replaces a file of its name that is none.
    """

    replaces: bool = False

    def names(self) -> list[str]:
        """Return the names of possible checkpoints, without the files of ``torch.save`` that are none."""
        visible = [entry.name for entry in self._entries(self.path) if entry.name[0] != "." and not entry.is_symlink()]
        files = [name for name in visible if self._is_file(name) and (self._is_damaged(name) or self.sizes(name))]
        return sorted([*super().names(), *files])

    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the sizes of a checkpoint's files; of one that is a file, of its manifest and of all before it."""
        if not self._is_file(name):
            return super().sizes(name)
        with self._archive(name) as archive:
            last = archive.infolist()[-1] if archive else None
            if last is None or not last.filename.endswith(f"/{MANIFEST}"):
                return {}
            return {MANIFEST: last.file_size, _RECORDS: last.header_offset}

    def _is_damaged(self, name: str) -> bool:
        try:
            self.sizes(name)
        except CheckpointError:
            return True
        return False

    @contextlib.contextmanager
    def reader(self, name: str, file: str) -> Iterator[io.RawIOBase]:
        """Open a file of a checkpoint for reading."""
        if not self._is_file(name):
            with super().reader(name, file) as source:
                yield source
            return
        with self._archive(name) as archive, (self.path / name).open("rb", buffering=0) as records:
            assert archive is not None  # else it has no size
            content: Any = io.BytesIO(archive.read(archive.infolist()[-1])) if file == MANIFEST else records
            yield content

    def begin(self, name: str) -> str:
        """Create a temporary folder for the files of a new checkpoint, and return its name."""
        # LocalFolder.begin rejects a file that is no checkpoint: the draft has a free name, and `commit` replaces it.
        is_replaced = self._is_file(name) and (self.replaces or self._is_damaged(name))
        return super().begin(f"{name}.new" if is_replaced else name)

    def commit(self, name: str, draft: str, manifest: Manifest) -> None:
        """Give a checkpoint its name, as one file if this ends in ``.pt``; one that had the name is replaced."""
        if not name.endswith(SUFFIX):
            super().commit(name, draft, manifest)
            return
        written, file = OpenCheckpoint(LocalFolder(self.path), draft, manifest), self.path / draft / "file"
        try:
            with file.open("xb") as target:
                torch.save(content_of(written, str(self.path / name)), target)
            _add_manifest(file, manifest)
            file.replace(self.path / name)
            sync_folder(self.path)
        except (OSError, RuntimeError) as error:
            raise CheckpointSaveError(self.path / name, f"{type(error).__name__}: {error}") from error

    def set_latest(self, latest: str, name: str) -> None:
        """Point a link to a checkpoint, and with ``latest`` also that of MosaicML Composer, if no file has its name."""
        super().set_latest(latest, name)
        is_free = self.get_latest(_LATEST) is not None or not (self.path / _LATEST).exists()
        if latest == "latest" and name.endswith(SUFFIX) and name != _LATEST and is_free:
            super().set_latest(_LATEST, name)

    def delete(self, name: str) -> None:
        """Delete a checkpoint."""
        if not self._is_file(name):
            super().delete(name)
            return
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointSaveError(self.path / name, f"an old one cannot be deleted: {error}") from error

    def _is_file(self, name: str) -> bool:
        return name.endswith(SUFFIX) and (self.path / name).is_file()

    @contextlib.contextmanager
    def _archive(self, name: str) -> Iterator[zipfile.ZipFile | None]:
        """Open a file of ``torch.save``, and yield None for one that does not begin as such."""
        path = self.path / name
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    with zipfile.ZipFile(file) as archive:
                        yield archive
                else:
                    yield None
        except (zipfile.BadZipFile, OSError, IndexError) as error:
            raise CheckpointError(path, f"is not a complete file of torch.save: {error}") from None


def _add_manifest(file: Path, manifest: Manifest) -> None:
    """Add the manifest to a file of ``torch.save``, and return when the file is on the disk."""
    digest = xxhash.xxh3_128()
    with zipfile.ZipFile(file, "a") as archive, file.open("rb") as source:
        size = archive.start_dir  # of all records; what follows, a list of them, is written again
        for begin in range(0, size, _CHUNK):
            digest.update(source.read(min(_CHUNK, size - begin)))
        complete = attrs.evolve(manifest, files={_RECORDS: FileRecord(size, digest.hexdigest())})
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/{MANIFEST}", complete.to_bytes())
    with file.open("rb+") as target:
        os.fsync(target.fileno())


def open_files(path: str | os.PathLike[str], *, replaces: bool = False) -> Folder:
    """Return the folder of a path or URL, in which checkpoints may be files if it is local."""
    return open_folder(path) if is_remote(path) else FileFolder(local_path(path).absolute(), replaces)


def let_savers_write_files(state: State, *, is_split: bool) -> None:
    """Let savers whose names of checkpoints end in ``.pt`` write files, if nothing is in the way, else warn.

    If only that of the link to the newest one ends so, checkpoints whose name equals the default of this library,
    whether it was given or not, get the default name of MosaicML Composer. With files the link ``latest`` has that of
    Composer, ``latest-rank0.pt``, beside it. Savers for which this was decided before are left as they are.

    Args:
        state: The run.
        is_split: Whether each process will have a part of the model, so that a checkpoint has to be a folder.
    """
    for saver in state.callbacks:
        if not isinstance(saver, CheckpointSaver) or saver.open_folder is not open_folder:
            continue
        links_to_file = str(saver.latest_filename).endswith(SUFFIX)
        if links_to_file and saver.filename == "ep{epoch}-ba{batch}":
            saver.filename = FileName(f"{saver.filename}-rank{{rank}}{SUFFIX}", saver.folder)
        if str(saver.filename).endswith(SUFFIX):
            place = saver.folder if is_remote(saver.folder) else next(iter(saver.folders_of_copies(state)), None)
            if is_split or is_sharded(state.model) or place is not None:
                saver.open_folder = partial(open_folder)
                _warn_of_folder(saver.filename, place)
            else:
                saver.open_folder = partial(open_files, replaces=saver.overwrite)
        elif links_to_file:
            saver.open_folder = partial(open_folder)
            _warn_of_folder(str(saver.latest_filename), None, f"it is a link to {saver.filename!r} (save_filename)")


def save_as_file(state: State, path: str, extra: Mapping[str, Any] | None, **options: Any) -> str:
    """Save a checkpoint as a file if its name ends in ``.pt`` and nothing is in the way, and return its path.

    Args:
        state: The run.
        path: Its path or URL.
        extra: More to save, by name.
        options: Those of :func:`~composer.checkpoint.saving.save`.
    """
    if path.endswith(SUFFIX) and not is_sharded(state.model) and not is_remote(path):
        options |= {"open_folder": partial(open_files, replaces=True), "overwrite": True}  # as torch.save does
    elif path.endswith(SUFFIX):
        _warn_of_folder(path, path if is_remote(path) else None)
    return save(state, path, extra, **options)


def _warn_of_folder(name: str, place: str | None, reason: str = "each process writes its part of the model") -> None:
    reason = reason if place is None else f"{without_secret_urls(place)} is a URL"
    warn_former(f"The checkpoint {name!r} is a folder and no file, because {reason}: remove '{SUFFIX}' from its name.")
