"""Generate continuations of prompts during training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from composer.core import (
    Callback,
    Event,
    Interval,
    Logger,
    LoggerDestination,
    State,
    Time,
    TimeUnit,
    evaluation_weights,
    get_precision_context,
)
from composer.core.checks import to_strings
from composer.core.evaluator import evaluation_mode
from composer.core.interval import at_checkpoints
from composer.core.saving.randomness import preserve_rng_state
from composer.functional.checks import check_sizes


@runtime_checkable
class _SupportsGeneration(Protocol):
    tokenizer: Any

    def generate(self, input_ids: Tensor, **kwargs: Any) -> Tensor: ...


class Generate(Callback):
    """Generate continuations of prompts every ``interval`` and at the end of each fit, and log them as a table.

    It works with any model that has ``tokenizer``, as Transformers' are, and ``generate(input_ids, attention_mask=…)``,
    which returns token ids. The model generates in evaluation mode, with the weights used for evaluation, and the state
    of the random number generators is restored afterwards. The table, ``generations``, has the columns ``prompt`` and
    ``generation``. ``ConsoleLogger`` prints it; the progress bar does not.

    Args:
        prompts: One or several strings to continue.
        interval: How often: a time, a string (``"500ba"``), or a number of epochs.
        batch_size: Prompts per forward pass; all if None. Without a padding token it is 1.
        kwargs: Arguments of ``model.generate``, such as ``max_new_tokens=50``.

    Raises:
        ValueError: There are no prompts, ``batch_size`` is less than 1, or ``interval`` is not a length of time.
        TypeError: At ``INIT``: the model has no ``tokenizer`` or ``generate``, or its ``tokenizer`` is None.

    Example:
        >>> generate = Generate(["Once upon a time"], "500ba", max_new_tokens=20)
        >>> generate.prompts, generate.interval
        (('Once upon a time',), Time(500, TimeUnit.BATCH))
    """

    def __init__(
        self, prompts: str | Sequence[str], interval: Time | str | int, batch_size: int | None = None, **kwargs: Any
    ) -> None:
        self.prompts = tuple(to_strings("prompts", prompts))
        if not self.prompts:
            raise ValueError("prompts must hold at least one string to continue, got none.")
        if batch_size is not None:
            check_sizes(batch_size=batch_size)
        self.interval = Interval.named("interval", interval).every
        self.batch_size = len(self.prompts) if batch_size is None else batch_size
        self.generate_kwargs = kwargs
        self._generated_at, self._has_warned = -1, False

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Generate every ``interval``, after a batch, an epoch or an iteration, depending on its unit."""
        return at_checkpoints(self.interval)

    def init(self, state: State, logger: Logger) -> None:
        """Raise an error if the model cannot generate."""
        if type(self).generate is not Generate.generate:
            return
        if not isinstance(state.model, _SupportsGeneration):
            raise TypeError(
                f"Generate needs a model with the attribute tokenizer and the method generate(input_ids, ...), "
                f"and {type(state.model).__name__} lacks one of them."
            )
        if state.model.tokenizer is None:
            raise TypeError(
                f"Generate needs the model's tokenizer to read the prompts, and that of {type(state.model).__name__} "
                "is None. Set it, as in HuggingFaceModel(model, tokenizer=...)."
            )

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier training, and warn if no logger shows the table."""
        has_none = all(type(one).log_table is LoggerDestination.log_table for one in logger.destinations)
        if type(self) is Generate and state.rank == 0 and has_none and not self._has_warned:
            self._has_warned = True  # A subclass may log in another form.
            console = "Give loggers=ConsoleLogger() of composer.loggers, which prints it, or another one with tables."
            warnings.warn(f"Generate logs a table, which no logger of this training shows. {console}", stacklevel=2)
        self._generated_at = -1

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Generate, at the event that :meth:`intervals` selects."""
        self._generated_at = int(state.timestamp.count(TimeUnit.BATCH))
        self.generate(state, logger)

    epoch_checkpoint = iteration_checkpoint = batch_checkpoint

    def fit_end(self, state: State, logger: Logger) -> None:
        """Generate, unless this batch has already generated."""
        if self._generated_at != state.timestamp.count(TimeUnit.BATCH):
            self.generate(state, logger)

    def generate(self, state: State, logger: Logger) -> None:
        """Generate and log the table now; a subclass may override it, also for other models."""
        with evaluation_mode(state.model), preserve_rng_state(state.device), torch.no_grad(), evaluation_weights(state):
            is_padded = getattr(state.model.tokenizer, "pad_token_id", 0) is not None
            size = self.batch_size if is_padded else 1
            batches = [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]
            generations = [one for prompts in batches for one in self._continue(list(prompts), state)]
        rows = list(zip(self.prompts, generations, strict=True))
        logger.log_table(["prompt", "generation"], rows, name="generations")

    def _continue(self, prompts: list[str], state: State) -> list[str]:
        tokenizer = state.model.tokenizer
        # Padded on the left, so that the generated tokens follow the prompt.
        tokens = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1, padding_side="left")
        input_ids = tokens["input_ids"].to(state.device)
        attention_mask = tokens["attention_mask"].to(state.device)
        with get_precision_context(state.precision, state.device.type):
            ids = state.model.generate(input_ids, attention_mask=attention_mask, **self.generate_kwargs)
        length = input_ids.shape[1]
        if ids.shape[1] >= length and torch.equal(ids[: len(input_ids), :length], input_ids):
            ids = ids[:, length:]  # decoders return the prompt as well
        generations: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return generations
