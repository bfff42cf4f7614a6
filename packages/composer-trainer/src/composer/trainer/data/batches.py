"""The batches of training, one epoch after the other, from any resume point on."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs.validators import ge, optional
from torch.utils.data import DataLoader

from composer.core.data_spec import move_batch
from composer.core.serialization import from_data
from composer.distributed import (
    all_agree,
    all_gather_object,
    check_lengths,
    get_data_rank,
    get_data_world_size,
    get_world_size,
)
from composer.distributed.samplers import END, in_step, is_split_by_rank, num_repeated_samples
from composer.functional.nested import leaves
from composer.trainer.data.order import make_order
from composer.trainer.resume.data_state import DataState, check_data_state
from composer.trainer.settings.arguments import check_subset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from composer.core import Batch, DataSpec

__all__ = ["END", "Batches", "check_place", "none_given"]


@attrs.frozen
class _Place:
    """The data of :meth:`Batches.state_dict`."""

    epoch: int = attrs.field(validator=ge(0))
    batches: int = attrs.field(validator=ge(0))
    samples: int = attrs.field(validator=ge(0))
    done: int | None = attrs.field(validator=optional(ge(0)))
    length: int | None
    sizes: dict[str, int]
    order: str | None
    order_epoch: int = attrs.field(validator=ge(0))
    order_batches: int = attrs.field(validator=ge(0))
    loader: Any
    own_state: dict[str, Any]
    is_distributed: bool
    has_ended: bool


_log = logging.getLogger(__name__)

_MANY = 100_000
"""Batches after which an epoch of unknown length is reported, because it may never end."""

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
        own_state: The state of the loader's components, if it is already watched.

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
        own_state: DataState | None = None,
    ) -> None:
        check_subset("train_subset_num_batches", subset_num_batches)
        loader_length = spec.length
        if loader_length == 0:
            raise ValueError(
                "train_dataloader has no batches: its data set is empty, or smaller than one batch with drop_last=True."
            )
        self.spec = spec
        self.subset_num_batches = subset_num_batches
        self.spin = spin
        self._order = make_order(spec.dataloader, seed)
        rest = self._order.rest(0)
        if rest is not None:
            loader_length = rest.batches
            if not loader_length:
                raise ValueError(
                    "train_dataloader has no batches: its data set is smaller than one batch of all processes with "
                    "drop_last=True."
                )
        lengths = [length for length in (loader_length, subset_num_batches) if length is not None and length != -1]
        self.length = min(lengths) if lengths else None
        self.own_state = DataState(spec, skips=self._order.skips) if own_state is None else own_state
        self._device = device
        self._epoch = epoch
        self._may_be_at_end = False
        self._iterator: Iterator[Batch] | None = None
        self._in_step: Iterator[tuple[Batch, bool]] | None = None
        self._has_ended = False  # this process trains on no further batch of the epoch, and others do
        self._last = END  # of the batches that were loaded again
        self._finished: tuple[int, int] | None = None
        self.num_samples = 0
        """The number of samples in the batches of the epoch so far, which the caller of :meth:`next` counts."""
        self.usual_samples: int | None = None
        """The batch size of the loader, if it has one, and the same in all processes."""
        self._is_agreed = False  # the usual number of samples
        self._exhausted = False
        self._set_place(0, 0)
        # Loaders without a length, or that are only iterated over, may end earlier in some processes.
        self._may_end_apart = get_world_size() > 1 and (loader_length is None or not self._order.skips)
        self._may_be_equal = get_data_world_size() > 1 and not is_split_by_rank(spec.dataloader)
        if get_world_size() > 1 and rest is None:
            _warn_of_repeats(spec.dataloader)
        _warn_of_running_workers(spec.dataloader)

    @property
    def counts(self) -> bool:
        """Whether the last batch has a sample that no other process counts; else its weight is 0."""
        return not self._has_ended and (self._last_real is None or self._given <= self._last_real)

    @property
    def is_full(self) -> bool:
        """Whether it is certain that the last batch has the usual number of samples in each process."""
        return self._is_agreed and self._given <= self._last_full

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; for loaders without a length, known only after the last batch."""
        return self._exhausted or (self._end is not None and self._given >= self._end)

    def _set_place(self, given: int, done: int) -> None:
        """Set the position in the epoch: after some batches, with ``done`` samples of the order of all processes."""
        self._given, self._first, self._done = given, given, done
        self._end, self._last_real, self._last_full = self.length, None, 0
        rest = self._order.rest(done)
        if rest is not None:
            self._end, self._last_real, self._last_full = given + rest.batches, given + rest.real, given + rest.full
            if self.subset_num_batches != -1:
                self._end = min(self._end, self.subset_num_batches)

    def next(self) -> Batch:
        """Return the epoch's next batch; ``END`` if there is none.

        Raises:
            ValueError: The loader returned no batch in the epoch, or None as a batch.
        """
        if self._iterator is None and not self._has_ended:
            self._begin(self._given)
        if self._may_end_apart:
            batch = self._next_in_step()
        else:
            assert self._iterator is not None
            batch = next(self._iterator, END)
        if batch is END:
            if not self._given:
                raise ValueError(
                    "train_dataloader gave no batch in a complete epoch. A generator can be iterated over only once: "
                    "give an iterable that can be iterated over again."
                )
            self._exhausted = True
            return END
        if batch is None:
            raise none_given("train_dataloader", self._given)
        self._given += 1
        if self._device.type != "cpu":
            batch = move_batch(batch, self._device)
        if self.spec.batch_transforms is not None:
            batch = self.spec.batch_transforms(batch)
            if batch is None:
                raise none_given("batch_transforms of train_dataloader", self._given - 1)
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
        size, rest = self._order.batch_size, self._order.rest(0)
        self._is_agreed = all_agree((size, None if rest is None else rest.full))
        self.usual_samples = size if self._is_agreed else None
        if not self._may_end_apart:
            check_lengths(self.length)
            return
        lengths = [length for length in all_gather_object(self.length) if length is not None]
        self.length = self._end = max(lengths) if len(lengths) == get_world_size() else None

    def _next_in_step(self) -> Batch:
        """Return the next batch, END once all processes have no more; one to compute with weight 0 if others have."""
        if self._in_step is None:
            self._in_step = in_step(iter(()) if self._iterator is None else self._iterator, self._last)
            self._last = END
        batch, is_own = next(self._in_step, (END, True))
        self._has_ended = not is_own
        return batch

    def _begin(self, skip: int = 0) -> Iterator[Batch]:
        self.own_state.begin_epoch()
        batches = self._order.begin(self._epoch, skip, self._done)
        self._iterator = batches if self.length is not None else _watched(batches)
        if self._may_be_at_end:
            self._may_be_at_end = False
            first = next(self._iterator, END)
            if first is END:
                return self._begin()
            self._iterator = itertools.chain([first], self._iterator)
        return self._iterator

    def rewind(self, epoch: int | None = None) -> None:
        """Start the next epoch, or the given one, with the next batch."""
        self._finished = (self._epoch, self._given) if epoch is None else None
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._iterator = self._in_step = None
        self._last = END
        self.num_samples = 0
        self._exhausted = self._has_ended = False
        self._set_place(0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: the epoch, its number of batches so far, and the data to verify it."""
        in_epoch = self._given > 0 and not self.epoch_is_over
        order_epoch, order_batches = (self._epoch, self._given) if self._given else self._finished or (0, 0)
        order = self._order.fingerprint(order_batches) if order_batches else None
        return {
            "epoch": self._epoch,
            "batches": self._given,
            "samples": self.num_samples,
            "done": self._num_done(),
            "length": self.spec.length,
            "sizes": self._order.sizes(),
            "order": order,
            "order_epoch": order_epoch,
            "order_batches": order_batches,
            "loader": self._order.state_dict(),
            "is_distributed": self._order.samples_together is not None,
            "has_ended": self._has_ended,
            "own_state": self.own_state.to_data(in_epoch=in_epoch, is_checked=order is not None),
        }

    def _num_done(self) -> int | None:
        """Return the number of samples so far in the order of all processes; None if there is no such order."""
        together = self._order.samples_together
        return None if together is None else self._done + (self._given - self._first) * together

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return the problems of a saved position, valid by :func:`check_place`, that does not fit this data."""
        given = state["batches"]
        if self.length is None or given <= self.length or self._is_of_same_order(state):
            return []
        problem = f"data: {given} batches of the epoch were done, and train_dataloader has {self.length}."
        return [f"{problem} Is it the same data, with the same batch size?"]

    def _is_of_same_order(self, state: Mapping[str, Any]) -> bool:
        """Return whether a saved position is in the order of this data, whatever the number of processes."""
        is_shared = state.get("is_distributed", False) and self._order.samples_together is not None
        samples = state.get("sizes", {}).get("samples")
        return is_shared and samples is not None and samples == self._order.sizes().get("samples")

    def moved(self, state: Mapping[str, Any], world_size: int) -> dict[str, Any] | None:
        """Return this process's position for one that was saved with other global batches; None if there is none.

        All processes together continue with the sample after those that all processes together have trained on. The
        data must be split by a ``DistributedSampler`` there and here.

        Args:
            state: The saved position of any process.
            world_size: The number of processes with different samples that saved it.
        """
        if not self._is_of_same_order(state):
            return None
        sizes, done = state["sizes"], state.get("done")
        if done is None:  # an earlier release
            done = state["batches"] * sizes.get("samples a batch", 1) * world_size
        own = len(range(get_data_rank(), min(done, sizes["samples"]), get_data_world_size()))
        return {**state, "done": done, "samples": own, "length": None, "sizes": {"samples": sizes["samples"]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position. Batches before it that have to be loaded are loaded with the next batch."""
        self.rewind(state["epoch"])
        given, done = state["batches"], state.get("done")
        if done is None or not self._is_of_same_order(state):
            done = given * (self._order.samples_together or 0)
        self._set_place(given, done)
        self.num_samples, self._has_ended = state.get("samples", 0), state.get("has_ended", False)
        # A loader may have saved the end of the finished epoch as its position.
        self._may_be_at_end = state.get("loader") is not None and not given
        own, own_state, order = state.get("loader"), state.get("own_state", {}), state.get("order")
        in_epoch, first = bool(given) and not self.epoch_is_over, None
        is_replayed = self.own_state.load_at_begin(own_state, self._device)
        if own is not None and hasattr(self.spec.dataloader, "load_state_dict"):
            try:
                self.spec.dataloader.load_state_dict(own)
            except Exception as error:
                raise ValueError(
                    "train_dataloader.load_state_dict refused what was saved of it: is it the same loader, of the same "
                    f"data? {type(error).__name__}: {error}"
                ) from error
        elif in_epoch and not self._order.skips:
            first = self._replay(given)
        elif isinstance(self.spec.dataloader, (list, tuple)):
            first = self._count_samples(self.spec.dataloader[:given])
        if given:
            self._check_sizes(state, first)
        if in_epoch:
            if self._order.skips and (is_replayed or order is not None):
                self._begin(given)
            if order is not None:
                self._compare_order(self._order.fingerprint(given), order)
        else:
            # The data may change between two epochs. The order of a finished epoch is verified if they did not.
            is_same = (state.get("length"), state.get("sizes")) == (self.spec.length, self._order.sizes())
            if order is not None and "order_epoch" in state and is_same:
                again = self._order.choose_again(state["order_epoch"], state.get("order_batches", 0))
                self._compare_order(again, order)
        self.own_state.load(own_state, self._device, in_epoch=in_epoch)

    def _replay(self, given: int) -> int | None:
        if not self.spin:
            self._set_place(0, 0)
            self.num_samples = 0
            self._has_ended = False
            return None
        warnings.warn(
            f"train_dataloader cannot begin in the middle of an epoch: its first {given} batches are loaded again, and "
            "the run goes on with the next one. The result is exact only if the loader returns the same batches again: "
            "if it draws from the global generators, and stores its position in attributes that are numbers. A "
            "DataLoader of a map-style dataset, or a loader with state_dict() and load_state_dict() such as "
            "torchdata's StatefulDataLoader, resumes without loading them.",
            UserWarning,
            stacklevel=2,
        )
        from tqdm.auto import tqdm  # noqa: PLC0415  (only here)

        def load_again() -> Iterator[Batch]:
            for batch in itertools.islice(self._begin(), given):
                self._last = batch
                yield batch

        return self._count_samples(tqdm(load_again(), desc="going to where the run stopped", total=given))

    def _count_samples(self, batches: Iterable[Batch]) -> int | None:
        """Iterate over batches and return their number of samples; None if it is counted after transforms."""
        count = self.spec.get_num_samples_in_batch if self.spec.batch_transforms is None else None
        found = sum(count(batch) if count is not None and batch is not None else 0 for batch in batches)
        return None if count is None else found

    def _check_sizes(self, state: Mapping[str, Any], first: int | None) -> None:
        """Warn if sizes, such as the number of samples in the first batches, show that the data has changed."""
        counted = f"samples in the first {state['batches']} batches"
        before = {"batches": state.get("length"), **state.get("sizes", {}), counted: state.get("samples")}
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
                "the global generators of torch, NumPy or Python, or store its state in attributes that are numbers or "
                "generators.",
                UserWarning,
                stacklevel=4,
            )


def check_place(place: Mapping[str, Any] | None, path: str) -> None:
    """Check that a saved position in the data is what :meth:`Batches.state_dict` returns, or None for no data.

    Raises:
        ValueError: It is not; the message begins with ``path``.
    """
    if place is not None:
        added: dict[str, Any] = {
            "samples": 0,
            "done": None,
            "sizes": {},
            "order_epoch": 0,
            "order_batches": 0,
            "own_state": {},
            "is_distributed": False,
            "has_ended": False,
        }
        check_data_state(from_data({**added, **place}, _Place, path).own_state, f"{path}.own_state")


def none_given(what: str, place: int) -> ValueError:
    """Return the error for a loader, or transforms, that returned None as a batch."""
    return ValueError(
        f"{what} gave None as batch {place} of the epoch (counted from 0). Every batch must hold data: does the "
        "loader's collate_fn or a transform end without a return, or does its list or iterator hold None?"
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
            f"train_dataloader gave all {get_world_size()} processes the same first batch, so that each of them trains "
            "on every sample. Split the data by rank: an IterableDataset may yield itertools.islice(samples, "
            "composer.distributed.get_data_rank(), None, composer.distributed.get_data_world_size()).",
            UserWarning,
            stacklevel=3,
        )


def _watched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a loader without a length, and log a warning if there are very many."""
    for number, batch in enumerate(batches, start=1):
        if number == _MANY:
            _log.warning(
                "train_dataloader has no length and has given %d batches in one epoch. If it is endless, the "
                "epoch never ends, nor do its evaluations and checkpoints come: give train_subset_num_batches.",
                number,
            )
        yield batch
