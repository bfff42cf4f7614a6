"""Collect reference cycles at chosen batches."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import attrs

from composer.checkpoint.saver import CheckpointSaver
from composer.core import Callback, Event, Interval, Logger, State, Time, TimeUnit
from composer.core.interval import interval_time
from composer.core.saving.components import transient


@attrs.define(eq=False)
class GarbageCollector(Callback):
    """Let Python's garbage collector run at chosen batches only.

    The automatic collector stops a step whenever enough objects have been allocated. Of many processes, each is stopped
    in another step, and in each step all wait for the slowest. This callback disables it during ``fit`` and collects
    every ``interval``, in all processes after the same batch, at the end of an epoch, and before an evaluation or a
    checkpoint at an interval of its own. Memory that is not in a reference cycle is released as always.

    The objects that exist when the training begins, such as imported modules, are frozen (``gc.freeze``), which
    makes a collection fast: cycles among them are collected after the training, unless objects were frozen before.
    At the end of the training, also by an error, the collector is as it was before.

    Args:
        interval: How often to collect; ``"0ba"`` only where it is due anyway.

    Raises:
        TypeError: ``interval`` is not a length of time.
        ValueError: ``interval`` is negative, or a time that is not counted at the end of a batch.

    Example:
        >>> GarbageCollector("100ba")
        GarbageCollector(interval=Time(100, TimeUnit.BATCH))
    """

    interval: Time = attrs.field(default=Time(100, TimeUnit.BATCH), converter=interval_time)

    _is_active: bool = transient(default=False)
    _was_enabled: bool = transient(default=False)
    _has_frozen: bool = transient(default=False)
    _saving: list[Interval] = transient(factory=list)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Collect every ``interval``."""
        return {Event.BATCH_END: self.interval}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Disable the automatic collector, after a collection."""
        savers = [one for one in state.callbacks if isinstance(one, CheckpointSaver)]
        self._saving = [one.save_interval for one in savers if isinstance(one.save_interval, Interval)]
        self._is_active, self._was_enabled = True, gc.isenabled()
        gc.disable()
        gc.collect()
        self._has_frozen = not gc.get_freeze_count()
        if self._has_frozen:
            gc.freeze()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Collect, during a training."""
        if self._is_active:
            gc.collect()

    epoch_end = eval_before_all = batch_end

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Collect if a checkpoint is due."""
        if any(interval.is_due(state) for interval in self._saving):
            gc.collect()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Restore the collector."""
        if not self._is_active:
            return
        self._is_active = False
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    close = fit_end
