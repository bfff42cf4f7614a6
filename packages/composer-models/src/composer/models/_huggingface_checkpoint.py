"""Reading a wrapped Transformers model from a checkpoint, a folder or a file whose name ends in ``.pt``."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer.functional.torch_files import read_torch_file
from composer.models._huggingface_saved import from_composer, rebuild_model, rebuild_tokenizer, write_pretrained

# The files of a checkpoint of composer-trainer, on which this package does not depend.
_WEIGHTS, _STATE, _EXTRA, _MANIFEST = "model.safetensors", "state.json", "extra.safetensors", "manifest.json"
_LAYOUT, _FORMAT = "layout.json", 3
_READ = re.compile(r"(state|layout)\.json|(model|extra)(-\d{5}-of-\d{5})?\.safetensors")
"""The files that are read; of a sharded model each process writes one."""
_PREFIX = "model."


def write_huggingface_pretrained_from_composer_checkpoint(
    checkpoint_path: str | Path,
    output_folder: str | Path,
    local_checkpoint_save_location: str | Path | None = None,
    base_model: str | Path | None = None,
) -> None:
    """Convert a checkpoint to a folder that Transformers' ``from_pretrained`` reads.

    For a model with adapters, it is a folder with the adapters that ``PeftModel.from_pretrained`` reads, and with the
    embeddings if they were resized: resize those of the base model before it reads the adapters.

    Args:
        checkpoint_path: The checkpoint's folder, also a remote one.
        output_folder: Where to write configuration, weights (safetensors) and tokenizer.
        local_checkpoint_save_location: The folder for the files of a remote checkpoint, in which those of an earlier
            checkpoint are deleted; a temporary folder if ``None``.
        base_model: Folder or name of the base model, if the checkpoint holds adapters alone.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It holds no Transformers model, the weights do not fit, or there is no ``base_model`` for adapters.

    Example:
        >>> write_huggingface_pretrained_from_composer_checkpoint("checkpoints/ep3-ba1200", "exported")
        Traceback (most recent call last):
        FileNotFoundError: checkpoints/ep3-ba1200 must be a checkpoint: a folder with manifest.json, ...
    """
    described, weights = read_checkpoint(checkpoint_path, local_checkpoint_save_location)
    model, tokenizer = rebuild_model(described, weights, base_model=base_model), rebuild_tokenizer(described)
    with_embeddings = (described.get("peft") or {}).get("with_embeddings", False)
    write_pretrained(model, tokenizer, output_folder, with_embeddings=with_embeddings)


def read_checkpoint(
    checkpoint_path: str | Path, save_location: str | Path | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a saved Transformers model; nothing in the checkpoint is executed.

    The XXH3 of each file in a folder is compared with the manifest of the checkpoint. The weights are those used for
    evaluation: the averages of EMA or SWA, if the checkpoint contains them.

    Args:
        checkpoint_path: The checkpoint's folder, also a remote one (``"s3://bucket/ep3-ba1200"``), or a local file,
            also one of MosaicML Composer, whose weights are those of the training.
        save_location: The folder for the files of a remote checkpoint; a temporary folder if None.

    Returns:
        The description of model and tokenizer, and the weights by their names in the Transformers model.

    Raises:
        FileNotFoundError: The folder does not exist, or is not a checkpoint.
        ValueError: The checkpoint was changed after it was written, is of another format, is not of a
            :class:`~composer.models.HuggingFaceModel`, or holds the training weights of a schedule-free optimizer,
            which only that optimizer can convert to the weights used for evaluation.
    """
    read = _read_file if Path(checkpoint_path).is_file() else _read_folder
    described, weights, averages, is_schedule_free = read(checkpoint_path, save_location)
    if averages:
        weights = {name: _evaluated(name, weights, averages) for name in weights}
    elif is_schedule_free:
        raise ValueError(
            f"{checkpoint_path} holds the training weights of a schedule-free optimizer, and the model is "
            "evaluated with others. Save those: trainer.save_checkpoint(..., weights_only=True), or "
            "Trainer(save_weights_only=True)."
        )
    if described is None:
        raise ValueError(
            f"{checkpoint_path} contains no description of a Transformers model: the trained model must be a "
            "HuggingFaceModel."
        )
    return described, {name.removeprefix(_PREFIX): value for name, value in weights.items() if name.startswith(_PREFIX)}


def _read_file(path: str | Path, _: object) -> tuple[Any, dict[str, Tensor], dict[str, Tensor], bool]:
    """Return what is read of a file: the description, the weights, the averages, and whether there should be some."""
    try:
        content = read_torch_file(Path(path))
        state = content["state"]
        weights = {name: weight for name, weight in state["model"].items() if isinstance(weight, Tensor)}
        if "run" not in content and state.get("integrations"):
            return from_composer(state["integrations"]["huggingface"]), weights, {}, _is_schedule_free(state)
        run = content["run"]
        return run.get("integrations", {}).get("huggingface"), weights, _averages(run), _is_schedule_free(state)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no checkpoint of a Trainer: {type(error).__name__}: {error}") from None


def _read_folder(
    path: str | Path, save_location: str | Path | None
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor], bool]:
    """Return what is read of a folder, as :func:`_read_file`."""
    with _local(path, save_location) as folder:
        missing = [name for name in (_MANIFEST, _STATE) if not (folder / name).is_file()]
        missing += [] if any(folder.glob("model*.safetensors")) else [_WEIGHTS]
        if missing:
            raise FileNotFoundError(
                f"{path} must be a checkpoint: a folder with {_MANIFEST}, {_STATE} and {_WEIGHTS}. "
                f"It has no {' and no '.join(missing)}."
            )
        _check(folder, path)
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            names = {name: str(reference["$tensor"]) for name, reference in _averages(state).items()}
            described, is_schedule_free = state.get("integrations", {}).get("huggingface"), _is_schedule_free(state)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{path}/{_STATE} is not the state of a run.") from None
        tensors = _load_tensors(folder, _EXTRA, path) if names else {}
        if missing := sorted(set(names.values()) - tensors.keys()):
            raise ValueError(f"{path}/{_EXTRA} lacks {len(missing)} of the averages in {_STATE}.")
        averages = {name: tensors[tensor] for name, tensor in names.items()}
        return described, _load_tensors(folder, _WEIGHTS, path), averages, is_schedule_free


def _load_tensors(folder: Path, kind: str, shown: str | Path) -> dict[str, Tensor]:
    """Return the complete tensors of a kind of file, which one process has written, or each process a part."""
    from safetensors.torch import load_file  # noqa: PLC0415 (comes with Transformers)

    tensors: dict[str, Tensor] = load_file(folder / kind) if (folder / kind).is_file() else {}
    parts = {path.name: load_file(path) for path in folder.glob(kind.replace(".", "-*."))}
    try:
        layout = json.loads((folder / _LAYOUT).read_bytes()) if parts else {"files": {}, "tensors": {kind: {}}}
        files = [*layout["files"]]
        for name, one in layout["tensors"][kind].items():
            tensors[name] = torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]))
            for corner, number in zip(itertools.product(*one["cuts"]), one["files"], strict=True):
                part = parts[files[number]][name]
                place = [slice(start, start + length) for start, length in zip(corner, part.shape, strict=True)]
                tensors[name][tuple(place)] = part
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError):
        raise ValueError(f"{shown}/{_LAYOUT} is not the layout of the files with tensors.") from None
    return tensors


def _check(folder: Path, shown: str | Path) -> None:
    """Compare the files with the manifest, and the manifest with its own checksum.

    Raises:
        ValueError: A file has been changed, or the checkpoint is of another format.
    """
    import xxhash  # noqa: PLC0415  (an extra)

    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        expected, records = {_MANIFEST: manifest.pop("sha256")}, manifest["files"]
        present = {name for name in [*records, *(path.name for path in folder.iterdir())] if _READ.fullmatch(name)}
        expected |= {name: records[name]["xxh3_128"] for name in present}
        # The checksum of the manifest is that of its other entries, in the form in which they were written.
        content = json.dumps(manifest, sort_keys=True, indent=1) + "\n"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{shown}/{_MANIFEST} is not the manifest of a checkpoint with weights.") from None
    if (number := manifest.get("format_version", _FORMAT)) != _FORMAT:
        raise ValueError(f"{shown} is of format {number}, and this release reads format {_FORMAT}. Use a newer one.")
    digests = {_MANIFEST: hashlib.sha256(content.encode()).hexdigest()}
    for name in present:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    for name, digest in expected.items():
        if digests[name] != digest:
            raise ValueError(
                f"{shown}/{name} has been changed since it was written, and nothing was loaded. Save or copy the "
                "checkpoint again."
            )


def _averages(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved for each averaged weight, if an algorithm's averages are not in the model."""
    states = [each.get("state", {}) for each in state.get("algorithms", [])]
    return next((each["averaged_weights"] for each in states if each.get("averaged_weights")), {})


def _evaluated(name: str, weights: dict[str, Tensor], averages: dict[str, Tensor]) -> Tensor:
    """Return the average of a weight, or of the one to which it is tied; a frozen weight, which has none, itself."""
    weight = weights[name]
    names = [name] if name in averages else (one for one in averages if _is_same(weights.get(one), weight))
    # Averages of weights in bfloat16 are saved in float32.
    return next((averages[one].to(weight.dtype) for one in names), weight)


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one, other)


def _is_schedule_free(state: dict[str, Any]) -> bool:
    # Schedule-free optimizers exchange the weights between training and evaluation, and record it in their groups.
    groups = [group for each in state.get("optimizers", {}).values() for group in each.get("param_groups", [])]
    return any(group.get("train_mode") for group in groups)


@contextmanager
def _local(path: str | Path, save_location: str | Path | None) -> Iterator[Path]:
    """Yield a local folder with the files of the checkpoint."""
    if "://" not in str(path):
        yield Path(path)
        return
    from fsspec.core import url_to_fs  # noqa: PLC0415 (comes with torch; only for remote folders)

    files, remote = url_to_fs(str(path))
    with tempfile.TemporaryDirectory() as temporary:
        found = files.ls(remote, detail=False) if files.exists(remote) else []
        fetched = {source.rpartition("/")[2]: source for source in found}
        # The files at a wrong URL do not replace an earlier checkpoint, which must not be read in its place either.
        folder = Path(temporary if save_location is None or _MANIFEST not in fetched else save_location)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _listed(folder) - fetched.keys():
            (folder / name).unlink(missing_ok=True)  # another process may have deleted it
        # The manifest is the last: until a download is complete, the earlier one lists what a next call deletes.
        for name in [*filter(_READ.fullmatch, fetched), *({_MANIFEST} & fetched.keys())]:
            files.get_file(fetched[name], str(folder / name))
        yield folder


def _listed(folder: Path) -> set[str]:
    """Return the names of files to read that the manifest in a folder lists, if there is one."""
    try:
        return set(filter(_READ.fullmatch, json.loads((folder / _MANIFEST).read_bytes())["files"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()
