"""The embeddings of tokens in a wrapped model: rows for the tokens of its tokenizer, and the names of their weights."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fit_embedding(model: PreTrainedModel, num_tokens: int, *, allow: bool) -> tuple[str, ...]:
    """Add embedding rows for missing tokens; return the names of the resized weights."""
    try:
        num_rows = model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        num_rows = getattr(model.config, "vocab_size", num_tokens)
    if num_tokens <= num_rows:
        return ()
    if not allow:
        raise ValueError(
            f"The tokenizer has {num_tokens} tokens, but the model's embedding only {num_rows} rows, so some tokens "
            "have no embedding. Pass the tokenizer of this model, or allow_embedding_resizing=True."
        )
    try:
        model.resize_token_embeddings(num_tokens)
    except (AttributeError, NotImplementedError):
        warnings.warn(
            f"{type(model).__name__} cannot resize its embedding of {num_rows} rows for the {num_tokens} tokens of "
            "the tokenizer. Build it with a larger vocab_size.",
            stacklevel=3,
        )
        return ()
    return _names_of_embeddings(model)


def resized_before(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of embeddings with more or fewer rows than the pretrained model has, if its files are here."""
    path = getattr(model.config, "_name_or_path", "")
    try:
        pretrained = type(model.config).from_pretrained(path, local_files_only=True) if path else model.config
    except (OSError, ValueError):  # no such files
        return ()
    sizes = [getattr(config.get_text_config(), "vocab_size", None) for config in (pretrained, model.config)]
    return () if sizes[0] == sizes[1] else _names_of_embeddings(model)


def _names_of_embeddings(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the weights of the embeddings of tokens and of the head, without those of adapters."""
    found = [model.get_input_embeddings(), model.get_output_embeddings()]
    resized = [getattr(module, "base_layer", module) for module in found]
    return tuple(
        f"{name.removesuffix('.base_layer')}.{own}"
        for name, module in model.named_modules()
        if any(module is each for each in resized)
        for own, _ in module.named_parameters(recurse=False)
    )
