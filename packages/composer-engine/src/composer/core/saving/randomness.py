"""Derived seeds, and generators of torch, NumPy and Python: seed, preserve, save and restore their states.

A state has two forms. For a block of code, :func:`preserve_rng_state` and :func:`global_rng_states` keep it as the
libraries return it, which is fast. For a file, :func:`generator_state` returns plain data and tensors, which
:func:`set_generator_state` checks before it changes a generator; :func:`rng_state`, :func:`check_rng_state` and
:func:`load_rng_state` do this for the global generators, by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_POSITIONS = {"pos": range(625), "buffer_pos": range(5)}
"""Valid positions in the memory of MT19937 and Philox. NumPy does not check them, and reads beyond its memory."""


def derive_seed(*words: object) -> int:
    """Return a 64-bit seed computed from the words, the same in every process.

    Example:
        >>> derive_seed(17, "epoch", 3) == derive_seed(17, "epoch", 3) != derive_seed(17, "epoch", 4)
        True
    """
    # Not hash(), which is different in each process for strings.
    return int.from_bytes(hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest())


def seed_globals(seed: int) -> None:
    """Seed the global CPU generators; those of other devices do not change.

    Example:
        >>> with preserve_rng_state():
        ...     seed_globals(17)
        ...     first = random.random()
        ...     seed_globals(17)
        ...     first == random.random()
        True
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # without an import of NumPy, nothing draws from it
        # NumPy accepts 32 bits.
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def preserve_rng_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of the CPU, and of a CUDA device, at the end of the block.

    Example:
        >>> with preserve_rng_state():
        ...     first = torch.rand(1)
        >>> first == torch.rand(1)
        tensor([True])
    """
    # As the libraries return them: generator_state(), for files, takes seven times as long.
    states = [*global_rng_states(device or torch.device("cpu")), (random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state(legacy=False)))
    try:
        yield
    finally:
        for set_state, state in states:
            set_state(state)


@contextlib.contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU for a block that may draw new weights, and restore it at the end.

    Example:
        >>> with seeded_draws(3):
        ...     first = torch.rand(1)
        >>> with seeded_draws(3):
        ...     first == torch.rand(1)
        tensor([True])
    """
    # Without devices, fork_rng would save the generators of all GPUs, too.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def global_rng_states(device: torch.device) -> list[tuple[Callable[[Any], object], Any]]:
    """Return ``(set_state, state)`` of each of torch's global generators, which layers draw from."""
    generators = [generator for name, generator in global_generators(device).items() if name in ("torch", "cuda")]
    return [(generator.set_state, generator.get_state()) for generator in generators]


def global_generators(device: torch.device) -> dict[str, Any]:
    """Return the global generators of Python, torch, NumPy if it is imported, and a CUDA device."""
    generators: dict[str, Any] = {"python": random._inst, "torch": torch.default_generator}  # noqa: SLF001
    if "numpy" in sys.modules:
        generators["numpy"] = sys.modules["numpy"].random.mtrand._rand  # noqa: SLF001
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # creates them
        generators["cuda"] = torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    return generators


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators of the CPU and of ``device``, as plain data and tensors.

    Example:
        >>> sorted(rng_state(torch.device("cpu")))
        ['numpy', 'python', 'torch']
    """
    return {name: generator_state(generator) for name, generator in global_generators(device).items()}


def check_rng_state(states: dict[str, Any], device: torch.device, path: str) -> None:
    """Check that :func:`load_rng_state` accepts ``states``, without changing a global generator.

    Raises:
        ValueError: ``states`` is not what :func:`rng_state` returns; the message begins with ``path``.
    """
    new: dict[str, Any] = {"python": random.Random(), "torch": torch.Generator()}  # noqa: S311  (no secret)
    if "numpy" in states:
        import numpy as np  # noqa: PLC0415  (the saving process used it)

        new["numpy"] = np.random.RandomState()
    if device.type == "cuda" and "cuda" in states:
        new["cuda"] = torch.Generator(device)
    for name, generator in new.items():
        try:
            set_generator_state(generator, states.get(name))
        except ValueError as error:
            raise ValueError(f"{path}.{name} {error}.") from None


def load_rng_state(states: dict[str, Any], device: torch.device) -> None:
    """Restore states that :func:`check_rng_state` accepts; generators without a saved state do not change."""
    for name, generator in global_generators(device).items():
        if name in states:
            set_generator_state(generator, states[name])


def generators_among(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return which values are generators of torch, Python or NumPy with a state, other than the global ones.

    Example:
        >>> [*generators_among({"own": random.Random(3), "system": random.SystemRandom(), "module": random})]
        ['own']
    """
    numpy: Any = sys.modules.get("numpy")  # without an import of NumPy there is no generator of its
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    found = {name: value for name, value in values.items() if isinstance(value, kinds)}
    shared = {id(generator) for generator in global_generators(torch.device("cpu")).values()} if found else ()
    return {
        name: value
        for name, value in found.items()
        if id(value) not in shared and not isinstance(value, random.SystemRandom)
    }


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of torch, Python or NumPy by 64 bits.

    Example:
        >>> first, second = random.Random(3), random.Random(5)
        >>> for generator in (first, second):
        ...     seed_generator(generator, 17)
        >>> first.random() == second.random()
        True
    """
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:  # NumPy's RandomState accepts 32 bits
        generator.seed(seed if isinstance(generator, random.Random) else seed & 0xFFFFFFFF)


def generator_state(generator: Any) -> dict[str, Any]:
    """Return a generator's state as plain data and tensors."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().cpu().clone()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    state: dict[str, Any] = tree_map(to_tensor, _numpy_state(generator))
    return state


def to_tensor(item: Any) -> Any:
    """Return an array of NumPy's as a tensor of the same bits, as torch computes little with unsigned numbers."""
    return torch.from_numpy(item.view(f"i{item.itemsize}").copy()) if hasattr(item, "itemsize") else item


def _numpy_state(generator: Any) -> dict[str, Any]:
    # A RandomState also has the second number of a pair of normal ones.
    is_new = hasattr(generator, "bit_generator")
    state: dict[str, Any] = generator.bit_generator.state if is_new else generator.get_state(legacy=False)
    return state


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
                lambda held, saved: saved.numpy().view(held.dtype) if isinstance(held, numpy.ndarray) else saved,
                _numpy_state(generator),
                data,
            )
            if hasattr(generator, "bit_generator"):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"was saved with a state that {type(generator).__name__} rejects: {error}") from None


def _fits(current: Any, data: Any, name: str = "") -> bool:
    """Return whether data has the structure of a generator's state, and its strings, which name the algorithm."""
    if isinstance(current, dict):
        is_alike = isinstance(data, dict) and data.keys() == current.keys()
        return is_alike and all(_fits(value, data[key], key) for key, value in current.items())
    if isinstance(current, Tensor):
        return isinstance(data, Tensor) and (data.shape, data.dtype) == (current.shape, current.dtype)
    if isinstance(current, str):
        return bool(data == current)
    return (data is None or type(data) in (int, float, bool)) and (name not in _POSITIONS or data in _POSITIONS[name])
