"""Values are stored without synchronization, and read together."""

import math

import pytest
import torch

from composer.core.logger import detach_to_host
from composer.loggers.values import numbers_by_name, read


class TestDetach:
    def test_is_independent_of_the_tensor(self):
        """In-place changes of the tensor do not change the stored value."""
        rate = torch.tensor(0.1, dtype=torch.float64)

        preserved = detach_to_host(rate)
        rate.fill_(0.2)

        assert preserved == 0.1

    def test_device_tensor_is_copied(self, unread):
        """A tensor on another device is copied without synchronization."""
        loss = unread(3)

        preserved = detach_to_host(loss)
        loss.fill_(4)

        assert unread.counter.reads == 0
        assert read([preserved]) == [3.0]


class TestRead:
    def test_synchronizes_once(self, unread):
        """Values of one dtype on one device are read together."""
        values = [unread(number) for number in range(50)]

        assert read(values) == [float(number) for number in range(50)]
        assert unread.counter.reads == 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_all_dtypes(self, dtype):
        """Values of each dtype are read exactly."""
        assert read([torch.tensor(0.375, dtype=dtype)]) == [0.375]


class TestNumbersByName:
    def test_only_numbers(self):
        """Elements of tensors and lists have their index in the name; other values are omitted."""
        logged = [{"a": torch.tensor([[1, 2]]), "b": "text", "c": None, "d": [0.5], "e": True, "f": math.inf}]

        assert numbers_by_name(logged) == [{"a/0/0": 1, "a/0/1": 2, "d/0": 0.5, "e": 1.0, "f": math.inf}]
