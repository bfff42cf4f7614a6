"""Loads a checkpoint before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.checkpoint.finding import agreed_path
from composer.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from composer.core import Callback, Event, Logger, State
from composer.core.checks import to_path
from composer.distributed.collectives import failing_together
from composer.functional.checks import check_flags

if TYPE_CHECKING:
    import os

    from composer.checkpoint.saving import IgnoreKeys

__all__ = ["LoadCheckpoint"]

_EVENTS = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START)


class LoadCheckpoint(Callback):
    """Load a checkpoint, once in each run, at an event before training; several can load one after the other.

    To go on with a run, give ``load_path`` to the trainer instead, which also restores the position in its data.

    Args:
        load_path: A checkpoint's folder or address; with ``load_weights_only`` also a file of weights. The run's name
            is filled in for ``{run_name}``.
        load_weights_only: Whether to load the model's weights, and nothing of the training.
        strict_model_weights: Whether weights that only one side has are an error, or a warning.
        ignore_keys: What stays as the run has it; see :func:`~composer.checkpoint.load_checkpoint`.
        event: When: ``INIT``, ``BEFORE_LOAD``, ``AFTER_LOAD`` or ``FIT_START``.

    What became of it is in :attr:`loaded`.

    Raises:
        ValueError: The event is another.

    Example:
        >>> LoadCheckpoint("runs/first/latest", load_weights_only=True).load_path
        'runs/first/latest'
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: IgnoreKeys = None,
        event: Event | str = Event.BEFORE_LOAD,
    ) -> None:
        if event not in _EVENTS:
            raise ValueError(f"event must be one before training, {', '.join(_EVENTS)}, got {str(event)!r}.")
        check_flags(load_weights_only=load_weights_only, strict_model_weights=strict_model_weights)
        self.load_path = to_path("load_path", load_path)
        self.load_weights_only, self.strict_model_weights = load_weights_only, strict_model_weights
        self.ignore_keys = ignore_keys
        self.event = Event(event)
        self.loaded: LoadedCheckpoint | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Forget an earlier run, and load, if it is to be done here."""
        self.loaded = None
        self._load_at(Event.INIT, state, logger)

    def before_load(self, state: State, logger: Logger) -> None:
        """Load, if it is to be done here."""
        self._load_at(Event.BEFORE_LOAD, state, logger)

    def after_load(self, state: State, logger: Logger) -> None:
        """Load, if it is to be done here."""
        self._load_at(Event.AFTER_LOAD, state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Load, if it is to be done here."""
        self._load_at(Event.FIT_START, state, logger)

    def _load_at(self, event: Event, state: State, logger: Logger) -> None:
        if event is not self.event or self.loaded is not None:
            return
        given = self.load_path.replace("{run_name}", state.run_name)
        path = agreed_path(lambda: given, "load_path") or given
        with failing_together("Loading a checkpoint"):
            self.loaded = load_checkpoint(
                path,
                state,
                weights_only=self.load_weights_only,
                strict_model_weights=self.strict_model_weights,
                ignore_keys=self.ignore_keys,
                logger=logger,
            )
