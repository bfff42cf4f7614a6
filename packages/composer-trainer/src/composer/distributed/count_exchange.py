"""The exchange of counts between the processes of a training, and the clock on which they agree.

``Parallelism`` owns a :class:`CountExchange` if there are several processes. ``Parallelism.begin_batch`` begins the
exchange for a batch, and its ``BatchWeights`` finishes it when a count of all processes is needed.
"""

from __future__ import annotations

from typing import Any

import torch

from composer.distributed.environment import host_group
from composer.distributed.global_batch import BatchShare, GlobalBatch

__all__ = ["CountExchange"]

_MOST_SECONDS, _MOST_BATCHES = 0.25, 128
"""The longest time between two exchanges, if batches take as long as before, and the most batches without one."""


class CountExchange:
    """Exchanges what each process counts in its share of a batch; hosts are waited for, never a device.

    An exchange takes longer than a step of a small model. *Regular* batches, in which each process certainly has the
    usual number of samples, can do without: what they would exchange is known from the last exchange. At most twice as
    many follow without an exchange as there were batches since the one before, at most 128, and at most a quarter of a
    second passes. Regular batches of a millisecond are exchanged at the numbers 0, 3, 10, 25, 56 and so on, those of
    0.2 seconds each time. A process learns only with an exchange that another wants to stop.

    A count that differs from the known one raises an error, as the other processes cannot learn of it in time.

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
        self._own, self.last = BatchShare(0), GlobalBatch()
        self._rows = torch.empty(0)  # what each process has sent
        self._work: Any = None  # the exchange of this batch, if there is one
        self._clock = _SharedClock()
        # Since the last exchange: the seconds of this process, and the number of batches.
        self._seconds, self._batches = 0.0, 0
        self._batches_left = 0  # how many regular batches may follow without an exchange

    def begin(self, own: BatchShare, usual: int | None, *, is_regular: bool) -> None:
        """Send what this process counts, unless the other processes know it.

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
        # In the order of the fields of BatchShare, and whether the next batches may do without an exchange.
        counts = [own.samples, own.tokens, own.counted, own.microbatches, self._seconds]
        requests = [own.stop, own.logs, own.has_terms, is_regular and is_usual]
        sent = torch.tensor([*counts, *requests], dtype=torch.float64, device="cpu")
        self._rows = sent.new_empty(self.world_size * len(sent))
        # The model computes while the numbers are on their way.
        self._work = torch.distributed.all_gather_into_tensor(self._rows, sent, group=host_group(), async_op=True)

    def finish(self) -> GlobalBatch:
        """Return the totals of all processes.

        Raises:
            ValueError: No process has a sample to train on in this batch.
        """
        return self._derive() if self._work is None else self._receive()

    def _derive(self) -> GlobalBatch:
        """Return the totals that follow from the last exchange, with the time that batches took before it."""
        own, last = self._own, self.last
        self._clock.estimate()
        # Some process may still split its batches into as many microbatches, which all must run.
        microbatches = max(own.microbatches, last.microbatches)
        samples, seconds = own.samples * self.data_size, self._clock.elapsed()
        return GlobalBatch(samples, 0, samples, microbatches, seconds, logs=last.logs, has_terms=last.has_terms)

    def _receive(self) -> GlobalBatch:
        self._work.wait()
        # A list, as operations on tensors take longer for a few numbers.
        rows = self._rows.view(self.world_size, -1).tolist()
        totals = GlobalBatch.of([BatchShare(*row[:-1]) for row in rows], self._layer_size)
        if not totals.counted:
            raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
        self._clock.measure(totals.seconds, self._batches)
        # All processes decide alike, as they have the same numbers: each waits for the same exchanges.
        are_regular = all(row[-1] for row in rows)
        self._batches_left = self._clock.batches_within(_MOST_SECONDS, 2 * self._batches) if are_regular else 0
        self._seconds, self._batches = 0.0, 0
        totals.seconds = self._clock.elapsed()
        self.last = totals
        return self.last


class _SharedClock:
    """The seconds of a run, the same in all processes: measured at an exchange, and estimated until the next one.

    If batches became faster, more seconds were estimated than have passed. A clock does not go back: the following
    batches count 0 seconds until the measured time has caught up.
    """

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
        """Return the seconds to count for this batch."""
        seconds = max(0.0, self._estimated - self._counted)
        self._counted += seconds
        return seconds

    def batches_within(self, seconds: float, most: int) -> int:
        """Return how many batches may follow without an exchange, so that the next one is within so many seconds."""
        if not self._per_batch:
            return 0
        return min(most, _MOST_BATCHES, max(0, int(seconds / self._per_batch) - 1))
