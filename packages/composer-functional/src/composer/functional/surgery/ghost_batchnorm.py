"""Ghost batch normalisation: statistics of parts of a batch (Hoffer et al. 2017, arXiv:1705.08741)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from composer.functional.layers.ghost_batchnorm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    check_ghost_batch_size,
)
from composer.functional.surgery.replace import SurgeryReport, is_untouched, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_ghost_batchnorm"]

_GHOSTS: dict[type[nn.Module], type[GhostBatchNorm1d | GhostBatchNorm2d | GhostBatchNorm3d]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def apply_ghost_batchnorm(
    model: nn.Module, ghost_batch_size: int = 32, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> SurgeryReport:
    """Replace batch normalisation by one that sees small batches in training, in place (arXiv:1705.08741).

    ``torch.nn.BatchNorm1d``, 2d and 3d become :class:`GhostBatchNorm1d`, 2d and 3d, see there. These hold the same
    parameters and running statistics under the same names: a state dict fits the model before and after.

    Subclasses are left alone, for what they do besides is theirs to know: lazy layers that have not seen an input,
    those with an activation inside, and ghosts. So are ``torch.nn.SyncBatchNorm``, which makes batches larger on
    purpose, and layers that are pruned or normalised by the old ``torch.nn.utils.weight_norm`` and ``spectral_norm``,
    or whose ``forward`` was exchanged.

    Args:
        model: The model; **changed in place**.
        ghost_batch_size: How many samples a ghost batch has at most.
        optimizers: Optimizers of the model; every parameter survives under its name, so there is nothing to tell them.

    Returns:
        A report of what was replaced; empty if nothing matched.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``ghost_batch_size`` is not a whole number of at least 1, or the model itself is a layer that would
            be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
        >>> print(apply_ghost_batchnorm(model))
        1 module replaced
          1: BatchNorm2d -> GhostBatchNorm2d
        >>> bool(apply_ghost_batchnorm(model))
        False
    """
    check_ghost_batch_size(ghost_batch_size)

    def is_wanted(norm: nn.Module) -> bool:
        return type(norm) in _GHOSTS and is_untouched(norm)

    def haunt(norm: _BatchNorm, index: int) -> nn.Module | None:
        return _GHOSTS[type(norm)].from_batchnorm(norm, index, ghost_batch_size) if is_wanted(norm) else None

    if is_wanted(model):
        raise ValueError(
            f"model must hold the layers to be replaced, got a {type(model).__name__} that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )
    policies: dict[type[nn.Module], ReplacementFunction] = dict.fromkeys(_GHOSTS, haunt)
    return replace_module_classes(model, policies, optimizers)
