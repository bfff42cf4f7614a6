"""The bytes of a file with tensors; that they are read again is in ``test_reading.py``."""

import torch
from safetensors.torch import load

from composer.checkpoint.packing import bytes_of, pack_files
from composer.checkpoint.planning import describe_tensors, plan_files


def test_header_is_padded():
    """The tensors begin at a multiple of 8 bytes, and the safetensors package reads the file."""
    tensors = {"model.safetensors": {"weight": torch.arange(3.0)}}
    described = describe_tensors(tensors, is_first=True)
    _, [writes] = plan_files([described])

    [(header, weight)] = pack_files(tensors, described, writes, copy=True).values()

    assert len(header) % 8 == 0
    assert load(bytes(header) + bytes(weight))["weight"].tolist() == [0, 1, 2]


def test_bytes_are_those_of_the_tensor():
    """What is written to the bytes is in the tensor."""
    tensor = torch.zeros(2, dtype=torch.uint8)
    bytes_of(tensor)[1] = 7

    assert tensor.tolist() == [0, 7]
