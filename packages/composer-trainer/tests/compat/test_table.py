"""The table of former names."""

import importlib

import pytest

from composer.compat import entries
from composer.compat.table import former_modules, parse_home

GONE = [entry for entry in entries().values() if not entry.works]


def test_advice_is_one_sentence():
    """Advice begins with a capital letter and ends with a full stop where there is no equal."""
    advice = {entry.advice for entry in GONE}

    assert all(text[0].isupper() and text.endswith(".") for text in advice)


def test_homes_of_renamed_names():
    """A renamed name has its new one in the import, and a former package does not contain it again."""
    entry = entries()["composer.metrics.nlp.Perplexity"]

    assert entry.change == "from composer.metrics import LanguagePerplexity as Perplexity"
    assert "composer.utils" in former_modules()
    assert "composer.core" not in former_modules()


@pytest.mark.parametrize(
    "module", sorted({entry.module for entry in entries().values() if str(entry.module).startswith("composer.compat.")})
)
def test_functions_that_serve_former_names(module):
    """The public functions and classes of a module of replacements are those that the table lists there."""
    defined = vars(importlib.import_module(module)).items()
    public = {name for name, one in defined if name[0] != "_" and getattr(one, "__module__", "") == module}
    listed = {entry.name for entry in entries().values() if entry.module == module}

    assert public - {"P", "T", "lag_schedules"} <= listed


@pytest.mark.parametrize(
    ("home", "expected"),
    [
        ("composer.core", ("composer.core", None)),
        ("Use a list.", (None, "Use a list.")),
        ("composer.core: use list(...)", ("composer.core", "use list(...)")),
    ],
)
def test_parse_home(home, expected):
    """A home is a module, advice, or both."""
    assert parse_home(home) == expected
