"""The counts of a batch over all processes, and the weights of its losses that follow from them.

Each process computes its share of a batch, and the gradients of all are averaged. A loss is the mean over elements,
such as samples. For the mean over the elements of all processes, each must multiply its loss by

    its weight = its elements / the mean number of elements of all processes.

The number of all elements is known in one of three ways; none of them waits for a device:

- It is exchanged between the hosts: :meth:`BatchWeights.weight` waits for it. Shares of 3 and 5 samples have a mean of
  4, and get the weights 3/4 and 5/4.
- It is *usual*: nearly all batches have equally many. The weight assumes this at once, because waiting would stop the
  host before each forward pass, and :meth:`BatchWeights.correction` corrects gradients and losses when the exchange has
  shown the actual number. If 5 is usual, the same shares get the weights 3/5 and 5/5 at once, and later the correction
  5/4.
- The model counts the elements on the device (*terms*), such as labels that are not ignored. Reading this number would
  make the host wait for the device; so it is summed there, and the weights are tensors.

The counts of one process are a :class:`BatchShare`; the totals of all processes are a :class:`GlobalBatch`.
``Parallelism.begin_batch`` creates :class:`BatchWeights` for each batch, which have both; ``CountExchange`` exchanges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from composer.core.step import Microbatch
    from composer.distributed.count_exchange import CountExchange

__all__ = ["BatchShare", "BatchWeights", "GlobalBatch"]


@attrs.define
class BatchShare:
    """What one process counts in its share of a batch, and what it requests of all processes.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        counted: Number of elements that the loss is the mean of, such as tokens with a target; samples by default.
        microbatches: Number of microbatches.
        seconds: Time since the last batch.
        stop: Whether to stop after this batch.
        logs: Whether this process logs losses, for which all processes must average them.
        has_terms: Whether the model counts the elements that its loss is the mean of.

    Example:
        >>> BatchShare(samples=5).counted
        5
    """

    samples: int
    tokens: int = 0
    counted: float = attrs.field(default=attrs.Factory(lambda self: self.samples, takes_self=True))
    microbatches: int = 1
    seconds: float = 0.0
    stop: bool = False
    logs: bool = False
    has_terms: bool = False


@attrs.define
class GlobalBatch:
    """The totals of a batch over all processes.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        counted: Number of elements that the losses are the means of.
        microbatches: The largest number of microbatches of a process.
        seconds: Time since the last batch, the mean of all processes.
        stop: Whether a process requests to stop after this batch.
        logs: Whether a process logs losses.
        has_terms: Whether the model counts the elements of its loss; None if it does so only in some processes.

    Example:
        >>> GlobalBatch.of([BatchShare(samples=3), BatchShare(samples=5, stop=True)]).samples
        8
    """

    samples: int = 0
    tokens: int = 0
    counted: float = 0
    microbatches: int = 1
    seconds: float = 0.0
    stop: bool = False
    logs: bool = False
    has_terms: bool | None = False

    @classmethod
    def of(cls, shares: Sequence[BatchShare], layer_size: int = 1) -> GlobalBatch:
        """Return the totals of shares by rank, where each group of ``layer_size`` processes has the same samples.

        Numbers that were exchanged are floats, also those of whole numbers and flags.
        """
        different = shares[::layer_size]
        return cls(
            samples=int(sum(one.samples for one in different)),
            tokens=int(sum(one.tokens for one in different)),
            counted=sum(one.counted for one in different),
            microbatches=int(max(one.microbatches for one in shares)),
            seconds=sum(one.seconds for one in shares) / len(shares),
            stop=any(one.stop for one in shares),
            logs=any(one.logs for one in shares),
            has_terms=bool(shares[0].has_terms) if len({one.has_terms for one in shares}) == 1 else None,
        )


class BatchWeights:
    """The weights of the losses of this process in a batch, and the counts of all processes from which they follow.

    Losses that are multiplied by these weights give the step that one process takes with the complete batch.

    Args:
        own: The counts of this process.
        usual: What ``counted`` is in nearly all batches of each process; None if it is not known.
        exchange: Receives the counts of all processes; None if there is only this one.

    Example:
        >>> BatchWeights(BatchShare(samples=3)).weight()
        1.0
    """

    __slots__ = ("_exchange", "_had_terms", "_shares", "_totals", "_usual", "own")

    def __init__(self, own: BatchShare, usual: int | None = None, exchange: CountExchange | None = None) -> None:
        self.own, self._usual, self._exchange = own, usual, exchange
        self._totals: GlobalBatch | None = None
        self._shares = 1 if exchange is None else exchange.data_size
        # Read now, as finishing the exchange of this batch replaces it.
        self._had_terms = own.has_terms if exchange is None else exchange.last.has_terms

    def totals(self) -> GlobalBatch:
        """Return the totals of all processes; waits for hosts, never for a device.

        Raises:
            ValueError: No process has a sample to train on in this batch, or the model counts the elements of its loss
                in some processes only.
        """
        totals = self._totals or self._receive()
        if totals.has_terms is None:
            raise ValueError(
                "count_loss_terms() of the model returned a number in some processes and None in others, for the same "
                "batch, so that their losses cannot be weighed. Give all processes batches of the same kind: with "
                "labels of the same type and number of dimensions, or without."
            )
        return totals

    def weight(self) -> float:
        """Return what to multiply this process's loss by: its fraction of the batch times the number of processes.

        Waits for hosts if the usual number is not known.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._shares == 1:
            return 1.0
        usual, own = self._usual, self.own.counted
        return own * self._shares / self.totals().counted if usual is None else own / usual

    def correction(self) -> float:
        """Return the factor that the weighted losses and their gradients lack; 1 unless a batch has unusual counts.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._usual is None or self._shares == 1:
            return 1.0
        return self._usual * self._shares / self.totals().counted

    def weigh(
        self, microbatches: Sequence[Microbatch], terms: Sequence[Tensor] | None, device: torch.device
    ) -> Sequence[Microbatch]:
        """Return microbatches with their weights in the batch of all processes.

        Args:
            microbatches: Those of this process, each with its fraction of this process's share.
            terms: How many elements the loss of each is the mean of, on ``device``, which is not waited for; None if
                the model does not count them.
            device: The device of the model.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._uses_terms():
            if terms is None:
                terms = [torch.zeros((), device=device)] * len(microbatches)
            weights = self._weights_by_terms(terms)
            return [(batch, weight) for (batch, _), weight in zip(microbatches, weights, strict=True)]
        weight = self.weight()
        return microbatches if weight == 1 else [(batch, fraction * weight) for batch, fraction in microbatches]

    def _uses_terms(self) -> bool | None:
        """Return whether the processes weigh by terms: as in the last batch, unless all of them have changed.

        Only a process that has changed waits for the others. If it is the only one, it does what the others do, as
        all of them call the same collectives, until :meth:`totals` raises the error in all.
        """
        if self.own.has_terms == self._had_terms:
            return self._had_terms
        now = self._receive().has_terms
        return self._had_terms if now is None else now

    def _weights_by_terms(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        self._usual = None  # these weights need no correction
        own = torch.stack([*terms])
        own = own.double() if own.device.type == "cpu" else own.float()  # doubles are slow on most other devices
        total = own.sum()
        if self._exchange is not None:
            torch.distributed.all_reduce(total)
            own *= self._exchange.world_size
        # Not clamped, as terms may be weights of classes, whose sum may be below 1.
        return (own / torch.where(total == 0, 1, total)).unbind()

    def _receive(self) -> GlobalBatch:
        """Return the totals of all processes, without the check of :meth:`totals`."""
        if self._totals is None:
            self._totals = _totals_of_one(self.own) if self._exchange is None else self._exchange.finish()
        return self._totals


def _totals_of_one(own: BatchShare) -> GlobalBatch:
    """Return what :meth:`GlobalBatch.of` does for one share, in a fifth of the time, as it runs in each step."""
    counts = own.samples, own.tokens, own.counted, own.microbatches, own.seconds
    return GlobalBatch(*counts, own.stop, own.logs, own.has_terms)
