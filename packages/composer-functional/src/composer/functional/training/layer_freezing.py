"""Layer freezing: train the last layers longer than the first (Raghu et al. 2017, arXiv:1706.05806)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from composer.functional.checks import check_numbers, check_whole_numbers

__all__ = ["count_layers_to_freeze", "freeze_layers", "unfreeze_layers"]

_FROZEN = "_frozen_by_freeze_layers"
_PARAMETRIZATIONS = "parametrizations"


def count_layers_to_freeze(
    num_layers: int, current_duration: float, freeze_start: float = 0.5, freeze_level: float = 1.0
) -> int:
    """Return how many layers are frozen at a point of the training.

    ``floor(freeze_level * (current_duration - freeze_start) / (1 - freeze_start) * (num_layers - 1))``, at least 0

    Args:
        num_layers: The number of layers; the last is never frozen.
        current_duration: Which part of the training is over, in ``[0, 1]``.
        freeze_start: After which part the first layers are frozen, in ``[0, 1]``.
        freeze_level: Which part of the layers that may be is frozen at the end, in ``[0, 1]``.

    Returns:
        The number of layers, from the first on.

    Raises:
        ValueError: ``num_layers`` is negative, or another argument lies outside ``[0, 1]``.

    Example:
        >>> [count_layers_to_freeze(11, duration) for duration in (0.4, 0.5, 0.75, 1.0)]
        [0, 0, 5, 10]
    """
    check_whole_numbers(num_layers=num_layers)
    if num_layers < 0:
        raise ValueError(f"num_layers must be at least 0, got {num_layers}.")
    _check_fraction("current_duration", current_duration, "the part of the training that is over")
    _check_fraction("freeze_start", freeze_start, "the part of the training after which the first layers are frozen")
    _check_fraction("freeze_level", freeze_level, "the part of the layers that is frozen at the end")
    if num_layers == 0 or current_duration <= freeze_start:
        return 0
    progress = (current_duration - freeze_start) / (1 - freeze_start)
    # A number that only rounding keeps below the next whole one is that one.
    return math.floor(freeze_level * progress * (num_layers - 1) + 1e-9)


def freeze_layers(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None,
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze a part of the layers, from the first on, that grows with the training, in place (arXiv:1706.05806).

    A layer is a module that holds parameters itself, in the order of ``model.modules()``; what
    ``torch.nn.utils.parametrize`` made of its parameters is part of it. How many are frozen says
    :func:`count_layers_to_freeze`. Frozen parameters have ``requires_grad=False`` and no gradient, so no graph is built
    for the first layers, and optimizers leave them alone, with momentum and weight decay; groups and state stay. What a
    layer shares with one that is not frozen is not frozen either.

    A module notes which of its parameters were frozen here. If the number of frozen layers shrinks, these, and no
    others, require gradients again; what was frozen before the first call stays so.

    Args:
        model: The model; ``requires_grad`` of its parameters is **changed in place**.
        optimizers: Optimizers of the model, or ``None``. They need not be told.
        current_duration: Which part of the training is over, in ``[0, 1]``.
        freeze_start: After which part the first layers are frozen, in ``[0, 1]``.
        freeze_level: Which part of the layers that may be is frozen at the end, in ``[0, 1]``.

    Returns:
        ``(depth, fraction)``: how many layers are frozen, and which part of all layers that is.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizers`` are none.
        ValueError: A number lies outside ``[0, 1]``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
        >>> freeze_layers(model, None, current_duration=0.75)
        (1, 0.3333333333333333)
        >>> model[0].weight.requires_grad, model[2].weight.requires_grad
        (False, True)
    """
    _check_model(model)
    _check_optimizers(optimizers)
    layers = _list_layers(model)
    depth = count_layers_to_freeze(len(layers), current_duration, freeze_start, freeze_level)
    _freeze_first(layers, depth)
    return depth, depth / max(len(layers), 1)


def unfreeze_layers(model: nn.Module) -> int:
    """Let what :func:`freeze_layers` froze require gradients again, in place.

    Args:
        model: The model; ``requires_grad`` of its parameters is **changed in place**.

    Returns:
        How many parameters require gradients again.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> freeze_layers(model, None, current_duration=1.0)
        (1, 0.5)
        >>> unfreeze_layers(model)
        2
    """
    _check_model(model)
    layers = _list_layers(model)
    count = sum(len(vars(layer).get(_FROZEN, ())) for layer in layers)
    _freeze_first(layers, 0)
    return count


def _list_layers(model: nn.Module) -> list[nn.Module]:
    parametrized = [module for module in model.modules() if is_parametrized(module)]
    parts = {id(part) for module in parametrized for part in module.get_submodule(_PARAMETRIZATIONS).modules()}
    return [module for module in model.modules() if id(module) not in parts and _own_parameters(module)]


def _own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(layer.named_parameters(recurse=False))
    if is_parametrized(layer):
        parameters.update(layer.get_submodule(_PARAMETRIZATIONS).named_parameters(prefix=_PARAMETRIZATIONS))
    return parameters


def _freeze_first(layers: list[nn.Module], depth: int) -> None:
    """Freeze the first layers and let what was frozen here of the others be trained again."""
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
                parameter.grad = None
                frozen.add(name)
        if frozen:
            vars(layer)[_FROZEN] = frozenset(frozen)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, got {type(model).__name__}.")


def _check_optimizers(optimizers: Optimizer | Sequence[Optimizer] | None) -> None:
    if optimizers is None:
        return
    for optimizer in optimizers if isinstance(optimizers, Sequence) else (optimizers,):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizers must be one or several torch.optim.Optimizer or None, got {type(optimizer).__name__}."
            )


def _check_fraction(name: str, value: float, meaning: str) -> None:
    check_numbers(**{name: value})
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}. It is {meaning}.")
