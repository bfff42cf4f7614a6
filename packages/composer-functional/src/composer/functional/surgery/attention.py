"""Changes of attention in decoders: QK-norm, gates on its output, and the values of the first layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer.functional.checks import (
    check_flags,
    check_interval,
    check_modules,
    check_string,
    check_whole,
    is_module_class,
)
from composer.functional.layers.attention import (
    GatedAttention,
    HandOver,
    Heads,
    MixedValues,
    NormalizedHeads,
    begin_pass,
)
from composer.functional.layers.derived import plain_class
from composer.functional.surgery.architectures import find_described
from composer.functional.surgery.optimizers import (
    check_optimizers,
    find_holders,
    join_group,
    update_params_in_optimizer,
)
from composer.functional.surgery.replace import SurgeryReport, replace_layers


@dataclass(frozen=True)
class AttentionLayout:
    """The layers of an attention of your own, by their attributes.

    A layer of queries, keys and values has the same name three times.

    Attributes:
        module: The class of the attention. Its first argument is the hidden states.
        head_dim: The features of a head.
        query: The projection of queries, a linear layer.
        key: The one of keys.
        value: The one of values.
        output: All layers that the attention calls after the product of its weights and values, in their order.
        interleaved: In one layer of all three, whether a head's query, key and value follow each other, as in GPT-NeoX;
            otherwise all queries come first, then all keys.

    Raises:
        TypeError: A value has another type.
        ValueError: ``head_dim`` is less than 1, a name is empty or missing, or only two of the three are one layer.

    Example:
        >>> layout = AttentionLayout(nn.Module, 64, "qkv", "qkv", "qkv", output=("proj", "dropout"))
        >>> layout.output
        ('proj', 'dropout')
    """

    module: type[nn.Module]
    head_dim: int
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: tuple[str, ...] = ("o_proj",)
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_whole("head_dim", self.head_dim, 1)
        check_flags(interleaved=self.interleaved)
        if not is_module_class(self.module) or not isinstance(self.output, tuple):
            raise TypeError(
                f"module must be a class of modules and output a tuple, got {self.module!r} and {self.output!r}."
            )
        for name in ("query", "key", "value"):
            check_string(name, getattr(self, name))
        if len({self.query, self.key, self.value}) == 2 or not self.output:
            raise ValueError(
                "query, key and value must be three layers or one, and output at least one, got "
                f"{self.query!r}, {self.key!r}, {self.value!r} and {self.output!r}."
            )


def apply_qk_norm(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    layout: AttentionLayout | None = None,
    *,
    eps: float = 1e-6,
) -> SurgeryReport:
    """Normalize the queries and keys of each head in every attention of a decoder, in place (arXiv:2010.04245).

    ``q = weight * q / sqrt(mean(q^2) + eps)``, likewise for keys, before rotary embeddings, as in Qwen3 and Gemma 3.
    The weights, of the size of a head, are new and begin with 1. No logit exceeds ``sqrt(head_dim)`` then, so it is no
    change that a trained model ignores.

    **Decoders of Transformers** are detected: GPT-2, GPT-NeoX, and Llama with all models whose attention has its
    layers, such as Mistral, Qwen2, Gemma and SmolLM3, also with fewer heads of keys and values. Others need a
    ``layout``. A second call changes nothing. Layers of LoRA are part of what is normalized if they are added before;
    afterwards they need the names of the inner layers, such as ``"q_proj.layer"``.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model. The new weights join the group of another vector, such as a norm's weight.
        layout: The layers of your attention.
        eps: What is added to the mean square, more than 0.

    Returns:
        A report of the replaced projections; empty on a second call.

    Raises:
        TypeError: ``model`` is not a module, or ``eps`` is not a number.
        ValueError: No attention is found, or it normalizes queries already, or ``eps`` is out of range.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> print(apply_qk_norm(GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))))
        1 module replaced
          h.0.attn.c_attn: Conv1D -> NormalizedHeads
    """
    check_interval("eps", eps, 0, float("inf"), "It is added to a mean square.", open_low=True, open_high=True)
    found = _find_attentions(model, layout)
    normed = [
        name for _, (one, _) in found.items() for name in ("q_norm", "qk_norm", "q_layernorm") if hasattr(one, name)
    ]
    if normed:
        raise ValueError(f"model must not normalize its queries already, got attention with {normed[0]!r}.")
    makers: dict[nn.Module, Callable[[Any], nn.Module]] = {}
    for attention, each in found.values():
        count = 1 if _heads(each).axis is None else 2
        for layer in (getattr(attention, each.query), getattr(attention, each.key)):
            if not _contains(layer, NormalizedHeads):
                makers[layer] = partial(NormalizedHeads, heads=_heads(each), count=count, eps=eps)
    return _replace(model, makers, optimizers)


def apply_gated_attention(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    layout: AttentionLayout | None = None,
    *,
    elementwise: bool = True,
    initial_gate: float = 0.5,
) -> SurgeryReport:
    """Multiply the heads of every attention of a decoder by gates, in place (arXiv:2505.06708).

    ``output = W_o (heads * sigmoid(W_g x + log(initial_gate / (1 - initial_gate))))``, where ``x`` is the input of the
    attention. ``W_g`` is new and begins with 0: at the start each attention has ``initial_gate`` times its output
    (without biases). The paper's gates begin around 0.5; 0.99 changes a trained model little.

    **Decoders of Transformers** are detected as by :func:`apply_qk_norm`. A second call changes nothing. The output
    layers have other names in the saved weights, such as ``self_attn.output.o_proj``.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model. ``W_g`` joins the group of a matrix of the same attention.
        layout: The layers of your attention.
        elementwise: Whether each feature of a head has a gate; otherwise each head has one.
        initial_gate: The gate at the start, between 0 and 1.

    Returns:
        A report of the replaced attentions; empty on a second call.

    Raises:
        TypeError: ``model`` is not a module, or another value has another type.
        ValueError: No attention is found, or ``initial_gate`` is out of range.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> print(apply_gated_attention(GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))))
        1 module replaced
          h.0.attn: GPT2Attention -> GatedGPT2Attention
    """
    check_flags(elementwise=elementwise)
    check_interval("initial_gate", initial_gate, 0, 1, "It is a sigmoid.", open_low=True, open_high=True)
    makers: dict[nn.Module, Callable[[Any], nn.Module]] = {}
    for attention, each in _find_attentions(model, layout).values():
        if isinstance(attention, GatedAttention):
            continue
        inner, (hidden, _) = _features(getattr(attention, each.output[0]))[0], _features(getattr(attention, each.query))
        heads = inner // each.head_dim
        gate = nn.Linear(hidden, inner if elementwise else heads, bias=False)
        nn.init.zeros_(gate.weight)
        settings: dict[str, Any] = {
            "output": each.output,
            "num_heads": heads,
            "gate": gate,
            "initial_gate": initial_gate,
        }
        makers[attention] = partial(GatedAttention.around, **settings)
    return _replace(model, makers, optimizers)


def apply_value_residual(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    layout: AttentionLayout | None = None,
    *,
    initial_weight: float = 0.5,
) -> SurgeryReport:
    """Mix the values of the first attention into those of all later ones of a decoder, in place (arXiv:2410.17897).

    ``values = own * values + first * first_values``, with two new numbers for each later layer, which begin with
    ``1 - initial_weight`` and ``initial_weight``. With 0 the model computes the same at the start.

    **Decoders of Transformers** are detected as by :func:`apply_qk_norm`. A second call changes nothing. In the forward
    pass, blocks get the first values as an argument ``first_values``, which the blocks of your own model must pass on
    to a ``layout``.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model. The new numbers join the group of another vector, such as a norm's weight.
        layout: The layers of your attention.
        initial_weight: The weight of the first values at the start, from 0 to 1.

    Returns:
        A report of the replaced projections; empty on a second call.

    Raises:
        TypeError: ``model`` is not a module, or ``initial_weight`` is not a number.
        ValueError: No attention is found, ``initial_weight`` is out of range, or a model has a single layer.
        RuntimeError: In the forward pass: first values do not arrive, or reentrant checkpointing computes them.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> print(apply_value_residual(GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))))
        2 modules replaced
          h.0.attn.c_attn: Conv1D -> MixedValues
          h.1.attn.c_attn: Conv1D -> MixedValues
    """
    check_interval("initial_weight", initial_weight, 0, 1, "It is the weight of the first values.")
    stacks: dict[str, list[tuple[Any, AttentionLayout]]] = {}
    found = _find_attentions(model, layout)
    for path, pair in found.items():
        parts = path.split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()] or [len(parts)]
        inner = (one for one in numbers[::-1] if sum(path.split(".")[:one] == parts[:one] for path in found) > 1)
        stacks.setdefault(".".join(parts[: max(next(inner, numbers[0]) - 1, 0)]), []).append(pair)
    makers: dict[nn.Module, Callable[[Any], nn.Module]] = {}
    hooks: dict[nn.Module, Callable[..., Any]] = {}
    for path, pairs in stacks.items():
        sizes = {_features(getattr(attention, each.value))[1] for attention, each in pairs}
        if len(pairs) < 2 or len(sizes) > 1:
            raise ValueError(
                f"The layers of {path or 'the model'!r} must be two or more with equally many values, got {len(pairs)} "
                f"with {', '.join(map(str, sorted(sizes)))} features."
            )
        if _contains(getattr(pairs[0][0], pairs[0][1].value), MixedValues):
            continue
        hooks |= {model.get_submodule(path): begin_pass} | {one: HandOver(each.value) for one, each in pairs}
        for place, (attention, each) in enumerate(pairs):
            weight = initial_weight if place else None
            makers[getattr(attention, each.value)] = partial(MixedValues, heads=_heads(each), initial_weight=weight)
    report = _replace(model, makers, optimizers)
    for module, hook in hooks.items():
        module.register_forward_pre_hook(hook, with_kwargs=True)
    return report


def _find_attentions(model: nn.Module, layout: AttentionLayout | None) -> dict[str, tuple[Any, AttentionLayout]]:
    """Return the attentions of a decoder with their layouts, by their paths."""
    check_modules(model=model)
    if layout is not None:
        own = find_described(model, "layout.module", layout.module)
        missing = [
            name for name in (layout.query, layout.key, layout.value, *layout.output) if not hasattr(own[0][1], name)
        ]
        if missing:
            raise ValueError(
                f"layout must name layers of {layout.module.__name__}, got {missing[0]!r}, which is missing."
            )
        fused, output = getattr(own[0][1], layout.query), getattr(own[0][1], layout.output[0])
        if layout.query == layout.value and isinstance(output, nn.Module):  # no more one below gates
            features, inner = _features(fused)[1], _features(output)[0]
            if features != 3 * inner:
                raise ValueError(
                    f"layout must name a layer with as many queries as keys and values, got {layout.query!r} with "
                    f"{features} features for {inner} of {layout.output[0]!r}. Use three layers."
                )
        return {path: (attention, layout) for path, attention in own}
    known = {path: (module, _known_layout(module)) for path, module in model.named_modules()}
    found = {path: (module, own) for path, (module, own) in known.items() if own is not None}
    if not found:
        raise ValueError(
            "model must hold the attention of a decoder like GPT-2, GPT-NeoX or Llama (Transformers), got a "
            f"{type(model).__name__} without. Describe an attention of your own by layout=AttentionLayout(...)."
        )
    return found


def _known_layout(module: Any) -> AttentionLayout | None:
    """Return the layout of an attention of Transformers, or None."""
    cls, head_dim = plain_class(module), getattr(module, "head_dim", getattr(module, "head_size", None))
    if not isinstance(head_dim, int) or getattr(module, "is_causal", False) is not True:
        return None
    if cls.__name__ == "GPT2Attention":
        return AttentionLayout(cls, head_dim, "c_attn", "c_attn", "c_attn", ("c_proj", "resid_dropout"))
    if cls.__name__ == "GPTNeoXAttention":
        fused = "query_key_value"
        return AttentionLayout(cls, head_dim, fused, fused, fused, ("dense",), interleaved=True)
    is_like_llama = all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    return AttentionLayout(cls, head_dim) if is_like_llama else None


def _heads(layout: AttentionLayout) -> Heads:
    """Return how the output of a projection is divided into heads."""
    axis = -2 if layout.interleaved else -3
    return Heads(layout.head_dim, axis if layout.query == layout.value else None)


def _contains(layer: nn.Module, cls: type[nn.Module]) -> bool:
    return any(isinstance(each, cls) for each in layer.modules())


def _features(layer: Any) -> tuple[int, int]:
    """Return the features of the input and output of a linear layer, or Conv1D of Transformers."""
    while isinstance(layer, (NormalizedHeads, MixedValues)):
        layer = layer.layer
    return (layer.nx, layer.nf) if hasattr(layer, "nf") else (layer.in_features, layer.out_features)


def _replace(
    model: nn.Module,
    makers: Mapping[nn.Module, Callable[[Any], nn.Module]],
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> SurgeryReport:
    """Replace modules; new parameters join the group of the nearest parameter with as many dimensions."""
    if optimizers is not None:
        check_optimizers(optimizers, model)
    before = [*model.named_parameters()]
    policies = dict.fromkeys(map(type, makers), lambda layer, _: makers[layer](layer))
    report = replace_layers(model, policies, makers.__contains__)
    if optimizers is not None and report:
        former = {id(parameter) for _, parameter in before}
        after = [*model.named_parameters()]
        kept = [pair for pair in after if id(pair[1]) in former]
        update_params_in_optimizer(before, kept, optimizers)
        holders = find_holders(optimizers)
        held = [pair for pair in kept if id(pair[1]) in holders]
        for name, parameter in after if held else ():
            if id(parameter) not in former:
                source = min(held, key=partial(_unlikeness, name, parameter))
                join_group(source, (name, parameter), optimizers)
    return report


def _unlikeness(name: str, parameter: nn.Parameter, pair: tuple[str, nn.Parameter]) -> tuple[bool, bool, bool, int]:
    """Return what is less the more a parameter of an optimizer has in common with a new one."""
    own, parts = name.split("."), pair[0].split(".")
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(own, parts, strict=False)))
    return pair[1].ndim != parameter.ndim, not pair[1].requires_grad, parts[-1] != own[-1], -shared
