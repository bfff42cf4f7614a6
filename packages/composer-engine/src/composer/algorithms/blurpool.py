"""BlurPool: blur before every stride."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import integer, is_flag
from composer.core.declarations import owned


@attrs.define(eq=False)
class BlurPool(ModelSurgery):
    """Blur the inputs of strided convolutions and the outputs of strided max pools (arXiv:1904.11486).

    See :func:`composer.functional.apply_blurpool`.

    Args:
        replace_convs: Whether strided convolutions are blurred.
        replace_maxpools: Whether strided max pools are blurred.
        blur_first: Whether convolutions are blurred before they run (cheaper) or after.
        min_channels: Convolutions with fewer input channels are not blurred.

    Raises:
        TypeError: ``min_channels`` is not a whole number.
        ValueError: ``min_channels`` is negative, or both kinds of layers are excluded.

    Example:
        >>> BlurPool(min_channels=32)
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=32)
    """

    replace_convs: bool = attrs.field(default=True, validator=is_flag)
    replace_maxpools: bool = attrs.field(default=True, validator=is_flag)
    blur_first: bool = attrs.field(default=True, validator=is_flag)
    min_channels: int = integer(16, 0, meaning="Convolutions with fewer input channels are not blurred.")

    former_names: ClassVar = {
        "blurpool/num_blurpool_layers": "BlurMaxPool2d",
        "blurpool/num_blurconv_layers": "BlurConv2d",
    }
    _kernel: ClassVar = staticmethod(cf.apply_blurpool)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned(
        "the strided convolutions and pools", "Blurred layers are not blurred again: combine the settings in one."
    )

    def __attrs_post_init__(self) -> None:
        if not (self.replace_convs or self.replace_maxpools):
            raise ValueError(
                "replace_convs and replace_maxpools are both False, so BlurPool has nothing to do; set one."
            )

    def explain_nothing(self, model: str) -> str:
        """Return what the model lacks, and the remedy."""
        wanted = [f"no strided Conv2d with at least {self.min_channels} input channels"] * self.replace_convs
        wanted += ["no strided MaxPool2d"] * self.replace_maxpools
        remedy = "lower min_channels" if self.replace_convs else "set replace_convs=True"
        return f"{model} has {' and '.join(wanted)}. Remove it, or {remedy}."
