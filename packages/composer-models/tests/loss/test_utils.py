"""The names for targets are those of composer.functional."""

import pytest

import composer.loss
import composer.loss.utils
from composer import functional as cf


@pytest.mark.parametrize(
    ("module", "names"), [(composer.loss, ["soft_cross_entropy"]), (composer.loss.utils, composer.loss.utils.__all__)]
)
def test_functions_are_reexported(module, names):
    """The functions of composer.functional are the same objects."""
    assert all(getattr(module, name) is getattr(cf, name) for name in names)
