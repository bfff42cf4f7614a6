"""Weights from files of torch.save, of Composer and others, and of safetensors; nothing in them is run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError, MissingCheckpointError
from composer.checkpoint.folders import is_remote, local_path
from composer.checkpoint.remote import file_system
from composer.functional import torch_files

_NESTS = (("state", "model"), ("state_dict",), ("model",), ("model_state_dict",))
"""Where weights are in files that contain more, such as those of Composer, Lightning, and torch's tutorial."""
_NAMES = "'state_dict', 'model' or 'model_state_dict'"


def load_torch_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a file of ``torch.save``; everything else in it is ignored.

    Beside tensors, containers and numbers it may hold what a Composer checkpoint does: torch's version, durations, and
    NumPy's arrays of numbers.

    Args:
        path: A Composer checkpoint (``.pt``), a ``state_dict``, or one under ``state_dict`` or ``model``.

    Raises:
        CheckpointError: It holds anything else that is not data, which is named, or no weights.

    Example:
        >>> import pathlib, tempfile, torch
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "weights.pt"
        >>> torch.save(torch.nn.Linear(2, 2).state_dict(), path)
        >>> list(load_torch_weights(path))
        ['weight', 'bias']
    """
    return weights_in(read_torch_file(Path(path)), path)


def read_file(path: str) -> Any:
    """Return the content of a file of safetensors or of ``torch.save``.

    Args:
        path: Its path or URL.

    Raises:
        CheckpointError: It cannot be read, or holds anything that is not data.
    """
    with tempfile.TemporaryDirectory(prefix="composer-") as folder:
        file = _download(path, Path(folder)) if is_remote(path) else local_path(path)
        if not file.is_file():
            raise MissingCheckpointError(path)
        if not path.endswith(".safetensors"):
            try:
                return read_torch_file(file)
            except CheckpointError as error:  # of the downloaded copy, which is deleted
                raise CheckpointError(path, error.reason) from error
        try:  # not mapped into memory: a file that is cut off later would end the process
            return safetensors.torch.load(file.read_bytes())
        except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
            raise CheckpointError(path, f"is not a complete safetensors file: {error}") from None


def _download(url: str, folder: Path) -> Path:
    file = folder / "weights"
    try:
        files, remote = file_system(url)
        with files.open(remote, "rb") as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 8 << 20)
    except Exception as error:
        raise CheckpointError(url, f"cannot be read: {type(error).__name__}: {error}") from error
    return file


def read_torch_file(path: Path) -> Any:
    """Return the content of a file of ``torch.save``, on the CPU.

    Raises:
        CheckpointError: It cannot be read, or holds anything that is not data.
    """
    try:
        return torch_files.read_torch_file(path)
    except ValueError as error:
        raise CheckpointError(path, str(error)) from None


def weights_in(content: Any, path: str | Path) -> dict[str, Tensor]:
    """Return the weights in the content of a file, also if they are below one of the usual names.

    Raises:
        CheckpointError: There are none.
    """
    for nest in ((), *_NESTS):
        weights = _inside(content, nest)
        if weights:
            return weights
    raise CheckpointError(path, f"holds no weights: no state_dict, by itself or under {_NAMES}.")


def _inside(content: Any, nest: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors by name at a place in what was loaded; nothing if there are dictionaries beside them.

    Those that ``get_extra_state()`` of a module has returned are in any ``state_dict``, and are ignored.
    """
    for name in nest:
        content = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping):
        return {}
    items = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    others = [name for name, value in content.items() if isinstance(value, Mapping)]
    is_unnamed = any(not isinstance(name, str) for name in items)
    return {} if is_unnamed or any(not str(name).endswith("_extra_state") for name in others) else items
