"""What a user leaves out of a checkpoint, or does not load: paths of a saved state, by patterns or a function."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["IgnoreKeys", "check_ignore_keys", "ignored_keys"]

IgnoreKeys: TypeAlias = str | Sequence[str] | Callable[[dict[str, Any]], object] | None
"""Patterns such as ``"optimizers/*"``, or a function that removes from its argument, a dictionary, what to ignore."""


def check_ignore_keys(ignore_keys: object, name: str = "ignore_keys") -> None:
    """Raise a TypeError if ``ignore_keys`` is neither None, strings nor a function; the error calls it by ``name``."""
    if ignore_keys is None or isinstance(ignore_keys, str) or callable(ignore_keys):
        return
    if not isinstance(ignore_keys, Collection) or not all(isinstance(pattern, str) for pattern in ignore_keys):
        raise TypeError(f"{name} must be strings such as 'optimizers/*', or a function, got {ignore_keys!r}.")


def ignored_keys(saved: dict[str, Any], ignore_keys: IgnoreKeys) -> tuple[str, ...]:
    """Remove from a saved state what is to be ignored, and return the paths of what was removed.

    Args:
        saved: A saved state; changed in place.
        ignore_keys: Patterns of paths as of file names, such as ``"model/head.*"``, ``"optimizers/*"``,
            ``"algorithms/EMA"``, ``"timestamp"``; or a function that changes the dictionary.

    Raises:
        TypeError: ``ignore_keys`` is neither.

    Example:
        >>> saved = {"model": {"body.weight": 1, "head.weight": 2}, "timestamp": {}}
        >>> ignored_keys(saved, "model/head.*"), saved
        (('model/head.weight',), {'model': {'body.weight': 1}, 'timestamp': {}})
    """
    if ignore_keys is None:
        return ()
    before = _paths(saved)
    if callable(ignore_keys):
        ignore_keys(saved)
    else:
        check_ignore_keys(ignore_keys)
        patterns = [ignore_keys] if isinstance(ignore_keys, str) else ignore_keys
        # Patterns of MosaicML Composer begin with it.
        patterns = [pattern.removeprefix("state/") for pattern in patterns]
        for path in before:
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                _remove(saved, path)
    after = _paths(saved)
    removed = [path for path in before if path not in after]
    return tuple(path for path in removed if path.rpartition("/")[0] not in removed)


def _paths(saved: Mapping[str, Any]) -> dict[str, None]:
    paths: dict[str, None] = {}
    for name, value in saved.items():
        paths[name] = None
        if isinstance(value, Mapping) and name != "timestamp":
            paths |= {f"{name}/{inner}": None for inner in value}
        elif isinstance(value, list):
            paths |= {
                f"{name}/{record['key']}": None for record in value if isinstance(record, Mapping) and "key" in record
            }
    return paths


def _remove(saved: dict[str, Any], path: str) -> None:
    name, _, inner = path.partition("/")
    if not inner or name not in saved:
        saved.pop(name, None)
    elif isinstance(saved[name], list):
        saved[name] = [
            record for record in saved[name] if not isinstance(record, Mapping) or record.get("key") != inner
        ]
    elif isinstance(saved[name], dict):
        saved[name].pop(inner, None)
