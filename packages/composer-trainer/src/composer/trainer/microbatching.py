"""Gradient accumulation: weighted microbatches, and the largest that fit into memory, found by trial.

``split_microbatches`` weights each microbatch by its fraction of this process's share of a batch; the weights in the
batch of all processes are those of ``BatchWeights.weigh``. ``MicrobatchSearch`` computes a batch again in smaller
microbatches if it does not fit; a trial has no effect but on the size. ``BatchGradients`` calls all of it.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from typing import TYPE_CHECKING

import torch

from composer.core.randomness import global_rng_states
from composer.core.step import is_out_of_memory
from composer.distributed import all_reduce_min, get_world_size
from composer.functional.dtensors import without_repeats
from composer.trainer.evaluation.metrics import load_metrics, save_metrics, update_train_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from composer.core import Batch, DataSpec, State
    from composer.core.step import Microbatch, Step
    from composer.distributed import Parallelism

__all__ = ["MicrobatchSearch", "announced", "measured", "split_microbatches", "warn_if_larger"]

_log = logging.getLogger(__name__)

_NO_LIMIT = 2**31


def split_microbatches(
    batch: Batch, spec: DataSpec, microbatch_size: int | None, count: Callable[[Batch], int] | None = None
) -> Sequence[tuple[Batch, float]]:
    """Return the microbatches, each with its weight: its fraction of the batch.

    The mean over the batch equals the sum of the microbatches' means times these weights, whatever their sizes. Samples
    are counted, or what ``count`` returns for a batch, unless that is 0 for all of them. The ``microbatch_transforms``
    of ``spec`` are applied to each.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> spec = DataSpec([])
        >>> [(len(one), weight) for one, weight in split_microbatches(torch.zeros(5, 2), spec, 2)]
        [(2, 0.4), (2, 0.4), (1, 0.2)]
    """
    microbatches, weights = [batch], [1.0]
    if microbatch_size is not None and spec.get_num_samples_in_batch(batch) > microbatch_size:
        microbatches = list(spec.split_batch(batch, microbatch_size))
        counts = list(map(count or spec.get_num_samples_in_batch, microbatches))
        if not any(counts):
            # In several processes this share has the weight 0, as unsplit, and if all have none, all raise an error.
            if get_world_size() == 1 and not spec.get_num_tokens_in_batch(batch):
                raise ValueError(
                    "accumulate_train_batch_on_tokens=True, but a batch has no token. Tokens are counted in "
                    "batch['input_ids']; for other batches give DataSpec(loader, get_num_tokens_in_batch=...)."
                )
            counts = list(map(spec.get_num_samples_in_batch, microbatches))
        total = sum(counts)
        weights = [number / total for number in counts]
    if spec.microbatch_transforms is not None:
        microbatches = list(map(spec.microbatch_transforms, microbatches))
    return list(zip(microbatches, weights, strict=True))


class MicrobatchSearch:
    """Computes a batch's gradients in microbatches that fit into memory.

    After an out-of-memory error the size is halved and the batch is computed again. Buffers such as those of batch
    norm, the training metrics and the generators are restored first, so that a trial has no effect. Algorithms and
    callbacks run again at ``BEFORE_TRAIN_BATCH`` to ``AFTER_LOSS``.

    Args:
        state: Its ``device_train_microbatch_size`` is set to the size found.
        parallel: Runs the model in all processes. Several processes search once, for the first batch, each by itself,
            and use the smallest size. If a process runs out of memory later, the others time out.
        step: Computes the gradients.
    """

    def __init__(self, state: State, parallel: Parallelism, step: Step) -> None:
        self._state, self._parallel, self._step = state, parallel, step
        self._is_found = False

    def compute_gradients(self, num_samples: int) -> Tensor:
        """Compute the gradients of a batch, split into microbatches of the largest size that fits; return its loss.

        Raises:
            RuntimeError: A single sample does not fit.
        """
        state, step, is_alone = self._state, self._step, not self._parallel.is_connected
        # Each trial exchanges a number between the processes, which is too slow for every batch.
        if self._is_found and not is_alone:
            return step.compute_gradients()
        before = _Snapshot(state, step)
        while True:
            tried = min(state.device_train_microbatch_size or num_samples, num_samples)
            failure = self._try()
            fits = bool(all_reduce_min(failure is None))
            # The gradients of a trial are those of the batch, but several processes have not summed them yet.
            if fits and is_alone:
                return step.total
            before.restore(state, step)
            if fits:
                self._is_found = True
                return step.compute_gradients()
            state.device_train_microbatch_size = self._next_size(tried, failure)
            del failure
            self._free_memory()

    def _try(self) -> RuntimeError | None:
        """Compute the gradients in the current size, and return the error if there is not enough memory."""
        # Gradients of a trial are not synchronized, and are discarded.
        self._parallel.is_trial = self._parallel.is_connected
        try:
            self._step.compute_gradients()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The traceback refers to the frames, and these to the tensors that fill the memory.
            return error.with_traceback(None)
        finally:
            self._parallel.is_trial = False
        return None

    def _next_size(self, tried: int, failure: RuntimeError | None) -> int:
        """Return the size to try after one that does not fit in all processes; all of them must call it.

        Raises:
            RuntimeError: A single sample does not fit.
        """
        # A process in which a single sample does not fit sends 0, so that all raise the error. One in which the batch
        # fits, perhaps a smaller one, does not limit the others.
        size = all_reduce_min(_NO_LIMIT if failure is None else (tried + 1) // 2 if tried > 1 else 0)
        if not size:
            raise RuntimeError(
                "device_train_microbatch_size='auto' found none that fits: a single sample needs more memory than "
                f"'{self._state.device}' has left. Use a smaller model or input, or activation checkpointing."
            ) from failure
        _log.info("%d samples do not fit into the memory of '%s': trying %d.", tried, self._state.device, size)
        return size

    def _free_memory(self) -> None:
        for optimizer in self._state.optimizers:
            optimizer.zero_grad()
        # Tensors in cycles of references are freed only by the collector.
        gc.collect()
        if self._state.device.type == "cuda":
            torch.cuda.empty_cache()


class _Snapshot:
    """The state that computing gradients changes besides the gradients."""

    def __init__(self, state: State, step: Step) -> None:
        # The metrics use the outputs of the first computation of a step, which the next trial is again.
        self._batch, self._times_computed = state.batch, step.times_computed
        self._buffers = [(one := without_repeats(buffer), one.detach().clone()) for buffer in state.model.buffers()]
        self._draws = global_rng_states(state.device)
        self._metrics = save_metrics(state.train_metrics)

    def restore(self, state: State, step: Step) -> None:
        state.outputs = state.loss = None
        state.batch, step.times_computed = self._batch, self._times_computed
        state.restart_draws()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for set_state, before in self._draws:
            set_state(before)
        load_metrics(state.train_metrics, self._metrics, state.device)
        if state.scaler is not None:
            # An update with the current scale resets that the gradients of the trial were unscaled.
            state.scaler.update(state.scaler.scale(torch.ones((), device=state.device)))


def warn_if_larger(microbatch_size: int, num_samples: int) -> None:
    """Warn if a size of microbatches is larger than a batch.

    Example:
        >>> warn_if_larger(2, num_samples=4)
    """
    if microbatch_size > num_samples:
        warnings.warn(
            f"device_train_microbatch_size={microbatch_size} is larger than the batch of {num_samples} samples, which "
            "is not split. Make the batches larger, or the microbatches smaller if memory has to be saved.",
            UserWarning,
            stacklevel=2,
        )


def announced(microbatches: Sequence[Microbatch], announce: Callable[[bool], None]) -> Iterator[Microbatch]:
    """Yield the microbatches, and announce before each whether it is the last.

    Example:
        >>> list(announced([("first", 0.5), ("second", 0.5)], print))
        False
        True
        [('first', 0.5), ('second', 0.5)]
    """
    for number, microbatch in enumerate(microbatches, start=1):
        announce(number == len(microbatches))
        yield microbatch


def measured(microbatches: Iterable[Microbatch], state: State) -> Iterator[Microbatch]:
    """Yield the microbatches, and update the training metrics after each, with its targets before algorithms.

    Example:
        >>> from composer.core import State
        >>> list(measured([([1, 2], 0.0)], State(model=None)))
        [([1, 2], 0.0)]
    """
    for batch, weight in microbatches:
        original = copy.copy(batch)
        yield batch, weight
        # A microbatch of weight 0 only keeps the processes in step. The host does not wait for a weight on the device.
        if state.batch_counts and (isinstance(weight, torch.Tensor) or weight):
            update_train_metrics(state, original)
