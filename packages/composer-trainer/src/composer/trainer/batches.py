"""The batches of training: one epoch after the other, on the device, going on where the last ``fit`` stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.core.data_spec import move_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from composer.core import Batch, DataSpec

__all__ = ["Batches"]


class Batches:
    """Gives batch after batch of a loader and knows when an epoch is over.

    Args:
        spec: The loader, with how to treat its batches.
        subset_num_batches: An epoch's batches, if fewer than the loader has; -1 is all.
        device: Where batches are moved to.

    Raises:
        ValueError: The loader has no batches, or ``subset_num_batches`` is 0 or less than -1.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> batches = Batches(DataSpec([torch.zeros(2), torch.ones(2)]), -1, torch.device("cpu"))
        >>> batches.length, batches.next(), batches.epoch_is_over
        (2, tensor([0., 0.]), False)
    """

    def __init__(self, spec: DataSpec, subset_num_batches: int, device: torch.device) -> None:
        if subset_num_batches != -1 and subset_num_batches < 1:
            raise ValueError(
                f"train_subset_num_batches must be a number of batches, or -1 for all, got {subset_num_batches}."
            )
        loader_length = spec.length
        if loader_length == 0:
            raise ValueError(
                "train_dataloader has no batches: its data set is empty, or smaller than one batch with drop_last=True."
            )
        lengths = [length for length in (loader_length, subset_num_batches) if length is not None and length != -1]
        self.spec = spec
        self.subset_num_batches = subset_num_batches
        self.length = min(lengths) if lengths else None
        self._device = device
        self._iterator: Iterator[Batch] | None = None
        self._given = 0
        self._exhausted = False

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; of loaders without a length, whether it was seen to have none."""
        return self._exhausted or self._given == self.length

    def next(self) -> Batch | None:
        """Return the epoch's next batch; None if there is none.

        Raises:
            ValueError: The loader has given no batch at all.
        """
        if self._iterator is None:
            self._iterator = iter(self.spec.dataloader)
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self._given:
                raise ValueError(
                    "train_dataloader gave no batch in a whole epoch. A generator can be gone through only once: "
                    "give something that can be iterated over again."
                ) from None
            self._exhausted = True
            return None
        self._given += 1
        if self._device.type != "cpu":
            batch = move_batch(batch, self._device)
        return batch if self.spec.batch_transforms is None else self.spec.batch_transforms(batch)

    def rewind(self) -> None:
        """Begin a new epoch with the next batch."""
        self._iterator = None
        self._given = 0
        self._exhausted = False
