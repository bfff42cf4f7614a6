"""Parameter groups for an optimizer: which parameters decay, and learning rates by depth (arXiv:2106.08254)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from composer.functional.checks import check_interval, check_modules, described, is_module_class
from composer.functional.surgery.structure import NORMS, PRODUCTS, find_blocks, find_towers, is_norm


def parameter_groups(
    model: nn.Module,
    lr: float | None = None,
    *,
    weight_decay: float | None = None,
    no_decay: Iterable[type[nn.Module]] = (nn.Embedding, nn.EmbeddingBag),
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters of a model in groups for an optimizer.

    Without weight decay are biases and other parameters of at most one dimension, the parameters of norms and of the
    modules in ``no_decay``, and those that broadcast over a batch: parameters ``(1, ...)`` of modules other than linear
    layers and convolutions, such as class tokens and positions, and scales ``(C, 1, 1)``; and such parameters of any
    shape whose names begin with ``pos`` or contain ``position``. Those that a model itself lists in
    ``no_weight_decay()``, as models of timm do, are without decay, too.

    With ``layer_decay``, the learning rate of depth ``d`` of ``D`` is ``lr * layer_decay ** (D - d)`` (Bao et al. 2021,
    arXiv:2106.08254, section A.4). What comes before the first block has depth 0, block ``k`` depth ``k``, and what
    comes after the last block, such as the head, depth ``D``, the number of blocks plus 1; what lies between two blocks
    has the depth of the second. The blocks are the repeated ones of the model, such as the layers of a transformer or
    the residual blocks in the stages of a ResNet. Towers that process different inputs, such as texts and images, have
    depths of their own. Of a model of timm the depths are those that its ``group_matcher()`` defines. Those of the same
    network in another library may differ: timm's PvtV2 and MaxViT have one for each stage, its DINOv2 has no head, and
    where the first block belongs to the stem, or the last one to the head, as in MobileNetV2, MobileViT and MobileViTV2
    of Transformers and MobileNetV3 and MNASNet of torchvision, there are fewer blocks. Transformers' MobileNetV1 and
    torchvision's GoogLeNet have more, as each convolution is one.

    A tied parameter occurs once, at the depth where it occurs first, and without decay if one of its places has none.
    Frozen parameters are left out, as by timm.

    Args:
        model: The model.
        lr: The learning rate of the last layer, and of all without ``layer_decay``; None leaves it to the optimizer.
        weight_decay: The decay of the other parameters, in the convention of the optimizer, 0 or more; None leaves it
            to the optimizer.
        no_decay: Types of modules whose own parameters do not decay; ``()`` decays embeddings.
        layer_decay: The factor from one depth to the next lower one, above 0 and at most 1; None for no such factor.

    Returns:
        Groups with ``"params"``, ``"weight_decay"`` and ``"lr"``; without what is left to the optimizer.

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
    types = check_settings(model, lr, weight_decay, no_decay, layer_decay)
    without = undecayed(model, types)
    distances = {} if layer_decay is None else _distances(model)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        distance, decay = distances.get(name, 0), 0.0 if id(parameter) in without else weight_decay
        given = {"weight_decay": decay, "lr": None if lr is None else lr * (layer_decay or 1.0) ** distance}
        settings = {name: value for name, value in given.items() if value is not None}
        group = groups.setdefault((distance, decay == 0), {"params": [], **settings})
        group["params"].append(parameter)
    if not groups:
        raise ValueError(f"model must have parameters that require gradients, got none in {type(model).__name__}.")
    return list(groups.values())


def check_settings(
    model: nn.Module,
    lr: float | None,
    weight_decay: float | None,
    no_decay: Iterable[type],
    layer_decay: float | None,
) -> tuple[type, ...]:
    """Return the types of modules without decay if all arguments are valid."""
    check_modules(model=model)
    if lr is not None:
        check_interval("lr", lr, 0, math.inf, "It is the learning rate of the last layer.", open_high=True)
    if weight_decay is not None:
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


def undecayed(model: nn.Module, types: tuple[type, ...]) -> set[int]:
    """Return the ids of the parameters without weight decay."""
    found = set()
    for module in model.modules():
        listed = getattr(module, "no_weight_decay", None)
        if callable(listed):
            own = dict(module.named_parameters(remove_duplicate=False))
            found |= {id(own[name]) for name in listed() if name in own}
        is_plain = isinstance(module, (*NORMS, *types))
        for name, parameter in module.named_parameters(recurse=False):
            is_position = "position" in name or name.partition("_")[0] == "pos"
            broadcasts = parameter.ndim <= 1 or (
                not isinstance(module, PRODUCTS)
                and (is_position or parameter.shape[0] == 1 or parameter.numel() == max(parameter.shape))
            )
            if is_plain or broadcasts:
                found.add(id(parameter))
    return found


def _distances(model: nn.Module) -> dict[str, int]:
    """Return how far the parameters are from the last layer, by name; one that is missing is in it."""
    from_timm = {name: each for name, each in model.named_modules() if callable(getattr(each, "group_matcher", None))}
    distances: dict[str, int] = {}
    for prefix, module in from_timm.items():
        from timm.models import group_parameters  # noqa: PLC0415  (the model is of timm)

        depths = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
        last = max(depths.values())
        distances |= {f"{prefix}.{name}" if prefix else name: last - depth for name, depth in depths.items()}
    blocks = [(name, block) for name, block in find_blocks(model) if not any(_is_in(name, one) for one in from_timm)]
    if not blocks and not distances:
        raise ValueError(
            f"layer_decay requires a model with repeated blocks, such as the layers of a transformer in a ModuleList, "
            f"got {type(model).__name__} without any. Leave out layer_decay, or write the groups yourself."
        )
    towers = find_towers(model, [name for name, _ in blocks]) or ({"": model} if blocks else {})
    for tower in towers:
        own = [block for name, block in blocks if _is_in(name, tower)]
        numbers = {id(one): number for number, block in enumerate(own, 1) for one in block.parameters()}
        part = model.get_submodule(tower)
        aligned = _of_aligned_lists(part, numbers) | _of_norms_of_embeddings(part, numbers)
        begun = 0
        for name, parameter in model.named_parameters():
            if name in distances or not _is_in(name, tower):
                continue
            begun = max(begun, numbers.get(id(parameter), 0))
            before = aligned.get(id(parameter), begun + 1 if begun else 0)
            distances[name] = len(own) + 1 - numbers.get(id(parameter), before)
    nearest = min(distances.get(name, 0) for name, _ in model.named_parameters())  # 1 if the model ends with a block
    return {name: distance - nearest for name, distance in distances.items()}


def _is_in(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _of_aligned_lists(model: nn.Module, numbers: dict[int, int]) -> dict[int, int]:
    """Return the numbers of the blocks before which the members of lists are that have one for each stage.

    Such are the patch embeddings of PVT, in a list beside that of its stages: each but the first is between two stages.
    """
    found: dict[int, int] = {}
    for holder in model.modules():
        lists = [list(child.children()) for child in holder.children() if isinstance(child, nn.ModuleList)]
        begins = [[numbers.get(id(next(member.parameters(), None)), 0) for member in members] for members in lists]
        stages = next((one for one in begins if len(one) > 1 and all(one)), None)
        for members, blocks in zip(lists, begins, strict=True):
            if stages and len(members) == len(stages) and not any(blocks):
                for member, block in list(zip(members, stages, strict=True))[1:]:
                    found |= {id(parameter): block for parameter in member.parameters()}
    return found


def _of_norms_of_embeddings(model: nn.Module, numbers: dict[int, int]) -> dict[int, int]:
    """Return the numbers of the blocks before which norms are that are registered after them, as BART's."""
    found: dict[int, int] = {}
    for holder in model.modules():
        first = min((numbers[id(one)] for one in holder.parameters() if id(one) in numbers), default=0)
        for name, child in holder.named_children():
            if is_norm(child) and "embed" in name:
                found |= {id(parameter): first if first > 1 else 0 for parameter in child.parameters()}
    return found
