"""The precision in which a model computes, and the memory format of images."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from composer.core.checks import nearest
from composer.core.former import StringEnum


class Precision(StringEnum):
    """The precision in which a model computes.

    Example:
        >>> Precision("amp_bf16").autocast_dtype
        torch.bfloat16
    """

    FP32 = "fp32"
    """The precision of the parameters, usually 32 bits; no autocast."""
    AMP_FP16 = "amp_fp16"
    """Autocast to 16-bit floats with 5 bits of exponent; the loss is scaled to keep small gradients."""
    AMP_BF16 = "amp_bf16"
    """Autocast to 16-bit floats with 8 bits of exponent."""
    AMP_FP8 = "amp_fp8"
    """Matrix products in 8 bits, in layers that support it; autocast to bfloat16 elsewhere."""

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        word = str(value).strip().lower().removeprefix("torch.").replace("-", "_")
        if word.upper() in cls.__members__:
            return cls[word.upper()]
        hint = nearest(_ELSEWHERE.get(word, word), [one.value for one in cls])
        # Here, because the error that Enum raises after this method suggests nothing.
        raise ValueError(f"precision must be one of {', '.join(cls)}, got {value!r}{hint}")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None without autocast."""
        if self is Precision.FP32:
            return None
        return torch.float16 if self is Precision.AMP_FP16 else torch.bfloat16


_ELSEWHERE = {
    **dict.fromkeys(("32", "32_true", "float32", "float", "no", "fp32_true", "full"), Precision.FP32),
    **dict.fromkeys(("bf16", "bf16_mixed", "bf16_true", "bfloat16", "amp_bfloat16"), Precision.AMP_BF16),
    **dict.fromkeys(("16", "16_mixed", "16_true", "fp16", "float16", "half", "amp", "mixed"), Precision.AMP_FP16),
    **dict.fromkeys(("fp8", "float8", "transformer_engine"), Precision.AMP_FP8),
}


def get_precision_context(precision: Precision | str, device_type: str | None = None) -> AbstractContextManager[object]:
    """Return the context for the forward pass and the loss.

    Args:
        precision: A :class:`Precision` or its value.
        device_type: ``"cpu"``, ``"cuda"`` or ``"mps"``; the type of the accelerator, or else the CPU, if None.

    Example:
        >>> with get_precision_context("amp_bf16", "cpu"):
        ...     torch.nn.Linear(2, 2)(torch.rand(1, 2)).dtype
        torch.bfloat16
    """
    dtype = Precision(precision).autocast_dtype
    if dtype is None:
        return contextlib.nullcontext()
    found = torch.accelerator.current_accelerator(check_available=True) if device_type is None else device_type
    return torch.autocast("cpu" if found is None else torch.device(found).type, dtype=dtype)


class MemoryFormat(StringEnum):
    """The memory layout of a batch of images; ``to_torch()`` returns the corresponding :class:`torch.memory_format`."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"

    def to_torch(self) -> torch.memory_format:
        """Return the :class:`torch.memory_format`.

        Example:
            >>> MemoryFormat("channels_last").to_torch()
            torch.channels_last
        """
        memory_format: torch.memory_format = getattr(torch, self.value)
        return memory_format


class TrainerMode(StringEnum):
    """The mode of a run."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"
