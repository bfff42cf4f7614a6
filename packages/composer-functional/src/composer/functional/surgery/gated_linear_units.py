"""Gated linear units in the feed-forward blocks of transformers (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.functional.checks import check_flags
from composer.functional.layers.gated_linear_units import GatedLinearUnit, check_activation
from composer.functional.surgery.architectures import find_loaded_class
from composer.functional.surgery.replace import SurgeryReport, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_gated_linear_units"]


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    act_fn: Callable[[Tensor], Tensor] | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> SurgeryReport:
    """Put a gate into every feed-forward block of a transformer, in place (arXiv:2002.05202).

    ``W2(act_fn(W1 x))`` becomes ``W2(act_fn(W1 x) * V x)``: each first layer ``W1`` and its activation become a
    :class:`GatedLinearUnit`. ``W1`` stays inside as ``gated_layer`` with its weight, the optimizers' state for it and
    its hooks. ``V``, ``non_gated_layer``, is new: its weight is drawn from a normal distribution with mean 0 and the
    standard deviation of the weight of ``W1``, its bias is 0. The second layer, dropout, norm and residual connection
    are not touched. The inner size stays, so that the block has half as many parameters again; the paper, to compare at
    equal size, takes two thirds of it.

    Known are GPT-2 and BERT of Transformers, in any of their classes, alone or inside another model. Llama is gated by
    itself. The second time nothing changes. The models can be compiled without a graph break and exported.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model; the new parameters join the group of what they stand beside.
        act_fn: The activation, a module or a function of one tensor; the model's own if ``None``.
        gated_layer_bias: Whether ``W1`` keeps its bias; otherwise that parameter is gone.
        non_gated_layer_bias: Whether ``V`` has a bias.
        generator: Source of randomness for the new weights, a CPU generator; torch's default one if ``None``.

    Returns:
        A report of what was replaced; empty the second time.

    Raises:
        TypeError: ``model`` is not a module, or ``act_fn`` is a class or cannot be called.
        ValueError: The architecture is unknown or gated by itself, or its layers were replaced by other surgery.
        RuntimeError: ``generator`` is not on the CPU (raised by torch).

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
        >>> print(apply_gated_linear_units(model))
        1 module replaced
          encoder.layer.0.intermediate: BertIntermediate -> GatedLinearUnit
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_flags(gated_layer_bias=gated_layer_bias, non_gated_layer_bias=non_gated_layer_bias)
    if act_fn is not None:
        check_activation(act_fn)

    def gate(layer: nn.Module, own_activation: Callable[[Tensor], Tensor]) -> GatedLinearUnit:
        beside = _make_layer_beside(layer, non_gated_layer_bias, generator)
        unit = GatedLinearUnit(layer, beside, own_activation if act_fn is None else act_fn)
        if not gated_layer_bias:
            _drop_bias(layer)
        return unit

    policies: dict[type[nn.Module], ReplacementFunction] = {}
    intermediate = find_loaded_class("transformers.models.bert.modeling_bert", "BertIntermediate")
    blocks = _find_gpt2_blocks(model)
    _check_plain([block.c_fc for block in blocks])
    if intermediate is not None:
        found: list[Any] = [module for module in model.modules() if isinstance(module, intermediate)]
        _check_plain([block.dense for block in found])
        policies[intermediate] = lambda block, _: gate(block.dense, block.intermediate_act_fn)
    activations = {id(block.c_fc): block.act for block in blocks}
    for block in blocks:
        policies[type(block.c_fc)] = lambda layer, _: (
            gate(layer, activations[id(layer)]) if id(layer) in activations else None
        )
    report = replace_module_classes(model, policies, optimizers)
    for block in blocks:
        block.act = nn.Identity().train(block.training)  # the activation is in the unit
    if not report and not any(isinstance(module, GatedLinearUnit) for module in model.modules()):
        raise ValueError(_explain_unknown(model))
    return report


def _find_gpt2_blocks(model: nn.Module) -> list[Any]:
    cls = find_loaded_class("transformers.models.gpt2.modeling_gpt2", "GPT2MLP")
    blocks: list[Any] = [module for module in model.modules() if cls is not None and isinstance(module, cls)]
    return [block for block in blocks if not isinstance(block.c_fc, GatedLinearUnit)]


def _check_plain(layers: Sequence[nn.Module]) -> None:
    """Refuse layers that other surgery has changed, before anything is replaced."""
    for layer in layers:
        if not isinstance(layer, nn.Linear) and not (hasattr(layer, "nf") and hasattr(layer, "nx")):
            raise ValueError(
                f"The feed-forward layers must be as the model's author made them, got a {type(layer).__name__}. "
                "Apply gated linear units first, other surgery on these layers afterwards."
            )


def _make_layer_beside(layer: Any, bias: bool, generator: torch.Generator | None) -> nn.Module:
    """Make a layer of the same shape, with a weight of the same spread."""
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
    names = ("gate_proj", "up_proj", "down_proj")  # of Llama and those that took over its blocks
    if any(all(hasattr(module, each) for each in names) for module in model.modules()):
        return f"model must have feed-forward blocks without a gate, got a {name}, whose blocks have one already."
    return (
        f"model must hold the feed-forward blocks of GPT-2 or BERT (Transformers), got a {name} without. For others "
        "call replace_module_classes with a function that returns GatedLinearUnit(layer, another_layer, activation)."
    )
