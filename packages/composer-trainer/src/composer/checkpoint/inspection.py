"""Show and verify checkpoints as text, and merge their weights, without a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.manifest import MODEL, STATE, Manifest, dictionary
from composer.core import TimeUnit
from composer.core.checks import abridged
from composer.core.files import write_atomically


def verify_checkpoint(path: str | os.PathLike[str]) -> Manifest:
    """Compare every file of a checkpoint with its checksum, and return the manifest.

    Raises:
        CheckpointError: It is incomplete or damaged; the error names the file.

    Example:
        >>> verify_checkpoint("no/such/checkpoint")
        Traceback (most recent call last):
        composer.checkpoint.errors.MissingCheckpointError: no/such/checkpoint does not exist.
    """
    opened = open_checkpoint(path)
    opened.check()
    return opened.manifest


def show_checkpoint(path: str | os.PathLike[str]) -> str:
    """Return a description of a checkpoint: clock, algorithms, metrics and sizes.

    Args:
        path: The checkpoint; as for :func:`load_checkpoint`.

    Raises:
        CheckpointError: It is incomplete or damaged.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from composer.checkpoint import save_checkpoint
        >>> from composer.core import State
        >>> print(show_checkpoint(save_checkpoint(State(torch.nn.Linear(2, 2)), tempfile.mkdtemp() + "/ep0")))
        ... # doctest: +ELLIPSIS
        /...ep0
        run         run
        ...
    """
    opened = open_checkpoint(path)
    try:
        lines = [opened.path, *_about(opened.manifest), *_components(opened.data())]
    except RecursionError:
        raise CheckpointError(f"{opened.path}/{STATE}", "is nested deeper than anything that is saved.") from None
    return "\n".join([*lines, *_files(opened.manifest)])


def merge_weights(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the weights of a checkpoint to one safetensors file, which any reader of that format loads.

    A checkpoint of a sharded model has its weights in parts; this joins them.

    Args:
        path: The checkpoint; as for :func:`load_checkpoint`.
        file: The file to write; it is replaced if it exists.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or has no weights.
        OSError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from composer.checkpoint import save_checkpoint
        >>> from composer.core import State
        >>> folder = tempfile.mkdtemp()
        >>> merge_weights(save_checkpoint(State(torch.nn.Linear(2, 2)), f"{folder}/ep0"), f"{folder}/all.safetensors")
        >>> from safetensors.torch import load_file
        >>> sorted(load_file(f"{folder}/all.safetensors"))
        ['bias', 'weight']
    """
    weights = open_checkpoint(path).tensors(MODEL)
    if not weights:
        raise CheckpointError(path, "holds no weights: they were left out when it was saved.")
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    write_atomically(lambda unfinished: save_file(contiguous, unfinished, {"format": "pt"}), Path(file))


def _row(name: str, value: object) -> str:
    return f"{name:<12}{value}"


def _about(manifest: Manifest) -> list[str]:
    clock = manifest.timestamp
    counts = ", ".join(
        f"{clock.count(unit):,} {unit.plural}"
        for unit in (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN)
        if clock.count(unit)
    )
    kind = "weights only" if manifest.weights_only else "everything to continue training"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    values = {name: "not finite" if value is None else f"{value:.6g}" for name, value in manifest.metrics.items()}
    metrics = [_printable(_row("", f"{name} {value}")) for name, value in values.items()]
    return [
        _row("run", _printable(manifest.run_name)),
        _row("clock", counts or "nothing trained"),
        _row("holds", kind),
        _row("saved", f"{_printable(manifest.created)} by {_printable(versions)}"),
        *([_row("metrics", ""), *metrics] if metrics else []),
    ]


def _printable(text: str) -> str:
    """Return text without control characters, and with long lines abridged."""
    return "".join(letter if letter.isprintable() else "?" for letter in abridged(text))


def _components(data: dict[str, Any]) -> list[str]:
    lines = []
    for kind in ("algorithms", "callbacks", "schedulers"):
        saved = data.get(kind)
        records = [*map(dictionary, saved)] if isinstance(saved, list) else []
        records = [record for record in records if isinstance(record.get("key"), str)]
        if records:
            lines.append(_row(kind, ""))
        for record in records:
            settings = dictionary(record.get("settings"))
            shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
            lines.append(_row("", _printable(f"{record['key']}({shown})")[:200]))
    if optimizers := dictionary(data.get("optimizers")):
        lines.append(_row("optimizers", _printable(", ".join(optimizers))))
    return lines


def _files(manifest: Manifest) -> list[str]:
    sizes = [_row("", f"{name} {record.size:,} bytes") for name, record in manifest.files.items()]
    return [_row("files", f"{manifest.size:,} bytes"), *sizes]
