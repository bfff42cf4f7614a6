"""Former names work for one release."""

import pytest

from composer.distributed import smallest


def test_smallest_is_all_reduce_min():
    """The former name returns the same, with a warning that states the present name."""
    with pytest.warns(DeprecationWarning, match="all_reduce_min"):
        assert smallest(16) == 16
