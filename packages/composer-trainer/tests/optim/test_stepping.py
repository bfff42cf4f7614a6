"""What the optimizers share: decays on lists of tensors, and their precision."""

import pytest
import torch

from composer.optim.stepping import decay, takes_lists


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decay_is_not_rounded(dtype):
    """On a CPU, weights of 16 bits are multiplied by 0.998 and not by 0.9961, the nearest number of bfloat16."""
    weights = [torch.tensor([2.609375, -1.5], dtype=dtype), torch.tensor(0.25, dtype=dtype)]
    expected = [(weight.double() * 0.998).to(dtype) for weight in weights]

    decay(weights, 0.002)

    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_lists_of_32_bits():
    """Only lists with tensors of 16 bits on a CPU are processed one by one."""
    assert takes_lists([torch.ones(2), torch.ones(2, dtype=torch.bfloat16, device="meta")])
    assert not takes_lists([torch.ones(2), torch.ones(2, dtype=torch.float16)])
