"""LayerFreezing: stop training the first layers before the last ones."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_at_end, warn_if_idle
from composer.algorithms._progress import FRACTION_OF_TRAINING, elapsed_duration
from composer.core import Algorithm, Event, Logger, Stage, State, TimeUnit, saved
from composer.core.checks import number
from composer.core.declarations import owned
from composer.core.saving.components import transient


@attrs.define(eq=False)
class LayerFreezing(Algorithm):
    """Freeze an increasing number of layers, starting with the first, at the end of each epoch (arXiv:1706.05806).

    See :func:`composer.functional.freeze_layers`. Parameters are frozen by ``requires_grad=False``; the optimizers keep
    them and their state.

    Args:
        freeze_start: The fraction of the training after which the first layer is frozen, in ``[0, 1]``.
        freeze_level: The fraction of layers that is frozen at the end, in ``[0, 1]``; the last layer is never frozen.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> LayerFreezing(freeze_start=0.3, freeze_level=0.5)
        LayerFreezing(freeze_start=0.3, freeze_level=0.5)
    """

    freeze_start: float = attrs.field(default=0.5, validator=FRACTION_OF_TRAINING)
    freeze_level: float = number(1.0, 0, 1, meaning="It is a fraction of the layers.")
    _frozen_at: float | None = saved(default=None)  # the fraction of the training at which layers were last frozen
    _has_frozen: bool = transient(default=False)  # in this fit, before its end

    # At FIT_START the layers that an earlier process had frozen are frozen again.
    runs_at: ClassVar = dict.fromkeys((Event.FIT_START, Event.EPOCH_END, Event.FIT_END), Stage.WEIGHTS)
    reads: ClassVar = {"model", "optimizers", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"model", "gradients"}
    owns: ClassVar = owned(
        "which layers are frozen",
        "Two schedules would contradict each other: choose one freeze_start and freeze_level.",
    )

    acted = 0

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, freeze_start=self.freeze_start == 1, freeze_level=self.freeze_level == 0)

    @property
    def find_unused_parameters(self) -> bool:
        """Return True: frozen parameters get no gradient."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Freeze the layers that are due; warn at the end of a fit in which none were."""
        if event is Event.FIT_END:
            self._warn_if_never_begun(state)
            return
        if event is Event.EPOCH_END:
            self._frozen_at = elapsed_duration(self, state)
        elif not state.timestamp.count(TimeUnit.BATCH):
            self._frozen_at = None  # a training starts, possibly another one
        elif self._frozen_at is not None:  # a fraction of the former duration, if this fit is longer
            self._frozen_at = min(self._frozen_at, elapsed_duration(self, state))
        # At the start of a fit, layers that are not due are unfrozen.
        depth, fraction = cf.freeze_layers(
            state.model, state.optimizers, self._frozen_at or 0.0, self.freeze_start, self.freeze_level
        )
        if depth and (event is Event.FIT_START or (self._frozen_at or 0.0) < 1):
            self._has_frozen = True
            self.acted += 1
        logger.log_metrics({"layer_freezing/layers_frozen": depth, "layer_freezing/percentage_frozen": fraction})

    def _warn_if_never_begun(self, state: State) -> None:
        if not self._has_frozen:
            warn_at_end(
                state,
                f"{self!r} has frozen no layer before the fit ended at {state.max_duration}: layers are frozen at the "
                "end of an epoch that others follow. Start earlier, or train for more epochs.",
            )
        self._has_frozen = False
