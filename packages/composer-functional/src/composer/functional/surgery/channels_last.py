"""Channels last: store images and filters pixel by pixel, as fast convolutions want them."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from composer.functional.surgery.replace import Replacement, SurgeryReport

__all__ = ["apply_channels_last"]


def apply_channels_last(model: nn.Module) -> SurgeryReport:
    """Lay out all four-dimensional parameters and buffers with the channels last, in place.

    Values, shapes and parameter objects stay, so optimizers need not be told. Activations follow by themselves from
    the first convolution on; see https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html.

    Args:
        model: The model; **changed in place**.

    Returns:
        A report of the modules whose memory format changed; empty the second time.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> print(apply_channels_last(model))
        1 module replaced
          0: Conv2d -> Conv2d (channels last)
        >>> model[0].weight.is_contiguous(memory_format=torch.channels_last)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    return SurgeryReport(
        tuple(
            Replacement((path,), type(module).__name__, f"{type(module).__name__} (channels last)")
            for path, module in model.named_modules()
            if _lay_out(module)
        )
    )


def _lay_out(module: nn.Module) -> bool:
    """Change the module's own tensors; say whether any changed."""
    changed = False
    for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
        if tensor.ndim == 4:
            strides = tensor.stride()
            # Through .data, the parameter stays the object that optimizers know.
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
            changed = changed or tensor.stride() != strides
    return changed
