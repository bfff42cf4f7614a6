"""End a training that does not get better any more."""

from __future__ import annotations

import attrs

from composer.callbacks._monitored import Comparison, MetricStopper, Patience, check_comparison, comparison
from composer.core import State, Time, Timestamp, TimeUnit, saved
from composer.core.checks import number_between

__all__ = ["EarlyStopper"]


def _to_patience(given: Time | str | int) -> Time:
    patience = Time.from_input(given, TimeUnit.EPOCH, name="patience")
    if patience.value < 0:
        raise ValueError(f"patience must not be negative, got {patience}.")
    return patience


@attrs.define(eq=False)
class EarlyStopper(MetricStopper):
    """End the training when a metric has not got better for more than ``patience``.

    The metric is read at the end of each evaluation, or of each epoch if it is one of training. A value that is not a
    number is never better. The best value and its time are saved, so a resumed training ends where the first would
    have; one that was ended does not go on by itself when it is resumed.

    Args:
        monitor: The metric's name, such as ``"MulticlassAccuracy"``.
        dataloader_label: Whose: an evaluator's label (``"eval"``), or that of the training data (``"train"``).
        comp: Tells whether a value is better than the best: ``"less"``, ``"greater"`` or a function of two tensors such
            as ``torch.less``. If None, less is better where the name has ``loss``, ``error``, ``perplexity`` or
            ``crossentropy`` in it, and else more.
        min_delta: By how much a value has to be better, at least 0.
        patience: How long it may take to get better: a time, a text (``"500ba"``, ``"0.1dur"``) or a number of epochs.

    Raises:
        TypeError: ``patience`` is no length of time.
        ValueError: A value is out of range. When training starts: there is no such metric or label.

    Example:
        >>> EarlyStopper("MulticlassAccuracy", "eval", patience="3ep").patience
        Time(3, 'ep')
    """

    monitor: str
    dataloader_label: str
    comp: Comparison = attrs.field(default=None, validator=check_comparison)
    min_delta: float = attrs.field(
        default=0.0, validator=number_between(0, meaning="It is the smallest change that counts as an improvement.")
    )
    patience: Time = attrs.field(default=Time(1, TimeUnit.EPOCH), converter=_to_patience)

    best: float | None = saved(default=None)
    """The best value so far."""
    best_occurred: Timestamp | None = saved(default=None)
    """When it was; or, if there was no number yet, when the first value was looked at."""
    stopped_at: int | None = saved(default=None)
    is_fitting: bool = attrs.field(default=False, init=False, repr=False)

    def judge(self, value: float, state: State) -> bool:
        """Return whether the metric has stayed as it is for too long, having seen its latest value."""
        before = None if self.best_occurred is None else (self.best, self.best_occurred)
        self.best, self.best_occurred = self._rule().best_of(before, value, state.timestamp)
        return self.judge_again(state)

    def judge_again(self, state: State) -> bool:
        """Return whether the metric has stayed as it is for too long."""
        since = self.best_occurred
        return since is not None and self._rule().is_over(since, state.timestamp, state.max_duration)

    def _rule(self) -> Patience:
        return Patience(comparison(self.comp, self.monitor), self.min_delta, self.patience)
