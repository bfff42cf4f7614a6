"""The mode, training or evaluation, of each module of a model, and a context without autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


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


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products have the dtype of their factors, on the device of a tensor.

    Example:
        >>> one = torch.eye(2)
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(one):
        ...     (one @ one).dtype
        torch.float32
    """
    # The meta device has no autocast, and raises an error.
    return contextlib.nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
