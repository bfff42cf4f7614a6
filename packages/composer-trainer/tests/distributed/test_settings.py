"""Sections of ``parallelism_config``."""

import attrs
import pytest

from composer.distributed.settings import Settings


@attrs.frozen
class Example(Settings):
    section = "example"
    hint = " See the guide."

    size: int = 1
    name: str = ""


def test_a_dictionary_gives_the_settings():
    """Keys are settings, the others have their defaults."""
    assert Example.from_config({"size": 3}) == Example(size=3, name="")


def test_unknown_keys_raise():
    """The error names the section, its settings and the unknown keys."""
    message = r"parallelism_config\['example'\] takes size, name, got 'sizes', 'x'\. See the guide\."
    with pytest.raises(ValueError, match=message):
        Example.from_config({"sizes": 3, "x": 1})
