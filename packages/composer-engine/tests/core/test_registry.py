"""Algorithms are reconstructed from name and settings, with registered classes."""

import gc
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from composer.core import Algorithm, BatchKey, Time, algorithm_classes, rebuild_algorithm
from composer.core.serializable import is_unsaved, settings_to_data


@attrs.define(eq=False)
class RegistryExample(Algorithm):
    alpha: float = attrs.field(default=0.2, validator=attrs.validators.ge(0))
    every: Time = attrs.field(default="1ep", converter=lambda value: Time.from_input(value, "ep"))
    input_key: BatchKey = 0
    act_fn: Callable[[Any], Any] | None = None
    _seen: int = attrs.field(default=0, init=False)

    def apply(self, event, state, logger):
        """Do nothing."""


class PlainExample(Algorithm):
    def apply(self, event, state, logger):
        """Do nothing."""


class PlainWithArguments(PlainExample):
    def __init__(self, alpha=0.2):
        self.alpha = alpha


def define(module):
    """Return a class named Twice defined in the given module."""
    return type("Twice", (PlainExample,), {"__module__": module, "__qualname__": "Twice"})


class TestKnownClasses:
    def test_defined_class_is_registered(self):
        """Classes are registered automatically, except those that attrs replaces."""
        assert algorithm_classes()["RegistryExample"] == [RegistryExample]

    def test_abstract_classes_are_not_registered(self):
        """Abstract classes are not offered."""
        kind = type("Unfinished", (Algorithm,), {})

        assert "Unfinished" not in algorithm_classes()
        del kind

    def test_redefined_class_replaces_the_first(self):
        """A redefined class, as in a notebook, replaces the first one."""
        first, second = define("notebook"), define("notebook")

        assert algorithm_classes()["Twice"] == [second]
        del first, second
        gc.collect()

    def test_same_name_in_two_modules(self):
        """The caller distinguishes them by module."""
        one, other = define("one"), define("other")

        with pytest.raises(ValueError, match=r"'Twice' may be one\.Twice and other\.Twice; choose one by classes"):
            rebuild_algorithm({"name": "Twice", "settings": {}})
        assert type(rebuild_algorithm({"name": "Twice", "settings": {}}, classes=[other])) is other

        del one, other
        gc.collect()


class TestSettings:
    def test_round_trip(self):
        """Settings are converted to data and reconstruct an equal algorithm."""
        algorithm = RegistryExample(alpha=0.5, every="3ba", input_key="image")

        settings = settings_to_data(algorithm)
        again = rebuild_algorithm({"name": "RegistryExample", "settings": settings}, classes=[RegistryExample])

        assert settings == {"alpha": 0.5, "every": "3ba", "input_key": "image", "act_fn": None}
        assert again.settings() == algorithm.settings()

    def test_functions_are_described(self):
        """A run with functions as keys can be saved; the functions are described."""
        settings = settings_to_data(RegistryExample(input_key=(print, len), act_fn=abs))

        assert settings["input_key"] == {"unsaved": "(function builtins.print, function builtins.len)"}
        assert settings["act_fn"] == {"unsaved": "function builtins.abs"}
        assert [name for name, data in settings.items() if is_unsaved(data)] == ["input_key", "act_fn"]

    @pytest.mark.parametrize("data", [None, {}, {"unsaved": 3}, {"unsaved": "x", "more": 1}, "unsaved"])
    def test_dictionaries_are_data(self, data):
        """Only the exact description is treated as one."""
        assert not is_unsaved(data)

    def test_plain_classes(self):
        """Settings of plain classes are unknown."""
        assert settings_to_data(PlainWithArguments()) == {}


class TestRebuild:
    @pytest.mark.parametrize(
        ("record", "text"),
        [
            ({"name": "RegistryExampel"}, "must have a name and a dictionary of settings"),
            ({"name": ["x"], "settings": {}}, "must have a name and a dictionary of settings"),
            (
                {"name": "RegistryExampel", "settings": {}},
                r"is named 'RegistryExampel'; did you mean 'RegistryExample'\?",
            ),
            ({"name": "Nowhere to be found", "settings": {}}, r"'Nowhere to be found'\. Import the module"),
            ({"settings": {"alhpa": 3}}, r"has no setting 'alhpa'; did you mean 'alpha'\?"),
            ({"settings": {"seen": 3}}, "has no setting 'seen'"),
            ({"settings": {"alpha": "x"}}, "Its setting alpha: must be float, got 'x'"),
            ({"settings": {"every": "soon"}}, "Its setting every: must be Time, got 'soon'"),
            ({"settings": {"alpha": -1}}, "cannot be constructed again from its saved settings: 'alpha' must be >= 0"),
            (
                {"settings": {"input_key": {"unsaved": "function m.f"}}},
                r"setting input_key was not data but function m\.f.*algorithms=\[RegistryExample\(input_key=\.\.\.\)\]",
            ),
            ({"name": "PlainWithArguments", "settings": {}}, "it is no attrs class, so its settings are unknown"),
            ({"name": "PlainExample", "settings": {"a": 1}}, "it is no attrs class"),
        ],
    )
    def test_invalid_settings_raise(self, record, text):
        """The error states the algorithm, the setting, what was expected and the remedy."""
        with pytest.raises(ValueError, match=text):
            rebuild_algorithm({"name": "RegistryExample", **record}, classes=[RegistryExample])

    def test_all_problems_are_reported_together(self):
        """All problems are in one error."""
        with pytest.raises(ValueError, match=r"'x'.*'y'"):
            rebuild_algorithm({"name": "RegistryExample", "settings": {"x": 1, "y": 2}}, classes=[RegistryExample])

    def test_unsaved_settings_use_defaults(self):
        """A setting that is newer than the checkpoint has its default."""
        again = rebuild_algorithm({"name": "RegistryExample", "settings": {}}, classes=[RegistryExample])

        assert again.alpha == 0.2

    def test_plain_classes_without_arguments(self):
        """They are constructed without arguments."""
        assert isinstance(rebuild_algorithm({"name": "PlainExample", "settings": {}}), PlainExample)

    def test_names_are_not_imported(self, monkeypatch):
        """Nothing is imported or evaluated to find a class."""
        monkeypatch.setattr("builtins.__import__", None)

        with pytest.raises(ValueError, match=r"is named 'os\.system'"):
            rebuild_algorithm({"name": "os.system", "settings": {}})
