"""States of the user's own generators of torch, Python and NumPy, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, tree_flatten, tree_flatten_with_path, tree_map

from composer.core.serialization import is_number, plain_number

__all__ = ["generator_state", "is_generator", "set_generator_state"]

_POSITIONS = {"pos": range(625), "buffer_pos": range(5)}
"""Valid positions in the memory of MT19937 and Philox. NumPy does not check them, and reads beyond its memory."""


def _numpy_types(*names: str) -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")  # without an import of NumPy there is no generator of its
    return () if numpy is None else tuple(getattr(numpy.random, name) for name in names)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of torch, Python or NumPy other than the global ones.

    Example:
        >>> is_generator(random.Random(3)), is_generator(random)
        (True, False)
    """
    types = (torch.Generator, random.Random, *_numpy_types("Generator", "RandomState", "BitGenerator"))
    if not isinstance(value, types):
        return False
    numpy = sys.modules.get("numpy")
    is_numpys_global = numpy is not None and value is numpy.random.mtrand._rand  # noqa: SLF001
    return value is not torch.default_generator and value is not random._inst and not is_numpys_global  # noqa: SLF001


def generator_state(generator: Any) -> Any:
    """Return a generator's state as plain data and tensors; None if it has none, such as ``random.SystemRandom``."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().cpu().clone()}
    if isinstance(generator, random.Random):
        try:
            version, words, gauss = generator.getstate()
        except NotImplementedError:
            return None
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    return tree_map(_plain_word, _numpy_state(generator))


def _numpy_state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, _numpy_types("RandomState")):
        state: dict[str, Any] = generator.get_state(legacy=False)
        return state
    return dict(getattr(generator, "bit_generator", generator).state)


def _plain_word(value: Any) -> Any:
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
                getattr(generator, "bit_generator", generator).state = state
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"was saved with a state that {type(generator).__name__} refuses: {error}") from None


def _fits(current: Any, data: Any) -> bool:
    """Return whether data has the structure of a generator's state, and its text, which names the algorithm."""
    if current is None:
        return False
    leaves, spec = tree_flatten(current)
    try:
        saved = spec.flatten_up_to(data)
    except ValueError:
        return False
    positions = [
        (path[-1].key, value) for path, value in tree_flatten_with_path(data)[0] if type(path[-1]) is MappingKey
    ]
    return all(map(_is_alike, leaves, saved)) and all(
        value in _POSITIONS[name] for name, value in positions if name in _POSITIONS
    )


def _is_alike(current: Any, saved: Any) -> bool:
    if isinstance(current, Tensor):
        return isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (current.shape, current.dtype)
    if isinstance(current, str):
        return bool(saved == current)
    return saved is None or type(saved) in (int, float, bool)
