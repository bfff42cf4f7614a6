"""Data sets of packed sequences: rows of one length that have several documents each (arXiv:2404.10830)."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from composer import functional as cf
from composer.core.checks import is_flag, one_of, whole_number_from
from composer.core.precision import Precision, get_precision_context
from composer.core.saving.randomness import derive_seed, preserve_rng_state
from composer.functional.datasets import by_epoch, outermost
from composer.functional.training.packing import labels_of, measure_documents

if TYPE_CHECKING:
    from composer.core.state import State

Document: TypeAlias = tuple[Tensor, Tensor]
"""Token ids and labels, both of shape (n,)."""

_FULL = 0.99
"""The part of a row from which on a stream does not wait for documents that fill it further."""

_CHECKED = 64
"""The number of tokens of each of the two documents on which a model is checked."""


def pack_sequences(
    dataset: Any,
    length: int,
    method: str = "best_fit",
    *,
    too_long: str = "split",
    pad_id: int = 0,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    buffer_size: int = 2000,
    check_model: bool = True,
) -> Dataset[dict[str, Any]]:
    """Pack the documents of a data set into rows of ``length`` tokens (arXiv:2404.10830).

    A sample is a document: a dictionary with ``"input_ids"``, and perhaps ``"labels"`` (-100 where there is no loss)
    and ``"attention_mask"``, whose zeros are padding to remove; or token ids alone. Tokens whose
    ``"assistant_masks"`` or ``"completion_mask"`` is 0 have no loss. Each document is in one row, and occurs
    once in an epoch. Rows are those of :func:`composer.functional.pack_documents`. Load them by
    ``DataLoader(packed, batch_size, collate_fn=cf.collate_packed)``. The Trainer checks at the first batch that the
    model keeps documents apart; in a loop of your own, call :func:`composer.functional.check_packing` once.

    - Of a data set with a length, the result is one, too. Which documents share a row depends only on ``seed`` and the
      epoch, which the Trainer sets by ``set_epoch(epoch)``; the number of rows is always the same. So a loader
      shuffles, splits and resumes the rows like other samples.
    - Of a stream, the result is an ``IterableDataset`` that packs ``buffer_size`` documents at a time. Documents in
      rows that are not nearly full wait for the next ones, at most half of the rows. While it is
      iterated over, ``state_dict()`` is the place after the last row, from which the stream continues with the same
      rows after ``load_state_dict(state)``. A source with these two methods, whose state after a document is the place
      after it, continues at once; other sources are read up to the place. As in each ``IterableDataset``, the source
      must yield the part of its process and worker.

    Args:
        dataset: A data set with ``__getitem__`` and ``__len__``, or an iterable of documents that can be iterated over
            again.
        length: The number of tokens of a row.
        method: ``"best_fit"``, or ``"in_order"`` to preserve the order; see :func:`composer.functional.pack_lengths`.
        too_long: What to do with documents of more than ``length`` tokens: ``"split"`` into parts, of which each is a
            document; ``"truncate"``; or ``"raise"`` an error.
        pad_id: The id of the padding.
        seed: Seed of the rows' order, and of the choice among documents of the same length, for ``"best_fit"``.
        lengths: The number of tokens of each document of a data set with a length; if None, each is loaded once.
        buffer_size: The number of documents that are packed at a time, of a stream.
        check_model: Whether the Trainer, and other trainers whose model takes ``input_ids``, check the model.

    Raises:
        TypeError: ``dataset`` cannot be read again, or a sample is no document.
        ValueError: A setting is out of range, or a document is empty or, with ``too_long="raise"``, too long.

    Example:
        >>> packed = pack_sequences([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]], length=8)
        >>> len(packed), packed[0]["input_ids"].shape
        (2, torch.Size([8]))
    """
    packing = _Packing(length, method, too_long, pad_id, seed, buffer_size, check_model)
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return PackedDataset(dataset, packing, lengths)
    if not isinstance(dataset, Iterable) or isinstance(dataset, Iterator):
        raise TypeError(
            f"dataset must have __getitem__ and __len__, or be iterable more than once, got {type(dataset).__name__}. "
            "Write an IterableDataset whose __iter__ starts again."
        )
    if lengths is not None:
        raise ValueError("lengths must be None for a stream, whose documents are measured when they are read.")
    return PackedStream(dataset, packing)


@attrs.frozen
class _Packing:
    """The settings of :func:`pack_sequences`."""

    length: int = attrs.field(validator=whole_number_from(1, meaning="It is the number of tokens of a row."))
    method: str = attrs.field(validator=one_of("best_fit", "in_order"))
    too_long: str = attrs.field(validator=one_of("split", "truncate", "raise"))
    pad_id: int = attrs.field(validator=whole_number_from(0, meaning="It is the id of the padding."))
    seed: int = attrs.field(validator=whole_number_from(0, meaning="It is the seed of the rows' order."))
    buffer_size: int = attrs.field(validator=whole_number_from(1, meaning="It is a number of documents."))
    check_model: bool = attrs.field(validator=is_flag)

    def parts(self, size: int, name: str) -> list[tuple[int, int]]:
        """Return the starts and ends of the parts of a document that are packed."""
        if not size:
            raise ValueError(f"{name} has no tokens. Remove empty documents before packing.")
        if size > self.length and self.too_long == "raise":
            raise ValueError(
                f"{name} has {size} tokens, and a row {self.length}. Set too_long='split' or too_long='truncate'."
            )
        end = size if self.too_long == "split" else min(size, self.length)
        return [(start, min(start + self.length, end)) for start in range(0, end, self.length)]

    def rows(self, sizes: Sequence[int], *key: object) -> list[list[int]]:
        """Return the rows of documents of some sizes, in an order that is drawn by the seed and the key."""
        if self.method == "in_order":
            return cf.pack_lengths(sizes, self.length, self.method)
        generator = random.Random(derive_seed(self.seed, "packing", *key))  # noqa: S311
        order = generator.sample(range(len(sizes)), len(sizes))
        rows = cf.pack_lengths([sizes[index] for index in order], self.length)
        generator.shuffle(rows)  # those with the longest documents come first
        return [[order[place] for place in row] for row in rows]

    def row(self, documents: Iterable[Document]) -> dict[str, Any]:
        """Return the sample of a row."""
        ids, labels = zip(*documents, strict=True)
        return cf.pack_documents(ids, self.length, labels=labels, pad_id=self.pad_id)


class PackedDataset(Dataset[dict[str, Any]]):
    """The rows of a data set with a length."""

    def __init__(self, dataset: Any, packing: _Packing, lengths: Sequence[int] | None) -> None:
        self.dataset, self.packing = dataset, packing
        # Persistent workers of a loader share its memory.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        if lengths is None:
            lengths = measure_documents(_document(dataset[at], f"dataset[{at}]") for at in range(len(dataset)))
        if len(lengths) != len(dataset) or len(lengths) == 0:
            raise ValueError(
                f"dataset must have one document or more, and lengths a number for each, got {len(dataset)} and "
                f"{len(lengths)}."
            )
        self._parts = [
            (index, *part) for index, size in enumerate(lengths) for part in packing.parts(size, f"dataset[{index}]")
        ]
        self._planned: tuple[int, list[list[int]]] = (-1, [])

    @property
    def epoch(self) -> int:
        """The epoch, on which the choice of documents that share a row depends."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, here and in the data sets within that have this method."""
        self._epoch.fill_(epoch)
        for one in by_epoch(self.dataset):
            one.set_epoch(epoch)

    def _rows(self) -> list[list[int]]:
        if self._planned[0] != (epoch := self.epoch):
            sizes = [end - start for _, start, end in self._parts]
            self._planned = (epoch, self.packing.rows(sizes, epoch))
        return self._planned[1]

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.packing.row(self._part(*self._parts[part]) for part in self._rows()[row])

    def _part(self, index: int, start: int, end: int) -> Document:
        ids, labels = _document(self.dataset[index], f"dataset[{index}]")
        if len(ids) < end:
            raise ValueError(
                f"dataset[{index}] has {len(ids)} tokens, and the rows were planned for {end} or more. A document must "
                "have the same length each time, and lengths those of the documents."
            )
        return ids[start:end], labels[start:end]


class PackedStream(IterableDataset[dict[str, Any]]):
    """The rows of a stream."""

    def __init__(self, dataset: Iterable[Any], packing: _Packing) -> None:
        self.dataset, self.packing, self.epoch = dataset, packing, 0
        self._has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._state, self._is_loaded = _beginning(0), False
        self._iteration: object = None  # the last one that has begun

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of the rows depends; another one than before starts at its beginning."""
        if epoch != self.epoch:
            self.epoch, self._is_loaded = epoch, False
            self._rewind()
        for one in by_epoch(self.dataset):
            one.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last row of the current iteration; the beginning if there is none."""
        return dict(self._state) if self._state["source"] is not None else self._with_source(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration start at a saved place."""
        self._state, self.epoch, self._is_loaded = dict(state), state["epoch"], True
        self._iteration = None
        self._load_source(state["source"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows from a place that was loaded, otherwise from the beginning."""
        if not self._is_loaded:
            self._state = self._with_source(_beginning(self.epoch))
        self._is_loaded = False
        self._iteration = iteration = object()
        try:
            yield from self._rows_from(self._state)
        except GeneratorExit:  # the rest is not read, as in an evaluation of some batches
            if self._iteration is iteration:
                self._rewind()
            raise
        self._state = _beginning(self.epoch)

    def _rewind(self) -> None:
        self._load_source(self._state["start"])
        self._state = _beginning(self.epoch)

    def _load_source(self, state: Any) -> None:
        source: Any = self.dataset
        if state is not None:
            source.load_state_dict(state)

    def _with_source(self, state: Mapping[str, Any]) -> dict[str, Any]:
        source: Any = self.dataset
        place = source.state_dict() if self._has_state else None
        return {**state, "source": place, "start": place}

    def _rows_from(self, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._load_source(state["source"])
        documents = itertools.islice(iter(self.dataset), 0 if self._has_state else state["read"], None)
        is_last = False
        while not is_last:
            # The place before the documents of a buffer, and how many of its rows were returned, determine the rest.
            self._state = state
            waiting = _separate(state["waiting"])
            missing = max(1, self.packing.buffer_size - len(waiting))
            read = list(itertools.islice(documents, missing))
            is_last = len(read) < missing
            rows, waiting = self._pack([*waiting, *self._measured(read, state["read"])], state, is_last=is_last)
            for number in range(state["returned"], len(rows)):
                self._state = {**state, "returned": number + 1}
                yield self.packing.row(rows[number])
            state = {
                **self._with_source(state),
                "start": state["start"],
                "buffer": state["buffer"] + 1,
                "read": state["read"] + len(read),
                "waiting": _joined(waiting),
                "returned": 0,
            }

    def _measured(self, samples: Sequence[Any], number: int) -> Iterator[Document]:
        for place, sample in enumerate(samples, start=number):
            ids, labels = _document(sample, name := f"document {place}")
            yield from ((ids[start:end], labels[start:end]) for start, end in self.packing.parts(len(ids), name))

    def _pack(
        self, documents: Sequence[Document], state: Mapping[str, Any], *, is_last: bool
    ) -> tuple[list[list[Document]], list[Document]]:
        """Return the rows of a buffer, and the documents that wait for the next one."""
        packing = self.packing
        sizes = [len(ids) for ids, _ in documents] if state["buffer"] else measure_documents(documents)
        rows = packing.rows(sizes, state["epoch"], state["buffer"])
        free = [packing.length - sum(len(documents[index][0]) for index in row) for row in rows]
        emptiest = sorted(range(len(rows)), key=lambda place: -free[place])[: len(rows) // 2]
        waits = {place for place in emptiest if free[place] > (1 - _FULL) * packing.length}
        if packing.method == "in_order":
            waits = {len(rows) - 1}
        if is_last:
            waits = set()
        ready = [[documents[index] for index in row] for place, row in enumerate(rows) if place not in waits]
        return ready, [documents[index] for place in sorted(waits) for index in rows[place]]


def _beginning(epoch: int) -> dict[str, Any]:
    """Return the state of a stream that has returned no row; ``source`` and ``start`` are states of its source."""
    state = {"epoch": epoch, "buffer": 0, "read": 0, "waiting": _joined([]), "returned": 0}
    return {**state, "source": None, "start": None}


def _joined(documents: Sequence[Document]) -> dict[str, Any]:
    """Return documents as two tensors, as a checkpoint may have many."""
    ids, labels = zip(*documents, strict=True) if documents else ((torch.empty(0, dtype=torch.int64),),) * 2
    return {"ids": torch.cat(ids), "labels": torch.cat(labels), "lengths": [len(one) for one, _ in documents]}


def _separate(joined: Mapping[str, Any]) -> list[Document]:
    ids, labels = (joined[name].split(joined["lengths"]) for name in ("ids", "labels"))
    return list(zip(ids, labels, strict=True)) if joined["lengths"] else []


def _document(sample: Any, name: str) -> Document:
    """Return the token ids and labels of a sample, without padding."""
    parts = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if parts.get("input_ids") is None:
        raise ValueError(f"{name} must have input_ids, got {sorted(map(str, parts))}. Tokenize texts first.")
    try:
        ids = torch.as_tensor(parts["input_ids"])
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(sample).__name__
        raise TypeError(f"{name} must be token ids, or a dictionary with input_ids, got {got}.") from error
    labels, mask = labels_of(parts, ids), parts.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    is_wrong = ids.numel() and ids.is_floating_point()  # an empty list is a tensor of floats
    if is_wrong or ids.ndim != 1 or not labels.shape == mask.shape == ids.shape:
        raise ValueError(
            f"{name} must have whole numbers as input_ids, shape (n,), and labels and attention_mask of the same "
            f"shape, got {ids.dtype} of shape {tuple(ids.shape)}, {tuple(labels.shape)} and {tuple(mask.shape)}."
        )
    kept = mask != 0
    return ids[kept].long(), labels[kept].long()


def has_packed_rows(loader: Any) -> bool:
    """Return whether a loader has rows of :func:`pack_sequences` for which the model is to be checked."""
    packed = outermost(loader, lambda one: isinstance(one, PackedDataset | PackedStream))
    return any(one.packing.check_model for one in packed)


def check_packed_model(state: State, batch: Any, *, raises: bool = True) -> None:
    """Raise a ValueError, or warn, if the model mixes the documents of a packed batch; the run does not change.

    Documents are made of the first tokens of the batch, so that all processes compute as often. Computing in 8 bits, a
    model scales its activations by those of all documents, so it is not checked.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch or state.precision is Precision.AMP_FP8:
        return
    ids, mask = batch["input_ids"][0, : 2 * _CHECKED], batch.get("attention_mask")
    size = len(ids) // 2
    if not size:  # rows of one token
        return
    # As long as the rows of the batch, with which a sliding window is compared; padding is not computed.
    row = cf.pack_documents([ids[:size], ids[-size:]], batch["input_ids"].shape[1])
    output = "mask" if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 4 else "position_ids"
    output = "cu_seqlens" if "cu_seq_lens_q" in batch else output
    try:
        with preserve_rng_state(state.device), get_precision_context(state.precision, state.device.type):
            cf.check_packing(state.model, cf.collate_packed([row]), output)
    except ValueError as error:
        if not raises:
            warnings.warn(f"The first batch is a row of documents, by its position_ids: {error}", stacklevel=2)
            return
        error.add_note("Pad the rows instead; or pack_sequences(..., check_model=False) trains without this check.")
        raise
