"""Alibi: a bias on attention instead of position embeddings, for longer sequences than in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import report_surgery
from composer.core import Algorithm, Event, ExclusiveResource, FieldsByEvent, Logger, Stage, State
from composer.core.checks import number_between, whole_number_from

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Alibi"]


@attrs.define(eq=False)
class Alibi(Algorithm):
    """Replace position embeddings by a bias that decreases with distance (arXiv:2108.12409).

    See :func:`composer.functional.apply_alibi`. Training sequences are folded into shorter, cheaper ones. With
    SeqLengthWarmup, which also shortens them, use ``train_sequence_length_scaling=1``.

    Args:
        max_sequence_length: The longest sequence that the model is meant for.
        train_sequence_length_scaling: The length of the parts into which training sequences are split, as a fraction of
            their length, in ``(0, 1]``; a batch of ``(N, L)`` tokens becomes ``(N / scaling, L * scaling)``.

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
    train_sequence_length_scaling: float = attrs.field(
        default=0.25, validator=number_between(0, 1, above=True, meaning="It is a fraction of the sequences' length.")
    )

    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE, Event.AFTER_DATALOADER: Stage.RESHAPE}
    reads: ClassVar = FieldsByEvent({Event.INIT: {"model", "optimizers"}, Event.AFTER_DATALOADER: {"batch"}})
    writes: ClassVar = reads
    owns: ClassVar = {
        ExclusiveResource("the position embeddings", remedy="A second one would find none: choose one set of settings.")
    }

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: at each batch only if sequences are folded."""
        folds = self.train_sequence_length_scaling < 1
        return self.runs_at if folds else {Event.INIT: Stage.ARCHITECTURE}

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the model no longer has position embeddings."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the attention, or fold the sequences of the batch."""
        if event is Event.AFTER_DATALOADER:
            length = state.batch_get_item("input_ids").shape[1]
            shorter = max(1, int(length * self.train_sequence_length_scaling))
            state.batch = cf.set_batch_sequence_length(state.batch, shorter, truncate=False)
            return
        report = cf.apply_alibi(state.model, self.max_sequence_length, state.optimizers)
        report_surgery(self, report, logger, missing=f"{type(state.model).__name__} already has this bias. Remove it.")
