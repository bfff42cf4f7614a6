"""A hue for kornia's ``ColorJitter`` on a CPU, in a quarter of the time."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from math import tau
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

_HUE = "_hue_fn"  # the attribute of ka.ColorJitter, which its compile() also replaces
_OFFSETS = (2.0, 5 / 3, 4 / 3)
"""Where red, green and blue are on the circle of hues, in turns, plus 1, so that fractions are of positive numbers."""


def shift_hue(image: Tensor, angle: Tensor) -> Tensor:
    """Return images with another hue, as ``kornia.enhance.adjust_hue`` does, up to rounding.

    A channel is ``value - chroma * w``, where ``w`` is from 0 to 1 and depends only on the distance of the channel and
    the hue on the circle of hues (https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative), so that nothing
    has to be chosen for each sixth of the circle.

    Args:
        image: RGB images, shape ``(N, 3, H, W)``, float32 or float64, that need no gradients.
        angle: The shift of each image, shape ``(N,)``, in radians.

    Returns:
        New images, shape ``(N, 3, H, W)``.

    Example:
        >>> red = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
        >>> shift_hue(red, torch.tensor([tau / 3])).flatten().round(decimals=4)
        tensor([0., 1., 0.])
    """
    red, green, blue = image.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    from_green, from_blue = (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)
    hue = torch.where(red == value, green - blue, torch.where(green == value, from_green, from_blue))
    hue.div_(chroma.clamp(min=torch.finfo(image.dtype).tiny)).div_(6).add_((angle / tau).frac().view(-1, 1, 1))
    weight = hue[:, None] + image.new_tensor(_OFFSETS).view(3, 1, 1)
    weight.frac_().sub_(0.5).abs_().mul_(-6).add_(2).clamp_(0, 1).mul_(chroma[:, None])
    return weight.neg_().add_(value[:, None])


@contextmanager
def with_faster_hue(augmentation: nn.Module, params: Any) -> Iterator[None]:
    """Let the ``ColorJitter`` modules of kornia in an augmentation use :func:`shift_hue`.

    It is used for RGB images on a CPU without gradients. Compiled modules keep their own function. Several threads may
    use the same modules: calls outside of this context, and copies made meanwhile, have kornia's function.

    Args:
        augmentation: The augmentation.
        params: The parameters that it drew. Its modules are searched only if there is a hue among them.
    """
    if not _may_have_hue(params):
        yield
        return
    from kornia.enhance import adjust_hue  # noqa: PLC0415  (kornia is imported at first use)

    own = (adjust_hue, _shift_or_adjust)  # the second one while another thread is here
    jitters = [module for module in augmentation.modules() if module.__dict__.get(_HUE) in own]
    with _changing:
        for module in jitters:
            _num_users[module] += 1
            setattr(module, _HUE, _shift_or_adjust)
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)
        with _changing:
            for module in jitters:
                _num_users[module] -= 1
                if not _num_users[module]:
                    del _num_users[module]
                    setattr(module, _HUE, adjust_hue)


_num_users: Counter[nn.Module] = Counter()
_changing = threading.Lock()
_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)
"""Whether this thread is in :func:`with_faster_hue`; another one may be, with the same modules."""


def _may_have_hue(params: Any) -> bool:
    if isinstance(params, list):  # of a container
        return any(_may_have_hue(getattr(item, "data", None)) for item in params)
    return params is None or "hue_factor" in params  # None for modules that are not kornia's, and for patches


class _ShiftOrAdjust:
    """Shifts the hue by :func:`shift_hue` if it can, else by kornia's function, which is in pickles and deep copies."""

    def __call__(self, image: Tensor, angle: Any) -> Tensor:
        usable = image.device.type == "cpu" and image.ndim == 4 and image.shape[1] == 3 and isinstance(angle, Tensor)
        usable = usable and not (torch.is_grad_enabled() and (image.requires_grad or angle.requires_grad))
        if usable and _is_inside.get():
            return shift_hue(image, angle)
        from kornia.enhance import adjust_hue  # noqa: PLC0415  (kornia is imported at first use)

        adjusted: Tensor = adjust_hue(image, angle)
        return adjusted

    def __reduce__(self) -> tuple[Any, ...]:
        from kornia.enhance import adjust_hue  # noqa: PLC0415  (kornia is imported at first use)

        return copy, (adjust_hue,)  # a copy of a function is the function


_shift_or_adjust = _ShiftOrAdjust()
