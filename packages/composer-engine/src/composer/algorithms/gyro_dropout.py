"""GyroDropout: dropout with a fixed set of masks."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._surgery import FORWARD_PASSES, ModelSurgery
from composer.core import Event, Logger, Stage, State, TimeUnit
from composer.core.checks import integer, number
from composer.core.data.spec import length_of
from composer.core.declarations import owned
from composer.functional.surgery.gyro_dropout import check_not_recomputed


@attrs.define(eq=False)
class GyroDropout(ModelSurgery):
    """Drop neurons by a fixed set of masks that alternate (Lee et al., "Gyro Dropout", MLSys 2022).

    See :func:`composer.functional.apply_gyro_dropout`. Layers are replaced at ``INIT``, so that a checkpoint can be
    loaded into them, if the length of the training and its data are known; otherwise at ``FIT_START``.

    Args:
        p: The probability of dropping a neuron, in ``[0, 1)``.
        sigma: The number of masks.
        tau: The number of masks in use at a time, at most ``sigma``.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> GyroDropout(sigma=64, tau=8)
        GyroDropout(p=0.5, sigma=64, tau=8)
    """

    p: float = number(0.5, 0, 1, below=True, meaning="It is the probability of dropping a neuron.")
    sigma: int = integer(256, 1, meaning="It is the number of masks.")
    tau: int = integer(16, 1, meaning="It is the number of masks in use.")

    _kernel: ClassVar = staticmethod(cf.apply_gyro_dropout)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE, Event.FIT_START: Stage.ARCHITECTURE}
    reads: ClassVar = {"model", "max_duration", "train_dataloader", "dataloader_len", "device_train_microbatch_size"}
    writes: ClassVar = {"model"}
    owns: ClassVar = {
        *owned("the dropout layers", "A second one would find no plain layers: choose one set of settings."),
        FORWARD_PASSES,
    }
    acts_in_training = True
    found_nothing: ClassVar = "{model} has no nn.Dropout of a positive p outside attention. Remove it."

    def __attrs_post_init__(self) -> None:
        if self.sigma < self.tau:
            raise ValueError(f"sigma must be at least tau, got {self.sigma} and {self.tau}. It is the number of masks.")
        warn_if_idle(self, p=self.p == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the dropout layers, once, and divide the training among their masks."""
        passes = _count_passes(state)
        layers = [layer for layer in state.model.modules() if isinstance(layer, cf.GyroDropout)]
        if layers:
            check_not_recomputed(state.model)  # it may have been enabled since they were replaced
            if passes is not None:
                for layer in layers:
                    # The training may be longer, or have more microbatches, than at INIT.
                    layer.period = math.ceil(passes * layer.tau / layer.sigma)
            return
        if event is Event.FIT_START and self.surgery_report is not None and not self.surgery_report:
            return  # it has warned at INIT
        if passes is None:
            if event is Event.FIT_START:
                raise ValueError(
                    "GyroDropout divides the training among its masks and needs its length: set "
                    "State.max_duration in epochs or batches, and train on a loader that has a len()."
                )
            return
        self.replace(state, logger, iters_per_epoch=passes, max_epoch=1)


def _count_passes(state: State) -> int | None:
    """Return the number of forward passes of the training; None if it is unknown."""
    duration, length = state.max_duration, state.dataloader_len
    loader: Any = state.train_dataloader
    if length is None:
        length = length_of(loader)
    if duration is not None and duration.unit is TimeUnit.BATCH:
        batches = int(duration.value)
    elif duration is not None and duration.unit is TimeUnit.EPOCH and length is not None:
        batches = int(duration.value) * length
    else:
        return None
    batch_size, microbatch_size = getattr(loader, "batch_size", None), state.device_train_microbatch_size
    return max(1, batches * (math.ceil(batch_size / microbatch_size) if microbatch_size and batch_size else 1))
