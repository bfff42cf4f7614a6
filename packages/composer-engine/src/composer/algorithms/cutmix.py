"""CutMix: paste a box of another image into each image."""

from __future__ import annotations

from typing import Any

import attrs
import torch  # noqa: TC002  (attrs looks up annotations at run time)
from torch import Tensor  # noqa: TC002

from composer import functional as cf
from composer.algorithms._mixing import SampleMixing
from composer.core import BatchKey  # noqa: TC001
from composer.core.checks import number_between, true_or_false

__all__ = ["CutMix"]


@attrs.define(eq=False)
class CutMix(SampleMixing):
    """Paste a box of another image into every image, and blend the labels by its area (arXiv:1905.04899).

    See :func:`composer.functional.cutmix_batch`.

    Args:
        alpha: Both parameters of the Beta distribution of the box's area.
        interpolate_loss: Blend the losses for both labels instead of the labels, for losses that need class ids. This
            is exact for losses that are linear in the target, and calls the loss a second time.
        uniform_sampling: Whether all pixels are equally likely to be covered; otherwise the centre of the box is drawn
            uniformly, and the box is clipped to the image.
        input_key: The key of the images in a batch.
        target_key: The key of the labels in a batch.

    Raises:
        TypeError: ``alpha`` is not a number.
        ValueError: ``alpha`` is not positive and finite.

    Example:
        >>> CutMix(alpha=0.5)
        CutMix(alpha=0.5, interpolate_loss=False, uniform_sampling=False, input_key=0, target_key=1)
    """

    alpha: float = attrs.field(
        default=1.0,
        validator=number_between(0, above=True, meaning="It is both parameters of the Beta distribution."),
    )
    interpolate_loss: bool = attrs.field(default=False, validator=true_or_false)
    uniform_sampling: bool = attrs.field(default=False, validator=true_or_false)
    input_key: BatchKey = 0
    target_key: BatchKey = 1
    _partner_weight: float = attrs.field(default=0.0, init=False, repr=False)
    _partners: Tensor | None = attrs.field(default=None, init=False, repr=False)

    def mix(self, input: Tensor, target: Any, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        """Paste a box of its partner into every image."""
        partners = cf.draw_permutation(input, generator=generator)
        mixed, _, weight, _ = cf.cutmix_batch(
            input,
            target,
            alpha=self.alpha,
            indices=partners,
            uniform_sampling=self.uniform_sampling,
            generator=generator,
        )
        return mixed, partners, 1 - weight
