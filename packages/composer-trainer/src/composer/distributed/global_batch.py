"""The weights of the losses of a batch that is split over processes.

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

``Parallelism.begin_batch`` begins the exchange of the counts (``distributed/counts.py``) and creates
:class:`BatchWeights`, which finish it when a count of all processes is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from composer.core.step import Microbatch
    from composer.distributed.counts import BatchShare, CountExchange, GlobalBatch


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
