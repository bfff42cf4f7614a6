"""GradientClipping: limit the size of gradients."""

from __future__ import annotations

import warnings
from typing import ClassVar

import attrs

from composer import functional as cf
from composer.core import Algorithm, Event, Logger, Stage, State
from composer.core.checks import caller_level, number_between, one_of
from composer.core.optimizers import held_parameters, unwrapped
from composer.core.saving.components import transient


@attrs.define(eq=False)
class GradientClipping(Algorithm):
    """Limit the gradients of the complete batch (arXiv:1211.5063; adaptive: arXiv:2102.06171).

    See :func:`composer.functional.apply_gradient_clipping`. The gradients are those of the parameters that optimizers
    hold; others, which no optimizer sets to zero, would grow from step to step. Clipping by norm beside Muon gives a
    warning: the size of Muon's updates does not depend on the size of the gradients.

    Args:
        clipping_type: The quantity to limit: the ``"norm"`` of all gradients together, each ``"value"``, or, with
            ``"adaptive"``, the norm of each unit relative to that of its weights.
        clipping_threshold: The limit.

    Raises:
        TypeError: ``clipping_threshold`` is not a number.
        ValueError: ``clipping_type`` is unknown, or ``clipping_threshold`` is not positive and finite.

    Example:
        >>> GradientClipping("norm", 1.0)
        GradientClipping(clipping_type='norm', clipping_threshold=1.0)
    """

    clipping_type: str = attrs.field(validator=one_of("norm", "value", "adaptive"))
    clipping_threshold: float = attrs.field(
        validator=number_between(0, above=True, meaning="It is the limit of the gradients.")
    )

    _is_first: bool = transient(default=True)

    runs_at: ClassVar = {Event.AFTER_TRAIN_BATCH: Stage.GRADIENT}
    reads: ClassVar = {"optimizers"}
    writes: ClassVar = {"gradients"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Clip the gradients."""
        if self._is_first:
            self._is_first = False
            self._warn_beside_muon(state)
        # A program's own loop may have optimizers that the state does not know.
        held = [one for optimizer in state.optimizers for one in held_parameters(optimizer.param_groups)]
        cf.apply_gradient_clipping(held or state.model, self.clipping_type, self.clipping_threshold)

    def _warn_beside_muon(self, state: State) -> None:
        names = [type(unwrapped(optimizer)).__name__ for optimizer in state.optimizers]
        muon = next((name for name in names if "muon" in name.lower()), None)
        if muon is not None and self.clipping_type == "norm":
            warnings.warn(
                f"GradientClipping by norm has little effect on {muon}, whose updates of matrices have the same size "
                "for all gradients: it changes only how much a batch counts in the momentum, and scales the "
                "gradients of all other parameters by the norm of the matrices' gradients. Remove it.",
                stacklevel=caller_level(),
            )
