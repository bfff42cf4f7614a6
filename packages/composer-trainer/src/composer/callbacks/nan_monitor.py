"""Stop a training whose loss is NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from composer.core import Callback, Event, Logger, State, Time, TimeUnit
from composer.core.checks import is_flag
from composer.core.saving.components import transient
from composer.core.step import losses_by_name


def _to_every(given: Time | str | int) -> Time:
    every = Time.from_input(given, TimeUnit.BATCH, name="every")
    if every.value <= 0:
        raise ValueError(f"every must be a length of time above 0, such as '10ba', got {every}.")
    return every


class _Loss(NamedTuple):
    batch: int
    name: str
    value: Tensor


@attrs.define(eq=False)
class NaNMonitor(Callback):
    """Raise an error when the loss is not a number (NaN).

    The error names the first batch whose loss is NaN, and which of several losses. Steps do not synchronize with the
    device: losses are collected, and read every ``every`` and at the end of each epoch. On a GPU each check starts a
    copy, which the next check reads; so the error is raised up to twice ``every`` after the batch.

    Args:
        every: How often to check within an epoch: a time, a string or a number of batches.
        infinite: Whether an infinite loss is an error as well.

    Raises:
        TypeError: ``every`` is not a length of time.
        ValueError: ``every`` is not above 0.

    Example:
        >>> NaNMonitor(every="100ba")
        NaNMonitor(every=Time(100, TimeUnit.BATCH), infinite=False)
    """

    every: Time = attrs.field(default=Time(10, TimeUnit.BATCH), converter=_to_every)
    infinite: bool = attrs.field(default=False, validator=is_flag)

    _collected: list[_Loss] = transient(factory=list)
    _copied: _Copy | None = transient(default=None)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Check every ``every``."""
        return {Event.BATCH_END: self.every}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier training."""
        self._collected, self._copied = [], None

    def after_loss(self, state: State, logger: Logger) -> None:
        """Collect the loss of a microbatch."""
        batch, loss = int(state.timestamp.count(TimeUnit.BATCH)), state.loss
        parts = {"": loss} if isinstance(loss, Tensor) else losses_by_name(loss or {})
        self._collected += [
            _Loss(batch, str(name), one.detach()) for name, one in parts.items() if isinstance(one, Tensor)
        ]

    def batch_end(self, state: State, logger: Logger) -> None:
        """Read the copy of the previous check, and start to copy the losses since then.

        Raises:
            RuntimeError: A loss is NaN.
        """
        self._read(state)
        self._copy()
        # On a CPU there is no copy to wait for, so the error need not be raised one check later.
        if self._copied is not None and self._copied.ready is None:
            self._read(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Read all losses.

        Raises:
            RuntimeError: A loss is NaN.
        """
        self._read(state)
        self._copy()
        self._read(state)

    fit_end = epoch_end

    def _copy(self) -> None:
        if not self._collected:
            return
        losses, self._collected = self._collected, []
        values = torch.stack([loss.value if loss.value.ndim == 0 else loss.value.sum() for loss in losses])
        ready = None
        if values.device.type == "cuda":
            stream = torch.cuda.current_stream(values.device)
            values = values.to("cpu", non_blocking=True)
            # With CUDA, a copy to pinned memory may be incomplete when it returns: the values may be read only after an
            # event that the same stream records behind it.
            ready = stream.record_event()
        self._copied = _Copy(losses, values, ready)

    def _read(self, state: State) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            return
        if copied.ready is not None:
            copied.ready.synchronize()
        for loss, value in zip(copied.losses, copied.values.tolist(), strict=True):
            is_nan = value != value  # noqa: PLR0124  (true only for NaN)
            if is_nan or (self.infinite and value in {float("inf"), float("-inf")}):
                raise RuntimeError(_message(loss, "not a number (NaN)" if is_nan else "infinite", state))


class _Copy(NamedTuple):
    """Losses that are being copied to the CPU; ``ready`` is recorded after the copy, or None if it is complete."""

    losses: list[_Loss]
    values: Tensor
    ready: torch.cuda.Event | None


def _message(loss: _Loss, what: str, state: State) -> str:
    now = int(state.timestamp.count(TimeUnit.BATCH))
    part = f" {loss.name!r}" if loss.name else ""
    rates = ", ".join(
        f"{type(optimizer).__name__} {float(group['lr']):.4g}"
        for optimizer in state.optimizers
        for group in optimizer.param_groups
        if "lr" in group
    )
    half = " The precision is amp_fp16: try 'amp_bf16', whose range is larger." if state.precision == "amp_fp16" else ""
    return (
        f"The training loss{part} is {what} since batch {loss.batch}, counted from 0; detected after {now} "
        f"batches. Check that batch's data (NaN, infinite values, labels out of range) and the learning rate "
        f"({rates}): try a smaller one, a warm-up or GradientClipping.{half} "
        "torch.autograd.set_detect_anomaly(True) names the operation that produces a NaN gradient."
    )
