"""Values are kept without waiting for a device, and read together."""

import math

import pytest
import torch

from composer.loggers.values import detach_to_host, flat, numbers_by_name, read, show


class TestKeep:
    def test_is_not_changed_by_what_happens_to_the_tensor(self):
        """A tensor that is later changed in place, as optimizers do with learning rates, leaves the value alone."""
        rate = torch.tensor(0.1, dtype=torch.float64)

        kept = detach_to_host(rate)
        rate.fill_(0.2)

        assert kept == 0.1

    def test_tensor_elsewhere_is_copied_and_not_read(self, unread):
        """A number that another device computes is not waited for, and is safe from later changes."""
        loss = unread(3)

        kept = detach_to_host(loss)
        loss.fill_(4)

        assert unread.counter.reads == 0
        assert read([kept]) == [3.0]

    def test_lets_go_of_the_graph(self, unread):
        """A kept loss does not hold on to what its gradient needs."""
        assert not detach_to_host(unread(1).requires_grad_()).requires_grad

    @pytest.mark.parametrize("value", [3, 0.5, "text", None])
    def test_anything_else_is_what_it_is(self, value):
        """What is no tensor is kept as it is."""
        assert detach_to_host(value) is value


class TestRead:
    def test_waits_once_for_many(self, unread):
        """Numbers of one type on one device are read in one go."""
        values = [unread(number) for number in range(50)]

        assert read(values) == [float(number) for number in range(50)]
        assert unread.counter.reads == 1

    def test_keeps_order_and_types(self):
        """Whole numbers stay whole, and others stand where they stood."""
        values = [torch.tensor(1), "a", torch.tensor([0.5, 1.5]), torch.tensor([2.5]), torch.tensor(True), 7]

        assert read(values) == [1, "a", [0.5, 1.5], 2.5, True, 7]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_any_number_format(self, dtype):
        """Numbers are read exactly in each format."""
        assert read([torch.tensor(0.375, dtype=dtype)]) == [0.375]

    def test_not_a_number(self):
        """What is no number is read, too."""
        (number,) = read([torch.tensor(math.nan)])

        assert math.isnan(number)


def test_show_rounds_to_four_digits():
    """Text is for people."""
    assert show([("loss", torch.tensor(2 / 3)), ("lr", 1.25e-7), ("epoch", 3)]) == "loss=0.6667, lr=1.25e-07, epoch=3"


class TestNumbersByName:
    def test_waits_once_for_all(self, unread):
        """The numbers of several dictionaries are read in one go."""
        logged = [{"loss": unread(number), "batch": number} for number in range(9)]

        assert numbers_by_name(logged) == [{"loss": float(number), "batch": number} for number in range(9)]
        assert unread.counter.reads == 1

    def test_only_numbers(self):
        """Of tensors and lists each number has its place in its name; what is no number is left out."""
        logged = [{"a": torch.tensor([[1, 2]]), "b": "text", "c": None, "d": [0.5], "e": True, "f": math.inf}]

        assert numbers_by_name(logged) == [{"a/0/0": 1, "a/0/1": 2, "d/0": 0.5, "e": 1.0, "f": math.inf}]


class TestFlat:
    def test_names(self):
        """Names of dictionaries in dictionaries are joined; empty ones are not lost."""
        nested = {"a": {"b": {"c": 1}, "d": []}, "e": (1, {"f": 2}), 3: {}}

        assert flat(nested) == {"a/b/c": 1, "a/d": [], "e/0": 1, "e/1/f": 2, "3": {}}

    def test_separator(self):
        """Another separator, where a product wants one."""
        assert flat({"a": {"b": 1}}, ".") == {"a.b": 1}
