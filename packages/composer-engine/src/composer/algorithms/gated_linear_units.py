"""GatedLinearUnits: feed-forward layers with a gate."""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003  (attrs fields are looked up at run time)
from typing import ClassVar

import attrs
from torch import Tensor  # noqa: TC002

from composer import functional as cf
from composer.algorithms._surgery import report_surgery
from composer.core import Algorithm, Event, ExclusiveResource, Logger, Stage, State
from composer.core.checks import true_or_false

__all__ = ["GatedLinearUnits"]


@attrs.define(eq=False)
class GatedLinearUnits(Algorithm):
    """Give the feed-forward layers of a transformer a gate (arXiv:2002.05202).

    See :func:`composer.functional.apply_gated_linear_units`.

    Args:
        act_fn: What the gate goes through; the model's own activation if None.
        gated_layer_bias: Whether the gate has a bias.
        non_gated_layer_bias: Whether the other projection has one.

    Raises:
        TypeError: ``act_fn`` cannot be called.

    Example:
        >>> GatedLinearUnits(gated_layer_bias=True)
        GatedLinearUnits(act_fn=None, gated_layer_bias=True, non_gated_layer_bias=False)
    """

    act_fn: Callable[[Tensor], Tensor] | None = None
    gated_layer_bias: bool = attrs.field(default=False, validator=true_or_false)
    non_gated_layer_bias: bool = attrs.field(default=False, validator=true_or_false)

    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {
        ExclusiveResource(
            "the feed-forward layers", remedy="A second one would find none that is left: choose one act_fn."
        )
    }

    def __attrs_post_init__(self) -> None:
        if self.act_fn is not None and not callable(self.act_fn):
            raise TypeError(f"act_fn must be a function of a tensor such as torch.nn.GELU(), got {self.act_fn!r}.")

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the gates have weights of their own."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the feed-forward layers, and give the gates' parameters to the optimizers."""
        del event
        report = cf.apply_gated_linear_units(
            state.model,
            state.optimizers,
            act_fn=self.act_fn,
            gated_layer_bias=self.gated_layer_bias,
            non_gated_layer_bias=self.non_gated_layer_bias,
        )
        report_surgery(
            self, report, logger, missing=f"the feed-forward layers of {type(state.model).__name__} are gated already."
        )
