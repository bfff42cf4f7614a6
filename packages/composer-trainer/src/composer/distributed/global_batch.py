"""The counts of a batch over all processes, their exchange between hosts, and the weights of the losses.

Each process computes its share of a batch, and the gradients of all are averaged. A loss is the mean over elements,
such as samples. For the mean over the elements of all processes, each must multiply its loss by

    its weight = its elements / the mean number of elements of all processes.

The number of all elements is known in one of three ways, of which none waits for a device. As an example, two shares
have 3 and 5 samples, which have a mean of 4:

- The hosts exchange it. The weights 3/4 and 5/4 wait for the exchange, and so does the forward pass.
- It is *usual*: nearly all shares have 5. The weights 3/5 and 5/5 wait for nothing, and
  :meth:`BatchWeights.correction` multiplies gradients and losses by 5/4 when the exchange has shown the actual number.
- The model counts its *terms*, such as labels that are not ignored. Their number is summed on the device, where it
  stays, as do the weights 3/4 and 5/4. To read it, the host would have to wait for the device.

The counts of a process are a :class:`BatchShare`, and those of all processes, of the same type, a ``GlobalBatch``.
``Parallelism.begin_batch`` lets its :class:`CountExchange` begin, of which one process has none, and creates
:class:`BatchWeights`, which finish the exchange when a count of all processes is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch

from composer.distributed.environment import host_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from composer.core.step import Microbatch


@attrs.define
class BatchShare:
    """What a process counts in its share of a batch and requests of all, or the totals of several shares.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        counted: Number of elements that the loss is the mean of, such as tokens with a target; samples by default.
        microbatches: Number of microbatches, the largest one of several processes.
        seconds: Time since the last batch, the mean of several processes.
        stop: Whether to stop after this batch: 1 if ``stop_training`` was called, 2 after a signal, else 0.
        has_terms: Whether the model counts the elements that its loss is the mean of, in one of the processes.
        terms_disagree: Whether it does so in some of several processes only, for which ``BatchWeights.totals()`` raises
            an error in all of them.

    Example:
        >>> BatchShare.of([BatchShare(samples=3), BatchShare(samples=5, stop=1)]).samples
        8
    """

    samples: int = 0
    tokens: int = 0
    counted: float = attrs.field(default=attrs.Factory(lambda self: self.samples, takes_self=True))
    microbatches: int = 1
    seconds: float = 0.0
    stop: int = 0
    has_terms: bool = False
    terms_disagree: bool = False

    @classmethod
    def of(cls, shares: Sequence[BatchShare], layer_size: int = 1) -> BatchShare:
        """Return the totals of shares by rank, where each group of ``layer_size`` processes has the same samples."""
        different = shares[::layer_size]
        return cls(
            samples=int(sum(one.samples for one in different)),
            tokens=int(sum(one.tokens for one in different)),
            counted=sum(one.counted for one in different),
            microbatches=int(max(one.microbatches for one in shares)),
            seconds=sum(one.seconds for one in shares) / len(shares),
            stop=int(max(one.stop for one in shares)),
            has_terms=any(one.has_terms for one in shares),
            terms_disagree=len({bool(one.has_terms) for one in shares}) > 1,
        )

    def to_row(self) -> list[float]:
        """Return what a process sends; ``BatchShare(*row)`` reads it, as floats, also those of flags."""
        counts = [self.samples, self.tokens, self.counted, self.microbatches, self.seconds]
        return [*counts, self.stop, self.has_terms]


GlobalBatch: TypeAlias = BatchShare
"""The counts of a batch over all processes: what their shares are together."""


class BatchWeights:
    """The weights of the losses of this process in a batch, and the counts of all processes from which they follow.

    Losses that are multiplied by these weights give the step that one process takes with the complete batch.

    Args:
        own: The counts of this process.
        usual: What ``counted`` is in nearly all batches of each process; None if it is not known.
        exchange: Receives the counts of all processes; None if there is only this one.

    Example:
        >>> from composer.distributed import BatchShare
        >>> BatchWeights(BatchShare(samples=3)).weight()
        1.0
    """

    __slots__ = ("_data_size", "_exchange", "_had_terms", "_is_exact", "_totals", "_usual", "own")

    def __init__(self, own: BatchShare, usual: int | None = None, exchange: CountExchange | None = None) -> None:
        self.own, self._usual, self._exchange = own, usual, exchange
        self._totals: GlobalBatch | None = own if exchange is None else None
        self._data_size = 1 if exchange is None else exchange.data_size
        self._is_exact = self._data_size == 1  # whether the weights need no correction
        # Read now, as finishing the exchange of this batch replaces it.
        self._had_terms = own.has_terms if exchange is None else exchange.last.has_terms

    def totals(self) -> GlobalBatch:
        """Return the totals of all processes; waits for hosts, never for a device.

        Raises:
            ValueError: No process has a sample to train on in this batch, or the model counts the elements of its loss
                in some processes only.
        """
        totals = self._totals or self._finished()
        if totals.terms_disagree:
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
        if self._data_size == 1:
            return 1.0
        usual, own = self._usual, self.own.counted
        return own * self._data_size / self.totals().counted if usual is None else own / usual

    def correction(self) -> float:
        """Return the factor that the weighted losses and their gradients lack; 1 unless a batch has unusual counts.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._usual is None or self._is_exact:
            return 1.0
        return self._usual * self._data_size / self.totals().counted

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

    def _uses_terms(self) -> bool:
        """Return whether the processes weigh by terms: as in the last batch, unless all of them have changed.

        Only a process that has changed waits for the others. If it is the only one, it does what the others do, as
        all of them call the same collectives, until :meth:`totals` raises the error in all.
        """
        if self.own.has_terms == self._had_terms:
            return self._had_terms
        totals = self._finished()
        return self._had_terms if totals.terms_disagree else totals.has_terms

    def _weights_by_terms(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        self._is_exact = True
        numbers = torch.stack([*terms])
        # Doubles are slow on most other devices.
        numbers = numbers.double() if numbers.device.type == "cpu" else numbers.float()
        total = numbers.sum()
        if self._exchange is not None:
            torch.distributed.all_reduce(total)
            numbers *= self._exchange.world_size
        # Not clamped, as terms may be weights of classes, whose sum may be below 1.
        return (numbers / torch.where(total == 0, 1, total)).unbind()

    def _finished(self) -> GlobalBatch:
        """Return the totals of all processes, without the check of :meth:`totals`."""
        if self._totals is None:
            assert self._exchange is not None
            self._totals = self._exchange.finish()
        return self._totals


class CountExchange:
    """Exchanges what each process counts in its share of a batch; hosts are waited for, never a device.

    Args:
        world_size: Number of processes.
        layer_size: Number of processes with the same samples, which split the layers of the model.

    Attributes:
        world_size: Number of processes.
        data_size: Number of processes, or groups of them, with different samples.
        last: The totals that were received last.
    """

    def __init__(self, world_size: int, layer_size: int) -> None:
        self.world_size, self.data_size, self._layer_size = world_size, world_size // layer_size, layer_size
        self.last = GlobalBatch()
        self._rows = torch.empty(0)  # what each process has sent
        self._work: Any = None  # the exchange of this batch

    def begin(self, own: BatchShare) -> None:
        """Send what this process counts; its ``seconds`` are those since the last call."""
        # Kept, as a thread of gloo that released the last reference would need the interpreter's lock.
        self._sent = sent = torch.tensor(own.to_row(), dtype=torch.float64, device="cpu")
        self._rows = sent.new_empty(self.world_size * len(sent))
        # The model computes while the numbers are on their way.
        self._work = torch.distributed.all_gather_into_tensor(self._rows, sent, group=host_group(), async_op=True)

    def finish(self) -> GlobalBatch:
        """Return the totals of all processes.

        Raises:
            ValueError: No process has a sample to train on in this batch.
        """
        self._work.wait()
        # A list, as operations on tensors take longer for a few numbers.
        rows = self._rows.view(self.world_size, -1).tolist()
        self.last = GlobalBatch.of([BatchShare(*row) for row in rows], self._layer_size)
        if not self.last.counted:
            raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
        return self.last
