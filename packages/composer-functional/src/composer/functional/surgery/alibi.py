"""ALiBi: attention biases by distance instead of position embeddings (Press et al. 2021, arXiv:2108.12409)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from composer.functional.checks import check_flags, check_modules, check_whole
from composer.functional.layers.alibi import AlibiBias, NoPositionEmbedding
from composer.functional.surgery.architectures import (
    ARCHITECTURES,
    AddBias,
    check_implementation,
    find_described,
    is_causal,
    lift_limits,
    replace_embedding,
)
from composer.functional.surgery.replace import Replacement, SurgeryReport, replace_module_classes

if TYPE_CHECKING:
    _Policy = TypeVar("_Policy", bound=Callable[[nn.Module, int, int], nn.Module | None])


class PolicyRegistry(dict[type[nn.Module], "Callable[[nn.Module, int, int], nn.Module | None]"]):
    """Functions ``f(module, index, max_sequence_length)`` that change a module for ALiBi, by its class.

    Example:
        >>> registry = PolicyRegistry()
        >>> @registry.register(nn.Linear)
        ... def convert(module, index, max_sequence_length):
        ...     return module
        >>> registry[nn.Linear] is convert
        True
    """

    def register(self, *classes: type[nn.Module]) -> Callable[[_Policy], _Policy]:
        """Return a decorator that enters a function for classes of modules."""

        def enter(function: _Policy) -> _Policy:
            self.update(dict.fromkeys(classes, function))
            return function

        return enter


policy_registry = PolicyRegistry()
"""What :func:`apply_alibi` calls for modules of these classes, in place of what it does otherwise."""


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
    causal: bool = False,
) -> SurgeryReport:
    """Replace a transformer's position embeddings by a bias on attention that decreases with distance, in place.

    ``softmax(q·k / sqrt(d) - slope * |i - j|)`` for query ``i`` and key ``j`` (arXiv:2108.12409), with one slope per
    head (:func:`alibi_slopes`). A model that is trained this way on short sequences works on longer ones.

    **GPT-2, BERT and Llama of Transformers** are detected, in any of their classes, alone or inside another model.
    Position embeddings and rotary embeddings are replaced by modules without effect, and their parameters are removed
    from the model and the optimizers. Each self-attention gets an :class:`AlibiBias` as ``alibi`` and a hook that adds
    it to the mask, so that padding, packed sequences and caches work as before, with eager and with SDPA attention. The
    bias of BERT is symmetric. Afterwards sequences may have any length; ``max_sequence_length`` becomes the
    configuration's ``max_position_embeddings``. A second call changes nothing. The models can be compiled without a
    graph break and exported.

    **Other models** need all of ``heads_per_layer``, ``attention_module``, ``attr_to_replace``, ``alibi_attention``: a
    method of each attention is replaced by your function, which adds ``self.alibi(query_length, key_length)``, the
    negative distances times the slopes, to its logits.

    Args:
        model: The model; **changed in place**.
        max_sequence_length: The longest sequence that the model is meant for, at least 1.
        optimizers: Optimizers of the model, from which the position embedding's parameter is removed.
        heads_per_layer: The number of heads of your attention.
        position_embedding_attribute: Path from the model to the ``torch.nn.Embedding`` of positions, such as
            ``"transformer.wpe"``; ``None`` if there is none.
        attention_module: The class of your attention.
        attr_to_replace: The name of the method to replace.
        alibi_attention: The new method; its first argument is the module.
        mask_replacement_function: Called at the end with each attention and ``max_sequence_length``, to change other
            parts that depend on the length in place, such as a stored mask. ``None`` if there are none.
        causal: Whether ``self.alibi`` of your attention also masks keys after the query; if False, your function masks.

    Returns:
        A report of the replaced embeddings and the changed attentions; empty on a second call.

    Raises:
        TypeError: ``model`` is not a module, ``max_sequence_length`` or ``heads_per_layer`` is not an integer,
            ``attention_module`` is not a class of modules, or ``mask_replacement_function`` returned another object.
        ValueError: The architecture is unknown, its attention has a kernel that takes no bias, such as flash attention,
            or parameters of an unknown release of Transformers, a number is less than 1, or the description of your
            attention is incomplete or matches no module.

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
    check_modules(model=model)
    check_flags(causal=causal)
    meaning = "It is the longest sequence that the model is meant for."
    check_whole("max_sequence_length", max_sequence_length, 1, meaning)
    own = {
        "heads_per_layer": heads_per_layer,
        "attention_module": attention_module,
        "attr_to_replace": attr_to_replace,
        "alibi_attention": alibi_attention,
    }
    if any(type(module) in policy_registry for module in model.modules()):
        policies = {
            one: lambda module, index: policy_registry[type(module)](module, index, max_sequence_length)
            for one in policy_registry
        }
        return replace_module_classes(model, policies, optimizers)
    if all(each is None for each in (*own.values(), position_embedding_attribute, mask_replacement_function)):
        return _apply_to_known(model, max_sequence_length, optimizers)
    if heads_per_layer is None or attention_module is None or attr_to_replace is None or alibi_attention is None:
        missing = ", ".join(name for name, value in own.items() if value is None)
        raise ValueError(f"An attention of your own must be described by all of {', '.join(own)}; missing: {missing}.")
    attentions = _find_own(model, attention_module, attr_to_replace)
    embeddings = [] if position_embedding_attribute is None else [_get_embedding(model, position_embedding_attribute)]
    bias = AlibiBias(heads_per_layer, causal)
    changed = _replace(model, [(each, replace_embedding(each)) for each in embeddings if each], optimizers)
    for _, attention in attentions:
        setattr(attention, attr_to_replace, MethodType(alibi_attention, attention))
        _attach(attention, bias)
    report = _report(model, changed, attentions, max_sequence_length)
    if mask_replacement_function is not None:
        for _, attention in attentions:
            result = mask_replacement_function(attention, max_sequence_length)
            if result is not None and result is not attention:
                raise TypeError(
                    "mask_replacement_function must change the attention that is passed to it, and return it or None, "
                    f"got {type(result).__name__}, another object."
                )
    return report


_Attentions = list[tuple[str, nn.Module]]


def _apply_to_known(
    model: nn.Module, max_sequence_length: int, optimizers: Optimizer | Sequence[Optimizer] | None
) -> SurgeryReport:
    by_architecture = [(architecture, architecture.find_attentions(model)) for architecture in ARCHITECTURES]
    if not any(attentions for _, attentions in by_architecture):
        raise ValueError(
            f"model must hold the attention of one of {', '.join(each.name for each in ARCHITECTURES)} (Transformers), "
            f"got a {type(model).__name__} without. Describe an attention of your own by heads_per_layer, "
            "attention_module, attr_to_replace and alibi_attention."
        )
    plain = [(architecture, _without_alibi(attentions)) for architecture, attentions in by_architecture]
    attentions = [pair for _, pairs in plain for pair in pairs]
    for _, attention in attentions:
        check_implementation(attention)
    hooks = {attention: AddBias.to(attention) for _, attention in attentions}
    positions = [pair for architecture, pairs in plain if pairs for pair in architecture.find_positions(model)]
    changed = _replace(model, positions, optimizers)
    biases: dict[tuple[int, bool], AlibiBias] = {}
    for architecture, pairs in plain:
        for _, attention in pairs:
            settings = architecture.num_heads(attention), is_causal(attention)
            _attach(attention, biases.setdefault(settings, AlibiBias(*settings)))
            attention.register_forward_pre_hook(hooks[attention], with_kwargs=True)
    if attentions:
        lift_limits(model, attentions, max_sequence_length)
    return _report(model, changed, attentions, max_sequence_length)


def _without_alibi(attentions: _Attentions) -> _Attentions:
    return [(path, each) for path, each in attentions if not isinstance(getattr(each, "alibi", None), AlibiBias)]


def _find_own(model: nn.Module, cls: type[nn.Module], method: str) -> _Attentions:
    attentions = find_described(model, "attention_module", cls)
    if not hasattr(attentions[0][1], method):
        raise ValueError(f"attr_to_replace must be an attribute of {cls.__name__}, got {method!r}, which is missing.")
    return _without_alibi(attentions)


def _get_embedding(model: nn.Module, path: str) -> nn.Embedding | None:
    """Return the embedding, or None if it has been replaced already."""
    try:
        embedding = model.get_submodule(path)
    except AttributeError:
        embedding = None
    if isinstance(embedding, NoPositionEmbedding):
        return None
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(  # noqa: TRY004 (the path itself is a str)
            f"position_embedding_attribute must be the path of a torch.nn.Embedding in the model, got {path!r}, "
            f"where there is {'nothing' if embedding is None else f'a {type(embedding).__name__}'}."
        )
    return embedding


def _replace(
    model: nn.Module,
    positions: list[tuple[nn.Module, nn.Module]],
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> SurgeryReport:
    # Policies apply to classes; the dictionary restricts them to the embeddings of positions.
    replacements = dict(positions)
    policies = {type(old): lambda module, _: replacements.get(module) for old in replacements}
    return replace_module_classes(model, policies, optimizers)


def _attach(attention: nn.Module, bias: AlibiBias) -> None:
    bias.train(attention.training)  # otherwise model.eval() before the surgery would leave one module in training mode
    attention.register_module("alibi", bias)


def _report(
    model: nn.Module, replaced: SurgeryReport, attentions: _Attentions, max_sequence_length: int
) -> SurgeryReport:
    """Finish the surgery: free the bias after each forward pass, write the length into configurations, and report."""
    # Later layers replace earlier ones in the dictionary: the last layer that uses a bias frees it.
    last = {id(attention.alibi): attention for _, attention in attentions}
    for attention in last.values():
        attention.register_forward_hook(_forget)
    changed = {id(attention) for _, attention in attentions}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "max_position_embeddings") and any(id(each) in changed for each in module.modules()):
            config.max_position_embeddings = max_sequence_length
    names = [(path, type(attention).__name__) for path, attention in attentions]
    return SurgeryReport((*replaced, *(Replacement((path,), name, f"{name} (ALiBi)") for path, name in names)))


def _forget(module: Any, _args: Any, _output: Any) -> None:
    if not torch.compiler.is_compiling():
        module.alibi.forget()
