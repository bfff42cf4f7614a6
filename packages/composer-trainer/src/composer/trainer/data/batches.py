"""The batches of training, one epoch after the other, from any resume point on."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from attrs.validators import ge, optional
from torch.utils.data import DataLoader

from composer.core.data_spec import move_batch
from composer.distributed import (
    all_agree,
    all_gather_object,
    check_lengths,
    get_data_rank,
    get_data_world_size,
    get_world_size,
)
from composer.distributed.samplers import END, in_step, is_split_by_rank, num_repeated_samples
from composer.functional.checks import check_subset
from composer.functional.nested import leaves
from composer.trainer.data.order import make_order
from composer.trainer.resume.contract import SavedObjects, has_state, load_objects, parts_of, save_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from composer.core import Batch, DataSpec

__all__ = ["END", "Batches", "SavedPlace", "batch_is_none"]


@attrs.frozen
class SavedPlace:
    """The data of :meth:`Batches.state_dict`; see there."""

    epoch: int = attrs.field(validator=ge(0))
    place: int = attrs.field(validator=ge(0))
    global_batch_size: int | None = attrs.field(validator=optional(ge(1)))
    length: int | None
    sizes: dict[str, int]
    order: str | None
    loader: Any
    parts: SavedObjects
    has_ended: bool


_log = logging.getLogger(__name__)

_MANY_BATCHES = 100_000
"""Batches after which an epoch of unknown length is reported, because it may never end."""

# The numbers of each tensor by which first batches are compared between processes.
_COMPARED = 1000


class Batches:
    """Iterates over the batches of a loader, epoch by epoch.

    Order and randomness of the data depend only on the seed and the epoch; see :mod:`composer.trainer.data.order`.

    Args:
        spec: The loader and its transforms.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.
        device: The device that batches are moved to.
        seed: The run's seed.
        epoch: The number of the first epoch.
        spin: Whether a loader that cannot start in the middle of an epoch is fast-forwarded to the resume point; else
            it starts at the beginning of the epoch.

    Raises:
        ValueError: The loader has no batches, or ``subset_num_batches`` is out of range.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> batches = Batches(DataSpec([torch.zeros(2), torch.ones(2)]), -1, torch.device("cpu"))
        >>> batches.length, batches.next(), batches.epoch_is_over
        (2, tensor([0., 0.]), False)
    """

    def __init__(
        self,
        spec: DataSpec,
        subset_num_batches: int,
        device: torch.device,
        *,
        seed: int = 0,
        epoch: int = 0,
        spin: bool = True,
    ) -> None:
        check_subset("train_subset_num_batches", subset_num_batches)
        if spec.length == 0:
            raise ValueError(
                "train_dataloader has no batches: its data set is empty, or smaller than one batch with drop_last=True."
            )
        self.spec = spec
        self.subset_num_batches = subset_num_batches
        self.spin = spin
        self._order = order = make_order(spec.dataloader, seed)
        self._step, self._rank = order.step, get_data_rank()
        end, length = order.end(0), spec.length
        if end == 0:
            raise ValueError(
                "train_dataloader has no batches: its data set is smaller than one batch of all processes with "
                "drop_last=True."
            )
        # Rounded up, because the last batch may have fewer samples.
        self.length = length if end is None else -(-end // self._step)
        if subset_num_batches != -1:
            self.length = subset_num_batches if self.length is None else min(self.length, subset_num_batches)
        parts = parts_of(spec.dataloader)
        # A sampler draws its order when an epoch begins, and what loads samples again draws for them again. The others
        # are restored as they are at the resume point.
        self.replayed = {name: one for name, one in parts.items() if not order.skips or name.endswith("sampler")}
        """The parts of the loader that a resumed run needs as they were at the start of the epoch."""
        self.parts = {name: one for name, one in parts.items() if name not in self.replayed}
        """The other parts of the loader, and its transforms."""
        for name in ("batch_transforms", "microbatch_transforms"):
            if getattr(spec, name) is not None:
                self.parts[name] = getattr(spec, name)
        loader: Any = spec.dataloader
        # Not those of a stream whose workers start again in each epoch: it is loaded again from the start of the epoch,
        # from copies of the objects as they were then.
        has_copies = getattr(loader, "num_workers", 0) and (order.skips or getattr(loader, "persistent_workers", False))
        self.copied = {name: one for name, one in parts.items() if has_copies and not name.endswith("sampler")}
        """The parts of which worker processes have copies that may differ from those here."""
        self._at_begin = save_objects(self.replayed)
        self._device = device
        self._epoch = epoch
        self._may_be_at_end = False
        self._iterator: Iterator[Batch] | None = None
        self._in_step: Iterator[tuple[Batch, bool]] | None = None
        self._has_ended = False  # this process trains on no further batch of the epoch, and others do
        self._last = END  # of the batches that were loaded again
        self.usual_samples: int | None = None
        """The batch size of the loader, if it has one, and the same in all processes."""
        self._is_certain = False  # that all batches but the last have the usual number of samples
        self._exhausted = False
        self._set_place(0)
        # Loaders without a length, or that are only iterated over, may end earlier in some processes.
        self._may_end_apart = get_world_size() > 1 and (length is None or not order.skips)
        self._may_be_equal = get_data_world_size() > 1 and not is_split_by_rank(spec.dataloader)
        if get_world_size() > 1 and end is None:
            _warn_of_repeats(spec.dataloader)
        _warn_of_running_workers(spec.dataloader)

    @property
    def counts(self) -> bool:
        """Whether the last batch has a sample that no other process counts; else its weight is 0."""
        if self._data_end is None:
            return not self._has_ended
        return self._place - self._step + self._rank < self._data_end

    @property
    def is_full(self) -> bool:
        """Whether it is certain that the last batch has the usual number of samples in each process."""
        return self._is_certain and self._data_end is not None and self._place <= self._data_end

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; for loaders without a length, known only after the last batch."""
        return self._exhausted or (self._end is not None and self._place >= self._end)

    def _set_place(self, place: int) -> None:
        """Set the place in the epoch, as :class:`DataOrder` counts it, and the places where data and epoch end."""
        self._place = place
        self._data_end = self._order.end(place)
        self._end = self.length if self._data_end is None else self._data_end
        if self._end is not None and self.subset_num_batches != -1:
            self._end = min(self._end, self.subset_num_batches * self._step)

    @property
    def _num_batches(self) -> int:
        return -(-self._place // self._step)

    def next(self) -> Batch:
        """Return the epoch's next batch; ``END`` if there is none.

        Raises:
            ValueError: The loader returned no batch in the epoch, or None as a batch.
        """
        if self._iterator is None:
            self._begin(self._place)
        if self._may_end_apart:
            batch = self._next_in_step()
        else:
            assert self._iterator is not None
            batch = next(self._iterator, END)
        if batch is END:
            if not self._place:
                raise ValueError(
                    "train_dataloader returned no batch in a complete epoch. A generator can be iterated over only "
                    "once: give an iterable that can be iterated over again."
                )
            self._exhausted = True
            return END
        if batch is None:
            raise batch_is_none("train_dataloader", self._num_batches)
        self._place += self._step
        # Batches are on the CPU, and walking through their containers takes time in each step.
        if self._device.type != "cpu":
            batch = move_batch(batch, self._device)
        if self.spec.batch_transforms is not None:
            batch = self.spec.batch_transforms(batch)
            if batch is None:
                raise batch_is_none("batch_transforms of train_dataloader", self._num_batches - 1)
        if self._may_be_equal:
            self._may_be_equal = False
            _warn_if_equal(batch if self.counts else None)
        return batch

    def agree_on_length(self) -> None:
        """Set the length to that of the longest loader of all processes, and the usual number of samples in a batch.

        All processes must call it.

        Raises:
            ValueError: The loaders have different lengths, and one of the processes cannot train without own batches.
        """
        size = self._order.batch_size
        is_equal = all_agree((size, self._order.is_collated_by_torch, self._data_end))
        self._is_certain = is_equal and size is not None and self._order.is_collated_by_torch
        self.usual_samples = size if is_equal else None
        if not self._may_end_apart:
            check_lengths(self.length)
            return
        lengths = [length for length in all_gather_object(self.length) if length is not None]
        self.length = max(lengths) if len(lengths) == get_world_size() else None
        self._set_place(self._place)

    def _next_in_step(self) -> Batch:
        """Return the next batch, END once all processes have no more; one to compute with weight 0 if others have."""
        if self._in_step is None:
            assert self._iterator is not None
            self._in_step = in_step(self._iterator, self._last)
            self._last = END
        batch, is_own = next(self._in_step, (END, True))
        self._has_ended = not is_own
        return batch

    def _begin(self, place: int = 0) -> Iterator[Batch]:
        self._at_begin = save_objects(self.replayed)
        # After the states were saved, because the order may draw from these objects.
        batches = self._order.begin(self._epoch, place)
        self._iterator = batches if self.length is not None else _watched(batches)
        if self._may_be_at_end:
            self._may_be_at_end = False
            first = next(self._iterator, END)
            # The restored loader was at the end of its data: iterated over once more, it begins the new epoch.
            if first is END:
                return self._begin()
            self._iterator = itertools.chain([first], self._iterator)
        return self._iterator

    def rewind(self, epoch: int | None = None) -> None:
        """Start the next epoch, or the given one, with the next batch."""
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._iterator = self._in_step = None
        self._exhausted = self._has_ended = False
        self._last = END
        self._set_place(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data: the epoch and the place in it, and the data to restore and to verify it."""
        in_epoch, loader = self._place > 0 and not self.epoch_is_over, cast("Any", self.spec.dataloader)
        return {
            "epoch": self._epoch,
            "place": self._place,
            "global_batch_size": self._order.global_batch_size,
            "length": self.spec.length,
            "sizes": self._order.sizes(),
            "order": self._order.fingerprint(self._place) if in_epoch else None,
            "loader": loader.state_dict() if has_state(loader) else None,
            # In an epoch the states from its start, because a resumed run draws its order again.
            "parts": self._at_begin if in_epoch else save_objects(self.replayed),
            "has_ended": self._has_ended,
        }

    def is_of_same_order(self, state: Mapping[str, Any]) -> bool:
        """Return whether a saved place is a number of samples of this data, whatever the number of processes."""
        samples = state["sizes"].get("samples")
        is_shared = None not in (state["global_batch_size"], self._order.global_batch_size, samples)
        return is_shared and samples == self._order.sizes().get("samples")

    def _place_of(self, state: Mapping[str, Any]) -> int:
        """Return a saved place as a place in this data."""
        place: int = state["place"]
        if self.is_of_same_order(state):
            return place
        # The data has another size or another split, and only the number of batches is comparable.
        return -(-place // (state["global_batch_size"] or 1)) * self._step

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return the problems of a saved place, a valid :class:`SavedPlace`, that does not fit this data."""
        given = self._place_of(state) // self._step
        if self.length is None or given <= self.length or self.is_of_same_order(state):
            return []
        problem = f"data: {given} batches of the epoch were done, and train_dataloader has {self.length}."
        return [f"{problem} Is it the same data, with the same batch size?"]

    def load_state_dict(self, state: Mapping[str, Any], samples: int | None = None) -> None:
        """Restore a saved place. Batches before it that have to be loaded are loaded with the next batch.

        Args:
            state: What :meth:`state_dict` returned.
            samples: The number of samples in the batches before the place, if it is known.
        """
        self.rewind(state["epoch"])
        self._set_place(self._place_of(state))
        given, in_epoch, first = self._num_batches, self._place > 0 and not self.epoch_is_over, None
        # A loader may have saved the end of the finished epoch as its position.
        self._may_be_at_end = state["loader"] is not None and not given
        load_objects(state["parts"], self.replayed)
        self._at_begin = state["parts"]
        loader: Any = self.spec.dataloader
        if state["loader"] is not None and has_state(loader):
            load_objects({"states": {"train_dataloader": state["loader"]}}, {"train_dataloader": loader})
            # Iterated over, a loader at the end of its data may begin again.
            self._iterator = iter(()) if state["has_ended"] else None
        elif in_epoch and not self._order.skips:
            first = self._replay(given)
        elif isinstance(loader, (list, tuple)):
            first = self._count_samples(loader[:given])
        if given:
            self._check_sizes(state, samples, first)
        if in_epoch and state["order"] is not None:
            self._begin(self._place)
            self._compare_order(self._order.fingerprint(given), state["order"])

    def _replay(self, given: int) -> int | None:
        if not self.spin:
            self._set_place(0)
            return None
        warnings.warn(
            f"train_dataloader cannot begin in the middle of an epoch: its first {given} batches are loaded again, and "
            "training continues with the next one. The result is exact only if the loader returns the same batches "
            "again, as it does if it draws from the global generators or from generators that are its attributes. A "
            "DataLoader of a map-style dataset, or a loader with state_dict() and load_state_dict() such as "
            "torchdata's StatefulDataLoader, resumes without loading them.",
            UserWarning,
            stacklevel=2,
        )
        from tqdm.auto import tqdm  # noqa: PLC0415  (only here)

        def load_again() -> Iterator[Batch]:
            for batch in itertools.islice(self._begin(), given):
                # in_step computes with a copy of it if this process has no batch left, and others have.
                self._last = batch
                yield batch

        return self._count_samples(tqdm(load_again(), desc="loading to the resume point", total=given))

    def _count_samples(self, batches: Iterable[Batch]) -> int | None:
        """Iterate over batches and return their number of samples; None if it is counted after transforms."""
        count = self.spec.get_num_samples_in_batch if self.spec.batch_transforms is None else None
        found = sum(count(batch) if count is not None and batch is not None else 0 for batch in batches)
        return None if count is None else found

    def _check_sizes(self, state: Mapping[str, Any], samples: int | None, first: int | None) -> None:
        """Warn if sizes, such as the number of samples in the first batches, show that the data has changed."""
        if self.is_of_same_order(state):
            return
        counted = f"samples in the first {self._num_batches} batches"
        before = {"batches": state["length"], **state["sizes"], counted: samples}
        now = {"batches": self.spec.length, **self._order.sizes(), counted: first}
        changed = [name for name in now if None not in (now[name], before.get(name)) and now[name] != before[name]]
        if changed:
            warnings.warn(
                f"train_dataloader had {before[changed[0]]} {changed[0]} when the run stopped in an epoch, and has "
                f"{now[changed[0]]}, so some samples of this epoch may come twice and others not at all. Is it the "
                "same data, with the same batch size and number of workers?",
                UserWarning,
                stacklevel=2,
            )

    def _compare_order(self, now: str | None, saved: object) -> None:
        if now != saved:
            warnings.warn(
                "train_dataloader's sampler gives another order than before the run stopped, so some samples are "
                "repeated and others skipped, and the run differs from an uninterrupted one. Let the sampler draw from "
                "the global generators of torch, NumPy or Python or from one that is its attribute, or give it "
                "state_dict() and load_state_dict().",
                UserWarning,
                stacklevel=4,
            )


def batch_is_none(what: str, place: int) -> ValueError:
    """Return the error for a loader, or transforms, that returned None as a batch."""
    return ValueError(
        f"{what} returned None as batch {place} of the epoch (counted from 0). Every batch must hold data: does "
        "the loader's collate_fn or a transform end without a return, or does its list or iterator hold None?"
    )


def _warn_of_repeats(loader: object) -> None:
    repeated = num_repeated_samples(loader)
    if repeated:
        is_loader = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        described = type(loader.batch_sampler if is_loader else loader).__name__  # type: ignore[attr-defined]
        warnings.warn(
            f"{repeated} samples of each epoch are trained on twice, as the processes cannot share them out evenly and "
            f"the {described} chooses its batches itself, so that repeats cannot be left out. Give its sampler "
            "drop_last=True: composer.distributed.get_sampler(dataset, drop_last=True).",
            UserWarning,
            stacklevel=4,
        )


def _warn_of_running_workers(loader: object) -> None:
    if getattr(loader, "_iterator", None) is not None:  # torch's DataLoader keeps it if its workers are persistent
        warnings.warn(
            "train_dataloader has an active iterator, whose workers keep running beside those of the training. Do not "
            "iterate over it before, or create another one with persistent_workers=True for the training.",
            UserWarning,
            stacklevel=4,
        )


def _warn_if_equal(batch: Batch | None) -> None:
    """Warn if all processes have the same first batch, by the first numbers of each tensor; None if one has none."""
    tensors = [value for value in leaves(batch) if isinstance(value, torch.Tensor)]
    dense = [one for one in tensors if one.layout is torch.strided and not one.is_nested]
    beginnings = [(tuple(one.shape), one.reshape(-1)[:_COMPARED].tolist()) for one in dense]
    if all_agree(beginnings) and beginnings:
        warnings.warn(
            f"train_dataloader returned the same first batch in all {get_world_size()} processes, so that each "
            "trains on every sample. Split the data by rank: an IterableDataset may yield itertools.islice(samples, "
            "composer.distributed.get_data_rank(), None, composer.distributed.get_data_world_size()).",
            UserWarning,
            stacklevel=3,
        )


def _watched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a loader without a length, and log a warning if there are very many."""
    for number, batch in enumerate(batches, start=1):
        if number == _MANY_BATCHES:
            _log.warning(
                "train_dataloader has no length and has returned %d batches in one epoch. If it is endless, the epoch "
                "never ends, and evaluations and checkpoints at its end never run: give train_subset_num_batches.",
                number,
            )
        yield batch
