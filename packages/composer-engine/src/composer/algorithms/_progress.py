"""How far the training is, for algorithms whose strength follows it."""

from __future__ import annotations

from composer.core import Algorithm, State
from composer.core.checks import number_between

FRACTION_OF_TRAINING = number_between(0, 1, meaning="It is a fraction of the training.")


def elapsed_duration(algorithm: Algorithm, state: State) -> float:
    """Return the fraction of the training that is complete, at most 1.

    The last batch may have more samples or tokens than are left of the duration.

    Raises:
        ValueError: The length of the training is unknown.
    """
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ValueError(
            f"{type(algorithm).__name__} needs the length of the training, which is not set: "
            "set State.max_duration, e.g. '10ep'."
        )
    return min(1.0, elapsed.value)
