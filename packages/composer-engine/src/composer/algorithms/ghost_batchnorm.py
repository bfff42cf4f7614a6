"""GhostBatchNorm: normalise small parts of a batch separately."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import integer
from composer.core.declarations import owned
from composer.functional.layers.ghost_batchnorm import GHOST_BATCH_SIZE


@attrs.define(eq=False)
class GhostBatchNorm(ModelSurgery):
    """Normalise small "ghost" batches separately, whose noise regularises (arXiv:1705.08741).

    See :func:`composer.functional.apply_ghost_batchnorm`.

    Args:
        ghost_batch_size: The largest number of samples that are normalised together.

    Raises:
        TypeError: ``ghost_batch_size`` is not a whole number.
        ValueError: ``ghost_batch_size`` is less than 1.

    Example:
        >>> GhostBatchNorm(ghost_batch_size=16)
        GhostBatchNorm(ghost_batch_size=16)
    """

    ghost_batch_size: int = integer(32, 1, meaning=GHOST_BATCH_SIZE)

    former_names: ClassVar = {"GhostBatchNorm/num_new_modules": None}
    _kernel: ClassVar = staticmethod(cf.apply_ghost_batchnorm)
    runs_at: ClassVar = {Event.INIT: Stage.NORMALIZATION}
    owns: ClassVar = owned("the batch norms", "A second one would find no plain norms: choose one ghost_batch_size.")
    acts_in_training = True
    idle_reason = "No batch or microbatch was larger than ghost_batch_size: choose a smaller one."
    found_nothing: ClassVar = "{model} has no plain nn.BatchNorm1d, 2d or 3d. Remove it."
