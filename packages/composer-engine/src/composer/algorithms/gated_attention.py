"""GatedAttention: multiply the output of each head by gates."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import is_flag, number
from composer.core.declarations import owned


@attrs.define(eq=False)
class GatedAttention(ModelSurgery):
    """Multiply the output of each head of a decoder by gates (arXiv:2505.06708).

    See :func:`composer.functional.apply_gated_attention`.

    Args:
        elementwise: Whether each feature of a head has a gate; otherwise each head has one.
        initial_gate: The gate at the start, between 0 and 1.
        layout: The layers of your own attention; None for those of Transformers.

    Raises:
        TypeError: A value has another type.
        ValueError: ``initial_gate`` is out of range; or, when the model is changed, no attention is found.

    Example:
        >>> GatedAttention(elementwise=False)
        GatedAttention(elementwise=False, initial_gate=0.5)
    """

    elementwise: bool = attrs.field(default=True, validator=is_flag)
    initial_gate: float = number(0.5, 0, 1, above=True, below=True, meaning="It is a sigmoid.")
    layout: cf.AttentionLayout | None = attrs.field(default=None, repr=False, kw_only=True)

    _kernel: ClassVar = staticmethod(cf.apply_gated_attention)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned("the gates of attention", "Choose one kind of gates.")
    found_nothing: ClassVar = "the attention of {model} already has gates. Remove it."
