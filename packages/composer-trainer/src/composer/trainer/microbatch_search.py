"""The search for the largest microbatches that fit into memory, for ``device_train_microbatch_size="auto"``."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from composer.core.saving.randomness import global_rng_states
from composer.core.step import Step, is_out_of_memory
from composer.distributed import all_reduce_min
from composer.functional.dtensors import without_repeats
from composer.trainer.evaluation.metrics import load_metrics, save_metrics

if TYPE_CHECKING:
    from composer.core import State, Time
    from composer.distributed import Parallelism

_log = logging.getLogger(__name__)

_NO_LIMIT = 2**31


def what_needs_whole_batch(model: nn.Module, microbatch_size: int) -> str:
    """Return what is known of a model by which microbatches do not give the step of the batch; empty for nothing.

    Example:
        >>> what_needs_whole_batch(torch.nn.BatchNorm1d(4), 8)
        '1 of its layers normalizes by the samples of a microbatch (BatchNorm1d)'
    """
    if getattr(model, "loss_needs_whole_batch", False):
        return f"the loss of {type(model).__name__} is no mean over samples (its loss_needs_whole_batch is True)"
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    # Ghost batches are the same if no microbatch divides one.
    layers = [layer for layer in layers if microbatch_size % getattr(layer, "ghost_batch_size", microbatch_size + 1)]
    verb = "normalizes" if len(layers) == 1 else "normalize"
    kind = layers and type(layers[0]).__name__
    return f"{len(layers)} of its layers {verb} by the samples of a microbatch ({kind})" if layers else ""


class MicrobatchSearch:
    """Computes a batch's gradients in microbatches that fit into memory.

    After an out-of-memory error the size is halved and the batch is computed again. Buffers such as those of batch
    norm, the training metrics and the generators are restored first, so that a trial has no effect. Algorithms and
    callbacks run again at ``BEFORE_TRAIN_BATCH`` to ``AFTER_LOSS``.

    Args:
        state: Its ``device_train_microbatch_size`` is set to the size found.
        parallel: Runs the model in all processes. Several processes search in the first two batches, as optimizers make
            their state in the first step: each tries a size by itself, and they agree on the next. If a process runs
            out of memory later, the others time out.
        step: Computes the gradients.
    """

    def __init__(self, state: State, parallel: Parallelism, step: Step) -> None:
        self._state, self._parallel, self._step = state, parallel, step
        self._tried: set[Time] = set()

    def compute_gradients(self, num_samples: int) -> Tensor:
        """Compute the gradients of a batch, split into microbatches of the largest size that fits; return its loss.

        Raises:
            RuntimeError: A single sample does not fit.
        """
        state, step, is_alone = self._state, self._step, not self._parallel.is_connected
        # Each trial exchanges a number between the processes, which is too slow for every batch.
        if not is_alone and len(self._tried) > 1 and state.timestamp.batch not in self._tried:
            return step.compute_gradients()
        before = _BeforeTrial(state, step)
        while True:
            tried = min(state.device_train_microbatch_size or num_samples, num_samples)
            failure = self._try()
            # A process in which a single sample does not fit sends 0, so that all raise the error. One in which the
            # batch fits, perhaps a smaller one, does not limit the others.
            size = all_reduce_min(_NO_LIMIT if failure is None else (tried + 1) // 2 if tried > 1 else 0)
            # The gradients of a trial in one process are those of the batch.
            if size == _NO_LIMIT and is_alone:
                return step.total
            before.restore(state, step)
            if size == _NO_LIMIT:
                self._tried.add(state.timestamp.batch)
                return step.compute_gradients()
            self._check(size, tried, failure)
            state.device_train_microbatch_size = size
            del failure
            for optimizer in state.optimizers:
                optimizer.zero_grad()
            # Tensors in cycles of references are freed only by the collector.
            gc.collect()
            if state.device.type == "cuda":
                torch.cuda.empty_cache()

    def _try(self) -> RuntimeError | None:
        """Compute the gradients in the current size, and return the error if there is not enough memory."""
        try:
            with self._parallel.trial():
                self._step.compute_gradients()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The traceback refers to the frames, and these to the tensors that fill the memory.
            return error.with_traceback(None)
        return None

    def _check(self, size: int, tried: int, failure: RuntimeError | None) -> None:
        """Raise a RuntimeError if no sample fits, or microbatches of a size do not give the step of the batch."""
        if size and (reason := what_needs_whole_batch(self._state.model, size)):
            raise RuntimeError(
                f"device_train_microbatch_size='auto' does not split batches where the step would be another one: "
                f"{tried} samples do not fit into memory, and {reason}. Set a number to split them nevertheless."
            ) from failure
        if not size:
            raise RuntimeError(
                "device_train_microbatch_size='auto' found none that fits: a single sample needs more memory than "
                f"'{self._state.device}' has left. Use a smaller model or input, or activation checkpointing."
            ) from failure
        _log.info("%d samples do not fit into the memory of '%s': trying %d.", tried, self._state.device, size)


class _BeforeTrial:
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
