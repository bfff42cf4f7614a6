"""Depth stacking: grow a trained model to a deeper one by copies of its blocks (Du et al. 2024, arXiv:2405.15319)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer.functional.checks import check_choice, check_modules, check_whole, few
from composer.functional.dtensors import is_sharded
from composer.functional.surgery.optimizers import check_optimizers, update_params_in_optimizer
from composer.functional.surgery.replace import Replacement, SurgeryReport
from composer.functional.surgery.structure import find_blocks

_DEPTH = re.compile("(n|num|number)_?(of_|hidden_|encoder_|decoder_|transformer_)?(layer|block)s?|depth")
"""The names under which a configuration, or a module around the list, has the number of blocks."""


def apply_depth_stacking(
    model: nn.Module,
    factor: int = 2,
    order: str = "stack",
    blocks: str | None = None,
    zero_layers: Sequence[str] = (),
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Make a model ``factor`` times as deep by copies of its blocks, in place (arXiv:2405.15319).

    ``"stack"`` repeats all blocks, ``1 2 3 1 2 3``, the G_stack of the paper; ``"interleave"`` repeats each block,
    ``1 1 2 2 3 3``. Outputs change, unless ``zero_layers`` makes the copies identities: the layers that end the
    residual branches of a block, whose weights and biases are 0 in the copies (arXiv:2401.02415). These are
    ``["self_attn.o_proj", "mlp.down_proj"]`` of Llama, ``["attn.c_proj", "mlp.c_proj"]`` of GPT-2, and
    ``["self_attn.out_proj", "linear2"]`` of ``torch.nn.TransformerEncoderLayer`` with ``norm_first=True``.

    A copy has its own weights, and what a block shares with the rest of the model, such as a configuration, stays
    shared. Numbers of blocks, such as ``num_layers`` and ``n_block``, are updated in the modules around the list and
    their ``config``, an object or a dictionary, with lists of one entry for each block, such as ``layer_types``; so is
    each ``layer_idx``, which caches of keys and values need.

    Each new parameter joins the groups of the one that it copies, with a copy of its state, such as momentum and the
    moments and steps of Adam. Those of ``zero_layers`` start without state.

    Args:
        model: The model; **changed in place**.
        factor: How many times as many blocks the model has afterwards, at least 2.
        order: ``"stack"`` or ``"interleave"``.
        blocks: The path of the list of blocks, such as ``"model.layers"``; if None, that of the modules that occur
            several times in one list, without lists of lists.
        zero_layers: The names, within a block, of the layers that are 0 in the copies.
        optimizers: Optimizers of the model, which keep their state by parameter.

    Returns:
        A report of the new blocks; empty if ``blocks`` is None and the model has no repeated blocks.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: ``factor`` or ``order`` is out of range, a name does not exist, the blocks are not equal or in
            several lists, the model is sharded, or it has an encoder and a decoder.

    Example:
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)))
        >>> print(apply_depth_stacking(model))
        2 modules replaced
          2: copy of 0 -> TransformerEncoderLayer
          3: copy of 1 -> TransformerEncoderLayer
    """
    check_whole("factor", factor, 2, "The model has so many times as many blocks.")
    check_choice("order", order, "stack", "interleave")
    check_modules(model=model)
    listed = [] if optimizers is None else check_optimizers(optimizers, model)
    path = find_stack(model, blocks, zero_layers)
    if path is None:
        return SurgeryReport()
    holder: Any = model.get_submodule(path)
    old = list(holder)
    depth = len(old)
    sources = list(range(depth)) * factor if order == "stack" else [one for one in range(depth) for _ in range(factor)]
    firsts = [sources.index(source) for source in range(depth)]
    named = [pair for place, block in enumerate(old) for pair in _named(path, place, block)]
    places = list(enumerate(sources))
    new = [old[source] if place == firsts[source] else _copied(model, old[source]) for place, source in places]
    _set_depths(model, path, sources)
    for place, block in enumerate(new):
        holder.register_module(str(place), block)
        for module in block.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = place
    moved = [pair for place, block in zip(firsts, old, strict=True) for pair in _named(path, place, block)]
    update_params_in_optimizer(named, moved, listed)
    report = []
    for place, source in places:
        if place != firsts[source]:
            zeroed = [one for name in zero_layers for one in new[place].get_submodule(name).parameters()]
            for parameter in zeroed:
                nn.init.zeros_(parameter)
            pairs = zip(_named(path, firsts[source], old[source]), _named(path, place, new[place]), strict=True)
            _add_to_optimizers(pairs, {*zeroed}, listed)
            name, origin = (f"{path}.{one}".removeprefix(".") for one in (place, source))
            report.append(Replacement((name,), f"copy of {origin}", type(new[place]).__name__))
    return SurgeryReport(tuple(report))


def find_stack(model: nn.Module, blocks: str | None = None, zero_layers: Sequence[str] = ()) -> str | None:
    """Return the path of the list of blocks that can be repeated; None if there are no repeated blocks.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The list cannot be repeated; see :func:`apply_depth_stacking`.
    """
    check_modules(model=model)
    if isinstance(zero_layers, str):
        raise TypeError(f"zero_layers must be a list of names, got {zero_layers!r}.")
    if is_sharded(model):
        raise ValueError("model must not be sharded yet, got one that is: add the blocks before FSDP2 splits it.")
    if any(getattr(getattr(each, "config", None), "is_encoder_decoder", False) for each in model.modules()):
        raise ValueError(
            "model must be one stack of blocks, got an encoder and a decoder, which count them separately."
        )
    paths = (
        list(dict.fromkeys(name.rpartition(".")[0] for name, _ in find_blocks(model))) if blocks is None else [blocks]
    )
    if not paths:
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    holder: Any = modules.get(paths[0])
    if len(paths) > 1 or not isinstance(holder, (nn.ModuleList, nn.Sequential)):
        lists = [name for name, one in modules.items() if isinstance(one, (nn.ModuleList, nn.Sequential))]
        raise ValueError(
            f"blocks must be the path of the one list to repeat, got {blocks!r}. The lists of "
            f"{type(model).__name__} are {few([*map(repr, lists)]) or 'none'}."
        )
    members = list(holder)
    layouts = [(type(block), [(name, one.shape) for name, one in block.state_dict().items()]) for block in members]
    different = next((place for place, layout in enumerate(layouts) if layout != layouts[0]), None)
    if different is not None or not members or len({*members}) < len(members):
        raise ValueError(
            f"blocks must be a list of equal and separate modules, got {paths[0]!r}, whose {different or 0}. member "
            "differs. Put the blocks into a list of their own, and change single ones afterwards (ValueResidual)."
        )
    layers = [name for name, one in members[0].named_modules() if any(True for _ in one.parameters(recurse=False))]
    if unknown := [name for name in zero_layers if name not in dict(members[0].named_modules())]:
        raise ValueError(f"zero_layers must be names within a block, got {unknown[0]!r}. Its layers are {few(layers)}.")
    return paths[0]


def _named(path: str, place: int, block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a block with their names in the model, if it is at a place of the list."""
    return ((f"{path}.{place}.{name}".removeprefix("."), parameter) for name, parameter in block.named_parameters())


def _copied(model: nn.Module, block: nn.Module) -> nn.Module:
    """Return a copy of a block; what modules outside refer to, too, is not copied."""
    inside = list(block.modules())
    shared = {id(one) for module in {*model.modules()}.difference(inside) for one in _references(module)}
    return copy.deepcopy(block, {id(one): one for module in inside for one in _references(module) if id(one) in shared})


def _references(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        yield from value.values() if name in {"_parameters", "_buffers", "_modules"} else (value,)


def _set_depths(model: nn.Module, path: str, sources: Sequence[int]) -> None:
    """Set the number of blocks, and lists with an entry for each, where the modules around them state them."""
    depth, parts = len({*sources}), path.split(".")[:-1]
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    configs = {id(each.config): each.config for each in around if hasattr(each, "config")}
    for owner in (*configs.values(), *around):
        # Not by setattr, as a configuration may be immutable.
        values = owner if isinstance(owner, MutableMapping) else getattr(owner, "__dict__", {})
        for name, value in list(values.items()):
            if isinstance(value, (list, tuple)) and "layer" in name and len(value) == depth:
                values[name] = type(value)(value[source] for source in sources)
            elif type(value) is int and value == depth and _DEPTH.fullmatch(name):
                values[name] = len(sources)


def _add_to_optimizers(
    pairs: Iterable[tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]],
    zeroed: set[nn.Parameter],
    optimizers: Sequence[Optimizer],
) -> None:
    """Add each new parameter to the groups of the one that it copies, with a copy of its state."""
    for source, added in pairs:
        if source[1] is added[1]:
            continue
        update_params_in_optimizer([source], [source, added], optimizers)
        for optimizer in optimizers:
            if source[1] in optimizer.state and added[1] not in zeroed:
                optimizer.state[added[1]] = copy.deepcopy(optimizer.state[source[1]])
