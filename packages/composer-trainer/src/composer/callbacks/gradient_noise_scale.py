"""Log the gradient noise scale, which estimates the critical batch size."""

from __future__ import annotations

import warnings

import attrs
import torch
from torch import Tensor

from composer import functional as cf
from composer.core import Callback, Event, Logger, NoEffectWarning, State, saved
from composer.core.checks import integer, number
from composer.core.interval import Call
from composer.core.saving.components import reset_fields, transient
from composer.distributed import all_gather
from composer.functional.dtensors import is_dtensor
from composer.functional.training.gradient_clipping import measure_norm


@attrs.define(eq=False)
class GradientNoiseScale(Callback):
    """Log the simple noise scale of the gradients, an estimate of the critical batch size (arXiv:1812.06162).

    ``B = trace of the covariance of a sample's gradient / squared norm of the gradient``, in samples; see
    :func:`composer.functional.estimate_gradient_noise`. It is estimated from the norms of two gradients that a step
    computes anyway: that of the first microbatch, and that of the batch of all processes before gradient clipping. An
    estimate of one batch is far too noisy, so averages of both parts are logged at ``BATCH_END``:

    - ``gradient_noise/scale``: their ratio ``B``;
    - ``gradient_noise/squared_norm`` and ``gradient_noise/trace``: the averages, which may be negative at first.

    If the loss is a mean over tokens, a sample is one of average length. A measured batch costs two norms of all
    gradients; nothing is copied and no step waits for the device. With several processes, the first microbatch of each
    counts. Batches with a gradient that is not finite are left out, and so are sparse gradients.

    Batches must be split: ``Trainer(device_train_microbatch_size=...)``. A model sharded by FSDP2 has gradients of a
    microbatch only with ``ddp_sync_strategy="multi_auto_sync"``.

    Args:
        batch_log_interval: Batches between two measurements: 10 measures the 10th, 20th, … batch.
        smoothing: The weight of the earlier averages in a measurement, in [0, 1).

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of range. In ``fit``: batches are not split, or there are no gradients after the
            first microbatch.

    Example:
        >>> GradientNoiseScale(batch_log_interval=100)
        GradientNoiseScale(batch_log_interval=100, smoothing=0.95)
    """

    batch_log_interval: int = integer(10, 1, meaning="It counts batches.")
    smoothing: float = number(0.95, 0, 1, below=True, meaning="It is the weight of earlier averages.")

    # The averages of the squared norm, of the trace, and of 1, which makes up for their start at 0.
    _averages: Tensor | None = saved(default=None)

    _first: tuple[State, Tensor] | None = transient(default=None)  # the norm of the first microbatch, times its weight
    _weights: list[float | Tensor] = transient(factory=list)  # of the microbatches
    _measured: tuple[Tensor, Tensor] | None = transient(default=None)
    _has_measured: bool = transient(default=False)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that batches are split, and begin new averages in a new run."""
        averages = self._averages if state.timestamp.counts.batch else None
        reset_fields(self)
        self._averages = averages
        if state.device_train_microbatch_size is None and not state.auto_microbatching:
            raise ValueError(
                "GradientNoiseScale compares the gradients of a microbatch and of its batch, and batches are not "
                "split: give Trainer(device_train_microbatch_size=...), half of a process's batch or less."
            )

    def wrap_event(self, event: Event, call: Call) -> Call:
        """Measure the gradients of a batch before algorithms, such as clipping, change them."""

        def measure_first() -> None:
            self._measure()
            call()

        return measure_first if event is Event.AFTER_TRAIN_BATCH else call

    @torch.no_grad()
    def after_backward(self, state: State, logger: Logger) -> None:
        """Measure the gradients of the first microbatch."""
        if (state.timestamp.counts.batch + 1) % self.batch_log_interval:
            return
        if state.microbatch == 0:
            gradients = _gradients(state)
            if not gradients:
                raise ValueError(
                    "GradientNoiseScale requires gradients after the first microbatch, and there are none. For a model "
                    "sharded by FSDP2 give Trainer(ddp_sync_strategy='multi_auto_sync')."
                )
            norm = measure_norm(gradients)
            if state.scaler is not None:
                norm = norm / state.scaler.scale(torch.ones_like(norm))
            self._first, self._weights = (state, norm), []
        self._weights.append(state.microbatch_weight)

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure the gradients of the batch; in this process only, as automatic microbatching runs it in trials."""
        if self._first is None:
            return
        (state, norm), self._first = self._first, None
        is_split, one = len(self._weights) > 1, torch.ones_like(norm)
        if not (is_split or self._has_measured):
            warnings.warn(
                "GradientNoiseScale measures nothing in a batch of a single microbatch: make "
                "device_train_microbatch_size at most half of a process's batch.",
                NoEffectWarning,
                stacklevel=2,
            )
        self._has_measured = True
        own = torch.stack([norm, self._weights[0] * one, sum(self._weights) * one, is_split * one])
        self._measured = own, measure_norm(_gradients(state)).square()

    @torch.no_grad()
    def batch_end(self, state: State, logger: Logger) -> None:
        """Update the averages, and log them, if this batch is measured."""
        if self._measured is None:
            return
        (own, big), self._measured = self._measured, None
        small, share = _first_microbatch(torch.stack(all_gather(own)))
        size = state.timestamp.counts.sample - state.previous_timestamp.counts.sample or 1
        found = torch.stack([*cf.estimate_gradient_noise(small, big, share * size, size), torch.ones_like(big)])
        before = torch.zeros_like(found) if self._averages is None else self._averages.to(found)
        # A batch that is not split has no finite estimate.
        self._averages = torch.where(found.isfinite().all(), torch.lerp(found, before, self.smoothing), before)
        if logger.is_heard:
            square, trace, weight = self._averages.unbind()
            metrics = {"scale": trace / square, "squared_norm": square / weight, "trace": trace / weight}
            logger.log_metrics({f"gradient_noise/{name}": value for name, value in metrics.items()})


def _gradients(state: State) -> list[Tensor]:
    """Return the gradients of all parameters that are not sparse; those of sharded parameters are complete sums."""
    found = [(one, one.grad) for one in state.model.parameters() if one.grad is not None]
    return [
        gradient.redistribute(placements=weight.placements) if is_dtensor(gradient) and is_dtensor(weight) else gradient
        for weight, gradient in found
        if gradient.layout is torch.strided
    ]


def _first_microbatch(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norm of the gradient of a first microbatch, and its fraction of the batch of all processes.

    Args:
        rows: For each process the norm of the first microbatch's gradient times its weight, this weight, the sum of the
            weights of its microbatches, and whether there are several.
    """
    # Equal norms are those of gradients that were averaged over the processes already, so of one larger microbatch.
    is_reduced = (rows[:, 0] == rows[0, 0]).all()
    rows = torch.where(is_reduced, rows.mean(0), rows)
    norms, weights, totals, is_split = rows.unbind(1)
    counts = (is_split == 1) & (weights > 0)
    weights = torch.where(counts, weights, 0.0)
    # The mean over processes of the squared norms, each in proportion to its size.
    square = torch.where(counts, norms.square() / weights, 0.0).sum() / weights.sum()
    share = weights.sum() / counts.sum() / totals.mean() / torch.where(is_reduced, 1, len(rows))
    return square, share
