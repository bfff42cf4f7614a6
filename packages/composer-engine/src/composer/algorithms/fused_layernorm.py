"""FusedLayerNorm: replace norms written in Python by fused kernels."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import LAYER_NORMS, ModelSurgery
from composer.core import Event, Stage


@attrs.define(eq=False)
class FusedLayerNorm(ModelSurgery):
    """Replace norms that consist of several operations by torch's fused norms.

    See :func:`composer.functional.apply_fused_layernorm`.

    Example:
        >>> FusedLayerNorm()
        FusedLayerNorm()
    """

    _kernel: ClassVar = staticmethod(cf.apply_fused_layernorm)
    runs_at: ClassVar = {Event.INIT: Stage.PRECISION}
    owns: ClassVar = {LAYER_NORMS}
    changes_weights: ClassVar = False
    found_nothing: ClassVar = "{model} has no norm that is written in Python. Remove it."
