"""The account of a batch over all processes: its samples, tokens and time, the weight of a loss, requests to stop."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from composer.distributed.collectives import host_group

__all__ = ["CountExchange", "GlobalBatch"]

_SECONDS = 4
"""The place of ``seconds`` among the fields of :class:`GlobalBatch`."""
_MOST_SECONDS, _MOST_BATCHES = 0.25, 128
"""The longest time between two exchanges, if batches take as long as before, and the most batches without one."""


@attrs.define
class GlobalBatch:
    """A batch, which consists of the parts of all processes.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens.
        counted: Number of elements that the loss is the mean of: samples, or tokens with a target.
        microbatches: Maximum number of microbatches of a process.
        seconds: Mean of the processes' seconds.
        stop: Whether any process requests to stop after this batch.
        logs: Whether any process logs losses.
        weight: Weight of this process's loss: its fraction of ``counted`` times the number of processes.

    Example:
        >>> GlobalBatch(samples=5, counted=5, weight=1.2).weight
        1.2
    """

    samples: int
    tokens: int = 0
    counted: float = 0.0
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
        self._batches = self._known_batches = 0  # since the last exchange; that follow without one
        self._seconds = self._pace = 0.0  # of this process since the last exchange; of a batch before it
        self._passed = self._estimated = self._counted = 0.0  # seconds of the run: measured, estimated, counted

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
        if is_regular and self._known_batches:
            if not is_usual:
                raise RuntimeError(
                    f"train_dataloader has batches of {usual} samples, from which none were removed so far, but this "
                    f"one has {own.samples} samples and {own.tokens} tokens, and {own.counted} remain after algorithms "
                    "and callbacks. The other processes could not know. Give DataSpec(loader, "
                    "get_num_samples_in_batch=...), or let the property selects_samples of an algorithm that removes "
                    "samples return True."
                )
            self._known_batches -= 1
            return
        numbers = [*attrs.astuple(own)[:-1], is_regular and is_usual]
        numbers[_SECONDS] = self._seconds
        sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
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
        self._estimated += self._pace
        microbatches = max(own.microbatches, last.microbatches)
        samples = own.samples * data_size
        return GlobalBatch(samples, 0, samples, microbatches, self._elapsed(), logs=last.logs)

    def _received(self) -> GlobalBatch:
        self._work.wait()
        # Lists, as operations on tensors take longer for a few numbers.
        columns = zip(*self._rows.view(self._world_size, -1).tolist(), strict=True)
        samples, tokens, counted, microbatches, seconds, stop, logs, known = columns
        others = slice(None, None, self._layer_size)  # a group of tensor parallelism has the same samples
        if not any(counted):
            raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
        mean = sum(seconds) / len(seconds)
        self._passed += mean
        self._estimated = self._passed
        self._pace = mean / self._batches
        most = min(2 * self._batches, _MOST_BATCHES) if all(known) else 0
        self._known_batches = min(most, max(0, int(_MOST_SECONDS / self._pace) - 1)) if self._pace else 0
        self._batches, self._seconds = 0, 0.0
        self._last = GlobalBatch(
            samples=int(sum(samples[others])),
            tokens=int(sum(tokens[others])),
            counted=sum(counted[others]),
            microbatches=int(max(microbatches)),
            seconds=self._elapsed(),
            stop=any(stop),
            logs=any(logs),
        )
        return self._last

    def _elapsed(self) -> float:
        """Return the seconds to count; 0 while more were counted than have passed, as clocks do not go back."""
        seconds = max(0.0, self._estimated - self._counted)
        self._counted += seconds
        return seconds
