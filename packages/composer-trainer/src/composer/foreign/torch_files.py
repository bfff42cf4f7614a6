"""Weights from files of torch.save, of Composer and others, and of safetensors; nothing in them is run.

``torch.load(weights_only=True)`` can be made to corrupt memory before torch 2.10 (CVE-2026-24747). The reader here is
Python's unpickler with a short list of what it may construct: containers, numbers, tensors and NumPy's arrays.
"""

from __future__ import annotations

import datetime
import io
import pickle
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from pickletools import genops
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from composer.checkpoint.errors import CheckpointError, MissingCheckpointError
from composer.checkpoint.folder import is_remote, local_path
from composer.checkpoint.remote import file_system

_NESTS = (("state", "model"), ("state_dict",), ("model",))
"""Where weights are in files that contain more, such as those of Composer and Lightning."""
_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


def load_torch_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file of ``torch.save``; everything else in it is ignored.

    Beside tensors, containers and numbers it may hold what a Composer checkpoint does: torch's version, durations, and
    NumPy's arrays of numbers.

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
    return _weights_in(read_torch_file(path), path)


def read_weights_file(path: str) -> tuple[dict[str, Tensor], Any]:
    """Return the weights in a file, and all of the content of a file of ``torch.save``.

    Args:
        path: The path or URL of a file of safetensors or of ``torch.save``.

    Raises:
        CheckpointError: It cannot be read, holds anything that is not data, or no weights.
    """
    with tempfile.TemporaryDirectory(prefix="composer-") as folder:
        file = _download(path, Path(folder)) if is_remote(path) else local_path(path)
        if not file.is_file():
            raise MissingCheckpointError(path)
        if not path.endswith(".safetensors"):
            try:
                content = read_torch_file(file)
                return _weights_in(content, file), content
            except CheckpointError as error:  # of the downloaded copy, which is deleted
                raise CheckpointError(path, error.reason) from error
        try:  # not mapped into memory: a file that is cut off later would end the process
            return safetensors.torch.load(file.read_bytes()), None
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
        with zipfile.ZipFile(path) as archive:
            _check_sizes(archive, path)
            return _Reader(archive).read()
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            path, f"is not a complete file of torch.save: {error}. Files of torch before 1.6 have to be saved again."
        ) from None
    except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
        line = (str(error).strip().splitlines() or [""])[0]
        reason = f"is no file of torch.save that holds only data: {type(error).__name__}: {line:.200}"
        raise CheckpointError(path, reason) from None


def _weights_in(content: Any, path: Path) -> dict[str, Tensor]:
    for nest in ((), *_NESTS):
        weights = _inside(content, nest)
        if weights:
            return weights
    raise CheckpointError(path, "holds no weights: neither a state_dict nor one under 'state_dict' or 'model'.")


def _check_sizes(archive: zipfile.ZipFile, path: Path) -> None:
    """Reject a small file that becomes a large one, by compression or by parts that overlap."""
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError(path, "is a compressed archive, which torch.save does not write.")
    if sum(record.file_size for record in records) > path.stat().st_size:
        raise CheckpointError(path, "is an archive whose parts overlap, which torch.save does not write.")


class _Mapping(dict[Any, Any]):
    """A dictionary in a file, of any class; attributes of the instance are ignored."""

    def __setstate__(self, state: object) -> None: ...


class _Reader(pickle.Unpickler):
    """Reads the content of one archive; nothing but the functions of :meth:`find_class` is called."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        [name] = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
        self.archive, self.folder = archive, name.removesuffix("data.pkl")
        self.storages: dict[str, Tensor] = {}
        """The bytes of each storage; parameters that share memory share them."""
        content = archive.read(name)
        # Python's unpickler makes a table as long as the largest index into it.
        if any(code.name.endswith("PUT") and (argument or 0) > len(content) for code, argument, _ in genops(content)):
            raise ValueError("an index is larger than the file")
        super().__init__(io.BytesIO(content))

    def read(self) -> Any:
        order = f"{self.folder}byteorder"
        if order in self.archive.namelist() and self.archive.read(order).decode() != sys.byteorder:
            raise ValueError("it was written on a machine with another byte order")
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _CONSTRUCTED[module, name]
        except KeyError:
            raise CheckpointError(
                self.archive.filename,
                f"holds {module}.{name}, which is not data, so nothing of it was loaded. If you trust it, save only "
                "its weights again: torch.save(model.state_dict(), ...).",
            ) from None

    def persistent_load(self, pid: Any) -> tuple[Tensor, torch.dtype]:
        _, dtype, key, *_ = pid
        if key not in self.storages:
            record = self.archive.getinfo(f"{self.folder}data/{key}")
            content = bytearray(record.file_size)
            with self.archive.open(record) as file:
                file.readinto(content)  # type: ignore[attr-defined]
            self.storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        return self.storages[key], dtype


def _tensor(storage: tuple[Tensor, torch.dtype], offset: int, size: Any, stride: Any, *rest: Any) -> Tensor:
    content, dtype = storage
    # After two settings of gradients: a dtype, if it has no storage class; the bits of a lazy conjugate or negative.
    dtype = next((one for one in rest[2:] if isinstance(one, torch.dtype)), dtype)
    bits = next((one for one in rest[2:] if isinstance(one, dict)), {})
    tensor = content.view(dtype).as_strided(size, stride, offset)  # torch checks the bounds
    tensor = torch.conj(tensor) if bits.get("conj") else tensor
    return torch._neg_view(tensor) if bits.get("neg") else tensor  # noqa: SLF001


def _array(*_: object) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.empty(0)


def _array_dtype(name: str, *_: object) -> Any:
    import numpy as np  # noqa: PLC0415

    if np.dtype(name).kind not in "biufc":
        raise ValueError(f"an array of {name!r} holds no numbers")
    return np.dtype(name)


_CONSTRUCTED: dict[tuple[str, str], Any] = {
    **{("collections", name): lambda *_: _Mapping() for name in ("OrderedDict", "defaultdict")},
    # Its content is an argument, where other mappings are filled later. torch's MultiStepLR saves one.
    ("collections", "Counter"): Counter,
    # The protocol that torch.save uses by default has Python 2's name of the module.
    **dict.fromkeys([("builtins", "set"), ("__builtin__", "set")], set),
    # Only arguments of a defaultdict, which are not called.
    **{("__builtin__", name): None for name in ("dict", "float", "int", "list")},
    ("datetime", "timedelta"): datetime.timedelta,
    ("torch", "Size"): torch.Size,
    ("torch.torch_version", "TorchVersion"): str,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("_codecs", "encode"): lambda content, *_: content.encode("latin1"),
    ("numpy", "ndarray"): None,  # only an argument
    ("numpy", "dtype"): _array_dtype,
    # NumPy 1 and 2 have it under different names, and either may have written the file.
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
}
"""What is constructed for a name in a file."""


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
