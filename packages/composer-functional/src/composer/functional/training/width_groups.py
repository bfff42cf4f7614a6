"""Learning rates that stay the best when a model becomes wider or deeper (µP, arXiv:2203.03466; arXiv:2505.01618)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from composer.functional.checks import check_callables, check_flags, check_interval, check_modules, check_sizes
from composer.functional.surgery.structure import PRODUCTS
from composer.functional.training.parameter_groups import check_settings, undecayed

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_WITH_INPUTS_LAST = (*PRODUCTS, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def width_groups(
    model: nn.Module,
    base_model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    no_decay: Iterable[type[nn.Module]] = _EMBEDDINGS,
    embedding_exponent: float = 0.0,
    decoupled: bool = False,
) -> list[dict[str, Any]]:
    """Return groups for Adam with the learning rates of a small model, scaled to a wider one (arXiv:2203.03466).

    The rate of each matrix, also of the head, is ``lr * base_fan_in / fan_in``, and its weight decay is divided by the
    same factor, so that their product is the same in each width (for optimizers that multiply decay by rate, such as
    ``torch.optim.AdamW``). Input layers, biases, norms and layers of embeddings have ``lr``. So does each layer in
    each depth, if the model multiplies the output of each residual branch by ``base_depth / depth`` (CompleteP,
    arXiv:2505.01618). The model has to do the rest itself: initialize hidden matrices with the variance ``1 / fan_in``,
    the head with zeros or with the additional factor ``(base_fan_in / fan_in) ** 0.5``, and add heads of attention of
    the same size, or scale larger ones by ``1 / head_size``. A tied head has the rate of the embedding, and its logits
    are to be multiplied by ``base_width / width``.

    Args:
        model: The model to train.
        base_model: The same model in the width in which ``lr`` was chosen, and perhaps with fewer blocks; only names
            and shapes are used, so that it may be on the device ``"meta"``.
        lr: The learning rate of ``base_model``.
        weight_decay: Its weight decay, 0 or more. Parameters are left out as by :func:`parameter_groups`.
        no_decay: Types of modules whose own parameters do not decay.
        embedding_exponent: Embeddings have the rate ``lr * (base_width / width) ** embedding_exponent``: 0 in µP, 0.5
            in u-µP (arXiv:2407.17465).
        decoupled: Whether the optimizer does not multiply the decay by the rate, as ``DecoupledAdamW``: all groups have
            the same decay then.

    Returns:
        Groups with ``"params"``, ``"lr"`` and ``"weight_decay"``.

    Raises:
        TypeError: An argument has another type.
        ValueError: A number is out of range, ``base_model`` has other parameters, all parameters are frozen, or a
            matrix is not of a known layer, such as stacked experts, or positions that are an ``nn.Parameter``.

    Example:
        >>> def make(width):
        ...     return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2))
        >>> [(group["lr"], len(group["params"])) for group in width_groups(make(64), make(16), lr=0.1)]
        [(0.1, 4), (0.025, 2)]
    """
    types = check_settings(model, lr, weight_decay, no_decay, None)
    check_modules(base_model=base_model)
    check_flags(decoupled=decoupled)
    check_interval("embedding_exponent", embedding_exponent, 0, 1, "It is 0 in µP, and 0.5 in u-µP.")
    without, vectors = undecayed(model, types), undecayed(model, _EMBEDDINGS)
    base = {name: parameter.shape for name, parameter in base_model.named_parameters()}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        base_name = _base_name(name, parameter, base)
        shape, layer = base[base_name], _owner(model, name)
        factor = 1.0
        if isinstance(layer, _EMBEDDINGS):
            factor = (shape[1] / parameter.shape[1]) ** embedding_exponent
        elif id(parameter) not in vectors:
            factor = _fan_in(_owner(base_model, base_name), name, shape) / _fan_in(layer, name, parameter.shape)
        decay = 0.0 if id(parameter) in without else weight_decay if decoupled else weight_decay / factor
        group = groups.setdefault((factor, decay), {"params": [], "lr": lr * factor, "weight_decay": decay})
        group["params"].append(parameter)
    if not groups:
        raise ValueError(f"model must have parameters that require gradients, got none in {type(model).__name__}.")
    return list(groups.values())


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _base_name(name: str, parameter: Tensor, base: dict[str, torch.Size]) -> str:
    """Return the name in the base model, whose first block replaces those that it does not have."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts[:-2]) if part.isdigit()]
    names = [name, *(".".join([*parts[:place], "0", *parts[place + 1 :]]) for place in numbers)]
    found = next((one for one in names if one in base), None)
    if found is None or len(base[found]) != parameter.ndim:
        raise ValueError(
            f"base_model must have the parameters of model in another width, but {name!r} of the shape "
            f"{tuple(parameter.shape)} is {'missing' if found is None else tuple(base[found])} there. Make both by "
            "the same function of the width."
        )
    return found


def _fan_in(layer: Any, name: str, shape: torch.Size) -> int:
    if type(layer).__name__ == "Conv1D":  # of Transformers' GPT-2, with its inputs in the first dimension
        return shape[0]
    if isinstance(layer, _ConvTransposeNd):
        return shape[0] // layer.groups * math.prod(shape[2:])
    if isinstance(layer, _WITH_INPUTS_LAST):
        return math.prod(shape[1:])
    raise ValueError(
        f"{name!r} of the shape {tuple(shape)} is of {type(layer).__name__}, no layer with a known number of inputs, "
        "such as nn.Linear. Freeze it for this call, and add its group yourself: positions and embeddings have lr, a "
        "matrix, or each of a stack, lr * base_fan_in / fan_in."
    )


def activation_changes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_loss: Callable[[nn.Module], Tensor],
    steps: int = 4,
) -> dict[str, float]:
    """Return how much a few steps change the outputs of each layer: the coordinate check (arXiv:2203.03466, section D).

    Compare several widths: with the rates of :func:`width_groups` the changes are about the same in each, otherwise
    they grow or vanish with the width. The model is trained; use a copy. It should draw nothing, as dropout does.

    Args:
        model: The model.
        optimizer: Its optimizer.
        compute_loss: ``f(model) -> loss`` of the same batch each time.
        steps: The number of steps.

    Returns:
        The mean absolute change of the output of each layer with parameters, by name, in the order of their calls.

    Raises:
        TypeError: An argument has another type.
        ValueError: ``steps`` is less than 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> changes = activation_changes(model, optimizer, lambda model: model(torch.ones(1, 2)).sum(), steps=1)
        >>> round(changes["0"], 4)
        1.5
    """
    check_modules(model=model)
    check_callables(compute_loss=compute_loss)
    check_sizes(steps=steps)
    before = _outputs(model, compute_loss)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(compute_loss(model))
        optimizer.step()
    return {name: (after - before[name]).abs().mean().item() for name, after in _outputs(model, compute_loss).items()}


@torch.no_grad()
def _outputs(model: nn.Module, compute_loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def store(name: str, _: nn.Module, __: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor):
            found[name] = output.clone()

    layers = {
        name: layer for name, layer in model.named_modules() if any(True for _ in layer.parameters(recurse=False))
    }
    hooks = [layer.register_forward_hook(partial(store, name)) for name, layer in layers.items()]
    try:
        compute_loss(model)
    finally:
        for hook in hooks:
            hook.remove()
    return found
