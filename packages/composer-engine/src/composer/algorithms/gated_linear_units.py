"""GatedLinearUnits: feed-forward layers with a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import attrs
from torch import Tensor, nn

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import is_flag
from composer.core.declarations import owned


@attrs.define(eq=False)
class GatedLinearUnits(ModelSurgery):
    """Add gates to the feed-forward layers of a transformer (arXiv:2002.05202).

    See :func:`composer.functional.apply_gated_linear_units`.

    Args:
        act_fn: The activation; the model's own activation if None.
        gated_layer_bias: Whether the layer with the activation has a bias.
        non_gated_layer_bias: Whether the other layer has a bias.
        feed_forward_module: The class of your own feed-forward block; None for GPT-2 and BERT of Transformers.
        first_layer_attribute: Its attribute for the first layer.
        activation_attribute: Its attribute for the activation.

    Raises:
        TypeError: ``act_fn`` is not callable.

    Example:
        >>> GatedLinearUnits(gated_layer_bias=True)
        GatedLinearUnits(act_fn=None, gated_layer_bias=True, non_gated_layer_bias=False)
    """

    act_fn: Callable[[Tensor], Tensor] | None = None
    gated_layer_bias: bool = attrs.field(default=False, validator=is_flag)
    non_gated_layer_bias: bool = attrs.field(default=False, validator=is_flag)

    feed_forward_module: type[nn.Module] | None = attrs.field(default=None, repr=False, kw_only=True)
    first_layer_attribute: str | None = attrs.field(default=None, repr=False, kw_only=True)
    activation_attribute: str | None = attrs.field(default=None, repr=False, kw_only=True)

    _kernel: ClassVar = staticmethod(cf.apply_gated_linear_units)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned("the feed-forward layers", "A second one would find no plain layers: choose one act_fn.")
    found_nothing: ClassVar = "the feed-forward layers of {model} already have gates."

    def __attrs_post_init__(self) -> None:
        if self.act_fn is not None and not callable(self.act_fn):
            raise TypeError(f"act_fn must be a function of a tensor such as torch.nn.GELU(), got {self.act_fn!r}.")
