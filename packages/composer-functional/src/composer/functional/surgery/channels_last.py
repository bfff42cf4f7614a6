"""Channels last: the memory format in which convolutions are fastest on most hardware."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from composer.functional.checks import check_modules
from composer.functional.surgery.replace import Replacement, SurgeryReport


def apply_channels_last(model: nn.Module) -> SurgeryReport:
    """Convert all four-dimensional parameters and buffers to the ``channels_last`` memory format, in place.

    Values, shapes and parameter objects do not change, so optimizers remain valid. Activations have this format from
    the first convolution on; see https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html.

    Args:
        model: The model; **changed in place**.

    Returns:
        A report of the modules whose memory format changed; empty on a second call.

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
    check_modules(model=model)
    changed = []
    for path, module in model.named_modules():
        is_changed = False
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if tensor.ndim == 4:
                strides = tensor.stride()
                # Assigning .data keeps the parameter object that optimizers refer to.
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
                is_changed = is_changed or tensor.stride() != strides
        if is_changed:
            name = type(module).__name__
            changed.append(Replacement((path,), name, f"{name} (channels last)"))
    return SurgeryReport(tuple(changed))
