"""States of generators of torch, Python and NumPy, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from composer.core.serialization import is_number, plain_number

__all__ = ["generator_state", "is_generator", "set_generator_state"]

_POSITIONS = {"pos": range(625), "buffer_pos": range(5)}
"""Valid positions in the memory of MT19937 and Philox. NumPy does not check them, and reads beyond its memory."""


def _numpy_types(*names: str) -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")  # without an import of NumPy there is no generator of its
    return () if numpy is None else tuple(getattr(numpy.random, name) for name in names)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of torch, Python or NumPy with a state, other than the global ones.

    Example:
        >>> is_generator(random.Random(3)), is_generator(random.SystemRandom()), is_generator(random)
        (True, False, False)
    """
    kinds = (torch.Generator, random.Random, *_numpy_types("Generator", "RandomState"))
    if not isinstance(value, kinds) or isinstance(value, random.SystemRandom):
        return False
    is_global = value is torch.default_generator or value is random._inst  # noqa: SLF001
    numpy = sys.modules.get("numpy")
    return not (is_global or (numpy is not None and value is numpy.random.mtrand._rand))  # noqa: SLF001


def generator_state(generator: Any) -> dict[str, Any]:
    """Return a generator's state as plain data and tensors."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().cpu().clone()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    state: dict[str, Any] = tree_map(_to_python_number, _numpy_state(generator))
    return state


def _numpy_state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, _numpy_types("RandomState")):
        state: dict[str, Any] = generator.get_state(legacy=False)
        return state
    return dict(generator.bit_generator.state)


def _to_python_number(value: Any) -> Any:
    if hasattr(value, "tolist") and not is_number(value):  # an array
        return [int(word) for word in value]
    return plain_number(value) if is_number(value) else value


def set_generator_state(generator: Any, data: Any) -> None:
    """Restore a state that :func:`generator_state` returned for a generator of the same type.

    Raises:
        ValueError: The data is no such state. The generator does not change.

    Example:
        >>> first, second = random.Random(3), random.Random(5)
        >>> set_generator_state(second, generator_state(first))
        >>> first.random() == second.random()
        True
    """
    if not _fits(generator_state(generator), data):
        raise ValueError(f"is a {type(generator).__name__} here, and something else was saved")
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(data["torch"].cpu())
        elif isinstance(generator, random.Random):
            generator.setstate((data["version"], tuple(data["words"].tolist()), data["gauss"]))
        else:
            numpy = sys.modules["numpy"]
            state = tree_map(
                lambda now, saved: numpy.array(saved, dtype=now.dtype) if isinstance(now, numpy.ndarray) else saved,
                _numpy_state(generator),
                data,
            )
            if isinstance(generator, _numpy_types("RandomState")):
                generator.set_state(state)
            else:
                generator.bit_generator.state = state
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"was saved with a state that {type(generator).__name__} rejects: {error}") from None


def _fits(current: Any, data: Any, name: str = "") -> bool:
    """Return whether data has the structure of a generator's state, and its strings, which name the algorithm."""
    if isinstance(current, dict):
        is_alike = isinstance(data, dict) and data.keys() == current.keys()
        return is_alike and all(_fits(value, data[key], key) for key, value in current.items())
    if isinstance(current, list):
        return isinstance(data, list) and len(data) == len(current) and all(map(_fits, current, data))
    if isinstance(current, Tensor):
        return isinstance(data, Tensor) and (data.shape, data.dtype) == (current.shape, current.dtype)
    if isinstance(current, str):
        return bool(data == current)
    return (data is None or type(data) in (int, float, bool)) and (name not in _POSITIONS or data in _POSITIONS[name])
