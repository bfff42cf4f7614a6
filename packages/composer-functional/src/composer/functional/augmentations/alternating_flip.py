"""Alternating flips: each image is mirrored in every second epoch (Jordan 2024, arXiv:2404.00498)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer.functional.augmentations.cutout import check_images, is_pil
from composer.functional.checks import check_whole, described
from composer.functional.datasets import by_epoch
from composer.functional.nested import rebuild
from composer.functional.random import hash_words, spread_words


def alternating_flip_batch(images: Tensor, indices: Tensor, epoch: int, *, seed: int = 0) -> Tensor:
    """Mirror the images whose turn it is: each one in every second epoch, half of them in each (arXiv:2404.00498).

    Two epochs show both versions of each image, where independent flips repeat one of them for half of the images.
    Image ``i`` is mirrored in ``epoch`` if the lowest bit of ``hash(seed, i) + epoch`` is 1.

    Args:
        images: A batch, shape ``(N, C, H, W)``, any dtype.
        indices: The index of each image in its data set, shape ``(N,)``, int64, on the device of the images.
        epoch: The number of the epoch, from 0.
        seed: Determines which images are mirrored in the first epoch.

    Returns:
        The images, each mirrored left to right or not, in new memory.

    Raises:
        TypeError: An argument has another type.
        ValueError: A shape or number is invalid.

    Example:
        >>> images, indices = torch.arange(8.0).view(4, 1, 1, 2), torch.arange(4)
        >>> first, second = (alternating_flip_batch(images, indices, epoch) for epoch in range(2))
        >>> torch.equal(first, second.flip(-1)), torch.equal(alternating_flip_batch(images, indices, 2), first)
        (True, True)
    """
    check_images(images, "(N, C, H, W)", (4,), "images")
    check_whole("epoch", epoch, 0, "It is the number of an epoch.")
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        raise TypeError(f"indices must be a tensor of int64, the index of each image, got {described(indices)}.")
    if indices.shape != images.shape[:1]:
        raise ValueError(f"indices must have shape ({len(images)},), got {tuple(indices.shape)}.")
    turns = _turns(indices, epoch, seed)
    return torch.where(turns[:, None, None, None], images.flip(-1), images)


class AlternatingFlip(Dataset[Any]):
    """A data set whose images are mirrored in every second epoch, half of them in each (arXiv:2404.00498).

    See :func:`alternating_flip_batch`. The trainer of this library and distributed samplers' loops call
    :meth:`set_epoch` at the start of each epoch; workers of a loader see it, also persistent ones. What is mirrored
    depends on seed, epoch and index only, so a resumed run mirrors the same images.

    Args:
        dataset: A data set with a length. Its samples are images, or tuples, lists or dictionaries with one: tensors
            ``(..., W)`` or PIL images.
        seed: Determines which images are mirrored in the first epoch.
        key: The key of the image in a sample.

    Raises:
        TypeError: ``dataset`` has no length, or a sample has no image at ``key``.

    Example:
        >>> data = AlternatingFlip([(torch.tensor([[1.0, 2.0]]), 0)] * 4)
        >>> epochs = []
        >>> for epoch in range(2):
        ...     data.set_epoch(epoch)
        ...     epochs.append(torch.stack([image for image, _ in data]))
        >>> torch.equal(epochs[0], epochs[1].flip(-1))
        True
    """

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], seed: int = 0, key: Any = 0) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"dataset must have a length and items by index, got {described(dataset)}.")
        self.dataset, self.key = dataset, key
        self._first = _turns(torch.arange(len(dataset)), 0, seed).tolist()
        # Workers of a loader share its memory.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, from 0, at its start, here and in the data sets within that have this method."""
        check_whole("epoch", epoch, 0, "It is the number of an epoch.")
        self._epoch.fill_(epoch)
        for one in by_epoch(self.dataset):
            one.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> Any:
        sample: Any = cast("Any", self.dataset)[index]
        if self._first[index] == bool(self._epoch.item() % 2):
            return sample
        if not isinstance(sample, (Mapping, list, tuple)):
            return self._mirror(sample)
        parts = dict(sample) if isinstance(sample, Mapping) else dict(enumerate(sample))
        parts[self.key] = self._mirror(parts.get(self.key))
        return rebuild(sample, parts.values())

    def _mirror(self, image: Any) -> Any:
        if isinstance(image, Tensor) and image.ndim > 1:
            return image.flip(-1)
        if is_pil(image):
            return image.transpose(0)  # FLIP_LEFT_RIGHT; Pillow may not be installed
        raise TypeError(f"dataset must have an image, a tensor or of PIL, at key {self.key!r}, got {described(image)}.")


def _turns(indices: Tensor, epoch: int, seed: int) -> Tensor:
    """Return which images are mirrored in an epoch, bool."""
    check_whole("seed", seed)
    key = hash_words(spread_words(torch.tensor(seed, device="cpu")))  # copying it to a device would wait for it
    return (hash_words(key ^ spread_words(indices)) + epoch) % 2 == 1
