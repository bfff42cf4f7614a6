"""Each check names the parameter, what was expected and the value."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from composer.functional import checks

ONE = torch.ones(1)
ACCEPTED = [
    (checks.check_numbers, [0, -1.5, float("nan")]),
    (checks.check_whole_numbers, [0, -3]),
    (checks.check_sizes, [1, 7]),
    (checks.check_flags, [True, False]),
    (checks.check_tensors, [ONE, ONE.long()]),
    (checks.check_float_tensors, [ONE, ONE.half()]),
    (checks.check_modules, [nn.ReLU()]),
    (checks.check_callables, [print, nn.ReLU()]),
    (checks.check_pairs, [(1, 2), [3, 4]]),
    (checks.check_pixels, [2, (1, 2)]),
]
REJECTED = [
    (checks.check_numbers, "1", "x must be a number, got '1'. Convert it: float(x)."),
    (checks.check_numbers, True, "x must be a number, got True. Convert it: float(x)."),
    (checks.check_numbers, ONE, "x must be a number, got a tensor. Read it once, outside the training step: float(x)."),
    (checks.check_whole_numbers, 1.5, "x must be an int, got 1.5. Convert it: int(x)."),
    (checks.check_whole_numbers, True, "x must be an int, got True. Convert it: int(x)."),
    (checks.check_sizes, "2", "x must be an int, got '2'. Convert it: int(x)."),
    (checks.check_flags, "no", "x must be True or False, got 'no'."),
    (checks.check_flags, 1, "x must be True or False, got 1."),
    (checks.check_tensors, [1.0], "x must be a tensor, got [1.0]."),
    (checks.check_float_tensors, ONE.long(), "x must be a floating point tensor, got torch.int64."),
    (checks.check_float_tensors, 1.0, "x must be a floating point tensor, got float."),
    (checks.check_modules, {}, "x must be a torch.nn.Module, got dict."),
    (checks.check_callables, "gelu", "x must be callable, got 'gelu'."),
    (checks.check_pairs, (1, 2, 3), "x must be two ints, along the height and the width, got (1, 2, 3)."),
    (checks.check_pairs, 3, "x must be two ints, along the height and the width, got 3."),
    (checks.check_pixels, 1.5, "x must be an int, got 1.5. Convert it: int(x)."),
]


@pytest.mark.parametrize(("check", "values"), ACCEPTED, ids=lambda one: getattr(one, "__name__", ""))
def test_valid_values(check, values):
    """Valid values pass."""
    assert [check(x=value) for value in values] == [None] * len(values)


@pytest.mark.parametrize(("check", "value", "message"), REJECTED)
def test_wrong_types_raise(check, value, message):
    """The error has the name, the expected type, the value and, where there is one, the remedy."""
    with pytest.raises(TypeError) as caught:
        check(x=value)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "options", "interval"),
    [
        (1.5, {}, "[0, 1]"),
        (0, {"open_low": True}, "(0, 1]"),
        (1, {"open_high": True}, "[0, 1)"),
        (float("nan"), {}, "["),
    ],
)
def test_interval(value, options, interval):
    """A value outside raises with the interval and its meaning; the ends belong to it unless they are open."""
    checks.check_interval("p", 0.5, 0, 1, "It is a probability.", **options)

    with pytest.raises(ValueError, match=rf"p must lie in {re.escape(interval)}.*It is a probability\."):
        checks.check_interval("p", value, 0, 1, "It is a probability.", **options)


@pytest.mark.parametrize(("value", "text"), [("ab", "'ab'"), (None, "None"), ("a" * 50, "str"), (ONE, "Tensor")])
def test_described(value, text):
    """A short value is described by its repr, anything else by its class."""
    assert checks.described(value) == text
