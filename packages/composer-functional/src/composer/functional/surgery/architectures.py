"""The models of Transformers that surgery supports: their attention and their position embeddings."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from composer.functional.checks import is_module_class
from composer.functional.layers.alibi import NoPositionEmbedding, NoRotaryEmbedding
from composer.functional.layers.derived import plain_class


@dataclass(frozen=True)
class Architecture:
    """A family of models whose attention takes its mask as ``attention_mask``.

    Attributes:
        name: The name in error messages.
        module: The Python module of its classes. If it is not imported, no model has these classes.
        attention: The class of its self-attention.
        embedding: The class of the modules with a position embedding.
        positions: Their attribute for the position embedding.
        num_heads: Returns the number of heads of an attention module.
        make_replacement: Returns the replacement of a position embedding.
    """

    name: str
    module: str
    attention: str
    embedding: str
    positions: str
    num_heads: Callable[[nn.Module], int]
    make_replacement: Callable[[Any], nn.Module]

    def find_attentions(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the paths and modules of self-attention; attention to another sequence does not use positions."""
        cls = find_loaded_class(self.module, self.attention)
        return [
            (path, module)
            for path, module in model.named_modules()
            if cls is not None and isinstance(module, cls) and "crossattention" not in path.split(".")
        ]

    def find_positions(self, model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Return the position embeddings with their replacements."""
        embeddings = [getattr(each, self.positions) for each in find_instances(model, self.module, self.embedding)]
        return [(embedding, self.make_replacement(embedding)) for embedding in embeddings]


def find_loaded_class(module: str, name: str) -> type[nn.Module] | None:
    """Return a class of an imported module, or None; this never imports the module."""
    return getattr(sys.modules.get(module), name, None)


def find_instances(model: nn.Module, module: str, name: str) -> list[nn.Module]:
    """Return the modules of a class that :func:`find_loaded_class` finds."""
    cls = find_loaded_class(module, name)
    return [] if cls is None else [each for each in model.modules() if isinstance(each, cls)]


def find_described(model: nn.Module, name: str, cls: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules of a class, which was passed as ``name``, with their paths; raise an error without any."""
    if not is_module_class(cls):
        raise TypeError(f"{name} must be a class of modules, got {cls!r}.")
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, cls)]
    if not found:
        raise ValueError(f"{name} must be a class that is in the model, got {cls.__name__}, which is not.")
    return found


def replace_embedding(embedding: nn.Embedding) -> nn.Module:
    """Return a module that returns zeros instead of embedded positions."""
    return NoPositionEmbedding(embedding.embedding_dim)


def _replace_rotary(rotary: Any) -> nn.Module:
    config = rotary.config
    return NoRotaryEmbedding(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


GPT2, BERT = "transformers.models.gpt2.modeling_gpt2", "transformers.models.bert.modeling_bert"


ARCHITECTURES = (
    Architecture("GPT-2", GPT2, "GPT2Attention", "GPT2Model", "wpe", attrgetter("num_heads"), replace_embedding),
    Architecture(
        name="BERT",
        module=BERT,
        attention="BertSelfAttention",
        embedding="BertEmbeddings",
        positions="position_embeddings",
        num_heads=attrgetter("num_attention_heads"),
        make_replacement=replace_embedding,
    ),
    Architecture(
        name="Llama",
        module="transformers.models.llama.modeling_llama",
        attention="LlamaAttention",
        embedding="LlamaModel",
        positions="rotary_emb",
        num_heads=attrgetter("config.num_attention_heads"),
        make_replacement=_replace_rotary,
    ),
)

_ATTENTION_DROPOUTS = (
    (BERT, "BertSelfAttention", "dropout"),
    (BERT, "BertCrossAttention", "dropout"),
    (GPT2, "GPT2Attention", "attn_dropout"),
)


def find_attention_dropouts(model: nn.Module) -> set[nn.Module]:
    """Return the dropouts whose ``p`` an attention passes to functional dropout; Llama has none."""
    return {
        getattr(holder, attribute)
        for source, name, attribute in _ATTENTION_DROPOUTS
        for holder in find_instances(model, source, name)
        if hasattr(holder, attribute)
    }


@dataclass(frozen=True)
class AddBias:
    """A forward pre-hook of an attention of Transformers that adds the bias of its ``alibi`` to its mask.

    Eager attention adds the mask to the logits, and torch's scaled dot product attention takes it as an argument: it is
    the one place that is the same for both, and in every layer.

    Attributes:
        names: The parameters of the attention's ``forward``.
        cache: The one for earlier keys and values, which Transformers renamed in 5.24.
    """

    names: tuple[str, ...]
    cache: str

    @classmethod
    def to(cls, attention: nn.Module) -> AddBias:
        """Return the hook for a module.

        Raises:
            ValueError: Its ``forward`` has other parameters than those of the supported releases of Transformers.
        """
        names = tuple(inspect.signature(plain_class(attention).forward).parameters)[1:]
        caches = [name for name in ("cache", "past_key_values") if name in names]
        if len(caches) != 1 or not {"hidden_states", "attention_mask"} <= set(names):
            raise ValueError(
                f"{type(attention).__name__}.forward must have the parameters hidden_states, attention_mask, and "
                f"either cache or past_key_values, got {', '.join(names)}: install a release of Transformers that "
                "ALiBi supports, 4.57 to 5.24, or describe the attention by attention_module and alibi_attention."
            )
        return cls(names, caches[0])

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward pass, with the bias in the mask."""
        check_implementation(module)
        arguments = {**dict(zip(self.names[: len(args)], args, strict=True)), **kwargs}
        hidden: Tensor = arguments["hidden_states"]
        mask: Tensor | None = arguments.get("attention_mask")
        before, length = _measure(module, arguments.get(self.cache), mask, hidden.shape[1])
        bias = module.alibi(hidden.shape[1], length, mask, before, hidden.dtype, hidden.device)
        place = self.names.index("attention_mask")
        if place < len(args):
            return (*args[:place], bias, *args[place + 1 :]), kwargs
        return args, {**kwargs, "attention_mask": bias}


def check_implementation(attention: nn.Module) -> None:
    """Raise an error for an attention whose kernel takes no bias."""
    # In earlier versions of Transformers, attention has no configuration and each implementation is a class.
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", "eager")
    if implementation not in {"eager", "sdpa"}:
        raise ValueError(
            f'attn_implementation of the model must be "eager" or "sdpa" for ALiBi, got {implementation!r}, which '
            'takes no bias. Call model.set_attn_implementation("sdpa").'
        )


def is_causal(attention: Any) -> bool:
    """Return whether an attention without a mask is causal."""
    return bool(getattr(attention, "is_causal", getattr(attention, "is_decoder", False)))


def lift_limits(model: nn.Module, attentions: list[tuple[str, nn.Module]], max_sequence_length: int) -> None:
    """Remove or enlarge buffers whose size is the longest sequence, other than position embeddings."""
    embeddings: list[Any] = find_instances(model, BERT, "BertEmbeddings")
    for embedding in embeddings:
        positions = torch.arange(max_sequence_length, device=embedding.position_ids.device)
        embedding.register_buffer("position_ids", positions[None], persistent=False)
        # Without this buffer BERT creates the ids of the first segment for any length.
        if hasattr(embedding, "token_type_ids"):
            del embedding.token_type_ids
    # In earlier versions of Transformers, each layer of GPT-2 has a causal mask; they share one here.
    stored = [module for _, module in attentions if dict(module.named_buffers(recurse=False)).get("bias") is not None]
    if stored:
        shape = (1, 1, max_sequence_length, max_sequence_length)
        mask = torch.ones(shape, dtype=torch.bool, device=vars(stored[0])["_buffers"]["bias"].device).tril()
        for attention in stored:
            attention.register_buffer("bias", mask, persistent=False)


def _measure(attention: Any, past: Any, mask: Tensor | None, query_length: int) -> tuple[int | Tensor, int]:
    """Return the number of earlier keys and of all keys, including the empty places of a fixed-size cache."""
    if past is None:
        return 0, query_length if mask is None else mask.shape[-1]
    before = past.get_seq_length(attention.layer_idx)
    if mask is not None:
        return before, mask.shape[-1]
    layers = getattr(past, "self_attention_cache", past).layers
    layer = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    fixed = getattr(layer, "max_cache_len", None)
    return before, before + query_length if fixed is None else fixed
