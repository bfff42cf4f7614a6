"""The table of former names."""

import importlib

import pytest

from composer.compat import entries

GONE = [entry for entry in entries().values() if not entry.works]


def test_advice_is_one_sentence():
    """Advice begins with a capital letter and ends with a full stop where there is no equal."""
    advice = {entry.advice for entry in GONE}

    assert all(text[0].isupper() and text.endswith(".") for text in advice)


@pytest.mark.parametrize(
    "module", sorted({entry.module for entry in entries().values() if str(entry.module).startswith("composer.compat.")})
)
def test_functions_that_serve_former_names(module):
    """The public functions and classes of a module of replacements are those that the table lists there."""
    defined = vars(importlib.import_module(module)).items()
    public = {name for name, one in defined if name[0] != "_" and getattr(one, "__module__", "") == module}
    listed = {entry.name for entry in entries().values() if entry.module == module}

    assert public - {"P", "T", "lag_schedules"} <= listed
