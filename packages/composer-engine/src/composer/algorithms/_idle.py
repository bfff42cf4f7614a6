"""Warnings of algorithms that change nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from composer.core import Algorithm, NoEffectWarning, State
from composer.core.checks import caller_level
from composer.core.state import STOPPED_BY_SIGNAL


def warn_if_idle(algorithm: Algorithm, **idle: bool) -> None:
    """Warn at construction about settings, by name, with which an algorithm changes nothing."""
    names = [name for name, is_idle in idle.items() if is_idle]
    if names:
        settings = " and ".join(f"{name}={getattr(algorithm, name)}" for name in names)
        warnings.warn(
            f"{type(algorithm).__name__} changes nothing with {settings}. Choose another value, or remove it.",
            NoEffectWarning,
            stacklevel=caller_level(),
        )


def warn_of_no_effect(message: str) -> None:
    """Warn, from a method of an algorithm, that it has changed nothing, and how to change that."""
    warnings.warn(message, NoEffectWarning, stacklevel=caller_level())


def warn_at_end(state: State, message: str, warn: Callable[[str], None] = warn_of_no_effect) -> None:
    """Warn of no effect at the end of a fit; not if a signal has stopped it, as a resumed run may have one."""
    if state.stop_reason != STOPPED_BY_SIGNAL:
        stop = "" if state.stop_reason is None else " The training was stopped: ignore this if it is resumed."
        warn(message + stop)
