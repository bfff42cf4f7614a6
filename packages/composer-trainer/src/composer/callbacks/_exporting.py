"""What callbacks that write a model at the end of a training have in common."""

from __future__ import annotations

import logging

from composer.core import State

_log = logging.getLogger(__name__)


def is_interrupted(state: State, writer: str) -> bool:
    """Return whether a signal has stopped the training before its end, and log then that nothing is written."""
    interrupted = (
        state.stop_reason is not None
        and state.max_duration is not None
        and not state.has_reached(state.max_duration)  # stop_training() sets it to a time that is reached
    )
    if interrupted and state.rank == 0:
        _log.warning("%s writes nothing: the training is not complete (%s).", writer, state.stop_reason)
    return interrupted
