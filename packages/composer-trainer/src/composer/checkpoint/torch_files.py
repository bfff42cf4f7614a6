"""Weights from files of torch.save, of Composer and others, and of safetensors; nothing in them is run."""

from __future__ import annotations

import datetime
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from composer.checkpoint.base import is_remote
from composer.checkpoint.errors import CheckpointError

__all__ = ["load_torch_weights", "read_weights_file"]

_NESTS = (("state", "model"), ("state_dict",), ("model",))
"""Where weights are in files that contain more, such as those of Composer and Lightning."""
_ARCHIVE = b"PK\x03\x04"
_END = 22 + 20 + 56
"""Bytes at the end of an archive that contain the position of its table of contents, in 32 and 64 bits."""


def load_torch_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file of ``torch.save``; everything else in it is ignored.

    The file is read with ``weights_only=True``. Beside what torch allows then, it may hold what a Composer checkpoint
    does: torch's version, durations, and NumPy's arrays and dtypes.

    Args:
        path: A Composer checkpoint (``.pt``), a ``state_dict``, or one under ``state_dict`` or ``model``.

    Raises:
        CheckpointError: It holds anything else that is not data, which is named, or no weights.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "weights.pt"
        >>> torch.save(torch.nn.Linear(2, 2).state_dict(), path)
        >>> list(load_torch_weights(path))
        ['weight', 'bias']
    """
    return _weights_in(_read_torch_file(path), path)


def read_weights_file(path: str) -> tuple[dict[str, Tensor], Any]:
    """Return the weights in a file, and all of the content of a file of ``torch.save``.

    Args:
        path: The path or URL of a file of safetensors or of ``torch.save``.

    Raises:
        CheckpointError: It cannot be read, holds anything that is not data, or no weights.
    """
    with tempfile.TemporaryDirectory(prefix="composer-") as folder:
        file = _download(path, Path(folder)) if is_remote(path) else Path(path.removeprefix("file://"))
        if not file.is_file():
            raise CheckpointError(path, "does not exist.")
        if not path.endswith(".safetensors"):
            content = _read_torch_file(file)
            return _weights_in(content, file), content
        try:  # not mapped into memory: a file that is cut off later would end the process
            return safetensors.torch.load(file.read_bytes()), None
        except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
            raise CheckpointError(path, f"is not a complete safetensors file: {error}") from None


def _download(url: str, folder: Path) -> Path:
    import fsspec  # noqa: PLC0415

    file = folder / "weights"
    try:
        with fsspec.open(url, "rb") as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 8 << 20)
    except Exception as error:
        raise CheckpointError(url, f"cannot be read: {type(error).__name__}: {error}") from error
    return file


def _read_torch_file(path: Path) -> Any:
    _check_not_compressed(path)
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
        raise CheckpointError(path, _why_rejected(error)) from None


def _weights_in(content: Any, path: Path) -> dict[str, Tensor]:
    for nest in ((), *_NESTS):
        weights = _inside(content, nest)
        if weights:
            return weights
    raise CheckpointError(path, "holds no weights: neither a state_dict nor one under 'state_dict' or 'model'.")


def _check_not_compressed(path: Path) -> None:
    """Reject what torch never writes: a small file that becomes a large one, by compression or by parts that overlap.

    torch reads archives by another library than Python's; where the two could see different contents, none is read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_ARCHIVE)) != _ARCHIVE:  # by which torch recognizes an archive, too
                return
            size = file.seek(0, 2)
            file.seek(max(0, size - _END))
            end = file.read()
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if _directory(end, size) != archive.start_dir:
                raise CheckpointError(path, "is no archive as torch.save writes it: its table of contents is hidden.")
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(path, f"is not a complete file of torch.save: {error}.") from None
    if any(one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size for one in records):
        raise CheckpointError(path, "is a compressed archive, which torch.save does not write.")
    if sum(one.file_size for one in records) > size:
        raise CheckpointError(path, "is an archive whose parts overlap, which torch.save does not write.")


def _directory(end: bytes, size: int) -> int | None:
    """Return where an archive's table of contents begins, from its last bytes; None if others follow them."""
    record = end[-22:]
    if not record.startswith(b"PK\5\6") or record[20:] != b"\0\0":
        return None
    if end[-42:-38] != b"PK\6\7":
        return int.from_bytes(record[16:20], "little")
    # In an archive of more than 4 GiB the position in 64 bits comes right before.
    is_there = end.startswith(b"PK\6\6") and int.from_bytes(end[-34:-26], "little") == size - _END
    return int.from_bytes(end[48:56], "little") if is_there else None


def _allowed() -> list[Any]:
    allowed: list[Any] = [torch.torch_version.TorchVersion, datetime.timedelta]
    try:
        import numpy as np  # noqa: PLC0415
    except ImportError:
        return allowed
    rebuild = np.ndarray.__reduce__(np.zeros(0))[0]
    # NumPy 1 and 2 have it under different names, and either may have written the file.
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    dtypes = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    return [*allowed, np.dtype, np.ndarray, *((rebuild, name) for name in names), *dtypes]


def _why_rejected(error: Exception) -> str:
    named = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"(?:class|function) ([\w.]+)", str(error))
    if named:
        return (
            f"holds {named.group(1)}, which is not data, so nothing of it was loaded. If you trust it, "
            "save only its weights again: torch.save(model.state_dict(), ...)."
        )
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"is no file of torch.save that holds only data: {type(error).__name__}: {reason:.200}"


def _inside(content: Any, nest: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors by name at a place in what was loaded; nothing if there are not only tensors."""
    for name in nest:
        content = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping):
        return {}
    items = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    others = [value for value in content.values() if isinstance(value, Mapping)]
    return (
        {} if others or any(not isinstance(name, str) for name in items) else {str(name): items[name] for name in items}
    )
