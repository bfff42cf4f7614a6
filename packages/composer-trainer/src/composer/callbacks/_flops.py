"""Floating-point operations: the number per batch, and the peak per second of a device."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch

from composer.core import Precision

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


@runtime_checkable
class HasFlops(Protocol):
    """A model with the operations of a batch, forward and backward: a number, or a function of the batch."""

    flops_per_batch: Any


def flops_per_batch(model: HasFlops, batch: Any) -> float:
    """Return the operations of a batch according to the model.

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
    """Count the operations between calls of :meth:`begin` and :meth:`end`.

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
        """Start counting."""
        from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  (imported only if needed)

        self.end()
        mode = self._counting.enter_context(FlopCounterMode(display=False))
        self._counting.callback(self._add, mode)

    def end(self) -> None:
        """Add the operations since :meth:`begin`, if it was called."""
        self._counting.close()

    def _add(self, mode: FlopCounterMode) -> None:
        self.total += mode.get_total_flops()


@attrs.frozen
class _Peak:
    """Peak 10^12 operations per second of dense matrix products, by number format; None if not published."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None


# From the data sheets, without sparsity; the first name contained in the device's name applies.
PEAKS = {
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
    """Return the peak operations per second of a GPU in a precision; None if unknown.

    In ``fp32`` it is the peak of TF32 if :func:`torch.set_float32_matmul_precision` allows TF32.

    Args:
        device_name: The result of :func:`torch.cuda.get_device_name`.
        precision: The precision of the run.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", Precision.AMP_BF16)
        312000000000000.0
    """
    # The name of a GPU instance (MIG) does not state its fraction of the GPU.
    candidates = (peak for name, peak in PEAKS.items() if re.search(rf"\b{re.escape(name)}\b", device_name))
    peak = None if "MIG" in device_name else next(candidates, None)
    if peak is None:
        return None
    known = {
        Precision.FP32: peak.fp32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32 or peak.fp32,
        Precision.AMP_FP16: peak.fp16,
        Precision.AMP_BF16: peak.bf16,
        Precision.AMP_FP8: peak.fp8,
    }[precision]
    return None if known is None else known * 1e12
