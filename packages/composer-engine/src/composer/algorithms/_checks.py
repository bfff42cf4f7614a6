"""Checks of algorithms: settings without effect, and the progress of the training."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from composer.core import NoEffectWarning, Time, TimeUnit
from composer.functional.layers.factorized import resolve_latent_size

if TYPE_CHECKING:
    import attrs

    from composer.core import Algorithm, State

__all__ = ["check_latent_size", "elapsed_duration", "to_time", "warn_if_idle"]


def check_latent_size(_: object, field: attrs.Attribute[Any], value: float) -> None:
    """Check, as a validator of attrs, that a latent size is a whole number of at least 1, or a fraction."""
    resolve_latent_size(value, 1, field.name)


def warn_if_idle(algorithm: Algorithm, **idle: bool) -> None:
    """Warn at construction about settings, by name, with which an algorithm changes nothing."""
    names = [name for name, is_idle in idle.items() if is_idle]
    if names:
        settings = " and ".join(f"{name}={getattr(algorithm, name)}" for name in names)
        warnings.warn(
            f"{type(algorithm).__name__} changes nothing with {settings}. Choose another value, or remove it.",
            NoEffectWarning,
            stacklevel=4,
        )


def elapsed_duration(algorithm: Algorithm, state: State) -> float:
    """Return the fraction of the training that is complete.

    Raises:
        ValueError: The length of the training is unknown.
    """
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ValueError(
            f"{type(algorithm).__name__} needs the length of the training, which is not set: "
            "set State.max_duration, e.g. '10ep'."
        )
    return elapsed.value


def to_time(value: Time | str | int, name: str) -> Time:
    """Return a time; an int is a number of batches. Errors contain the name of the setting."""
    return Time.from_input(value, TimeUnit.BATCH, name=name)
