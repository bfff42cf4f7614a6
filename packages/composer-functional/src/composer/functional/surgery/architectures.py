"""The models of Transformers that surgery knows by themselves: where attention is, and what knows positions."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.functional.layers.alibi import NoPositionEmbedding, NoRotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable

__all__: list[str] = []


@dataclass(frozen=True)
class Architecture:
    """A family of models whose attention takes its mask as ``attention_mask``.

    Attributes:
        name: What people call it.
        module: The Python module of its classes. What is not imported is in no model.
        attention: The class of its self-attention.
        embedding: The class that holds what embeds positions.
        positions: The attribute under which it does.
        num_heads: Reads the number of heads off an attention.
        make_replacement: Makes what stands in for the embedding, which is handed in.
    """

    name: str
    module: str
    attention: str
    embedding: str
    positions: str
    num_heads: Callable[[nn.Module], int]
    make_replacement: Callable[[Any], nn.Module]

    def find_attentions(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the paths and modules of self-attention; positions are no part of attention to another sequence."""
        cls = find_loaded_class(self.module, self.attention)
        return [
            (path, module)
            for path, module in model.named_modules()
            if cls is not None and isinstance(module, cls) and "crossattention" not in path.split(".")
        ]

    def find_positions(self, model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Return what embeds positions, with its replacement."""
        cls = find_loaded_class(self.module, self.embedding)
        holders = [module for module in model.modules() if cls is not None and isinstance(module, cls)]
        embeddings = [getattr(holder, self.positions) for holder in holders]
        return [(embedding, self.make_replacement(embedding)) for embedding in embeddings]


def find_loaded_class(module: str, name: str) -> type[nn.Module] | None:
    """Return a class of a module that somebody has imported; this never imports it."""
    return getattr(sys.modules.get(module), name, None)


def stand_in_for_embedding(embedding: nn.Embedding) -> nn.Module:
    """Make what gives zeros instead of embedded positions."""
    return NoPositionEmbedding(embedding.embedding_dim)


def _stand_in_for_rotary(rotary: Any) -> nn.Module:
    config = rotary.config
    return NoRotaryEmbedding(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _read(path: str) -> Callable[[nn.Module], int]:
    """Read an attribute of an attribute."""

    def read(module: Any) -> int:
        for name in path.split("."):
            module = getattr(module, name)
        return int(module)

    return read


ARCHITECTURES = (
    Architecture(
        name="GPT-2",
        module="transformers.models.gpt2.modeling_gpt2",
        attention="GPT2Attention",
        embedding="GPT2Model",
        positions="wpe",
        num_heads=_read("num_heads"),
        make_replacement=stand_in_for_embedding,
    ),
    Architecture(
        name="BERT",
        module="transformers.models.bert.modeling_bert",
        attention="BertSelfAttention",
        embedding="BertEmbeddings",
        positions="position_embeddings",
        num_heads=_read("num_attention_heads"),
        make_replacement=stand_in_for_embedding,
    ),
    Architecture(
        name="Llama",
        module="transformers.models.llama.modeling_llama",
        attention="LlamaAttention",
        embedding="LlamaModel",
        positions="rotary_emb",
        num_heads=_read("config.num_attention_heads"),
        make_replacement=_stand_in_for_rotary,
    ),
)


_ATTENTION_DROPOUTS = (
    ("transformers.models.bert.modeling_bert", "BertSelfAttention", "dropout"),
    ("transformers.models.bert.modeling_bert", "BertCrossAttention", "dropout"),
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Attention", "attn_dropout"),
)


def find_attention_dropouts(model: nn.Module) -> set[nn.Module]:
    """Return the dropouts of which an attention reads ``p`` for a function's dropout; Llama's has none."""
    found: set[nn.Module] = set()
    for source, name, attribute in _ATTENTION_DROPOUTS:
        cls = find_loaded_class(source, name)
        holders = [module for module in model.modules() if cls is not None and isinstance(module, cls)]
        found |= {getattr(holder, attribute) for holder in holders if hasattr(holder, attribute)}
    return found


@dataclass(frozen=True)
class AddBias:
    """A hook before an attention of Transformers that puts the bias of its ``alibi`` into its mask.

    The mask is what eager attention adds to the logits, and what torch's scaled dot product attention takes beside
    queries and keys: it is the one place that is the same for both, and in every layer.

    Attributes:
        names: The parameters of the attention's ``forward``.
    """

    names: tuple[str, ...]

    @classmethod
    def to(cls, attention: nn.Module) -> AddBias:
        """Make the hook for a module."""
        return cls(tuple(inspect.signature(type(attention).forward).parameters)[1:])

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check_implementation(module)
        given = {**dict(zip(self.names[: len(args)], args, strict=True)), **kwargs}
        hidden: Tensor = given["hidden_states"]
        mask: Tensor | None = given.get("attention_mask")
        before, length = _measure(module, given.get("past_key_values"), mask, hidden.shape[1])
        bias = module.alibi(hidden.shape[1], length, mask, before, hidden.dtype, hidden.device)
        place = self.names.index("attention_mask")
        if place < len(args):
            return (*args[:place], bias, *args[place + 1 :]), kwargs
        return args, {**kwargs, "attention_mask": bias}


def check_implementation(attention: nn.Module) -> None:
    """Refuse an attention whose kernel takes no bias."""
    # An attention without a configuration is of an earlier Transformers, where each implementation is a class.
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", "eager")
    if implementation not in {"eager", "sdpa"}:
        raise ValueError(
            f'attn_implementation of the model must be "eager" or "sdpa" for ALiBi, got {implementation!r}, which '
            'takes no bias. Call model.set_attn_implementation("sdpa").'
        )


def is_causal(attention: Any) -> bool:
    """Whether an attention looks back only when no mask says what it may see."""
    return bool(getattr(attention, "is_causal", getattr(attention, "is_decoder", False)))


def lift_limits(model: nn.Module, attentions: list[tuple[str, nn.Module]], max_sequence_length: int) -> None:
    """Remove or enlarge what the models store for their longest sequence, besides the embedding of positions."""
    embeddings = find_loaded_class("transformers.models.bert.modeling_bert", "BertEmbeddings")
    holders: list[Any] = [each for each in model.modules() if embeddings is not None and isinstance(each, embeddings)]
    for holder in holders:
        positions = torch.arange(max_sequence_length, device=holder.position_ids.device)
        holder.register_buffer("position_ids", positions[None], persistent=False)
        # Without this buffer BERT makes the ids of the first segment in any length.
        vars(holder)["_buffers"].pop("token_type_ids", None)
    # Earlier Transformers: GPT-2 has a causal mask in each layer. One for all is enough.
    stored = [attention for _, attention in attentions if _has_stored_mask(attention)]
    if stored:
        shape = (1, 1, max_sequence_length, max_sequence_length)
        mask = torch.ones(shape, dtype=torch.bool, device=vars(stored[0])["_buffers"]["bias"].device).tril()
        for attention in stored:
            attention.register_buffer("bias", mask, persistent=False)


def _has_stored_mask(attention: nn.Module) -> bool:
    return dict(attention.named_buffers(recurse=False)).get("bias") is not None


def _measure(attention: Any, past: Any, mask: Tensor | None, query_length: int) -> tuple[int | Tensor, int]:
    """Return how many keys there were before, and how many there will be, with empty places of a fixed cache."""
    if past is None:
        return 0, query_length if mask is None else mask.shape[-1]
    before = past.get_seq_length(attention.layer_idx)
    if mask is not None:
        return before, mask.shape[-1]
    layers = getattr(past, "self_attention_cache", past).layers
    layer = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    fixed = getattr(layer, "max_cache_len", None)
    return before, before + query_length if fixed is None else fixed
