"""ALiBi: attention that knows distances instead of positions (Press et al. 2021, arXiv:2108.12409)."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.functional.layers.alibi import AlibiBias, NoPositionEmbedding
from composer.functional.surgery.architectures import (
    ARCHITECTURES,
    AddBias,
    check_implementation,
    is_causal,
    lift_limits,
    stand_in_for_embedding,
)
from composer.functional.surgery.replace import Replacement, SurgeryReport, replace_module_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from composer.functional.surgery.replace import ReplacementFunction

__all__ = ["apply_alibi"]


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    *,
    heads_per_layer: int | None = None,
    position_embedding_attribute: str | None = None,
    attention_module: type[nn.Module] | None = None,
    attr_to_replace: str | None = None,
    alibi_attention: Callable[..., Any] | None = None,
    mask_replacement_function: Callable[[Any, int], Any] | None = None,
) -> SurgeryReport:
    """Take the positions out of a transformer, and let each head see keys the less the farther, in place.

    ``softmax(q·k / sqrt(d) - slope * |i - j|)`` for query ``i`` and key ``j`` (arXiv:2108.12409), with one slope per
    head (:func:`alibi_slopes`). A model trained so on short sequences works on longer ones.

    **GPT-2, BERT and Llama of Transformers**, in any of their classes, alone or inside another model, are found by
    themselves. What embedded positions, or rotated queries and keys, is replaced by what does nothing, and its
    parameter is gone from the model and the optimizers. Each self-attention gets an :class:`AlibiBias` as ``alibi`` and
    a hook that adds it to the mask, so that padding, packed sequences and caches work as before, with eager and with
    SDPA attention. BERT sees both sides alike. No sequence is too long afterwards; ``max_sequence_length`` is what the
    model's configuration says from then on (``max_position_embeddings``). The second time nothing changes. The models
    can be compiled without a graph break and exported.

    **Other models** take all of ``heads_per_layer``, ``attention_module``, ``attr_to_replace``, ``alibi_attention``:
    a method of each attention is replaced by a function of yours that has ``self.alibi(query_length, key_length)``
    at hand, the negative distances times the slopes, to add to its logits.

    Args:
        model: The model; **changed in place**.
        max_sequence_length: The longest sequence that the model is meant for, at least 1.
        optimizers: Optimizers of the model, which let the position embedding's parameter go.
        heads_per_layer: Your attention's number of heads.
        position_embedding_attribute: Path from the model to the ``torch.nn.Embedding`` of positions, as
            ``"transformer.wpe"``; ``None`` if there is none.
        attention_module: The class of your attention.
        attr_to_replace: The name of the method to be replaced.
        alibi_attention: The function to be that method; it is called with the module first.
        mask_replacement_function: Called with each attention and ``max_sequence_length`` when all else is done, to
            change in place what else depends on the length, as a mask that is stored. ``None`` if nothing does.

    Returns:
        A report of the embeddings that were replaced and the attentions that were changed; empty the second time.

    Raises:
        TypeError: ``model`` is not a module, ``max_sequence_length`` or ``heads_per_layer`` is not an integer,
            ``attention_module`` is not a class of modules, or ``mask_replacement_function`` returned another object.
        ValueError: The architecture is unknown, its attention has a kernel that takes no bias, as flash attention, a
            number is less than 1, or your own attention is described in part or is not in the model.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(n_positions=8, n_embd=16, n_layer=1, n_head=2))
        >>> print(apply_alibi(model, max_sequence_length=64))
        2 modules replaced
          wpe: Embedding -> NoPositionEmbedding
          h.0.attn: GPT2Attention -> GPT2Attention (ALiBi)
        >>> model(torch.arange(32)[None]).last_hidden_state.shape
        torch.Size([1, 32, 16])
    """
    _check(model, max_sequence_length)
    own = {
        "heads_per_layer": heads_per_layer,
        "attention_module": attention_module,
        "attr_to_replace": attr_to_replace,
        "alibi_attention": alibi_attention,
    }
    if all(each is None for each in (*own.values(), position_embedding_attribute, mask_replacement_function)):
        return _apply_to_known(model, max_sequence_length, optimizers)
    if heads_per_layer is None or attention_module is None or attr_to_replace is None or alibi_attention is None:
        missing = ", ".join(name for name, value in own.items() if value is None)
        raise ValueError(f"An attention of your own must be described by all of {', '.join(own)}; missing: {missing}.")
    attentions = _find_own(model, attention_module, attr_to_replace)
    embeddings = [] if position_embedding_attribute is None else [_get_embedding(model, position_embedding_attribute)]
    bias = AlibiBias(heads_per_layer, causal=False)  # what masks out is up to the function
    changed = _replace(model, [(each, stand_in_for_embedding(each)) for each in embeddings if each], optimizers)
    for _, attention in attentions:
        setattr(attention, attr_to_replace, MethodType(alibi_attention, attention))
        _attach(attention, bias)
    _forget_after(attentions)
    _set_length(model, attentions, max_sequence_length)
    if mask_replacement_function is not None:
        _replace_masks(attentions, mask_replacement_function, max_sequence_length)
    return _report(changed, attentions)


_Attentions = list[tuple[str, nn.Module]]


def _apply_to_known(
    model: nn.Module, max_sequence_length: int, optimizers: Optimizer | Sequence[Optimizer] | None
) -> SurgeryReport:
    found = [(architecture, architecture.find_attentions(model)) for architecture in ARCHITECTURES]
    if not any(attentions for _, attentions in found):
        raise ValueError(
            f"model must hold the attention of one of {', '.join(each.name for each in ARCHITECTURES)} (Transformers), "
            f"got a {type(model).__name__} without. Describe an attention of your own by heads_per_layer, "
            "attention_module, attr_to_replace and alibi_attention."
        )
    plain = [(architecture, _without_alibi(attentions)) for architecture, attentions in found]
    attentions = [pair for _, some in plain for pair in some]
    for _, attention in attentions:
        check_implementation(attention)
    positions = [pair for architecture, some in plain if some for pair in architecture.find_positions(model)]
    changed = _replace(model, positions, optimizers)
    biases: dict[tuple[int, bool], AlibiBias] = {}
    for architecture, some in plain:
        for _, attention in some:
            settings = architecture.num_heads(attention), is_causal(attention)
            _attach(attention, biases.setdefault(settings, AlibiBias(*settings)))
            attention.register_forward_pre_hook(AddBias.to(attention), with_kwargs=True)
    _forget_after(attentions)
    _set_length(model, attentions, max_sequence_length)
    if attentions:
        lift_limits(model, attentions, max_sequence_length)
    return _report(changed, attentions)


def _without_alibi(attentions: _Attentions) -> _Attentions:
    return [(path, each) for path, each in attentions if not isinstance(getattr(each, "alibi", None), AlibiBias)]


def _find_own(model: nn.Module, cls: type[nn.Module], method: str) -> _Attentions:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"attention_module must be a class of modules, got {cls!r}.")
    attentions = [(path, module) for path, module in model.named_modules() if isinstance(module, cls)]
    if not attentions:
        raise ValueError(f"attention_module must be a class that is in the model, got {cls.__name__}, which is not.")
    if not hasattr(attentions[0][1], method):
        raise ValueError(f"attr_to_replace must be an attribute of {cls.__name__}, got {method!r}, which it has not.")
    return _without_alibi(attentions)


def _get_embedding(model: nn.Module, path: str) -> nn.Embedding | None:
    """Return the embedding, or nothing if it is gone already."""
    try:
        embedding = model.get_submodule(path)
    except AttributeError:
        embedding = None
    if isinstance(embedding, NoPositionEmbedding):
        return None
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(  # noqa: TRY004 (the path, a text, is of the right type)
            f"position_embedding_attribute must be the path of a torch.nn.Embedding in the model, got {path!r}, "
            f"where there is {'nothing' if embedding is None else f'a {type(embedding).__name__}'}."
        )
    return embedding


def _replace(
    model: nn.Module,
    positions: list[tuple[nn.Module, nn.Module]],
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> SurgeryReport:
    replacements = {id(old): new for old, new in positions}
    policies: dict[type[nn.Module], ReplacementFunction] = {
        type(old): lambda module, _: replacements.get(id(module)) for old, _ in positions
    }
    return replace_module_classes(model, policies, optimizers)


def _attach(attention: nn.Module, bias: AlibiBias) -> None:
    bias.train(attention.training)
    attention.register_module("alibi", bias)


def _forget_after(attentions: _Attentions) -> None:
    """Let the last layer that has a bias drop it: kept until the next forward pass, it would be in the way."""
    last = {id(attention.alibi): attention for _, attention in attentions}
    for attention in last.values():
        attention.register_forward_hook(_forget)


def _forget(module: Any, _args: Any, _output: Any) -> None:
    if not torch.compiler.is_compiling():
        module.alibi.forget()


def _set_length(model: nn.Module, attentions: _Attentions, max_sequence_length: int) -> None:
    """Write the length into the configurations of the modules that hold the attentions."""
    changed = {id(attention) for _, attention in attentions}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "max_position_embeddings") and any(id(each) in changed for each in module.modules()):
            config.max_position_embeddings = max_sequence_length


def _replace_masks(
    attentions: _Attentions, mask_replacement_function: Callable[[Any, int], Any], max_sequence_length: int
) -> None:
    for _, attention in attentions:
        result = mask_replacement_function(attention, max_sequence_length)
        if result is not None and result is not attention:
            raise TypeError(
                "mask_replacement_function must change the attention that it is given, and return it or None, "
                f"got {type(result).__name__}, another object."
            )


def _report(replaced: SurgeryReport, attentions: _Attentions) -> SurgeryReport:
    names = [(path, type(attention).__name__) for path, attention in attentions]
    return SurgeryReport((*replaced, *(Replacement((path,), name, f"{name} (ALiBi)") for path, name in names)))


def _check(model: nn.Module, max_sequence_length: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(max_sequence_length, int) or isinstance(max_sequence_length, bool):
        raise TypeError(f"max_sequence_length must be an integer, got {type(max_sequence_length).__name__}.")
    if max_sequence_length < 1:
        raise ValueError(
            f"max_sequence_length must be at least 1, got {max_sequence_length}. "
            "It is the longest sequence that the model is meant for."
        )
