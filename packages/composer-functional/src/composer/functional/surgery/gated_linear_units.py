"""Gated linear units in the feed-forward blocks of transformers (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import check_flags, check_modules
from composer.functional.layers.gated_linear_units import GatedLinearUnit, check_activation
from composer.functional.surgery.architectures import BERT, GPT2, find_described, find_instances
from composer.functional.surgery.replace import SurgeryReport, replace_module_classes


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    act_fn: Callable[[Tensor], Tensor] | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    *,
    feed_forward_module: type[nn.Module] | None = None,
    first_layer_attribute: str | None = None,
    activation_attribute: str | None = None,
    generator: torch.Generator | None = None,
) -> SurgeryReport:
    """Add a gate to every feed-forward block of a transformer, in place (arXiv:2002.05202).

    ``W2(act_fn(W1 x))`` becomes ``W2(act_fn(W1 x) * V x)``: each first layer ``W1`` and its activation become a
    :class:`GatedLinearUnit`. ``W1`` becomes its ``gated_layer``, with its weight, optimizer state and hooks. ``V``,
    the ``non_gated_layer``, is new: its weight is drawn from a normal distribution with mean 0 and the standard
    deviation of the weight of ``W1``, its bias is 0. The second layer, dropout, norm and residual connection do not
    change. The inner size does not change either, so the block gets 50% more parameters; the paper reduces the inner
    size to two thirds for a comparison at equal size.

    **GPT-2 and BERT of Transformers** are detected, in any of their classes, alone or inside another model. Llama
    already has gates. A second call changes nothing. The models can be compiled without a graph break and exported.

    **Other models** need all of ``feed_forward_module``, ``first_layer_attribute``, ``activation_attribute``: a class
    whose ``forward`` calls its first layer and then its activation through these attributes.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model. The new parameters join the group of ``W1``.
        act_fn: The activation, a module or a function of one tensor; the model's own if ``None``.
        gated_layer_bias: Whether ``W1`` keeps its bias; otherwise that parameter is removed.
        non_gated_layer_bias: Whether ``V`` has a bias.
        feed_forward_module: The class of your feed-forward block.
        first_layer_attribute: Its attribute for ``W1``, a ``torch.nn.Linear``, such as ``"up"``.
        activation_attribute: Its attribute for the activation, which becomes a ``torch.nn.Identity``.
        generator: Source of randomness for the new weights, a CPU generator; torch's default one if ``None``.

    Returns:
        A report of the replaced layers; empty on a second call.

    Raises:
        TypeError: ``model`` is not a module, ``act_fn`` is a class or not callable, or ``feed_forward_module`` is not a
            class of modules.
        ValueError: The architecture is unknown or already has gates, other surgery has replaced its layers, or the
            description of your block is incomplete or matches no module.
        RuntimeError: ``generator`` is not on the CPU (raised by torch).

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
        >>> print(apply_gated_linear_units(model))
        1 module replaced
          encoder.layer.0.intermediate: BertIntermediate -> GatedLinearUnit
    """
    check_modules(model=model)
    check_flags(gated_layer_bias=gated_layer_bias, non_gated_layer_bias=non_gated_layer_bias)
    if act_fn is not None:
        check_activation(act_fn)

    def gate(layer: nn.Module, own_activation: Callable[[Tensor], Tensor]) -> GatedLinearUnit:
        beside = _make_layer_beside(layer, non_gated_layer_bias, generator)
        unit = GatedLinearUnit(layer, beside, own_activation if act_fn is None else act_fn)
        if not gated_layer_bias:
            _drop_bias(layer)
        return unit

    first, activation = "c_fc", "act"
    intermediates: list[Any] = []
    own = (feed_forward_module, first_layer_attribute, activation_attribute)
    if any(each is not None for each in own):
        if feed_forward_module is None or first_layer_attribute is None or activation_attribute is None:
            raise ValueError(
                "A feed-forward block of your own must be described by all of feed_forward_module, "
                f"first_layer_attribute and activation_attribute, got {own!r}."
            )
        first, activation = first_layer_attribute, activation_attribute
        blocks: list[Any] = _find_own(model, feed_forward_module, first, activation)
    else:
        blocks = find_instances(model, GPT2, "GPT2MLP")
        intermediates = find_instances(model, BERT, "BertIntermediate")
    blocks = [block for block in blocks if not isinstance(getattr(block, first), GatedLinearUnit)]
    # What a unit replaces, with the first layer and the activation: the first layer, or in BERT a module of both.
    units = {getattr(block, first): (getattr(block, first), getattr(block, activation)) for block in blocks}
    units |= {block: (block.dense, block.intermediate_act_fn) for block in intermediates}
    _check_plain([layer for layer, _ in units.values()])

    def replace(module: nn.Module, _: int) -> GatedLinearUnit | None:
        return gate(*units[module]) if module in units else None

    report = replace_module_classes(model, dict.fromkeys(map(type, units), replace), optimizers)
    for block in blocks:
        setattr(block, activation, nn.Identity().train(block.training))  # the unit applies the activation
    if not report and not any(isinstance(module, GatedLinearUnit) for module in model.modules()):
        raise ValueError(_explain_unknown(model))
    return report


def _find_own(model: nn.Module, cls: type[nn.Module], *attributes: str) -> list[nn.Module]:
    blocks = [block for _, block in find_described(model, "feed_forward_module", cls)]
    for name in attributes:
        if not callable(getattr(blocks[0], name, None)):
            raise ValueError(  # noqa: TRY004 (the name itself is a str)
                f"first_layer_attribute and activation_attribute must be attributes of {cls.__name__} that its forward "
                f"calls, got {name!r}, which is missing or not callable."
            )
    return blocks


def _check_plain(layers: Sequence[nn.Module]) -> None:
    """Raise an error for layers that other surgery has changed, before anything is replaced."""
    for layer in layers:
        if not isinstance(layer, nn.Linear) and not (hasattr(layer, "nf") and hasattr(layer, "nx")):
            raise ValueError(
                f"The feed-forward layers must be those of the original model, got a {type(layer).__name__}. "
                "Apply gated linear units first, other surgery on these layers afterwards."
            )


def _make_layer_beside(layer: Any, bias: bool, generator: torch.Generator | None) -> nn.Module:
    """Make a layer of the same shape, with weights of the same standard deviation."""
    with torch.device("meta"):  # torch's own initialisation would draw from the global generator
        if isinstance(layer, nn.Linear):
            beside: Any = nn.Linear(layer.in_features, layer.out_features, bias)
        else:
            beside = type(layer)(layer.nf, layer.nx)
    weight = layer.weight.detach()
    exact = torch.promote_types(weight.dtype, torch.float32)
    draws = torch.randn(weight.shape, generator=generator, dtype=exact, device="cpu").to(weight.device)
    beside.weight = nn.Parameter((draws * weight.to(exact).std(correction=0)).to(weight.dtype))
    if beside.bias is not None:
        beside.bias = nn.Parameter(weight.new_zeros(beside.bias.shape))
    if not bias:
        _drop_bias(beside)
    return beside  # type: ignore[no-any-return]


def _drop_bias(layer: Any) -> None:
    if isinstance(layer, nn.Linear):
        layer.register_parameter("bias", None)
    elif isinstance(layer.bias, nn.Parameter):
        # Conv1D of Transformers always adds its bias.
        zeros = torch.zeros_like(layer.bias.detach())
        del layer.bias
        layer.register_buffer("bias", zeros, persistent=False)


def _explain_unknown(model: nn.Module) -> str:
    name = type(model).__name__
    names = ("gate_proj", "up_proj", "down_proj")  # of Llama and the models that use its blocks
    if any(all(hasattr(module, each) for each in names) for module in model.modules()):
        return f"model must have feed-forward blocks without a gate, got a {name}, whose blocks have one already."
    return (
        f"model must hold the feed-forward blocks of GPT-2 or BERT (Transformers), got a {name} without. Describe a "
        "block of your own by feed_forward_module, first_layer_attribute and activation_attribute."
    )
