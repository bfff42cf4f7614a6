"""Parameter groups for an optimizer: which parameters decay, and learning rates by depth (arXiv:2106.08254)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from composer.functional.checks import check_interval, check_modules, described, is_module_class
from composer.functional.surgery.blocks import repeated_blocks

__all__ = ["parameter_groups"]

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_PRODUCTS = (nn.Linear, nn.Bilinear, _ConvNd)


def parameter_groups(
    model: nn.Module,
    lr: float | None = None,
    *,
    weight_decay: float,
    no_decay: Iterable[type[nn.Module]] = (nn.Embedding, nn.EmbeddingBag),
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters of a model in groups for an optimizer.

    Without weight decay are biases and other parameters of at most one dimension, the parameters of norms and of the
    modules in ``no_decay``, and those that broadcast over a batch: parameters ``(1, ...)`` of modules other than linear
    layers and convolutions, such as class tokens and positions, and scales ``(C, 1, 1)``. Those that a model itself
    lists in ``no_weight_decay()``, as models of timm do, are without decay, too.

    With ``layer_decay``, the learning rate of depth ``d`` of ``D`` is ``lr * layer_decay ** (D - d)`` (Bao et al. 2021,
    arXiv:2106.08254, section A.4). What comes before the first block has depth 0, block ``k`` depth ``k``, and what
    comes after the last block, such as the head, depth ``D``, the number of blocks plus 1; what lies between two blocks
    has the depth of the second. The blocks are the repeated ones of the model, such as the layers of a transformer. Of
    a model of timm the depths are those that its ``group_matcher()`` defines.

    A tied parameter occurs once, at the depth where it occurs first, and without decay if one of its places has none.
    Frozen parameters are left out, as by timm.

    Args:
        model: The model.
        lr: The learning rate of the last layer, and of all without ``layer_decay``; None leaves it to the optimizer.
        weight_decay: The decay of the other parameters, in the convention of the optimizer, 0 or more.
        no_decay: Types of modules whose own parameters do not decay; ``()`` decays embeddings.
        layer_decay: The factor from one depth to the next lower one, above 0 and at most 1; None for no such factor.

    Returns:
        Groups with ``"params"``, ``"weight_decay"`` and, if ``lr`` is given, ``"lr"``.

    Raises:
        TypeError: ``model`` is not a module, or ``no_decay`` contains something else than types of modules.
        ValueError: A number is out of range, ``layer_decay`` is given without ``lr`` or for a model without repeated
            blocks, or all parameters are frozen.

    Example:
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)), nn.Linear(8, 3))
        >>> for group in parameter_groups(model, lr=0.1, weight_decay=0.05, layer_decay=0.5):
        ...     print(group["lr"], group["weight_decay"], len(group["params"]))
        0.025 0.05 4
        0.025 0.0 8
        0.05 0.05 4
        0.05 0.0 8
        0.1 0.05 1
        0.1 0.0 1
    """
    types = _check(model, lr, weight_decay, no_decay, layer_decay)
    undecayed = _undecayed(model, types)
    depths = {} if layer_decay is None else _depths(model)
    deepest = max(depths.values(), default=0)
    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        depth, decay = depths.get(name, deepest), 0.0 if id(parameter) in undecayed else weight_decay
        rate = {} if lr is None else {"lr": lr * (layer_decay or 1.0) ** (deepest - depth)}
        group = groups.setdefault((depth, decay), {"params": [], "weight_decay": decay, **rate})
        group["params"].append(parameter)
    if not groups:
        raise ValueError(f"model must have parameters that require gradients, got none in {type(model).__name__}.")
    return list(groups.values())


def _check(
    model: nn.Module, lr: float | None, weight_decay: float, no_decay: Iterable[type], layer_decay: float | None
) -> tuple[type, ...]:
    """Return the types of modules without decay if all arguments are valid."""
    check_modules(model=model)
    if lr is not None:
        check_interval("lr", lr, 0, math.inf, "It is the learning rate of the last layer.", open_high=True)
    check_interval("weight_decay", weight_decay, 0, math.inf, "It decays the weights.", open_high=True)
    if layer_decay is not None:
        meaning = "It is the factor from the learning rate of one layer to that of the layer before."
        check_interval("layer_decay", layer_decay, 0, 1, meaning, open_low=True)
    if layer_decay is not None and lr is None:
        raise ValueError(
            f"lr is required with layer_decay={layer_decay}, as each group gets its own: give that of the last layer."
        )
    types = tuple(no_decay) if isinstance(no_decay, Iterable) else (no_decay,)
    if not all(map(is_module_class, types)):
        raise TypeError(f"no_decay must be types of modules such as [torch.nn.Embedding], got {described(no_decay)}.")
    return types


def _undecayed(model: nn.Module, types: tuple[type, ...]) -> set[int]:
    """Return the ids of the parameters without weight decay."""
    found = set()
    for module in model.modules():
        listed = getattr(module, "no_weight_decay", None)
        if callable(listed):
            own = dict(module.named_parameters(remove_duplicate=False))
            found |= {id(own[name]) for name in listed() if name in own}
        is_plain = isinstance(module, (*_NORMS, *types))
        for parameter in module.parameters(recurse=False):
            broadcasts = parameter.ndim <= 1 or (
                not isinstance(module, _PRODUCTS)
                and (parameter.shape[0] == 1 or parameter.numel() == max(parameter.shape))
            )
            if is_plain or broadcasts:
                found.add(id(parameter))
    return found


def _depths(model: nn.Module) -> dict[str, int]:
    """Return the depths of the parameters by name; one that is missing is in the last layer."""
    for prefix, module in model.named_modules():
        matcher = getattr(module, "group_matcher", None)
        if callable(matcher):
            from timm.models import group_parameters  # noqa: PLC0415  (the model is of timm)

            by_name = group_parameters(module, matcher(coarse=False), reverse=True)
            return {f"{prefix}.{name}" if prefix else name: depth for name, depth in by_name.items()}
    found = [block for _, block in repeated_blocks(model)]
    counts = Counter(map(type, found))
    blocks = [block for block in found if counts[type(block)] > 1]  # Transformers may name embeddings, too
    if not blocks:
        raise ValueError(
            f"layer_decay requires a model with repeated blocks, such as the layers of a transformer in a ModuleList, "
            f"got {type(model).__name__} without any. Leave out layer_decay, or write the groups yourself."
        )
    owners = {id(parameter): number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    depths, begun = {}, 0
    for name, parameter in model.named_parameters():
        depth = owners.get(id(parameter), begun + 1 if begun else 0)
        begun = max(begun, owners.get(id(parameter), 0))
        depths[name] = depth
    return depths
