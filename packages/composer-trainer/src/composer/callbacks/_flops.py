"""Floating-point operations: how many a batch takes, and how many a second a device can do at best."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch

from composer.core import Precision

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = ["FlopCounter", "KnowsFlops", "flops_per_batch", "peak_flops"]


@runtime_checkable
class KnowsFlops(Protocol):
    """A model that knows how many operations a batch takes, forward and backward: a number, or a function of it."""

    flops_per_batch: Any


def flops_per_batch(model: KnowsFlops, batch: Any) -> float:
    """Return how many operations a model says that a batch takes.

    Example:
        >>> class Model:
        ...     def flops_per_batch(self, batch):
        ...         return 6 * 1_000 * len(batch)
        >>> flops_per_batch(Model(), torch.zeros(8))
        48000.0
    """
    known = model.flops_per_batch
    return float(known(batch) if callable(known) else known)


class FlopCounter:
    """Counts the operations between :meth:`begin` and :meth:`end`, again and again, until it is told to stop.

    Example:
        >>> counter = FlopCounter()
        >>> counter.begin()
        >>> product = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> counter.end()
        >>> counter.total
        48
    """

    def __init__(self) -> None:
        self.total = 0
        self._counting = ExitStack()

    def begin(self) -> None:
        """Begin to count."""
        from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  (only who counts pays for the import)

        self.end()
        mode = self._counting.enter_context(FlopCounterMode(display=False))
        self._counting.callback(self._add, mode)

    def end(self) -> None:
        """Add what was counted since the beginning, if it was begun."""
        self._counting.close()

    def _add(self, mode: FlopCounterMode) -> None:
        self.total += mode.get_total_flops()


@attrs.frozen
class _Peak:
    """The 10^12 operations a second of dense matrix products, by number format; None where the maker says nothing."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None


# As their data sheets have it, without sparsity; the first name that is found in the device's is the one.
_PEAKS = {
    "B200": _Peak(tf32=1125, fp16=2250, bf16=2250, fp8=4500),
    "H200 NVL": _Peak(60, 417.5, 835.5, 835.5, 1670.5),
    "H200": _Peak(67, 494.5, 989.5, 989.5, 1979),
    "H100 NVL": _Peak(60, 417.5, 835.5, 835.5, 1670.5),
    "H100 PCIe": _Peak(51, 378, 756.5, 756.5, 1513),
    "H100": _Peak(67, 494.5, 989.5, 989.5, 1979),
    "A100": _Peak(19.5, 156, 312, 312),
    "A40": _Peak(37.4, 74.8, 149.7, 149.7),
    "A30": _Peak(10.3, 82, 165, 165),
    "A10": _Peak(31.2, 62.5, 125, 125),
    "L40S": _Peak(91.6, 183, 362, 362, 733),
    "L4": _Peak(30.3, 60, 121, 121, 242.5),
    "V100-SXM2": _Peak(fp32=15.7, fp16=125),
    "V100-PCIE": _Peak(fp32=14, fp16=112),
    "T4": _Peak(fp32=8.1, fp16=65),
}


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return how many operations a second a GPU can do at best in a precision; None if that is not known.

    In ``fp32`` they are those of TF32 where :func:`torch.set_float32_matmul_precision` allows it.

    Args:
        device_name: As :func:`torch.cuda.get_device_name` has it.
        precision: What the model computes in.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", Precision.AMP_BF16)
        312000000000000.0
    """
    # A part of a GPU (MIG) can do a part, and its name does not say which.
    found = (peak for name, peak in _PEAKS.items() if re.search(rf"\b{re.escape(name)}\b", device_name))
    peak = None if "MIG" in device_name else next(found, None)
    if peak is None:
        return None
    known = {
        Precision.FP32: peak.fp32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32 or peak.fp32,
        Precision.AMP_FP16: peak.fp16,
        Precision.AMP_BF16: peak.bf16,
        Precision.AMP_FP8: peak.fp8,
    }[precision]
    return None if known is None else known * 1e12
