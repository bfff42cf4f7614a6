"""Values are stored without synchronization, and read together."""

import math

import pytest
import torch

from composer.core.logger import detach_to_host
from composer.loggers.values import flat, numbers_by_name, read, show


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

    def test_releases_the_graph(self, unread):
        """A stored loss does not reference its graph."""
        assert not detach_to_host(unread(1).requires_grad_()).requires_grad

    @pytest.mark.parametrize("value", [3, 0.5, "text", None])
    def test_other_values_are_unchanged(self, value):
        """Other values are stored unchanged."""
        assert detach_to_host(value) is value


class TestRead:
    def test_synchronizes_once(self, unread):
        """Values of one dtype on one device are read together."""
        values = [unread(number) for number in range(50)]

        assert read(values) == [float(number) for number in range(50)]
        assert unread.counter.reads == 1

    def test_preserves_order_and_types(self):
        """Integers stay integers, and positions do not change."""
        values = [torch.tensor(1), "a", torch.tensor([0.5, 1.5]), torch.tensor([2.5]), torch.tensor(True), 7]

        assert read(values) == [1, "a", [0.5, 1.5], 2.5, True, 7]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_all_dtypes(self, dtype):
        """Values of each dtype are read exactly."""
        assert read([torch.tensor(0.375, dtype=dtype)]) == [0.375]

    def test_nan(self):
        """NaN is read."""
        (number,) = read([torch.tensor(math.nan)])

        assert math.isnan(number)


def test_format_rounds_to_four_digits():
    """Text has four digits."""
    assert [show(value) for value in (2 / 3, 1.25e-7, 3)] == ["0.6667", "1.25e-07", "3"]


class TestNumbersByName:
    def test_synchronizes_once_for_several_dictionaries(self, unread):
        """The values of several dictionaries are read together."""
        logged = [{"loss": unread(number), "batch": number} for number in range(9)]

        assert numbers_by_name(logged) == [{"loss": float(number), "batch": number} for number in range(9)]
        assert unread.counter.reads == 1

    def test_only_numbers(self):
        """Elements of tensors and lists have their index in the name; other values are omitted."""
        logged = [{"a": torch.tensor([[1, 2]]), "b": "text", "c": None, "d": [0.5], "e": True, "f": math.inf}]

        assert numbers_by_name(logged) == [{"a/0/0": 1, "a/0/1": 2, "d/0": 0.5, "e": 1.0, "f": math.inf}]


class TestFlat:
    def test_names(self):
        """Names of nested dictionaries are joined; empty ones are preserved."""
        nested = {"a": {"b": {"c": 1}, "d": []}, "e": (1, {"f": 2}), 3: {}}

        assert flat(nested) == {"a/b/c": 1, "a/d": [], "e/0": 1, "e/1/f": 2, "3": {}}

    def test_separator(self):
        """The separator can be set."""
        assert flat({"a": {"b": 1}}, ".") == {"a.b": 1}
