"""What a checkpoint folder holds of a wrapped Transformers model."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["read_checkpoint"]

_WEIGHTS, _STATE = "model.safetensors", "state.json"
_PREFIX = "model."


def read_checkpoint(
    checkpoint_path: str | Path, save_location: str | Path | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what was saved of a Transformers model; nothing in the folder is executed.

    Args:
        checkpoint_path: The checkpoint's folder, also a remote one (``"s3://bucket/ep3-ba1200"``).
        save_location: Where a remote folder's files are put; a temporary folder if None.

    Returns:
        The description of model and tokenizer, and the weights by the names of the Transformers model.

    Raises:
        FileNotFoundError: There is no such folder, or it is no checkpoint.
        ValueError: The checkpoint is not of a :class:`~composer.models.HuggingFaceModel`.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 (comes with Transformers)

    with _local(checkpoint_path, save_location) as folder:
        missing = [name for name in (_STATE, _WEIGHTS) if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{checkpoint_path} must be a checkpoint: a folder with {_STATE} and {_WEIGHTS}. "
                f"It has no {' and no '.join(missing)}."
            )
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        weights = load_file(folder / _WEIGHTS)
    described = state.get("integrations", {}).get("huggingface")
    if described is None:
        raise ValueError(
            f"{checkpoint_path} says nothing of a Transformers model: the model that was trained must be a "
            "HuggingFaceModel."
        )
    return described, {name.removeprefix(_PREFIX): value for name, value in weights.items() if name.startswith(_PREFIX)}


@contextmanager
def _local(path: str | Path, save_location: str | Path | None) -> Iterator[Path]:
    """Yield a folder of this machine with the checkpoint's files."""
    if "://" not in str(path):
        yield Path(path)
        return
    from fsspec.core import url_to_fs  # noqa: PLC0415 (comes with torch; only for remote folders)

    files, remote = url_to_fs(str(path))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if save_location is None else save_location)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_STATE, _WEIGHTS):
            source = f"{remote.rstrip('/')}/{name}"
            if files.exists(source):
                files.get_file(source, str(folder / name))
        yield folder
