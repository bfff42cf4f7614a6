"""NEFTune: add noise to the embeddings of tokens in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._surgery import ModelSurgery
from composer.core import BatchKey, Event, FieldsByEvent, Logger, Stage, State
from composer.core.checks import number
from composer.core.declarations import owned
from composer.core.saving.components import transient


@attrs.define(eq=False)
class NEFTune(ModelSurgery):
    """Add noise to the embeddings of tokens in training (Jain et al. 2023, arXiv:2310.05914).

    See :func:`composer.functional.draw_embedding_noise` and :func:`composer.functional.apply_neftune`.

    Args:
        alpha: The size of the noise; 5, 10 and 15 in the paper.
        embedding: The name of the embedding; ``None`` for that of a model of Transformers, or the only one.
        input_key: The key of the token ids in a batch.
        mask_key: The key of the mask of real tokens ``(N, L)``, if the batch has one: padding gets no noise, and does
            not count as the length. Masks of other dimensions, as of packed documents, are not used.

    Raises:
        TypeError: ``alpha`` is not a number.
        ValueError: ``alpha`` is negative; or, when the model is changed, the embedding cannot be found.

    Example:
        >>> NEFTune(alpha=10)
        NEFTune(alpha=10, embedding=None, input_key='input_ids', mask_key='attention_mask')
    """

    alpha: float = number(5.0, 0, meaning="It is the size of the noise.")
    embedding: str | None = None
    input_key: BatchKey = "input_ids"
    mask_key: str = "attention_mask"
    _layer: cf.NoisyEmbedding | None = transient(default=None)

    _kernel: ClassVar = staticmethod(cf.apply_neftune)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE, Event.BEFORE_FORWARD: Stage.AUGMENT}
    reads: ClassVar = FieldsByEvent({Event.INIT: {"model"}, Event.BEFORE_FORWARD: {"batch", "model"}})
    writes: ClassVar = {"model"}
    owns: ClassVar = owned("the noise on embeddings", "Choose one size of the noise.")
    changes_weights: ClassVar = False
    acts_in_training = True
    found_nothing: ClassVar = "the embedding of {model} has been replaced before. Remove it."

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, alpha=self.alpha == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the embedding, or draw the noise of a batch."""
        if event is Event.INIT:
            self.replace(state, logger)
            self._layer = next(layer for layer in state.model.modules() if isinstance(layer, cf.NoisyEmbedding))
            return
        assert self._layer is not None
        batch = state.batch
        mask = batch.get(self.mask_key) if isinstance(batch, Mapping) else None
        mask = mask if mask is None or mask.ndim == 2 else None  # one of pairs of tokens, as within packed documents
        ids, size = state.batch_get_item(self.input_key), self._layer.embedding_dim
        self._layer.noise = cf.draw_embedding_noise(ids, size, self.alpha, mask, generator=state.generator(self))
