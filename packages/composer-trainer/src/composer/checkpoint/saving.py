"""Saving a run: a snapshot of its state as the contents of files, and one checkpoint written from it.

:func:`save_checkpoint`, the Trainer and the saver take a :class:`Snapshot`, which :meth:`Snapshot.write` writes, in the
saver's thread. Each process that has regions of the model writes them; one may be alone. The first process begins a
draft, writes everything else, collects what the others have written, and commits: a checkpoint is complete or absent.
While it is written, nothing is exchanged through a process group: collectives of two threads could meet in another
order in each process.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from composer.checkpoint.base import (
    EXTRA,
    LAYOUT,
    MAX_STATE_BYTES,
    MODEL,
    OPTIMIZERS,
    STATE,
    Content,
    FileRecord,
    Manifest,
    dictionary,
    split_path,
    write_json,
)
from composer.checkpoint.errors import CheckpointError, CheckpointSaveError
from composer.checkpoint.ignoring import IgnoreKeys, ignored_keys
from composer.checkpoint.layout import TensorFile, describe_tensors, pack_files
from composer.checkpoint.local import open_folder
from composer.checkpoint.writers import failing_in_all, writers_of
from composer.core import State, TimeUnit, evaluation_weights, split_tensors
from composer.core.checks import shortened
from composer.core.files import fill_in_run
from composer.core.serialization import plain
from composer.distributed import from_rank_zero, get_global_rank
from composer.functional.dtensors import is_sharded, reshard

if TYPE_CHECKING:
    from composer.checkpoint.base import Folder
    from composer.checkpoint.layout import KeptMemory, Layout
    from composer.checkpoint.writers import Writers

__all__ = [
    "Snapshot",
    "checkpoint_name",
    "environment",
    "module_classes",
    "reject_fsdp1",
    "save_checkpoint",
    "save_in_all_processes",
    "take_snapshot",
]

ANSWER_TIMEOUT = 1800.0
"""Seconds after which an answer of another process that is missing makes a save fail."""
_LONGER = 30.0
"""Seconds that the other processes wait for the first one's decision after that."""


def save_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    overwrite: bool = False,
) -> str:
    """Save a run as a checkpoint, and return its path when it is complete.

    The checkpoint is written atomically and without a lock. Do not save into a folder to which the
    :class:`~composer.callbacks.CheckpointSaver` of another process saves: it deletes unfinished checkpoints when it
    starts.

    If the model is sharded by FSDP2, all processes have to call it, and each writes its regions of the tensors.

    Args:
        state: The run.
        path: The checkpoint's folder or URL, such as ``"runs/{run_name}/ep{epoch}-ba{batch}"``.
        extra: More to save, by name: plain data and tensors. :func:`load_checkpoint` returns it.
        weights_only: Whether to save only the weights that the model is evaluated with; training cannot resume from
            them. See :func:`composer.core.evaluation_weights`.
        ignore_keys: What not to save: patterns of paths such as ``"optimizers/*"``, or a function that removes it from
            the dictionary that it is called with.
        overwrite: Whether to replace another checkpoint of the name. If False, one of the same run and moment is kept,
            a damaged one is replaced, and any other raises an error.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
        CheckpointSaveError: It could not be written. Existing checkpoints are unchanged, except that one of the name at
            a URL is deleted first.

    Example:
        >>> import tempfile, torch
        >>> state = State(torch.nn.Linear(2, 2))
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/ep{epoch}-ba{batch}")
        >>> path[-7:], sorted(os.listdir(path))
        ('ep0-ba0', ['layout.json', 'manifest.json', 'model.safetensors', 'state.json'])
    """
    parent, name = split_path(fill_in_run(os.fspath(path), state, "A checkpoint's path"))
    folder, name = open_folder(parent), _valid_name(name)
    snapshot = take_snapshot(
        state, extra, path=folder.at(name), weights_only=weights_only, ignore_keys=ignore_keys, copy=False
    )
    snapshot.write(folder, name, overwrite=overwrite, prepare=folder.make)
    return folder.at(name)


def save_in_all_processes(state: State, path: str, *, extra: Mapping[str, Any], weights_only: bool) -> str:
    """Save a checkpoint with :func:`save_checkpoint`; all processes have to call it, also if no model is sharded.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1; in every process.
        CheckpointSaveError: The checkpoint could not be written; in every process.
    """
    reject_fsdp1(state.model)
    if is_sharded(state.model):
        return save_checkpoint(state, path, extra=extra, weights_only=weights_only)
    with failing_in_all(path):
        saved = path if get_global_rank() else save_checkpoint(state, path, extra=extra, weights_only=weights_only)
    return from_rank_zero(saved)


def checkpoint_name(pattern: str, state: State, parameter: str) -> str:
    """Return the name of a checkpoint at the current time of a run.

    Args:
        pattern: A name with ``{run_name}``, ``{epoch}``, ``{batch}``, ``{batch_in_epoch}`` and so on in it.
        state: The run.
        parameter: The parameter with the pattern, for the error.

    Raises:
        ValueError: Another name is in braces, or the result cannot be the name of a folder.

    Example:
        >>> checkpoint_name("ep{epoch}-ba{batch}", State(model=None), "filename")
        'ep0-ba0'
    """
    return _valid_name(fill_in_run(pattern, state, parameter), parameter)


def _valid_name(name: str, parameter: str = "A checkpoint's name") -> str:
    """Return a name, and raise a ValueError if a checkpoint cannot have it."""
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"{parameter} must be the name of a folder, without '/' and not beginning with '.', got {shortened(name)}."
        )
    return name


def take_snapshot(
    state: State,
    extra: Mapping[str, Any] | None = None,
    *,
    path: str = "",
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    copy: bool = True,
    memory: KeptMemory | None = None,
    measured: Collection[str] | None = None,
) -> Snapshot:
    """Return what this process writes of a checkpoint; if the model is sharded, all processes have to call it.

    Args:
        state: The run.
        extra: More to save, by name: plain data and tensors, such as the position in the data.
        path: The checkpoint, for errors.
        weights_only: Whether to save only the weights that the model is evaluated with, and what describes them.
        ignore_keys: What not to save.
        copy: Whether the run may change before the snapshot is written.
        memory: The copies of an earlier snapshot that has been written, to be filled again.
        measured: Labels of the data sets whose metrics were measured on these weights, and are listed; all if None.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        NotSerializableError: A value is neither data nor a tensor; the error names its place.
        CheckpointSaveError: In the other processes, if it fails in one.
    """
    reject_fsdp1(state.model)
    writers = writers_of(state.model)
    if not writers.is_alone:
        reshard(state.model)  # it may have its complete weights since an evaluation
    block = evaluation_weights(state) if weights_only else contextlib.nullcontext(enter_result=False)
    with block as may_differ:
        with writers.failing_in_all_processes(path):
            saved = _saved_state(state, extra, ignore_keys, weights_only=weights_only)
            data, tensors = _split_files(saved)
            described = describe_tensors(tensors, is_first=writers.rank == 0)
        layout, writes = writers.plan(described)
        contents: dict[str, list[memoryview]] | Exception
        try:
            # Evaluation weights are in the model only within the block, and are copied in any case.
            contents = pack_files(tensors, described, writes, copy=copy or may_differ, memory=memory)
        except Exception as error:
            if writers.is_alone:
                raise
            contents = error  # raised in all processes when the checkpoint is written
    manifest = Manifest(
        files={},
        timestamp=state.timestamp,
        run_name=state.run_name,
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        weights_only=weights_only,
        versions={name: data["environment"][name] for name in ("python", "torch", "composer-trainer")},
        metrics=metric_values(state, measured),
    )
    return Snapshot(data, contents, manifest, layout, writers)


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


def _saved_state(
    state: State, extra: Mapping[str, Any] | None, ignore_keys: IgnoreKeys, *, weights_only: bool
) -> dict[str, Any]:
    saved = state.state_dict() | {"model": state.get_model_state_dict()}
    if not weights_only:
        saved |= {"optimizers": state.get_optim_state_dict(), "extra": plain(dict(extra or {}), "extra")}
    if ignore_keys is not None:
        ignored_keys(saved, ignore_keys)
    if weights_only:
        names = ("version", "model", "algorithms", "timestamp", "run_name")
        saved = {name: saved[name] for name in names if name in saved}
        # Their settings, by which algorithms that the weights need are constructed again; not their progress.
        saved["algorithms"] = [{**record, "state": {}} for record in saved.get("algorithms", [])]
    get_metadata = getattr(state.model, "get_metadata", None)
    return saved | {
        "environment": environment(state.device),
        "integrations": plain(get_metadata(), "integrations") if callable(get_metadata) else {},
        "modules": module_classes(state.model),
    }


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
    for label, of_label in state.eval_metric_values.items():
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


def module_classes(model: Any) -> dict[str, str]:
    """Return the class of each module of the bare model, by name.

    Example:
        >>> module_classes(torch.nn.Sequential(torch.nn.ReLU()))
        {'': 'Sequential', '0': 'ReLU'}
    """
    if not isinstance(model, torch.nn.Module):
        return {}
    return {name: type(module).__name__ for name, module in model.named_modules()}


@attrs.define(eq=False)
class Snapshot:
    """What a process writes of a checkpoint; later changes of the run do not affect it, if the tensors are copies.

    Args:
        data: The content of :data:`STATE`, which the first process writes.
        contents: The contents of the files with this process's tensors, in pieces; or why there are none.
        manifest: The manifest without ``files``, which are added when they are written.
        layout: The layout without the checksums of the files.
        writers: The processes that write.
        timeout: Seconds to wait for other processes.
    """

    data: Any
    contents: dict[str, list[memoryview]] | Exception
    manifest: Manifest
    layout: Layout
    writers: Writers
    timeout: float = attrs.field(factory=lambda: ANSWER_TIMEOUT)
    _number: int = attrs.field(init=False)
    _until: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # In each key, so that an answer of a save that has failed is not taken for one of the next.
        self._number = self.writers.saves
        self._until = time.monotonic() + self.timeout + (_LONGER if self.writers.rank else 0.0)

    def limit_waiting(self, seconds: float) -> None:
        """Wait no longer than some seconds from now for other processes, which may have ended."""
        self._until = min(self._until, time.monotonic() + seconds)

    def write(
        self,
        folder: Folder,
        name: str,
        *,
        overwrite: bool = False,
        prepare: Callable[[], object] | None = None,
        finish: Callable[[Manifest], object] | None = None,
    ) -> None:
        """Write a checkpoint, unless an undamaged one of the same run and moment exists.

        All processes that write have to call it, and it fails in all or in none. No collectives are used.

        Args:
            folder: The folder.
            name: The checkpoint's name.
            overwrite: Whether to replace another checkpoint of the name.
            prepare: Called in the first process before.
            finish: Called in the first process when the checkpoint is complete.

        Raises:
            CheckpointSaveError: It could not be written, another checkpoint has the name, or a process has not written
                its files in time. Existing checkpoints are unchanged.
        """
        if self.writers.rank == 0:
            self._lead(folder, name, overwrite=overwrite, prepare=prepare, finish=finish)
        else:
            self._follow(folder, name)

    def _lead(
        self,
        folder: Folder,
        name: str,
        *,
        overwrite: bool,
        prepare: Callable[[], object] | None,
        finish: Callable[[Manifest], object] | None,
    ) -> None:
        """Write the first process's files, wait for the others, and commit the checkpoint."""
        draft, key, failed = None, "draft", None
        try:
            if prepare is not None:
                prepare()
            manifest = None if overwrite else self._existing(folder, name)
            if manifest is None:
                draft = folder.begin(name)
                self._send_all("draft", {"draft": draft})
                key = "outcome"
                # The first process writes while the others do, and waits for them afterwards.
                answers = [self._write_files(folder, name, draft)]
                answers += [self._receive(f"written by {rank}", rank) for rank in range(1, self.writers.world_size)]
                failed = next((answer for answer in answers if "error" in answer), None)
                if failed is not None:
                    raise CheckpointSaveError(folder.at(name), failed["error"])  # noqa: TRY301  (as any other failure)
                manifest = self._commit(folder, name, draft, answers)
            if finish is not None:
                finish(manifest)
            # If an equal checkpoint exists, this answers where the others expect a draft: they have nothing to write.
            self._send_all(key, {})
        except BaseException as error:
            with contextlib.suppress(Exception):  # this error is the one to raise
                self._send_all(key, failed or _failure(0, error))
            raise
        finally:
            if draft is not None:
                folder.abandon(draft)  # unfinished files, or a replaced checkpoint, for which no process has to wait

    def _follow(self, folder: Folder, name: str) -> None:
        """Write this process's files to the draft that the first process has begun, and wait for its decision."""
        rank, failed = self.writers.rank, None
        decision = self._receive(f"draft for {rank}")
        if "draft" in decision:
            try:
                answer = self._write_files(folder, name, decision["draft"])
            except Exception as error:  # noqa: BLE001  (raised below)
                answer, failed = _failure(rank, error), error
            with contextlib.suppress(RuntimeError):  # the first process has ended, as the next line finds as well
                self._send(f"written by {rank}", answer)
            decision = self._receive(f"outcome for {rank}")
            if failed is not None and (decision == answer or "unreachable" in decision):
                raise failed
        if "error" in decision:
            raise CheckpointSaveError(folder.at(name), decision["error"]) from failed

    def _existing(self, folder: Folder, name: str) -> Manifest | None:
        """Return the manifest of an undamaged checkpoint of the same run and moment; None if nothing has to be kept.

        Raises:
            CheckpointSaveError: Another checkpoint has the name.
        """
        if not folder.exists(name):
            return None
        try:
            existing = folder.manifest(name)
            folder.check(name, existing)
            saved = folder.data(name, existing)
        except CheckpointError:
            return None
        if _moment(existing) == _moment(self.manifest):
            # Since then an interrupted evaluation may have been completed, and the iteration that it belongs to.
            was_interrupted = bool(dictionary(saved.get("extra")).get("interrupted"))
            is_complete = existing.timestamp.counts[:2] == self.manifest.timestamp.counts[:2] and not was_interrupted
            is_measured = self.manifest.metrics.items() <= existing.metrics.items()
            return existing if is_complete and is_measured else None
        raise CheckpointSaveError(
            folder.at(name),
            f"there is one already, of run {existing.run_name!r} at batch {existing.timestamp.count(TimeUnit.BATCH)}. "
            "Set overwrite (save_overwrite=True of a Trainer) to replace it, or choose another folder or run_name.",
        )

    def _write_files(self, folder: Folder, name: str, draft: str) -> dict[str, Any]:
        """Write this process's files to a draft, and return their records, and headers and blocks of the tensors."""
        if isinstance(self.contents, Exception):
            raise self.contents
        files = {file: Content(pieces) for file, pieces in self.contents.items()}
        if self.writers.rank == 0:
            data = write_json(self.data, sort=False)
            if len(data) > MAX_STATE_BYTES:
                reason = f"its {STATE} would have {len(data)} bytes, and none of more than {MAX_STATE_BYTES} is read. "
                raise CheckpointSaveError(folder.at(name), f"{reason}Let large data in state_dict() be tensors.")
            files[STATE] = Content([memoryview(data)])
        for file, content in files.items():
            folder.put(name, draft, file, content)
        return {
            "files": {file: attrs.asdict(content.record) for file, content in files.items()},
            "tensors": {file: [len(pieces[0]), files[file].blocks] for file, pieces in self.contents.items()},
        }

    def _commit(self, folder: Folder, name: str, draft: str, answers: list[dict[str, Any]]) -> Manifest:
        tensors = {file: one for answer in answers for file, one in answer["tensors"].items()}
        layout = attrs.evolve(self.layout, files={file: TensorFile(*tensors[file]) for file in self.layout.files})
        content = Content([memoryview(layout.to_bytes())])
        folder.put(name, draft, LAYOUT, content)
        files = {file: FileRecord(**record) for answer in answers for file, record in answer["files"].items()}
        manifest = attrs.evolve(self.manifest, files=files | {LAYOUT: content.record})
        folder.commit(name, draft, manifest)
        return manifest

    def _send(self, key: str, answer: dict[str, Any]) -> None:
        self.writers.send(f"{self._number}: {key}", answer)

    def _send_all(self, key: str, answer: dict[str, Any]) -> None:
        for rank in range(1, self.writers.world_size):
            self._send(f"{key} for {rank}", answer)

    def _receive(self, key: str, rank: int = 0) -> dict[str, Any]:
        """Return the answer of a process, in which ``error`` is why there is none."""
        answer = self.writers.receive(f"{self._number}: {key}", lambda: self._until)
        if answer is None:
            return {"error": f"process {rank} has not answered in {self.timeout:g} seconds; is it still running?"}
        return answer | {"error": answer["unreachable"]} if "unreachable" in answer else answer


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    reason = error.reason if isinstance(error, CheckpointSaveError) else f"{type(error).__name__}: {error}"
    return {"error": f"process {rank} failed: {reason.rstrip('.')}."}


def _moment(manifest: Manifest) -> tuple[Any, ...]:
    now = manifest.timestamp.counts
    return manifest.run_name, manifest.weights_only, now.batch, now.sample, now.token
