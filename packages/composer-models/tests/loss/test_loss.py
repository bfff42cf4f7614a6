"""The losses are those of composer.functional."""

import pytest

import composer.loss
import composer.loss.utils
from composer import functional as cf


@pytest.mark.parametrize("module", [composer.loss, composer.loss.utils])
def test_names_are_those_of_functional(module):
    """Each public name is the very function of composer.functional."""
    assert all(getattr(module, name) is getattr(cf, name) for name in module.__all__)
