"""InfoBatch: train on a part of the samples with low losses, with larger weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._progress import FRACTION_OF_TRAINING, elapsed_duration
from composer.algorithms._sample_losses import check_processes, check_reduction
from composer.core import Algorithm, Event, FieldsByEvent, Logger, Stage, State, TimeUnit, get_precision_context, saved
from composer.core.checks import number
from composer.core.declarations import owned
from composer.core.saving.components import reset_fields, transient
from composer.core.saving.randomness import derive_seed
from composer.functional.random import send
from composer.functional.training.selective_backprop import mean_losses


class InfoBatchDataset(Dataset[Any]):
    """A data set for :class:`InfoBatch`, whose ``sampler`` yields the samples that are not pruned.

    A sample is a pair of its index and the sample of ``dataset``; :class:`InfoBatch` takes the indices out of a batch.
    Without the algorithm, the sampler yields all samples in order.

    Args:
        dataset: A data set with ``__getitem__`` and ``__len__``.

    Attributes:
        sampler: The sampler, with the state of the epoch: ``DataLoader(data, batch_size=32, sampler=data.sampler)``.
        order: The indices that it yields, int64; with several processes those of all.

    Raises:
        TypeError: ``dataset`` has no length, or cannot be indexed.

    Example:
        >>> data = InfoBatchDataset(["a", "b"])
        >>> data[1], list(data.sampler)
        ((1, 'b'), [0, 1])
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"dataset must have __getitem__ and __len__, got {type(dataset).__name__}.")
        self.dataset = dataset
        self.order = torch.arange(len(dataset))
        self.part = 0, 1  # the rank of this process, and the number of processes
        self.sampler = _Sampler(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        """Return an index and its sample."""
        return index, self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # A data set with the method is another one in each epoch.
        if name != "set_epoch":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.dataset.set_epoch


class _Sampler(Sampler[int]):
    """Yields the part of the order that this process trains on."""

    def __init__(self, data: InfoBatchDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[int]:
        rank, count = self._data.part
        return iter(self._data.order[rank::count].tolist())

    def __len__(self) -> int:
        # That of the process with the most samples, as all train on as many batches.
        return len(self._data.order[:: self._data.part[1]])

    def state_dict(self) -> dict[str, Any]:
        """Return the order."""
        return {"order": self._data.order, "part": list(self._data.part)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the order."""
        rank, count = state["part"]
        self._data.order, self._data.part = state["order"], (rank, count)


@attrs.define(eq=False)
class InfoBatch(Algorithm):
    """Train on a part of the samples with low losses, and increase their weights (arXiv:2303.04947).

    At the start of an epoch, samples are pruned by :func:`composer.functional.draw_infobatch_weights`, with their last
    losses as scores; the first epoch has all samples. The loss of a batch is the mean over its samples of their losses
    times their weights. Epochs that start in the last part of the training have all samples, and the loss of the model.

    The order of an epoch depends only on the seed, the epoch and the losses. The data set is an
    :class:`InfoBatchDataset`, and the model's ``loss`` is called a second time with ``reduction="none"``, which
    :class:`composer.models.ComposerClassifier` accepts. Losses stay on the device until the epoch ends. Several
    processes exchange them then, and when a checkpoint is saved.

    Args:
        ratio: The probability that a sample with a loss below the mean is pruned, in ``[0, 1)``.
        annealing: The fraction of the training at its end with all samples.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range. In training: the loader does not use an :class:`InfoBatchDataset` and its
            sampler, or there are several processes without the Trainer.

    Example:
        >>> InfoBatch(annealing=0.25)
        InfoBatch(ratio=0.5, annealing=0.25)
    """

    ratio: float = number(0.5, 0, 1, meaning="It is a probability.")
    annealing: float = attrs.field(default=0.125, validator=FRACTION_OF_TRAINING)

    _scores: Tensor | None = saved(default=None)  # the last losses before this epoch, NaN where there is none
    _weights: Tensor | None = saved(default=None)  # in this epoch
    _losses: Tensor | None = saved(default=None)  # in this epoch, NaN where there is none
    _prunes: bool = saved(default=False)  # in this epoch
    _num_processes: int = saved(default=1)

    _data: InfoBatchDataset | None = transient(default=None)
    _indices: Tensor | None = transient(default=None)  # of the batch
    _place: int = transient(default=0)  # in it, of the microbatch

    acted = 0
    acted_unit = "samples"
    idle_reason = (
        "It has pruned no sample: the first epoch and the last part of the training, annealing, have all of them. "
        "Train longer, or choose a larger ratio."
    )
    # At AFTER_LOSS before all algorithms that blend losses, or add to them: higher stages are first there.
    runs_at: ClassVar = {
        Event.FIT_START: Stage.SELECT,
        Event.EPOCH_START: Stage.SELECT,
        Event.AFTER_DATALOADER: Stage.SELECT,
        Event.AFTER_LOSS: Stage.GRADIENT,
        Event.EPOCH_END: Stage.SELECT,
    }
    reads: ClassVar = FieldsByEvent(
        {
            Event.FIT_START: {"model", "timestamp", "train_dataloader"},
            Event.EPOCH_START: {"timestamp", "max_duration", "dataloader_len"},
            Event.AFTER_DATALOADER: {"batch"},
            Event.AFTER_LOSS: {"batch", "losses", "model", "outputs"},
        }
    )
    # The order of the data set changes.
    writes: ClassVar = FieldsByEvent(
        {
            Event.FIT_START: {"train_dataloader"},
            Event.EPOCH_START: {"train_dataloader"},
            Event.AFTER_DATALOADER: {"batch"},
            Event.AFTER_LOSS: {"loss"},
        }
    )
    owns: ClassVar = owned("the choice of samples", "A second one would select from the rest: choose one.")

    def __attrs_post_init__(self) -> None:
        if self.ratio == 1:
            raise ValueError(f"ratio must be less than 1, got {self.ratio}.")
        warn_if_idle(self, ratio=self.ratio == 0, annealing=self.annealing == 1)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Choose the samples of an epoch, weigh the losses of a batch, and store the losses when the epoch ends."""
        if event is Event.FIT_START:
            self._begin(state)
        elif event is Event.EPOCH_START:
            self._prune(state)
        elif event is Event.AFTER_DATALOADER:
            self._indices, state.batch = _unpacked(state.batch)
        elif event is Event.AFTER_LOSS:
            if self._prunes:
                self._weigh(state)
        else:
            self._store_scores(state)

    def share_state(self, state: State) -> None:
        """Collect the losses of all processes."""
        if self._prunes and self._losses is not None and state.gather is not None:
            parts: list[Tensor] = state.gather(self._losses.cpu())
            self._losses = functools.reduce(lambda one, other: one.where(~one.isnan(), other), parts)

    def _begin(self, state: State) -> None:
        if not state.timestamp.count(TimeUnit.BATCH):
            reset_fields(self)
        check_reduction("InfoBatch", state)
        check_processes("InfoBatch", "use the Trainer", state)
        self._data = _data_of(state.train_dataloader)
        rank = state.rank if state.data_rank is None else state.data_rank
        self._data.part = (0, 1) if state.gather is None else (rank, len(state.gather(None)))
        if state.timestamp.count(TimeUnit.BATCH, in_epoch=True) and self._weights is not None:
            began, now = (len(self._weights), self._num_processes), (len(self._data), self._data.part[1])
            if began != now:
                raise ValueError(
                    f"InfoBatch cannot continue an epoch of {began[0]} samples and {began[1]} processes with {now[0]} "
                    f"samples and {now[1]} processes: resume from a checkpoint of the end of an epoch."
                )
            self._set_order(state)
        self._num_processes = self._data.part[1]

    def _prune(self, state: State) -> None:
        """Choose the samples of an epoch."""
        assert self._data is not None
        unknown = torch.full((len(self._data),), torch.nan)
        if self._scores is None or len(self._scores) != len(unknown):
            self._scores = unknown
        # A tolerance for rounding: 1 - 0.7 is above 0.3.
        self._prunes = elapsed_duration(self, state) < 1 - self.annealing - 1e-9
        self._losses = unknown.clone()
        self._weights = torch.ones_like(unknown)
        if self._prunes:
            self._weights = cf.draw_infobatch_weights(
                self._scores.cpu(), self.ratio, generator=_generator(state, "weights")
            )
            self.acted += int((self._weights == 0).sum())
        self._set_order(state)

    def _set_order(self, state: State) -> None:
        assert self._data is not None
        assert self._weights is not None
        kept = self._weights.cpu().nonzero().flatten()
        self._data.order = kept[torch.randperm(len(kept), generator=_generator(state, "order"))]

    def _weigh(self, state: State) -> None:
        """Weigh the losses of a microbatch, and record them."""
        assert self._indices is not None
        assert self._weights is not None
        assert self._losses is not None
        if state.microbatch <= 0:
            self._place = 0
        with get_precision_context(state.precision, state.device.type):
            losses: Any = state.compute_loss(state.outputs, state.batch, reduction="none")
        size = len(losses) if isinstance(losses, Tensor) and losses.ndim else len(self._indices)
        indices = self._indices[self._place : self._place + size]
        self._place += size
        if not len(indices) and state.microbatch > 0:
            return  # a copy of the last microbatch, with weight 0, while other processes have more of them
        losses = mean_losses(losses, len(indices))
        self._losses, self._weights = send(self._losses, losses.device), send(self._weights, losses.device)
        if state.batch_counts:
            self._losses[indices] = losses.detach().to(self._losses.dtype)
        loss, weight = (losses * self._weights[indices]).mean() * state.loss_share, state.microbatch_weight
        if self._num_processes == 1:  # the weight of a microbatch may be its share of the labels
            weight = weight.clamp(min=1e-30) if isinstance(weight, Tensor) else max(weight, 1e-30)
            loss = loss * (len(indices) / len(self._indices) / weight)
        state.loss = loss

    def _store_scores(self, state: State) -> None:
        """Replace the scores of the samples of an epoch."""
        self.share_state(state)
        if self._losses is not None and self._scores is not None:  # None if it was added within an epoch
            losses, self._losses = self._losses.cpu(), None
            self._scores = torch.where(losses.isnan(), self._scores.cpu(), losses)


def _generator(state: State, *words: object) -> torch.Generator:
    """Return a generator with the same draws in all processes."""
    epoch = int(state.timestamp.count(TimeUnit.EPOCH))
    return torch.Generator().manual_seed(derive_seed(state.rank_zero_seed, "InfoBatch", *words, epoch))


def _unpacked(batch: Any) -> tuple[Tensor, Any]:
    """Return the indices of a batch, and the batch without them."""
    if not isinstance(batch, Sequence) or len(batch) != 2 or not isinstance(batch[0], Tensor) or batch[0].ndim != 1:
        raise TypeError(
            "A batch of an InfoBatchDataset must be a pair of the indices, a tensor (N,), and the batch, got "
            f"{type(batch).__name__}. A collate_fn is given pairs of an index and a sample, too."
        )
    return batch[0].long(), batch[1]


def _data_of(loader: Any) -> InfoBatchDataset:
    data = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(data, InfoBatchDataset) or getattr(batches, "sampler", None) is not data.sampler:
        raise ValueError(
            "InfoBatch chooses the samples of train_dataloader, which must be a DataLoader of an InfoBatchDataset with "
            "its sampler: data = InfoBatchDataset(dataset); DataLoader(data, batch_size=32, sampler=data.sampler)."
        )
    return data
