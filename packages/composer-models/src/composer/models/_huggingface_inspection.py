"""Properties of a Transformers model, and checks of model and tokenizer."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING

from composer.models._huggingface_peft import base_of, is_peft_model
from composer.models.names import import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["argument_names", "check_model", "check_tokenizer", "fit_embedding"]


def check_model(model: object) -> None:
    """Raise an error for an object that is not a model of Transformers, or a model that returns tuples."""
    transformers = import_extra("transformers", needed="HuggingFaceModel needs Transformers", extra="huggingface")
    if not isinstance(model, transformers.PreTrainedModel) and not is_peft_model(model):
        raise TypeError(
            "model must be a transformers.PreTrainedModel or a peft.PeftModel around one, "
            f"got {type(model).__name__}. For other modules derive from ComposerModel."
        )
    if not getattr(base_of(model).config, "return_dict", True):
        raise ValueError(
            "The model's config.return_dict is False, so it returns tuples, in which the loss cannot be identified. "
            "Set it to True."
        )


def check_tokenizer(tokenizer: object) -> None:
    """Raise a TypeError for an object that is not a tokenizer of Transformers."""
    from transformers import PreTrainedTokenizerBase  # noqa: PLC0415 (an extra)

    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be one of Transformers', got {type(tokenizer).__name__}. "
            "Wrap one of the tokenizers package in transformers.PreTrainedTokenizerFast(tokenizer_object=...)."
        )


def fit_embedding(model: PreTrainedModel, num_tokens: int, *, allow: bool) -> tuple[str, ...]:
    """Add embedding rows for missing tokens; return the names of the resized weights."""
    try:
        num_rows = model.get_input_embeddings().weight.shape[0]
    except NotImplementedError:
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
    except NotImplementedError:
        warnings.warn(
            f"{type(model).__name__} cannot resize its embedding of {num_rows} rows for the {num_tokens} tokens of "
            "the tokenizer. Build it with a larger vocab_size.",
            stacklevel=3,
        )
        return ()
    resized = [model.get_input_embeddings(), model.get_output_embeddings()]
    return tuple(
        f"{name}.{own}"
        for name, module in model.named_modules()
        if any(module is each for each in resized)
        for own, _ in module.named_parameters(recurse=False)
    )


# Arguments of attention with packed sequences, which models take as keywords.
_OF_ATTENTION = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def argument_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the arguments of the model's ``forward``; none if they are only ``*args, **kwargs``."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {each.name for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}
    takes_more = names and any(each.kind is each.VAR_KEYWORD for each in parameters)
    return frozenset(names | _OF_ATTENTION if takes_more else names)
