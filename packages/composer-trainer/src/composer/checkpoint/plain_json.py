"""JSON as checkpoints hold it: read strictly, with a sentence for whatever is wrong."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from composer.checkpoint.errors import CheckpointError

__all__ = ["read_json", "write_json"]


def write_json(data: Any, *, sort: bool = True) -> bytes:
    r"""Return data as JSON; sorted, equal data gives equal bytes.

    Example:
        >>> write_json({"b": 1, "a": [0.5, None]})
        b'{\n "a": [\n  0.5,\n  null\n ],\n "b": 1\n}\n'
    """
    return (json.dumps(data, sort_keys=sort, indent=1, allow_nan=False) + "\n").encode()


def read_json(content: bytes, path: object) -> dict[str, Any]:
    """Return the dictionary that some JSON says.

    Args:
        content: The JSON.
        path: Where it comes from, for the error.

    Raises:
        CheckpointError: It is no JSON, or says something twice, or is no dictionary.

    Example:
        >>> read_json(b'{"a": 1, "a": 2}', "state.json")
        Traceback (most recent call last):
        composer.checkpoint.errors.CheckpointError: state.json is not the JSON of a checkpoint: 'a' is there twice.
    """
    try:
        data = json.loads(content.decode(), object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except RecursionError:
        raise CheckpointError(path, "is not the JSON of a checkpoint: it is nested too deep.") from None
    except ValueError as error:
        text = str(error).rstrip(".")
        raise CheckpointError(path, f"is not the JSON of a checkpoint: {text:.200}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(path, f"must hold a dictionary, got {type(data).__name__}.")
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{repeated[:80]!r} is there twice")
    return data


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
