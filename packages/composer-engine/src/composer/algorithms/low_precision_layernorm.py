"""LowPrecisionLayerNorm: compute layer norms in the precision of the surrounding layers."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import LAYER_NORMS, LowPrecisionNorm, to_apply_at
from composer.core import Event


@attrs.define(eq=False)
class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Compute layer norms in the low precision of the run, where autocast would use float32.

    See :func:`composer.functional.apply_low_precision_layernorm`.

    Args:
        apply_at: When the norms are replaced: ``Event.INIT``, or ``Event.AFTER_LOAD``.

    Raises:
        ValueError: ``apply_at`` is another event.

    Example:
        >>> LowPrecisionLayerNorm().apply_at.value
        'after_load'
    """

    apply_at: Event = attrs.field(default="after_load", converter=to_apply_at)  # type: ignore[assignment]  # mypy overlooks the converter

    _kernel: ClassVar = staticmethod(cf.apply_low_precision_layernorm)
    owns: ClassVar = {LAYER_NORMS}
    found_nothing: ClassVar = "{model} has no nn.LayerNorm, or the run's precision is fp32. Remove it."
