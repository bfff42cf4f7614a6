"""Ghost batch normalisation: statistics of parts of a batch (Hoffer et al. 2017, arXiv:1705.08741)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from composer.functional.checks import check_whole
from composer.functional.layers.ghost_batchnorm import (
    GHOST_BATCH_SIZE,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
)
from composer.functional.surgery.replace import SurgeryReport, is_untouched, replace_layers

_GHOSTS: dict[type[nn.Module], type[GhostBatchNorm1d | GhostBatchNorm2d | GhostBatchNorm3d]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def apply_ghost_batchnorm(
    model: nn.Module, ghost_batch_size: int = 32, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> SurgeryReport:
    """Replace batch normalisation by normalisation of small parts of each training batch, in place (arXiv:1705.08741).

    ``torch.nn.BatchNorm1d``, 2d and 3d become :class:`GhostBatchNorm1d`, 2d and 3d with the same parameters and running
    statistics under the same names: a state dict fits the model before and after.

    Not replaced are subclasses (lazy layers before their first input, layers with an activation inside, ghost layers),
    ``torch.nn.SyncBatchNorm``, whose purpose is larger batches, layers that are pruned or normalised by the old
    ``torch.nn.utils.weight_norm`` and ``spectral_norm``, and layers whose instance has its own ``forward``.

    Args:
        model: The model; **changed in place**.
        ghost_batch_size: The largest number of samples in a ghost batch.
        optimizers: Optimizers of the model. All parameters keep their names, so the optimizers do not change.

    Returns:
        A report of the replaced layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module, or ``ghost_batch_size`` is not an int.
        ValueError: ``ghost_batch_size`` is less than 1, or the model itself is a layer to be
            replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
        >>> print(apply_ghost_batchnorm(model))
        1 module replaced
          1: BatchNorm2d -> GhostBatchNorm2d
        >>> bool(apply_ghost_batchnorm(model))
        False
    """
    check_whole("ghost_batch_size", ghost_batch_size, 1, GHOST_BATCH_SIZE)

    def is_wanted(norm: nn.Module) -> bool:
        return type(norm) in _GHOSTS and is_untouched(norm)

    def replace(norm: _BatchNorm, index: int) -> nn.Module:
        return _GHOSTS[type(norm)].from_batchnorm(norm, index, ghost_batch_size)

    return replace_layers(model, dict.fromkeys(_GHOSTS, replace), is_wanted, optimizers)
