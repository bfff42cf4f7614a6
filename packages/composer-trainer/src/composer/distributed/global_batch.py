"""The counts of a batch over all processes, and the weights of its losses that follow from them.

Each process computes its share of a batch, and the gradients of all are averaged. A loss is the mean over elements,
such as samples. For the mean over the elements of all processes, each must multiply its loss by

    its weight = its elements / the mean number of elements of all processes.

The number of all elements is known in one of three ways; none of them waits for a device:

- It is exchanged between the hosts: :meth:`BatchWeights.weight` waits for it.
- It is *usual*: nearly all batches have equally many. The weight assumes this at once, and
  :meth:`BatchWeights.correction` corrects gradients and losses when the exchange has shown the actual number.
- The model counts the elements on the device (*terms*): they are summed there, and the weights are tensors.

``Parallelism.begin_batch`` creates :class:`BatchWeights` for each batch. :class:`CountExchange` lasts for the run, and
saves exchanges where all processes are certain to have the usual number (*regular* batches).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.distributed.collectives import host_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from composer.core.step import Microbatch

__all__ = ["BatchWeights", "CountExchange", "GlobalBatch"]

_MOST_SECONDS, _MOST_BATCHES = 0.25, 128
"""The longest time between two exchanges, if batches take as long as before, and the most batches without one."""


@attrs.define
class GlobalBatch:
    """The counts of a batch: those of one process's share, or those of all processes, which :class:`BatchWeights` sums.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        counted: Number of elements that the loss is the mean of, such as tokens with a target; samples by default.
        microbatches: Number of microbatches; of all processes the maximum.
        seconds: Time since the last batch; of all processes the mean.
        stop: Whether to stop after this batch, as a process requests.
        logs: Whether a process logs losses.
        has_terms: Whether the model counts the elements that its loss is the mean of; None if it does so only in some
            processes.

    Example:
        >>> GlobalBatch(samples=5).counted
        5
    """

    samples: int
    tokens: int = 0
    counted: float = attrs.field(default=attrs.Factory(lambda self: self.samples, takes_self=True))
    microbatches: int = 1
    seconds: float = 0.0
    stop: bool = False
    logs: bool = False
    has_terms: bool | None = False


class BatchWeights:
    """The weights of the losses of this process in a batch, and the counts of all processes from which they follow.

    Losses that are multiplied by these weights give the step that one process takes with the complete batch.

    Args:
        own: The counts of this process.
        usual: What ``counted`` is in nearly all batches of each process; None if it is not known.
        exchange: Receives the counts of all processes; None if there is only this one.

    Example:
        >>> BatchWeights(GlobalBatch(samples=3)).weight()
        1.0
    """

    __slots__ = ("_exchange", "_had_terms", "_shares", "_totals", "_usual", "own")

    def __init__(self, own: GlobalBatch, usual: int | None = None, exchange: CountExchange | None = None) -> None:
        self.own, self._usual, self._exchange = own, usual, exchange
        if exchange is None:
            self._totals: GlobalBatch | None = own
            self._shares, self._had_terms = 1, own.has_terms
        else:
            self._totals, self._shares, self._had_terms = None, exchange.data_size, exchange.last.has_terms

    def totals(self) -> GlobalBatch:
        """Return the batch of all processes; waits for hosts, never for a device.

        Raises:
            ValueError: No process has a sample to train on in this batch, or the model counts the elements of its loss
                in some processes only.
        """
        totals = self._totals or self._received()
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

    def correction(self) -> float:
        """Return the factor that the weighted losses and their gradients lack; 1 unless a batch has unusual counts.

        Raises:
            ValueError: As :meth:`totals`.
        """
        if self._usual is None or self._shares == 1:
            return 1.0
        return self._usual * self._shares / self.totals().counted

    def _received(self) -> GlobalBatch:
        if self._totals is None:
            assert self._exchange is not None
            self._totals = self._exchange.finish()
        return self._totals

    def _uses_terms(self) -> bool | None:
        """Return whether the processes weigh by terms: as in the last batch, unless all of them have changed.

        Only a process that has changed waits for the others. If it is the only one, it does what the others do, as
        all of them call the same collectives, until :meth:`totals` raises the error in all.
        """
        if self.own.has_terms == self._had_terms:
            return self._had_terms
        now = self._received().has_terms
        return self._had_terms if now is None else now

    def _weights_by_terms(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        self._usual = None  # these weights need no correction
        own = torch.stack([*terms]).float()
        total = own.sum()
        if self._exchange is not None:
            torch.distributed.all_reduce(total)
            own *= self._exchange.world_size
        return (own / total.clamp_(min=1)).unbind()


class CountExchange:
    """Exchanges what each process counts in its share of a batch; hosts are waited for, never a device.

    An exchange takes longer than a step of a small model, so that few regular batches are exchanged: at most twice as
    many as since the last exchange follow without one, and at most a quarter of a second passes. Their counts are
    known, and a different one raises an error. Only with an exchange a process learns that another wants to stop.

    Args:
        world_size: Number of processes.
        layer_size: Number of processes with the same samples, which split the layers of the model.

    Attributes:
        world_size: Number of processes.
        data_size: Number of processes, or groups of them, with different samples.
        last: The batch of all processes that was received last.
    """

    def __init__(self, world_size: int, layer_size: int) -> None:
        self.world_size, self.data_size, self._layer_size = world_size, world_size // layer_size, layer_size
        self._own = self.last = GlobalBatch(0)
        self._rows = torch.empty(0)
        self._work: Any = None
        self._clock = _SharedClock()
        # Since the last exchange: the seconds of this process, and the number of batches.
        self._seconds, self._batches = 0.0, 0
        # The number of batches that follow without an exchange.
        self._batches_left = 0

    def begin(self, own: GlobalBatch, usual: int | None, *, is_regular: bool) -> None:
        """Send what this process counts.

        Args:
            own: The counts of this process; its ``seconds`` are those since the last call.
            usual: Number of samples of each process in a regular batch, which has no tokens.
            is_regular: Whether this batch is one, as far as all processes know.

        Raises:
            RuntimeError: The counts are not those that the other processes rely on.
        """
        has_same_terms = own.has_terms == self.last.has_terms
        is_usual = own.samples == own.counted == usual and not own.tokens and has_same_terms
        self._own = own
        self._seconds += own.seconds
        self._batches += 1
        self._work = None
        if is_regular and self._batches_left:
            if not is_usual:
                raise RuntimeError(
                    f"train_dataloader has batches of {usual} samples, from which none were removed so far, but this "
                    f"one has {own.samples} samples and {own.tokens} tokens, and {own.counted} remain after algorithms "
                    f"and callbacks{'' if has_same_terms else ', and count_loss_terms() changed its type of result'}. "
                    "The other processes could not know. Give DataSpec(loader, "
                    "get_num_samples_in_batch=...), or let the property selects_samples of an algorithm that removes "
                    "samples return True."
                )
            self._batches_left -= 1
            return
        counts = [own.samples, own.tokens, own.counted, own.microbatches]
        requests = [own.stop, own.logs, is_regular and is_usual, own.has_terms]
        sent = torch.tensor([*counts, self._seconds, *requests], dtype=torch.float64, device="cpu")
        self._rows = sent.new_empty(self.world_size * len(sent))
        # The model computes while the numbers are on their way.
        self._work = torch.distributed.all_gather_into_tensor(self._rows, sent, group=host_group(), async_op=True)

    def finish(self) -> GlobalBatch:
        """Return the batch of all processes.

        Raises:
            ValueError: No process has a sample to train on in this batch.
        """
        return self._known() if self._work is None else self._received()

    def _known(self) -> GlobalBatch:
        """Return the batch that follows from the last exchange, with the time that batches took before it."""
        own, last = self._own, self.last
        self._clock.estimate()
        # Some process may still split its batches into as many microbatches, which all must run.
        microbatches = max(own.microbatches, last.microbatches)
        samples, seconds = own.samples * self.data_size, self._clock.elapsed()
        return GlobalBatch(samples, 0, samples, microbatches, seconds, logs=last.logs, has_terms=last.has_terms)

    def _received(self) -> GlobalBatch:
        self._work.wait()
        # Lists, as operations on tensors take longer for a few numbers.
        columns = zip(*self._rows.view(self.world_size, -1).tolist(), strict=True)
        samples, tokens, counted, microbatches, seconds, stop, logs, regular, terms = columns
        if not any(counted):
            raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
        self._clock.measure(sum(seconds) / len(seconds), self._batches)
        self._batches_left = self._clock.batches_within(_MOST_SECONDS, 2 * self._batches) if all(regular) else 0
        self._seconds, self._batches = 0.0, 0
        one_per_group = slice(None, None, self._layer_size)  # a group of tensor parallelism has the same samples
        self.last = GlobalBatch(
            samples=int(sum(samples[one_per_group])),
            tokens=int(sum(tokens[one_per_group])),
            counted=sum(counted[one_per_group]),
            microbatches=int(max(microbatches)),
            seconds=self._clock.elapsed(),
            stop=any(stop),
            logs=any(logs),
            has_terms=bool(terms[0]) if len({*terms}) == 1 else None,
        )
        return self.last


class _SharedClock:
    """The seconds of a run, the same in all processes; between two exchanges they are estimated."""

    def __init__(self) -> None:
        self._measured = self._estimated = self._counted = self._per_batch = 0.0

    def measure(self, seconds: float, batches: int) -> None:
        """Add the seconds that some batches took."""
        self._measured += seconds
        self._estimated = self._measured
        self._per_batch = seconds / batches

    def estimate(self) -> None:
        """Add a batch that took as long as those that were measured last."""
        self._estimated += self._per_batch

    def elapsed(self) -> float:
        """Return the seconds to count; 0 while more were counted than have passed, as clocks do not go back."""
        seconds = max(0.0, self._estimated - self._counted)
        self._counted += seconds
        return seconds

    def batches_within(self, seconds: float, most: int) -> int:
        """Return how many batches may follow without an exchange, so that the next one is within so many seconds."""
        if not self._per_batch:
            return 0
        return min(most, _MOST_BATCHES, max(0, int(seconds / self._per_batch) - 1))
