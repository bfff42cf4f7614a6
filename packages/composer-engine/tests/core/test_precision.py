"""Precisions and memory formats."""

import pytest
import torch
from torch import nn

from composer.core import MemoryFormat, Precision, get_precision_context


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)]
)
def test_context_sets_the_compute_dtype(precision, dtype):
    """Inside the context a layer's output has the precision's dtype; its weights do not change."""
    layer = nn.Linear(2, 2)

    with get_precision_context(precision, "cpu"):
        out = layer(torch.rand(1, 2))

    assert (out.dtype, layer.weight.dtype) == (dtype, torch.float32)


def test_device_without_a_name():
    """Without a device, as MosaicML Composer calls it, the context is that of the accelerator, or else of the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)

    assert get_precision_context("amp_bf16", None).device == ("cpu" if found is None else found.type)


def test_fp8_uses_bfloat16_elsewhere():
    """The trainer creates the 8-bit layers; everything else is in bfloat16."""
    with get_precision_context("amp_fp8", "cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize("memory_format", MemoryFormat)
def test_memory_formats_are_those_of_torch(memory_format):
    """Each member gives torch's format of its name."""
    assert memory_format.to_torch() is getattr(torch, memory_format.value)


@pytest.mark.parametrize(("name", "hint"), [("bf16", "; did you mean 'amp_bf16'?"), ("banana", "."), (None, ".")])
def test_unknown_precision_suggests_a_name(name, hint):
    """The error lists the precisions and suggests a similar one."""
    with pytest.raises(ValueError, match="precision must be one of") as raised:
        Precision(name)

    assert str(raised.value) == f"precision must be one of fp32, amp_fp16, amp_bf16, amp_fp8, got {name!r}{hint}"
