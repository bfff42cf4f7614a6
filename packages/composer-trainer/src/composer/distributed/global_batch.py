"""The counts of a batch over all processes, their exchange between hosts, and the weights of the losses.

Each process computes its share of a batch, and the gradients of all are averaged. A loss is the mean over *elements*
(``core/data/elements.py``), such as samples. For the mean over those of all processes, each must multiply its loss by

    its weight = its elements / the mean number of elements of all processes.

The number of all elements is known in one of three ways, of which none waits for a device. As an example, two shares
have 3 and 5 samples, which have a mean of 4:

- The hosts exchange it. The weights 3/4 and 5/4 wait for the exchange, and so does the forward pass.
- It is *usual*: nearly all shares have 5. The weights 3/5 and 5/5 wait for nothing, and
  :meth:`BatchWeights.correction` multiplies gradients and losses by 5/4 when the exchange has shown the actual number.
- The model counts them, such as labels that are not ignored. Their number is summed on the device, where it stays, as
  do the weights 3/4 and 5/4. To read it, the host would have to wait for the device.

What a process counts is a :class:`BatchShare`, and what all count together a :class:`GlobalBatch`.
``Parallelism.exchange_counts`` sends a share by a :class:`CountExchange` and returns :class:`BatchWeights`, which
receive the others when a count of all processes is needed. In a single process, where the share is the batch, the
Trainer uses only the reasons to stop of this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.core.data.elements import weighted_by
from composer.distributed.environment import host_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from composer.core.step import Microbatch

STOP_CALLED, STOP_SIGNAL = 1, 2
"""Why a process asks all to stop after a batch: ``stop_training`` was called, or it has received a signal."""


@attrs.define
class BatchShare:
    """What a process counts in its share of a batch, and requests of all.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        elements: Number of elements that the loss is the mean of, as the host counts them; samples by default.
        microbatches: Number of microbatches.
        seconds: Time since the last batch.
        stop: Why all have to stop after this batch: ``STOP_CALLED`` or ``STOP_SIGNAL``; 0 if they do not.
        on_device: Whether the model counts the elements, on the device.

    Example:
        >>> BatchShare(samples=3).elements
        3
    """

    samples: int = 0
    tokens: int = 0
    elements: float = attrs.field(default=attrs.Factory(lambda self: self.samples, takes_self=True))
    microbatches: int = 1
    seconds: float = 0.0
    stop: int = 0
    on_device: bool = False

    def to_row(self) -> list[float]:
        """Return what a process sends, which :meth:`GlobalBatch.of` takes."""
        counts = [self.samples, self.tokens, self.elements, self.microbatches, self.seconds]
        return [*counts, self.stop, self.on_device]


@attrs.define
class GlobalBatch(BatchShare):
    """The counts of a batch over all processes.

    Attributes:
        samples: The sum of the shares.
        tokens: Their sum.
        elements: Their sum.
        microbatches: The largest of the shares.
        seconds: The mean of the shares.
        stop: The largest of the shares.
        on_device: Whether the model counts the elements in one of the processes.
        differs: Whether it does so in some of them only, for which :meth:`BatchWeights.totals` raises an error in all.

    Example:
        >>> GlobalBatch.of([BatchShare(samples=3).to_row(), BatchShare(samples=5, stop=1).to_row()]).samples
        8
    """

    differs: bool = False

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], layer_size: int = 1) -> GlobalBatch:
        """Return the totals of what each rank has sent, where ``layer_size`` processes each have the same samples."""
        samples, tokens, elements, microbatches, seconds, stops, on_device = zip(*rows, strict=True)
        different = slice(None, None, layer_size)
        return cls(
            int(sum(samples[different])),
            int(sum(tokens[different])),
            sum(elements[different]),
            int(max(microbatches)),
            sum(seconds) / len(rows),
            int(max(stops)),
            any(on_device),
            len({*on_device}) > 1,
        )


class BatchWeights:
    """The weights of the losses of this process in a batch, and the counts of all processes from which they follow.

    Losses that are multiplied by these weights give the step that one process takes with the complete batch.

    Args:
        own: The counts of this process.
        usual_elements: The number of elements in nearly all batches of each process; None if it is not known.
        exchange: Receives the counts of all processes; None if there is only this one, or in a trial.

    Example:
        >>> from composer.distributed import BatchShare
        >>> BatchWeights(BatchShare(samples=3)).weight()
        1.0
    """

    __slots__ = (
        "_data_size", "_exchange", "_needs_no_correction", "_totals", "_usual_elements", "_was_on_device", "own",
    )  # fmt: skip

    def __init__(
        self, own: BatchShare, usual_elements: int | None = None, exchange: CountExchange | None = None
    ) -> None:
        self.own, self._usual_elements, self._exchange = own, usual_elements, exchange
        self._totals: GlobalBatch | None = None
        self._data_size = 1 if exchange is None else exchange.data_size
        self._needs_no_correction = self._data_size == 1
        # Read now, as receiving the counts of this batch replaces it.
        self._was_on_device = own.on_device if exchange is None else exchange.last.on_device

    def totals(self) -> GlobalBatch:
        """Return the totals of all processes; waits for hosts, never for a device.

        Raises:
            ValueError: No process has a sample to train on in this batch, or the model counts the elements of its loss
                in some processes only.
        """
        totals = self._totals or self._received()
        if totals.differs:
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
        usual, own = self._usual_elements, self.own.elements
        return own * self._data_size / self.totals().elements if usual is None else own / usual

    def correction(self) -> float:
        """Return the factor that the weighted losses and their gradients lack; 1 unless a batch has unusual counts.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._usual_elements is None or self._needs_no_correction:
            return 1.0
        return self._usual_elements * self._data_size / self.totals().elements

    def weigh(
        self, microbatches: Sequence[Microbatch], elements: Sequence[Tensor] | None, device: torch.device
    ) -> Sequence[Microbatch]:
        """Return microbatches with their weights in the batch of all processes; those of the device need no correction.

        Args:
            microbatches: Those of this process, each with its fraction of this process's share.
            elements: How many the loss of each is the mean of, on ``device``, which is not waited for; None if the
                model does not count them.
            device: The device of the model.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._uses_device():
            self._needs_no_correction = True
            numbers = [torch.zeros((), device=device)] * len(microbatches) if elements is None else elements
            return weighted_by(microbatches, numbers, 1 if self._exchange is None else self._exchange.world_size)
        weight = self.weight()
        return microbatches if weight == 1 else [(batch, fraction * weight) for batch, fraction in microbatches]

    def _uses_device(self) -> bool:
        """Return whether the processes add elements on the device: as in the last batch, unless all have changed.

        Only a process that has changed waits for the others. If it is the only one, it does what the others do, as
        all of them call the same collectives, until :meth:`totals` raises the error in all.
        """
        if self.own.on_device == self._was_on_device:
            return self._was_on_device
        totals = self._received()
        return self._was_on_device if totals.differs else totals.on_device

    def _received(self) -> GlobalBatch:
        """Return the totals of all processes, without the check of :meth:`totals`."""
        if self._totals is None:
            self._totals = GlobalBatch.of([self.own.to_row()]) if self._exchange is None else self._exchange.receive()
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

    def send(self, own: BatchShare) -> None:
        """Send what this process counts; its ``seconds`` are those since the last call."""
        # Kept, as a thread of gloo that released the last reference would need the interpreter's lock.
        self._sent = sent = torch.tensor(own.to_row(), dtype=torch.float64, device="cpu")
        self._rows = sent.new_empty(self.world_size * len(sent))
        # The model computes while the numbers are on their way.
        self._work = torch.distributed.all_gather_into_tensor(self._rows, sent, group=host_group(), async_op=True)

    def receive(self) -> GlobalBatch:
        """Return the totals of all processes.

        Raises:
            ValueError: No process has a sample to train on in this batch.
        """
        self._work.wait()
        # A list, as operations on tensors take longer for a few numbers.
        rows = self._rows.view(self.world_size, -1).tolist()
        self.last = GlobalBatch.of(rows, self._layer_size)
        if not self.last.elements:
            raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
        return self.last
