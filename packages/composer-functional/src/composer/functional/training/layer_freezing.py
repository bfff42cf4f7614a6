"""Layer freezing: stop training the first layers before the last ones (Raghu et al. 2017, arXiv:1706.05806)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from composer.functional.checks import check_interval, check_modules, check_whole
from composer.functional.surgery.optimizers import check_optimizers

_FROZEN = "_frozen_by_freeze_layers"
_PARAMETRIZATIONS = "parametrizations"


def count_layers_to_freeze(
    num_layers: int, current_duration: float, freeze_start: float = 0.5, freeze_level: float = 1.0
) -> int:
    """Return the number of frozen layers at a point of the training.

    ``floor(freeze_level * (current_duration - freeze_start) / (1 - freeze_start) * (num_layers - 1))``, at least 0

    Args:
        num_layers: The number of layers; the last is never frozen.
        current_duration: The completed fraction of the training, in ``[0, 1]``.
        freeze_start: The fraction after which the first layers are frozen, in ``[0, 1]``.
        freeze_level: The fraction of layers, except the last, that is frozen at the end, in ``[0, 1]``.

    Returns:
        The number of layers, starting with the first.

    Raises:
        ValueError: ``num_layers`` is negative, or another argument lies outside ``[0, 1]``.

    Example:
        >>> [count_layers_to_freeze(11, duration) for duration in (0.4, 0.5, 0.75, 1.0)]
        [0, 0, 5, 10]
    """
    check_whole("num_layers", num_layers, 0)
    check_interval("current_duration", current_duration, 0, 1, "It is the completed fraction of the training.")
    check_interval("freeze_start", freeze_start, 0, 1, "It is the fraction after which the first layers are frozen.")
    check_interval("freeze_level", freeze_level, 0, 1, "It is the fraction of layers that is frozen at the end.")
    if num_layers == 0 or current_duration <= freeze_start:
        return 0
    progress = (current_duration - freeze_start) / (1 - freeze_start)
    # The tolerance compensates for rounding just below an integer.
    return math.floor(freeze_level * progress * (num_layers - 1) + 1e-9)


def freeze_layers(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None,
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze a growing number of layers during training, starting with the first, in place (arXiv:1706.05806).

    A layer is a module with parameters of its own, in the order of ``model.modules()``, including their
    parametrizations by ``torch.nn.utils.parametrize``. :func:`count_layers_to_freeze` determines the number. Frozen
    parameters have ``requires_grad=False`` and no gradient, so no graph is built for the first layers, and optimizers
    skip them, including momentum and weight decay; groups and state do not change. Parameters that a layer shares with
    one that is not frozen are not frozen.

    Each module records which of its parameters this function has frozen. If the number of frozen layers decreases, only
    these require gradients again; parameters that were frozen before the first call remain frozen.

    Args:
        model: The model; ``requires_grad`` of its parameters is **changed in place**.
        optimizers: Optimizers of the model, or ``None``; not changed.
        current_duration: The completed fraction of the training, in ``[0, 1]``.
        freeze_start: The fraction after which the first layers are frozen, in ``[0, 1]``.
        freeze_level: The fraction of layers, except the last, that is frozen at the end, in ``[0, 1]``.

    Returns:
        ``(depth, fraction)``: the number of frozen layers, and their fraction of all layers.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizers`` are not optimizers.
        ValueError: A number lies outside ``[0, 1]``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
        >>> freeze_layers(model, None, current_duration=0.75)
        (1, 0.3333333333333333)
        >>> model[0].weight.requires_grad, model[2].weight.requires_grad
        (False, True)
    """
    check_modules(model=model)
    if optimizers is not None:
        check_optimizers(optimizers)
    layers = _list_layers(model)
    depth = count_layers_to_freeze(len(layers), current_duration, freeze_start, freeze_level)
    _freeze_first(layers, depth)
    return depth, depth / max(len(layers), 1)


def unfreeze_layers(model: nn.Module) -> int:
    """Unfreeze the parameters that :func:`freeze_layers` froze, in place.

    Args:
        model: The model; ``requires_grad`` of its parameters is **changed in place**.

    Returns:
        The number of parameters that require gradients again.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> freeze_layers(model, None, current_duration=1.0)
        (1, 0.5)
        >>> unfreeze_layers(model)
        2
    """
    check_modules(model=model)
    layers = _list_layers(model)
    count = sum(len(vars(layer).get(_FROZEN, ())) for layer in layers)
    _freeze_first(layers, 0)
    return count


def _list_layers(model: nn.Module) -> list[nn.Module]:
    # Parametrizations are modules, too, but their parameters count to the layer whose weight they compute.
    parametrized = [module for module in model.modules() if is_parametrized(module)]
    parts = {id(part) for module in parametrized for part in module.get_submodule(_PARAMETRIZATIONS).modules()}
    return [module for module in model.modules() if id(module) not in parts and _own_parameters(module)]


def _own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(layer.named_parameters(recurse=False))
    if is_parametrized(layer):
        parameters.update(layer.get_submodule(_PARAMETRIZATIONS).named_parameters(prefix=_PARAMETRIZATIONS))
    return parameters


def _freeze_first(layers: list[nn.Module], depth: int) -> None:
    """Freeze the first layers, and unfreeze the parameters of the others that were frozen here."""
    trained = {id(parameter) for layer in layers[depth:] for parameter in _own_parameters(layer).values()}
    for layer in layers:
        frozen_before = vars(layer).pop(_FROZEN, frozenset())
        frozen = set()
        for name, parameter in _own_parameters(layer).items():
            if id(parameter) in trained:
                if name in frozen_before:
                    parameter.requires_grad_()
            elif parameter.requires_grad or name in frozen_before:
                parameter.requires_grad_(False)
                # Optimizers skip parameters without a gradient. With zeros they would apply momentum and weight decay.
                parameter.grad = None
                frozen.add(name)
        if frozen:
            vars(layer)[_FROZEN] = frozenset(frozen)
