"""Names that a program can import, and cannot use."""

import importlib
import re

import pytest

from composer.compat import entries
from composer.compat.table import UNAVAILABLE

ENTRIES = [entry for entry in entries().values() if entry.module == UNAVAILABLE]


@pytest.mark.filterwarnings("ignore:composer.* is a former name:DeprecationWarning")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.former)
def test_names_that_cannot_be_used(entry):
    """A call, a subscript and an object of a subclass raise an error with what to use; nothing is an instance."""
    parent, _, name = entry.former.rpartition(".")
    found = getattr(importlib.import_module(parent), name)

    for use in (found, lambda: found["key"], type("Own", (found,), {})):
        with pytest.raises(NotImplementedError, match=re.escape(f"{name} is not available here. {entry.advice}")):
            use()
    assert not isinstance(3, found)
