"""The mode, training or evaluation, of each module of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__: list[str] = []


@contextlib.contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module of a model at the end.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Dropout())
        >>> with kept_modes(model):
        ...     _ = model.eval()
        >>> model.training
        True
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, was_training in modes:  # a part may have been in evaluation mode before
            module.training = was_training
