"""The batches of training: one epoch after the other, on the device, going on where the last ``fit`` stopped."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs.validators import ge
from torch.utils._pytree import tree_leaves

from composer.core.data_spec import move_batch
from composer.core.serialization import from_data
from composer.distributed import all_agree, all_gather_object, all_reduce_min, get_world_size
from composer.distributed.samplers import is_split_by_rank, num_repeated_samples
from composer.trainer.data_order import make_order
from composer.trainer.data_state import DataState, check_data_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from composer.core import Batch, DataSpec

__all__ = ["END", "Batches", "check_place", "none_given"]


@attrs.frozen
class _Place:
    """A place in the data, as :meth:`Batches.state_dict` describes it."""

    epoch: int = attrs.field(validator=ge(0))
    batches: int = attrs.field(validator=ge(0))
    samples: int = attrs.field(validator=ge(0))
    length: int | None
    sizes: dict[str, int]
    order: str | None
    order_epoch: int = attrs.field(validator=ge(0))
    order_batches: int = attrs.field(validator=ge(0))
    loader: Any
    own_state: dict[str, Any]


_log = logging.getLogger(__name__)

_MANY = 100_000
"""Batches after which an epoch without a known length is reported: it may never end."""

END: Any = object()
"""What :meth:`Batches.next` returns when the epoch has no batch left."""
_COMPARED = 1000


class Batches:
    """Gives batch after batch of a loader and knows when an epoch is over.

    Order and randomness of the data hang on the seed and the epoch alone; see :mod:`composer.trainer.data_order`.

    Args:
        spec: The loader, with how to treat its batches.
        subset_num_batches: An epoch's batches, if fewer than the loader has; -1 is all.
        device: Where batches are moved to.
        seed: The run's seed.
        epoch: The number of the first epoch.
        spin: Whether a loader that cannot go on in the middle of an epoch is gone through up to there when a run is
            resumed; else it begins anew.
        own_state: What is known already of the state that the loader's components keep.

    Raises:
        ValueError: The loader has no batches, or ``subset_num_batches`` is 0 or less than -1.

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
        self.spin = spin
        self._order = make_order(spec.dataloader, seed)
        self.own_state = DataState(spec, skips=self._order.skips) if own_state is None else own_state
        self._device = device
        self._epoch = epoch
        self._iterator: Iterator[Batch] | None = None
        self._given = 0
        self._finished: tuple[int, int] | None = None
        self.num_samples = 0
        """Samples in the batches given in the epoch; who counts those of a batch adds them."""
        self._exhausted = False
        # Of several processes, those whose loader has no length or is only iterated over may end before others.
        self._may_end_apart = get_world_size() > 1 and (loader_length is None or not self._order.skips)
        self._may_be_equal = get_world_size() > 1 and not is_split_by_rank(spec.dataloader)
        if get_world_size() > 1 and self._order.num_real_batches is None:
            _warn_of_repeats(spec.dataloader)

    @property
    def counts(self) -> bool:
        """Whether the last batch has a sample that no other process counts; else it is to be trained on by 0."""
        num_real = self._order.num_real_batches
        return num_real is None or self._given <= num_real

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; of loaders without a length, whether it was seen to have none."""
        return self._exhausted or self._given == self.length

    def next(self) -> Batch:
        """Return the epoch's next batch; :data:`END` if there is none.

        Raises:
            ValueError: The loader has given no batch at all, or None as a batch.
        """
        iterator = self._begin(self._given) if self._iterator is None else self._iterator
        batch = next(iterator, END)
        if self._may_end_apart and not all_reduce_min(batch is not END):
            self._warn_if_others_have_more(batch is not END)
            batch = END
        if batch is END:
            if not self._given:
                raise ValueError(
                    "train_dataloader gave no batch in a whole epoch. A generator can be gone through only once: "
                    "give something that can be iterated over again."
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
            _warn_if_equal(batch)
        return batch

    def _warn_if_others_have_more(self, has_more: bool) -> None:
        ended = [rank for rank, has in enumerate(all_gather_object(has_more)) if not has]
        if len(ended) < get_world_size():
            warnings.warn(
                f"train_dataloader ended after {self._given} batches in {_ranks(ended)} and has more in the other "
                "processes: the epoch ends here in all of them, and their further batches are not used. Give every "
                "process equally many batches.",
                UserWarning,
                stacklevel=3,
            )

    def _begin(self, skip: int = 0) -> Iterator[Batch]:
        self.own_state.begin_epoch()
        batches = self._order.begin(self._epoch, skip)
        self._iterator = batches if self.length is not None else _watched(batches)
        return self._iterator

    def rewind(self, epoch: int | None = None) -> None:
        """Begin the next epoch, or the one given, with the next batch."""
        self._finished = (self._epoch, self._given) if epoch is None else None
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._iterator = None
        self._given = self.num_samples = 0
        self._exhausted = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data: the epoch, the batches given in it, and what makes sure that it is the same."""
        in_epoch = self._given > 0 and not self.epoch_is_over
        order_epoch, order_batches = (self._epoch, self._given) if self._given else self._finished or (0, 0)
        order = self._order.fingerprint(order_batches) if order_batches else None
        return {
            "epoch": self._epoch,
            "batches": self._given,
            "samples": self.num_samples,
            "length": self.spec.length,
            "sizes": self._order.sizes(),
            "order": order,
            "order_epoch": order_epoch,
            "order_batches": order_batches,
            "loader": self._order.state_dict(),
            "own_state": self.own_state.to_data(in_epoch=in_epoch, is_checked=order is not None),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return why a run cannot go on at the saved place of this data, which :func:`check_place` has checked."""
        given = state["batches"]
        if self.length is not None and given > self.length:
            return [
                (
                    f"data: {given} batches of the epoch were done, and train_dataloader has {self.length}. "
                    "Is it the same data, with the same batch size?"
                )
            ]
        return []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the place that was saved. What has to be loaded to get there is loaded with the next batch."""
        self.rewind(state["epoch"])
        self._given = given = state["batches"]
        self.num_samples = state.get("samples", 0)
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
            # Between two epochs the data may change; of the same data, a finished epoch has the same order again.
            is_same = (state.get("length"), state.get("sizes")) == (self.spec.length, self._order.sizes())
            if order is not None and "order_epoch" in state and is_same:
                again = self._order.choose_again(state["order_epoch"], state.get("order_batches", 0))
                self._compare_order(again, order)
            self.own_state.load_between(own_state, self._device)
        self.own_state.load_now(own_state, self._device)

    def _replay(self, given: int) -> int | None:
        if not self.spin:
            self._given = self.num_samples = 0
            return None
        warnings.warn(
            f"train_dataloader cannot begin in the middle of an epoch: its first {given} batches are loaded again, and "
            "the run goes on with the next one. It is the right one only if the loader gives the same batches again: "
            "if it draws from the global generators, and keeps its place in attributes that are numbers. A DataLoader "
            "of a dataset with indices, or a loader with state_dict() and load_state_dict() such as torchdata's "
            "StatefulDataLoader, goes on at once.",
            UserWarning,
            stacklevel=2,
        )
        from tqdm.auto import tqdm  # noqa: PLC0415  (only here)

        again = itertools.islice(self._begin(), given)
        return self._count_samples(tqdm(again, desc="going to where the run stopped", total=given))

    def _count_samples(self, batches: Iterable[Batch]) -> int | None:
        """Iterate over batches and return how many samples they have; None if that is counted after transforms."""
        count = self.spec.get_num_samples_in_batch if self.spec.batch_transforms is None else None
        found = sum(count(batch) if count is not None and batch is not None else 0 for batch in batches)
        return None if count is None else found

    def _check_sizes(self, state: Mapping[str, Any], first: int | None) -> None:
        """Warn if numbers, such as that of the samples in the first batches, show that the data have changed."""
        counted = f"samples in the first {state['batches']} batches"
        before = {"batches": state.get("length"), **state.get("sizes", {}), counted: state.get("samples")}
        now = {"batches": self.spec.length, **self._order.sizes(), counted: first}
        changed = [name for name in now if None not in (now[name], before.get(name)) and now[name] != before[name]]
        if changed:
            warnings.warn(
                f"train_dataloader had {before[changed[0]]} {changed[0]} when the run stopped in an epoch, and has "
                f"{now[changed[0]]}, so some samples of this epoch may come twice and others not at all. Is it the "
                "same data, with the same batch size?",
                UserWarning,
                stacklevel=2,
            )

    def _compare_order(self, now: str | None, saved: object) -> None:
        if now != saved:
            warnings.warn(
                "train_dataloader's sampler gives another order than it gave before the run stopped, so some samples "
                "come more often than others, and the run differs from one that is not interrupted. Let the sampler "
                "draw from torch's, NumPy's or Python's global generators, or keep its state in attributes that are "
                "numbers or generators.",
                UserWarning,
                stacklevel=4,
            )


def check_place(place: Mapping[str, Any], path: str) -> None:
    """Raise if a saved place in the data is not what :meth:`Batches.state_dict` returns.

    Raises:
        ValueError: Something else was saved; the message begins with ``path``.
    """
    added = {"samples": 0, "sizes": {}, "order_epoch": 0, "order_batches": 0, "own_state": {}}
    check_data_state(from_data({**added, **place}, _Place, path).own_state, f"{path}.own_state")


def none_given(what: str, place: int) -> ValueError:
    """Return the error of a loader, or of transforms, that give None as a batch."""
    return ValueError(
        f"{what} gave None as batch {place} of the epoch (counted from 0). Every batch must hold data: does the "
        "loader's collate_fn or a transform end without a return, or does its list or iterator hold None?"
    )


def _warn_of_repeats(loader: object) -> None:
    repeated = num_repeated_samples(loader)
    if repeated:
        warnings.warn(
            f"{repeated} samples of each epoch are trained on twice, as the processes cannot share them out evenly and "
            f"a {type(loader).__name__} iterates by itself, so that repeats cannot be left out. Give its sampler "
            "drop_last=True: composer.distributed.get_sampler(dataset, drop_last=True).",
            UserWarning,
            stacklevel=4,
        )


def _warn_if_equal(batch: Batch) -> None:
    """Warn if all processes have the same first batch; of large tensors, the first numbers are compared."""
    values = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    dense = [one for one in tensors if one.layout is torch.strided and not one.is_nested]
    beginnings = [(tuple(one.shape), one.reshape(-1)[:_COMPARED].tolist()) for one in dense]
    if all_agree(beginnings) and beginnings:
        warnings.warn(
            f"train_dataloader gave all {get_world_size()} processes the same first batch, so that each of them trains "
            "on every sample. Split the data by rank: an IterableDataset may yield itertools.islice(samples, "
            "composer.distributed.get_global_rank(), None, composer.distributed.get_world_size()).",
            UserWarning,
            stacklevel=3,
        )


def _ranks(ranks: list[int]) -> str:
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"


def _watched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a loader without a length, and report it if there are very many."""
    for number, batch in enumerate(batches, start=1):
        if number == _MANY:
            _log.warning(
                "train_dataloader has no length and has given %d batches in one epoch. If it is endless, the "
                "epoch never ends, nor do its evaluations and checkpoints come: give train_subset_num_batches.",
                number,
            )
        yield batch
