"""The order that a sampler gives an epoch, as a function of the seed and the epoch.

Copies of torch's samplers draw from a seeded generator. An unknown sampler may draw from any: it is read at once, with
the global generators seeded, and digests of its keys show later whether a resumed run has the same order. The orders
of ``DataLoader`` in ``data/order.py`` call it.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from composer.core.data_spec import length_of
from composer.core.randomness import derive_seed, preserve_rng_state, seed_globals
from composer.distributed import ScheduledBatchSampler
from composer.trainer.data.seeding import seeded_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Keys", "WithDigests", "is_known", "order_of", "shared_order_of"]

# Samplers that draw from their generator alone, so that a copy with a seeded generator replaces them.
_DRAW_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, ScheduledBatchSampler)
# A sampler with more keys is endless, and its order cannot be drawn in advance.
_ENDLESS = 2**62
# Bytes of a digest: short, as one is stored for each key of an epoch.
_DIGEST_BYTES = 8


def is_known(sampler: Any) -> bool:
    """Return whether a sampler is of torch or of this library: its length is exact, and a copy draws its order."""
    if type(sampler) is BatchSampler:
        return is_known(sampler.sampler)
    return type(sampler) in (*_DRAW_AT_ONCE, SequentialSampler)


def order_of(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Return a sampler's keys for an epoch, with digests if its type is unknown, so that it may draw others."""
    keys = _draw(sampler, seed, epoch)
    return iter(keys) if is_known(sampler) else WithDigests(iter(keys), length_of(keys))


def _draw(sampler: Any, seed: int, epoch: int) -> Iterable[Any]:
    """Return a sampler's keys for an epoch, which have a length unless there is no end."""
    key = derive_seed(seed, "order", epoch)
    if is_known(sampler) or type(sampler) is BatchSampler:
        drawing = copy.copy(sampler)
        if type(sampler) is BatchSampler:
            drawing.sampler = _draw(sampler.sampler, seed, epoch)
        elif type(sampler) in _DRAW_AT_ONCE:
            drawing.generator = torch.Generator().manual_seed(key)
        return drawing  # type: ignore[no-any-return]
    if (length_of(sampler) or _ENDLESS) >= _ENDLESS:
        return seeded_batches(lambda: iter(sampler), seed, epoch)
    # An unknown sampler may draw from any generator: the global ones are seeded, and it is read completely before they
    # are restored.
    with preserve_rng_state():
        seed_globals(key)
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(key)
        return list(sampler)


def shared_order_of(sampler: Any, seed: int | None, epoch: int) -> list[Any]:
    """Return the order of a ``DistributedSampler`` for an epoch that all processes share, as if there were one.

    Without a seed it is the sampler's own.
    """
    drawing = copy.copy(sampler)
    drawing.epoch = epoch
    if seed is not None:
        drawing.seed, drawing.epoch = derive_seed(derive_seed(seed, "order", epoch), sampler.seed), 0
    drawing.num_replicas, drawing.rank, drawing.drop_last = 1, 0, False
    drawing.num_samples = drawing.total_size = len(sampler.dataset)
    return list(drawing)


class WithDigests:
    """Yields an iterator's items, and stores a digest of the items up to each; ``length`` is their number if known."""

    def __init__(self, keys: Iterator[Any], length: int | None = None) -> None:
        self.keys, self.length = keys, length
        self._digest, self._digests = hashlib.blake2b(digest_size=_DIGEST_BYTES), bytearray()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        key = next(self.keys)
        self._digest.update(repr(key).encode())
        self._digests += self._digest.digest()
        return key

    def fingerprint(self, count: int) -> str | None:
        """Return the digest of the first items; None if there are fewer."""
        end = count * _DIGEST_BYTES
        return bytes(self._digests[end - _DIGEST_BYTES : end]).hex() if 0 < end <= len(self._digests) else None


class Keys:
    """The remaining keys of a sampler, with its length."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.next: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.next

    def __len__(self) -> int:
        return len(self._sampler)
