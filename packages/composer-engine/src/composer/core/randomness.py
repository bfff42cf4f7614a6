"""Derived seeds, and the global generators of torch, NumPy and Python: seed, preserve, save and restore them."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "check_rng_state",
    "derive_seed",
    "global_rng_states",
    "load_rng_state",
    "preserve_rng_state",
    "rng_state",
    "seed_globals",
    "seeded_draws",
]


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
    states = [
        *global_rng_states(torch.device("cpu") if device is None else device),
        (random.setstate, random.getstate()),
    ]
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
    states: list[tuple[Callable[[Any], object], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators of the CPU and of ``device``, as plain data and tensors.

    Example:
        >>> sorted(rng_state(torch.device("cpu")))
        ['numpy', 'python', 'torch']
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        drawn = sys.modules["numpy"].random.get_state(legacy=False)
        states["numpy"] = {
            "generator": str(drawn["bit_generator"]),
            "words": torch.tensor(drawn["state"]["key"].tolist(), dtype=torch.int64, device="cpu"),
            "position": int(drawn["state"]["pos"]),
            "has_gauss": int(drawn["has_gauss"]),
            "gauss": float(drawn["gauss"]),
        }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_rng_state(states: dict[str, Any], device: torch.device, path: str) -> None:
    """Check that :func:`load_rng_state` accepts ``states``, without changing a global generator.

    Raises:
        ValueError: ``states`` is not what :func:`rng_state` returns; the message begins with ``path``.
    """
    try:
        _load(states, device, is_trial=True)
    except Exception as error:  # noqa: BLE001  (each library has its own errors)
        raise ValueError(
            f"{path}: must be the states of torch's, NumPy's and Python's generators, got something else: {error}"
        ) from None


def load_rng_state(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states that :func:`rng_state` returned; generators without a saved state do not change."""
    _load(states, device, is_trial=False)


def _load(states: dict[str, Any], device: torch.device, *, is_trial: bool) -> None:
    """Set the states of the global generators or, in a trial, of new ones."""
    python, drawn, cuda = states["python"], states.get("numpy"), states.get("cuda")
    of_python: Any = random.Random() if is_trial else random  # noqa: S311  (no secret)
    of_python.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    (torch.Generator() if is_trial else torch.default_generator).set_state(states["torch"].cpu())
    if drawn is not None:
        import numpy as np  # noqa: PLC0415  (the saving process used it)

        position, has_gauss, gauss = drawn["position"], drawn["has_gauss"], drawn["gauss"]
        if not 0 <= position <= 624:  # NumPy does not check it, and would read memory beyond the words
            raise ValueError(f"NumPy's position must be from 0 to 624, got {position!r}.")
        words = np.array(drawn["words"].tolist(), dtype=np.uint32)
        of_numpy: Any = np.random.RandomState() if is_trial else np.random
        of_numpy.set_state((drawn["generator"], words, position, has_gauss, gauss))
    if device.type == "cuda" and cuda is not None:
        if is_trial:
            torch.Generator(device).set_state(cuda.cpu())
        else:
            torch.cuda.set_rng_state(cuda.cpu(), device)
