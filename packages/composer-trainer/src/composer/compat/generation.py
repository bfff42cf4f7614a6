"""Where generation stops: helpers of Composer's in-context learning data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList


class MultiTokenEOSCriteria(StoppingCriteria):  # type: ignore[misc]
    """Stops the generation of each sequence whose new text contains a string.

    Args:
        stop_sequence: The string.
        tokenizer: The tokenizer of the model.
        initial_decoder_input_length: The tokens of the prompts, which are not searched.
        batch_size: Ignored.

    Example:
        >>> class Words:
        ...     def decode(self, ids): return " ".join("ab"[one] for one in ids)
        >>> MultiTokenEOSCriteria("a b", Words(), 1, 2)(torch.tensor([[0, 1, 0], [1, 0, 1]]), None)
        tensor([False,  True])
    """

    def __init__(
        self, stop_sequence: str, tokenizer: Any, initial_decoder_input_length: int, batch_size: int = 1
    ) -> None:
        del batch_size
        self.sequence, self.tokenizer, self.start = stop_sequence, tokenizer, initial_decoder_input_length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return for each sequence whether it is complete."""
        texts = [self.tokenizer.decode(one.tolist()) for one in input_ids[:, self.start :]]
        return torch.tensor([self.sequence in text for text in texts], device=input_ids.device)


def stop_sequences_criteria(
    tokenizer: Any, stop_sequences: Sequence[str], initial_decoder_input_length: int, batch_size: int
) -> Any:
    """Return the criteria for ``generate(stopping_criteria=...)`` that stop at any of the strings.

    Example:
        >>> len(stop_sequences_criteria(None, ["a", "b"], 4, 2))
        2
    """
    start = initial_decoder_input_length
    return StoppingCriteriaList([MultiTokenEOSCriteria(one, tokenizer, start, batch_size) for one in stop_sequences])
