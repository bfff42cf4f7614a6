"""Load a checkpoint before training."""

from __future__ import annotations

import os
from typing import Any

from composer.checkpoint.contents import IgnoreKeys, check_ignore_keys
from composer.checkpoint.loading import LoadedCheckpoint, LoadRequest
from composer.core import Callback, Event, Logger, State
from composer.core.checks import to_path
from composer.foreign.files import agreed_source
from composer.functional.checks import check_flags

_EVENTS = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START)


class LoadCheckpoint(Callback):
    """Load a checkpoint once per run, at an event before training; several such callbacks load in order.

    To resume a run, use the trainer's ``load_path`` instead, which also restores the position in the data.

    Args:
        load_path: Folder or URL of a checkpoint; with ``load_weights_only`` also a file of weights. ``{run_name}`` is
            replaced by the run's name.
        load_weights_only: Whether to load only the model's weights: those for evaluation, such as EMA's averages.
        strict_model_weights: Whether missing or unexpected weights raise an error instead of a warning.
        ignore_keys: State that is not loaded; see :func:`~composer.checkpoint.load_checkpoint`.
        event: ``INIT``, ``BEFORE_LOAD``, ``AFTER_LOAD`` or ``FIT_START``.

    The result is in ``loaded``.

    Raises:
        ValueError: The event is none of these.

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
        if str(event).lower() not in _EVENTS:
            raise ValueError(f"event must be one before training, {', '.join(_EVENTS)}, got {str(event)!r}.")
        check_flags(load_weights_only=load_weights_only, strict_model_weights=strict_model_weights)
        check_ignore_keys(ignore_keys)
        self.load_path = to_path("load_path", load_path)
        self.load_weights_only, self.strict_model_weights = load_weights_only, strict_model_weights
        self.ignore_keys = ignore_keys
        self.event = Event(event)
        self.loaded: LoadedCheckpoint | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and load if ``event`` is INIT."""
        self.loaded = None
        self._load_at(Event.INIT, state, logger)

    def before_load(self, state: State, logger: Logger) -> None:
        """Load if ``event`` is BEFORE_LOAD."""
        self._load_at(Event.BEFORE_LOAD, state, logger)

    def after_load(self, state: State, logger: Logger) -> None:
        """Load if ``event`` is AFTER_LOAD."""
        self._load_at(Event.AFTER_LOAD, state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Load if ``event`` is FIT_START."""
        self._load_at(Event.FIT_START, state, logger)

    def _load_at(self, event: Event, state: State, logger: Logger) -> None:
        if event is not self.event or self.loaded is not None:
            return
        self.loaded = load_checkpoint(
            self.load_path.replace("{run_name}", state.run_name),
            state,
            logger,
            load_weights_only=self.load_weights_only,
            strict_model_weights=self.strict_model_weights,
            ignore_keys=self.ignore_keys,
        )


def load_checkpoint(
    path: str, state: State, logger: Logger, *, load_weights_only: bool = False, **settings: Any
) -> LoadedCheckpoint:
    """Load a checkpoint in all processes, which agree on it; a program may replace this function."""
    request = LoadRequest(state, logger=logger, weights_only=load_weights_only, **settings)
    return request.load_in_all_processes(agreed_source(path))
