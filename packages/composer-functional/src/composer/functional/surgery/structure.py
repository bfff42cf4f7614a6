"""The parts of a model from its modules and shapes: blocks in stages, towers, input layers and output layers.

No name of a module is compared: libraries name the same part of the same network differently.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from composer.functional.layers.derived import plain_class

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
PRODUCTS = (nn.Linear, nn.Bilinear, _ConvNd)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LEAST = 2
"""The matrices of a block: a layer with its norm and activation is none, if the model has any blocks."""
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm of torch, or of a class with ``Norm`` in its name.

    Example:
        >>> is_norm(nn.LayerNorm(3)), is_norm(nn.Linear(3, 3))
        (True, False)
    """
    return isinstance(module, NORMS) or "Norm" in type(module).__name__


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of a model with their names, in the order of registration.

    A block is a member of a list, with at least two matrices (or one, if there are no others), whose class occurs
    several times. Blocks within blocks, such as experts, are not returned. Stages, which consist of blocks, are none.

    Example:
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)), nn.Linear(8, 2))
        >>> [name for name, _ in find_blocks(model)]
        ['0', '1']
    """
    members = {member for holder in model.modules() if isinstance(holder, _LISTS) for member in holder.children()}
    for least in (_LEAST, 1):
        counts = Counter(plain_class(member) for member in members if _is_block(member, least))
        # Also those with fewer matrices, such as blocks of EfficientNetV2 that do not expand.
        blocks = {member for member in members if counts[plain_class(member)] > 1 and not _is_stage(member, least)}
        if blocks:
            return list(_outermost(model, blocks, ""))
    return []


def _outermost(module: nn.Module, chosen: set[nn.Module], path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if child in chosen:
            yield where, child
        else:
            yield from _outermost(child, chosen, where)


def _is_block(module: nn.Module, least: int) -> bool:
    has_children = any(True for _ in module.children())
    return has_children and _count_matrices(module) >= least and not _is_stage(module, least)


def _is_stage(module: nn.Module, least: int) -> bool:
    """Return whether a module consists of blocks: a list of some, or mostly equal ones beside at most one matrix."""
    is_list = isinstance(module, _LISTS)
    lists = [module] if is_list else [child for child in module.children() if isinstance(child, _LISTS)]
    inner = [block for each in lists for block in each.children() if _is_block(block, least)]
    if is_list:
        return type(module) in {nn.ModuleList, nn.Sequential, nn.ModuleDict} or bool(inner)
    others = _count_matrices(module) - sum(map(_count_matrices, inner))
    return 0 < len(set(map(plain_class, inner))) <= max(1, len(inner) // 3) and others <= 1


def _count_matrices(module: nn.Module) -> int:
    """Return the number of weights with several rows and columns, without those of embeddings and norms."""
    return sum(
        weight.ndim > 1 and min(weight.shape[0], math.prod(weight.shape[1:])) > 1
        for child in module.modules()
        if not isinstance(child, _EMBEDDINGS) and not is_norm(child)
        for weight in child.parameters(recurse=False)
    )


def find_towers(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Return the parts of a model that process different inputs in parallel, by name; one part is no tower.

    They are the children, of the innermost module with all blocks, that have some of them, if each begins with an
    embedding, or with a layer for another number of features than the layers of the tower before return. The encoder
    and the decoder of one model are no towers.

    Example:
        >>> stems = {"text": nn.Embedding(9, 8), "image": nn.Linear(3, 8)}
        >>> layers = {name: [nn.TransformerEncoderLayer(8, 2) for _ in range(2)] for name in stems}
        >>> model = nn.ModuleDict({name: nn.Sequential(stem, *layers[name]) for name, stem in stems.items()})
        >>> list(find_towers(model, [name for name, _ in find_blocks(model)]))
        ['text', 'image']
    """
    paths = [name.split(".") for name in blocks]
    has_decoder = any(getattr(getattr(each, "config", None), "is_encoder_decoder", False) for each in model.modules())
    if has_decoder or not paths or _count_matrices(model.get_submodule(".".join(paths[0]))) < _LEAST:
        return {}
    first, last = min(paths), max(paths)
    depth = next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    holder = model.get_submodule(".".join(first[:depth]))
    if isinstance(holder, (nn.ModuleList, nn.Sequential)) or len(first) == depth:
        return {}
    towers = {name: model.get_submodule(name) for name in dict.fromkeys(".".join(path[: depth + 1]) for path in paths)}
    named = set(blocks)
    for name, tower in towers.items():
        inside = ((path, one) for path, one in tower.named_modules() if isinstance(one, (*PRODUCTS, *_EMBEDDINGS)))
        path, _ = next(inside, ("", None))
        parts = f"{name}.{path}".split(".")
        if any(".".join(parts[:end]) in named for end in range(1, len(parts) + 1)):
            return {}  # it begins with a block
    pairs = pairwise(towers.values())
    return {} if any(_follows(one, other) for one, other in pairs) else towers


def _follows(before: nn.Module, after: nn.Module) -> bool:
    """Return whether the first layer of a module takes as many features as a layer of another one returns."""
    layers = [one for one in after.modules() if isinstance(one, (*PRODUCTS, *_EMBEDDINGS))]
    sizes = {features(one)[1] for one in before.modules() if isinstance(one, PRODUCTS)}
    return not isinstance(layers[0], _EMBEDDINGS) and features(layers[0])[0] in sizes


def features(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer or a convolution.

    Example:
        >>> features(nn.Linear(3, 5)), features(nn.ConvTranspose2d(3, 5, 2))
        ((3, 5), (3, 5))
    """
    if isinstance(layer, _ConvNd):
        return layer.in_channels, layer.out_channels
    return getattr(layer, "in_features", getattr(layer, "in1_features", 0)), layer.out_features


def find_output_layers(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers and convolutions outside blocks whose outputs no norm and no later layer takes.

    Sizes decide: a layer takes what has as many features as its input, and a linear layer also flattened feature maps.
    Of towers, each is a model of its own, and layers beside them project their outputs.

    Example:
        >>> body, scores, boxes = nn.Linear(8, 16), nn.Linear(16, 91), nn.Linear(16, 364)
        >>> find_output_layers(nn.Sequential(body, scores, boxes)) == {scores, boxes}
        True
    """
    blocks = dict(find_blocks(model))
    towers = find_towers(model, blocks)
    hidden = {layer for block in blocks.values() for layer in block.modules()}
    found: set[nn.Module] = {
        layer
        for name in towers
        for layer in model.get_submodule(name.rpartition(".")[0]).children()
        if isinstance(layer, PRODUCTS)
    }
    for region in _regions(model, towers):
        layers = [one for one in region if isinstance(one, PRODUCTS) or (is_norm(one) and _has_parameters(one))]
        for place, layer in enumerate(layers):
            if layer not in hidden and isinstance(layer, PRODUCTS) and not _is_taken(layer, layers[place + 1 :]):
                found.add(layer)
    return found


def find_patch_layers(model: nn.Module) -> set[nn.Module]:
    """Return the first layer of the model, or of each tower, if it is a convolution of patches that do not overlap.

    Example:
        >>> patches = nn.Conv2d(3, 8, kernel_size=4, stride=4)
        >>> find_patch_layers(nn.Sequential(patches, nn.Conv2d(8, 8, 2, 2))) == {patches}
        True
    """
    towers = find_towers(model, [name for name, _ in find_blocks(model)])
    firsts = [next((one for one in region if isinstance(one, PRODUCTS)), None) for region in _regions(model, towers)]
    return {
        one for one in firsts if isinstance(one, _ConvNd) and one.kernel_size == one.stride != (1,) * len(one.stride)
    }


def _regions(model: nn.Module, towers: dict[str, nn.Module]) -> list[list[nn.Module]]:
    """Return the modules of each tower, and those outside, in the order of registration."""
    regions = [list(tower.modules()) for tower in towers.values()]
    within = {module for region in regions for module in region}
    return [*regions, [module for module in model.modules() if module not in within]]


def _is_taken(layer: nn.Module, later: list[nn.Module]) -> bool:
    """Return whether a norm or another layer takes the output of a layer."""
    _, size = features(layer)
    if later and is_norm(later[0]) and next(later[0].parameters(recurse=False)).numel() == size:
        return True
    return any(
        taken == size or (isinstance(layer, _ConvNd) and not isinstance(other, _ConvNd) and taken % size == 0)
        for other in later
        if isinstance(other, PRODUCTS)
        for taken in [features(other)[0]]
    )


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
