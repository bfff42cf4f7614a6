"""The table of former names."""

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
