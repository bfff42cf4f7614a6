"""Generators of torch's, Python's and NumPy's that belong to the user's objects: their states as data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from composer.core.serialization import is_number, plain_number

__all__ = ["generator_state", "is_generator", "set_generator_state"]

_PLACES = {"pos": range(625), "buffer_pos": range(5)}
"""The places that NumPy's MT19937 and Philox have in their memory. NumPy does not check them, and reads beyond it."""


def _numpys(*names: str) -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")  # where nobody has imported NumPy, nobody has a generator of its
    return () if numpy is None else tuple(getattr(numpy.random, name) for name in names)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: Any) -> bool:
    """Return whether a value is a source of random numbers of torch's, Python's or NumPy's, and not a global one.

    Example:
        >>> is_generator(random.Random(3)), is_generator(random)
        (True, False)
    """
    kinds = (torch.Generator, random.Random, *_numpys("Generator", "RandomState", "BitGenerator"))
    return isinstance(value, kinds) and not any(value is one for one in _global_generators())


def _global_generators() -> list[Any]:
    numpy = sys.modules.get("numpy")
    held: list[Any] = [torch.default_generator, random._inst]  # noqa: SLF001
    return held if numpy is None else [*held, numpy.random.mtrand._rand]  # noqa: SLF001


def generator_state(generator: Any) -> Any:
    """Return a generator's state as plain data and tensors; None if it has none, as one of the operating system's."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().cpu().clone()}
    if isinstance(generator, random.Random):
        try:
            version, words, gauss = generator.getstate()
        except NotImplementedError:
            return None
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    return _without_arrays(_numpy_state(generator))


def _numpy_state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, _numpys("RandomState")):
        state: dict[str, Any] = generator.get_state(legacy=False)
        return state
    bits = generator.bit_generator if isinstance(generator, _numpys("Generator")) else generator
    return dict(bits.state)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if _is_array(value):
        return [int(word) for word in value]
    return plain_number(value) if is_number(value) else value


def set_generator_state(generator: Any, data: Any) -> None:
    """Give a generator the state that :func:`generator_state` returned for one of its kind.

    Raises:
        ValueError: It is not such a state. The generator has not been changed.

    Example:
        >>> first, second = random.Random(3), random.Random(5)
        >>> set_generator_state(second, generator_state(first))
        >>> first.random() == second.random()
        True
    """
    current = generator_state(generator)
    if current is None or not _alike(current, data):
        raise ValueError(f"is a {type(generator).__name__} here, and something else was saved")
    try:
        _set(generator, data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"was saved with a state that {type(generator).__name__} refuses: {error}") from None


def _set(generator: Any, data: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(data["torch"].cpu())
    elif isinstance(generator, random.Random):
        generator.setstate((data["version"], tuple(data["words"].tolist()), data["gauss"]))
    else:
        state = _with_arrays(_numpy_state(generator), data)
        if isinstance(generator, _numpys("RandomState")):
            generator.set_state(state)
        else:
            bits = generator.bit_generator if isinstance(generator, _numpys("Generator")) else generator
            bits.state = state


def _with_arrays(current: Any, data: Any) -> Any:
    if isinstance(current, dict):
        return {key: _with_arrays(item, data[key]) for key, item in current.items()}
    return sys.modules["numpy"].array(data, dtype=current.dtype) if _is_array(current) else data


def _alike(current: Any, data: Any) -> bool:
    """Return whether data has the structure of a generator's state, and its texts, which name the kind."""
    if isinstance(current, Tensor):
        return isinstance(data, Tensor) and (data.shape, data.dtype) == (current.shape, current.dtype)
    if isinstance(current, dict):
        return (
            isinstance(data, dict)
            and data.keys() == current.keys()
            and all(_alike(current[k], data[k]) for k in data)
            and all(data[name] in places for name, places in _PLACES.items() if name in data)
        )
    if isinstance(current, list):
        return isinstance(data, list) and len(data) == len(current) and all(map(_alike, current, data))
    if isinstance(current, str):
        return bool(data == current)
    return data is None or (is_number(data) and type(data) in (int, float, bool))
