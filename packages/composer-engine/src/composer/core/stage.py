"""The order in which kinds of algorithms run within one event."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Stage"]


class Stage(IntEnum):
    """A kind of work. Within an event lower stages run first; within a stage the order of the user's list applies.

    Example:
        >>> Stage.AUGMENT < Stage.MIX
        True
    """

    SELECT = 10
    """On the batch: choose which samples to train on."""
    RESHAPE = 20
    """On the batch: change the samples' size or length."""
    AUGMENT = 30
    """On the batch: change each sample by itself."""
    MIX = 40
    """On the batch: blend samples with each other."""

    LABEL = 50
    """On the loss: change the targets."""
    LOSS = 60
    """On the loss: change its value."""

    ARCHITECTURE = 70
    """On the model: replace blocks."""
    NORMALIZATION = 80
    """On the model: replace norms, or normalise weights."""
    PRECISION = 90
    """On the model: fused and low-precision norms."""
    LAYOUT = 100
    """On the model: memory format."""

    GRADIENT = 110
    """On the weights: change gradients or the step."""
    WEIGHTS = 120
    """On the weights: change, freeze or average them."""

    UNDECLARED = 1000
    """An algorithm without a declared stage: after all others."""
