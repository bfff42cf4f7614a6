"""What algorithms have in common: settings that change nothing, and how much of the training is done."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from composer.core import NoEffectWarning, Time, TimeUnit

if TYPE_CHECKING:
    from composer.core import Algorithm, State

__all__ = ["elapsed_duration", "to_time", "warn_if_idle"]


def warn_if_idle(algorithm: Algorithm, **idle: bool) -> None:
    """Warn at construction of the settings, by name, with which an algorithm changes nothing."""
    names = [name for name, is_idle in idle.items() if is_idle]
    if names:
        settings = " and ".join(f"{name}={getattr(algorithm, name)}" for name in names)
        warnings.warn(
            f"{type(algorithm).__name__} changes nothing with {settings}. Choose another value, or leave it out.",
            NoEffectWarning,
            stacklevel=4,
        )


def elapsed_duration(algorithm: Algorithm, state: State) -> float:
    """Return the fraction of the training that is done.

    Raises:
        ValueError: The training has no length.
    """
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ValueError(
            f"{type(algorithm).__name__} counts in fractions of the training, whose length is not set: "
            "say State.max_duration, e.g. '10ep'."
        )
    return elapsed.value


def to_time(given: Time | str | int, name: str) -> Time:
    """Return a time; a whole number counts batches. An error names the setting."""
    return Time.from_input(given, TimeUnit.BATCH, name=name)
