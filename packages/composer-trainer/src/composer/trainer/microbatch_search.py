"""``device_train_microbatch_size="auto"``: the largest part of a batch that fits into memory, found by trying."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import torch

from composer.core.randomness import global_rng_states
from composer.distributed import all_reduce_min
from composer.trainer.metrics import load_metrics, save_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from composer.core import State
    from composer.distributed import Parallelism

__all__ = ["MicrobatchSearch", "is_out_of_memory"]

_log = logging.getLogger(__name__)
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("no"))
        (True, False)
    """
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


class MicrobatchSearch:
    """Computes a batch's gradients in parts that fit into memory.

    A part that does not fit is halved, and the batch computed again: buffers such as those of batch norm, the training
    metrics and the random draws are what they were before, so that a try leaves no trace. Algorithms and callbacks do
    see ``BEFORE_TRAIN_BATCH`` to ``AFTER_LOSS`` again.

    Args:
        state: Whose ``device_train_microbatch_size`` is set to what was found.
        parallel: How the model is run in all processes. Several processes look for a size once, for the first batch,
            each by itself, and take the smallest: where one of them fails later, the others wait for it in vain.
    """

    def __init__(self, state: State, parallel: Parallelism) -> None:
        self._state, self._parallel = state, parallel
        self._is_found = False

    def compute(self, compute: Callable[[], Tensor], num_samples: int, forget: Callable[[], None]) -> Tensor:
        """Return what ``compute()`` returns, with parts as large as fit; ``forget()`` is called after a try.

        Raises:
            RuntimeError: A single sample does not fit.
        """
        is_alone = not self._parallel.is_connected
        if self._is_found and not is_alone:
            return compute()
        before = _Snapshot(self._state)
        while True:
            tried = min(self._state.device_train_microbatch_size or num_samples, num_samples)
            # Gradients of a try are each process's own, and are thrown away.
            self._parallel.is_apart = not is_alone
            failure, loss = self._try(compute)
            self._parallel.is_apart = False
            fits = bool(all_reduce_min(failure is None))
            if fits and loss is not None and is_alone:
                return loss
            before.restore(self._state)
            forget()
            if fits:
                self._is_found = True
                return compute()
            self._halve(tried, failure)
            del failure
            _free(self._state)

    def _try(self, compute: Callable[[], Tensor]) -> tuple[BaseException | None, Tensor | None]:
        try:
            return None, compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The traceback holds the frames, and these the tensors that fill the memory.
            return error.with_traceback(None), None

    def _halve(self, tried: int, failure: BaseException | None) -> None:
        device = self._state.device
        size = all_reduce_min((tried + 1) // 2 if tried > 1 else 0)
        if not size:
            raise RuntimeError(
                "device_train_microbatch_size='auto' found none that fits: a single sample needs more memory than "
                f"'{device}' has left. Use a smaller model or input, or activation checkpointing."
            ) from failure
        self._state.device_train_microbatch_size = size
        _log.info("Parts of %d samples do not fit into the memory of '%s': trying %d.", tried, device, size)


class _Snapshot:
    """What computing gradients changes besides the gradients."""

    def __init__(self, state: State) -> None:
        self._batch = state.batch
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in state.model.buffers()]
        self._draws = global_rng_states(state.device)
        self._metrics = save_metrics(state.train_metrics)

    def restore(self, state: State) -> None:
        state.outputs = state.loss = None
        state.batch, state.microbatch = self._batch, -1
        state.restart_draws()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for set_state, before in self._draws:
            set_state(before)
        load_metrics(state.train_metrics, self._metrics, state.device)
        if state.scaler is not None:
            # An update to the scale that it has makes it forget that it unscaled the gradients of the try.
            state.scaler.update(state.scaler.scale(torch.ones((), device=state.device)))


def _free(state: State) -> Any:
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    gc.collect()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()
