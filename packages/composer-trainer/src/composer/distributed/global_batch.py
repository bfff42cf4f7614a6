"""The account of a batch over all processes: its samples, tokens and time, the weight of a loss, requests to stop."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from composer.distributed.collectives import host_group

__all__ = ["CountExchange", "GlobalBatch"]

_MOST_SECONDS, _MOST_BATCHES = 0.25, 128
"""The longest time between two exchanges, if batches take as long as before, and the most batches without one."""


@attrs.define
class GlobalBatch:
    """A batch, which consists of the parts of all processes, or the part of one process.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        counted: Number of elements that the loss is the mean of, such as tokens with a target; samples by default.
        microbatches: Number of microbatches; of all processes the maximum.
        seconds: Time since the last batch; of all processes the mean.
        stop: Whether to stop after this batch, as a process requests.
        logs: Whether a process logs losses.
        weight: Weight of this process's loss: its fraction of ``counted`` times the number of processes.

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
    weight: float = 1.0


class CountExchange:
    """Exchanges what each process counts in its part of a batch; hosts are waited for, never a device.

    An exchange takes longer than a step of a small model. Where every process is certain that all have the same known
    number of samples, only some batches are exchanged: at most twice as many as since the last exchange follow without
    one, and at most a quarter of a second passes. Only with an exchange a process learns that another wants to stop.

    Args:
        world_size: Number of processes.
        layer_size: Number of processes with the same samples, which compute the layers of the model in parts.
    """

    def __init__(self, world_size: int, layer_size: int) -> None:
        self._world_size, self._layer_size = world_size, layer_size
        self._own = self._last = GlobalBatch(0)
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
        is_usual = own.samples == own.counted == usual and not own.tokens
        self._own = own
        self._seconds += own.seconds
        self._batches += 1
        self._work = None
        if is_regular and self._batches_left:
            if not is_usual:
                raise RuntimeError(
                    f"train_dataloader has batches of {usual} samples, from which none were removed so far, but this "
                    f"one has {own.samples} samples and {own.tokens} tokens, and {own.counted} remain after algorithms "
                    "and callbacks. The other processes could not know. Give DataSpec(loader, "
                    "get_num_samples_in_batch=...), or let the property selects_samples of an algorithm that removes "
                    "samples return True."
                )
            self._batches_left -= 1
            return
        counts = [own.samples, own.tokens, own.counted, own.microbatches]
        requests = [own.stop, own.logs, is_regular and is_usual]
        sent = torch.tensor([*counts, self._seconds, *requests], dtype=torch.float64, device="cpu")
        self._rows = sent.new_empty(self._world_size * len(sent))
        # The model computes while the numbers are on their way.
        self._work = torch.distributed.all_gather_into_tensor(self._rows, sent, group=host_group(), async_op=True)

    def finish(self) -> GlobalBatch:
        """Return the batch of all processes.

        Raises:
            ValueError: No process has a sample to train on in this batch.
        """
        total = self._known() if self._work is None else self._received()
        data_size = self._world_size // self._layer_size
        total.weight = self._own.counted * data_size / total.counted
        return total

    def _known(self) -> GlobalBatch:
        """Return the batch that follows from the last exchange, with the time that batches took before it."""
        own, last, data_size = self._own, self._last, self._world_size // self._layer_size
        self._clock.estimate()
        # Some process may still split its batches into as many microbatches, which all must run.
        microbatches = max(own.microbatches, last.microbatches)
        samples = own.samples * data_size
        return GlobalBatch(samples, 0, samples, microbatches, self._clock.elapsed(), logs=last.logs)

    def _received(self) -> GlobalBatch:
        self._work.wait()
        # Lists, as operations on tensors take longer for a few numbers.
        columns = zip(*self._rows.view(self._world_size, -1).tolist(), strict=True)
        samples, tokens, counted, microbatches, seconds, stop, logs, regular = columns
        if not any(counted):
            raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
        self._clock.measure(sum(seconds) / len(seconds), self._batches)
        self._batches_left = self._clock.batches_within(_MOST_SECONDS, 2 * self._batches) if all(regular) else 0
        self._seconds, self._batches = 0.0, 0
        one_per_group = slice(None, None, self._layer_size)  # a group of tensor parallelism has the same samples
        self._last = GlobalBatch(
            samples=int(sum(samples[one_per_group])),
            tokens=int(sum(tokens[one_per_group])),
            counted=sum(counted[one_per_group]),
            microbatches=int(max(microbatches)),
            seconds=self._clock.elapsed(),
            stop=any(stop),
            logs=any(logs),
        )
        return self._last


@attrs.define
class _SharedClock:
    """The seconds of a run, the same in all processes; between two exchanges they are estimated."""

    _measured: float = attrs.field(default=0.0, init=False)
    _estimated: float = attrs.field(default=0.0, init=False)
    _counted: float = attrs.field(default=0.0, init=False)
    _per_batch: float = attrs.field(default=0.0, init=False)

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
