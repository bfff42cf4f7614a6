"""Files of ``torch.save``, of which nothing is run.

``torch.load(weights_only=True)`` can be made to corrupt memory before torch 2.10 (CVE-2026-24747). The reader here is
Python's unpickler with a short list of what it may construct: containers, numbers, tensors and NumPy's arrays.
"""

from __future__ import annotations

import datetime
import io
import pickle
import sys
import zipfile
from collections import Counter
from pathlib import Path
from pickletools import genops
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


class _NotDataError(ValueError):
    """A file holds anything that is not data."""


def read_torch_file(path: Path) -> Any:
    """Return the content of a file of ``torch.save``, on the CPU.

    Raises:
        ValueError: It cannot be read, or holds anything that is not data; the reason is the rest of a sentence that
            begins with the path.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "weights.pt")
        >>> torch.save({"weight": torch.ones(2), "epoch": 3}, path)
        >>> read_torch_file(path)
        {'weight': tensor([1., 1.]), 'epoch': 3}
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_sizes(archive, path.stat().st_size)
            return _Reader(archive).read()
    except _NotDataError:
        raise
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"is not a complete file of torch.save: {error}. Files of torch before 1.6 have to be saved again."
        ) from None
    except Exception as error:  # noqa: BLE001  (what is wrong in a file shows in any error)
        line = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"is no file of torch.save that holds only data: {type(error).__name__}: {line:.200}"
        ) from None


def _check_sizes(archive: zipfile.ZipFile, size: int) -> None:
    """Reject a small file that becomes a large one, by compression or by parts that overlap."""
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise _NotDataError("is a compressed archive, which torch.save does not write.")
    if sum(record.file_size for record in records) > size:
        raise _NotDataError("is an archive whose parts overlap, which torch.save does not write.")


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
            raise _NotDataError(
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
