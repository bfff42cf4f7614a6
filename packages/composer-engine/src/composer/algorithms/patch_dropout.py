"""PatchDropout: train vision transformers on a random part of the patches."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import number
from composer.core.declarations import owned


@attrs.define(eq=False)
class PatchDropout(ModelSurgery):
    """Train a vision transformer on a random part of each image's patches, evaluate on all (arXiv:2208.07220).

    See :func:`composer.functional.apply_patch_dropout`.

    Args:
        p: The fraction of the patches that is dropped in training, in ``[0, 1)``.

    Raises:
        TypeError: ``p`` is not a number.
        ValueError: ``p`` is out of range.

    Example:
        >>> PatchDropout(p=0.25).p
        0.25
    """

    p: float = number(0.5, 0, 1, below=True, meaning="It is the fraction of patches to drop.")

    _kernel: ClassVar = staticmethod(cf.apply_patch_dropout)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"model"}
    owns: ClassVar = owned("the patches of a vision transformer", "Choose one fraction of patches to drop.")
    changes_weights: ClassVar = False
    acts_in_training = True
    found_nothing: ClassVar = (
        "{model} has no vision transformer of timm, torchvision or Transformers that keeps all patches. Insert "
        "cf.PatchDropout(p) behind the position embeddings of your model."
    )

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, p=self.p == 0)
