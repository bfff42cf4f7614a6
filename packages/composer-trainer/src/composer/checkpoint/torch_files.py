"""Weights from files that torch.save has written, of Composer and others; nothing in them is run."""

from __future__ import annotations

import datetime
import re
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_torch_weights"]

_NESTS = (("state", "model"), ("state_dict",), ("model",))
"""Where weights lie in files that hold more: of Composer, of Lightning and many others."""


def load_torch_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights that a file of ``torch.save`` holds; all else in it is left alone.

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
    _check_not_compressed(path)
    try:
        with torch.serialization.safe_globals(_allowed()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
        raise CheckpointError(path, _why_refused(error)) from None
    for nest in ((), *_NESTS):
        weights = _inside(content, nest)
        if weights:
            return weights
    raise CheckpointError(path, "holds no weights: neither a state_dict nor one under 'state_dict' or 'model'.")


def _check_not_compressed(path: Path) -> None:
    """Refuse what torch never writes: a small file that becomes a large one."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
                raise CheckpointError(path, "is a compressed archive, which torch.save does not write.")
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise CheckpointError(path, f"is no whole file of torch.save: {error}.") from None


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


def _why_refused(error: Exception) -> str:
    named = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"(?:class|function) ([\w.]+)", str(error))
    if named:
        return (
            f"holds {named.group(1)}, which is not data, so nothing of it was loaded. If you trust it, "
            "save only its weights anew: torch.save(model.state_dict(), ...)."
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
