"""Alibi: a bias on attention instead of position embeddings, for longer sequences than in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
from torch import nn

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, FieldsByEvent, Logger, Stage, State
from composer.core.checks import is_flag, number, whole_number_from
from composer.core.declarations import owned


@attrs.define(eq=False)
class Alibi(ModelSurgery):
    """Replace position embeddings by a bias that decreases with distance (arXiv:2108.12409).

    See :func:`composer.functional.apply_alibi`. Training sequences are folded into shorter, cheaper ones. With
    SeqLengthWarmup, which also shortens them, use ``train_sequence_length_scaling=1``.

    Args:
        max_sequence_length: The longest sequence that the model is meant for.
        train_sequence_length_scaling: The length of the parts into which training sequences are split, as a fraction of
            their length, in ``(0, 1]``; a batch of ``(N, L)`` tokens becomes ``(N / scaling, L * scaling)``.
        heads_per_layer: The number of heads. This and the following arguments are for models other than those of
            Transformers.
        position_embedding_attribute: The path of the position embedding.
        attention_module: The class of your attention.
        attr_to_replace: The name of the method to replace.
        alibi_attention: The new method, which adds ``self.alibi(query_length, key_length)`` to the logits.
        mask_replacement_function: Changes other parts that depend on the length, such as a stored mask.
        causal: Whether ``self.alibi`` also masks keys after the query.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> Alibi(max_sequence_length=8192)
        Alibi(max_sequence_length=8192, train_sequence_length_scaling=0.25)
    """

    max_sequence_length: int = attrs.field(
        validator=whole_number_from(1, meaning="It is the longest sequence that the model is meant for.")
    )
    train_sequence_length_scaling: float = number(0.25, 0, 1, above=True, meaning="It is a fraction of the length.")

    heads_per_layer: int | None = attrs.field(default=None, repr=False, kw_only=True)
    position_embedding_attribute: str | None = attrs.field(default=None, repr=False, kw_only=True)
    attention_module: type[nn.Module] | None = attrs.field(default=None, repr=False, kw_only=True)
    attr_to_replace: str | None = attrs.field(default=None, repr=False, kw_only=True)
    alibi_attention: Callable[..., Any] | None = attrs.field(default=None, repr=False, kw_only=True)
    mask_replacement_function: Callable[[Any, int], Any] | None = attrs.field(default=None, repr=False, kw_only=True)
    causal: bool = attrs.field(default=False, validator=is_flag, repr=False, kw_only=True)

    _kernel: ClassVar = staticmethod(cf.apply_alibi)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE, Event.AFTER_DATALOADER: Stage.RESHAPE}
    reads: ClassVar = FieldsByEvent({Event.INIT: {"model", "optimizers"}, Event.AFTER_DATALOADER: {"batch"}})
    writes: ClassVar = reads
    owns: ClassVar = owned("the position embeddings", "A second one would find none: choose one set of settings.")
    found_nothing: ClassVar = "{model} already has this bias. Remove it."

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: at each batch only if sequences are folded."""
        folds = self.train_sequence_length_scaling < 1
        return self.runs_at if folds else {Event.INIT: Stage.ARCHITECTURE}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the attention, or fold the sequences of the batch."""
        if event is Event.AFTER_DATALOADER:
            length = state.batch_get_item("input_ids").shape[1]
            shorter = max(1, int(length * self.train_sequence_length_scaling + 1e-6))
            state.batch = cf.set_batch_sequence_length(state.batch, shorter, truncate=False)
            return
        self.replace(state, logger)
