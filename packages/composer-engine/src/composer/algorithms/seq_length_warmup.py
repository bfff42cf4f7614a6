"""SeqLengthWarmup: start with short sequences."""

from __future__ import annotations

import warnings
from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._progress import FRACTION_OF_TRAINING, elapsed_duration
from composer.core import Algorithm, Event, Logger, Stage, State
from composer.core.checks import caller_level, integer, is_flag
from composer.core.declarations import owned
from composer.core.saving.components import transient

_LENGTH = "It is a number of tokens."


@attrs.define(eq=False)
class SeqLengthWarmup(Algorithm):
    """Train on short sequences first, and increase their length (arXiv:2108.06084).

    See :func:`composer.functional.set_batch_sequence_length`. The batch is a dictionary as tokenizers return it. The
    length grows in multiples of ``step_size``, so a model is compiled for at most
    ``(max_seq_length - min_seq_length) / step_size`` lengths.

    Args:
        duration: The fraction of the training during which the length grows, in ``[0, 1]``.
        min_seq_length: The first length.
        max_seq_length: The last length, to which longer sequences are cut in the rest of the training, too, with a
            warning.
        step_size: The step by which the length grows.
        truncate: Truncate sequences; otherwise fold them into more and shorter ones.
        preserve_end_of_sequence: Whether a truncated sequence keeps its last token.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range, or ``max_seq_length`` is less than ``min_seq_length``.

    Example:
        >>> SeqLengthWarmup(duration=0.5, max_seq_length=512).max_seq_length
        512
    """

    duration: float = attrs.field(default=0.3, validator=FRACTION_OF_TRAINING)
    min_seq_length: int = integer(8, 1, meaning=_LENGTH)
    max_seq_length: int = integer(1024, 1, meaning=_LENGTH)
    step_size: int = integer(8, 1, meaning=_LENGTH)
    truncate: bool = attrs.field(default=True, validator=is_flag)
    preserve_end_of_sequence: bool = attrs.field(default=False, validator=is_flag)

    _has_warned: bool = transient(default=False)

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.RESHAPE}
    reads: ClassVar = {"batch", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"batch"}
    acted = 0
    idle_reason = "No batch was longer than the current length: choose a smaller min_seq_length, or a longer warm-up."
    owns: ClassVar = owned("the length of sequences", "The shorter length would win: choose one set of settings.")

    def __attrs_post_init__(self) -> None:
        if self.max_seq_length < self.min_seq_length:
            raise ValueError(
                f"max_seq_length must be at least min_seq_length, got {self.max_seq_length} and {self.min_seq_length}."
            )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Shorten the sequences of the batch to the current length."""
        length = self.length_at(elapsed_duration(self, state))
        before = state.batch
        found = before["input_ids"].shape[1]
        # If both lengths are equal, a constant one is chosen.
        if found > self.max_seq_length > self.min_seq_length and self.truncate and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self!r} cuts sequences of {found} tokens to max_seq_length={self.max_seq_length} in the entire "
                f"training, also after the warm-up. Set max_seq_length={found} to train on all tokens.",
                stacklevel=caller_level(),
            )
        state.batch = cf.set_batch_sequence_length(before, length, self.truncate, self.preserve_end_of_sequence)
        self.acted += length < found
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length})

    def length_at(self, elapsed: float) -> int:
        """Return the length after a fraction ``elapsed`` of the training.

        Example:
            >>> SeqLengthWarmup(min_seq_length=8, max_seq_length=64, duration=0.5).length_at(0.25)
            32
        """
        if elapsed >= self.duration:
            return self.max_seq_length
        growth = (self.max_seq_length - self.min_seq_length) * elapsed / self.duration
        return self.min_seq_length + int(growth) // self.step_size * self.step_size
