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
    every: Time = attrs.field(default="1ep", converter=lambda given: Time.from_input(given, "ep"))
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
    """Return a class named Twice as if a module had defined it."""
    return type("Twice", (PlainExample,), {"__module__": module, "__qualname__": "Twice"})


class TestKnownClasses:
    def test_a_defined_class_is_known(self):
        """Nobody has to register anything, and the class that attrs replaced is not counted."""
        assert algorithm_classes()["RegistryExample"] == [RegistryExample]

    def test_abstract_classes_are_not(self):
        """What cannot be made is not offered."""
        kind = type("Unfinished", (Algorithm,), {})

        assert "Unfinished" not in algorithm_classes()
        del kind

    def test_a_class_defined_again_replaces_the_first(self):
        """As in a notebook, whose cells are run again."""
        first, second = define("notebook"), define("notebook")

        assert algorithm_classes()["Twice"] == [second]
        del first, second
        gc.collect()

    def test_two_modules_with_one_name(self):
        """The caller distinguishes them."""
        one, other = define("one"), define("other")

        with pytest.raises(ValueError, match=r"'Twice' may be one\.Twice and other\.Twice; choose one by classes"):
            rebuild_algorithm({"name": "Twice", "settings": {}})
        assert type(rebuild_algorithm({"name": "Twice", "settings": {}}, classes=[other])) is other

        del one, other
        gc.collect()


class TestSettings:
    def test_round_trip(self):
        """Settings become data and make an equal algorithm."""
        algorithm = RegistryExample(alpha=0.5, every="3ba", input_key="image")

        settings = settings_to_data(algorithm)
        again = rebuild_algorithm({"name": "RegistryExample", "settings": settings}, classes=[RegistryExample])

        assert settings == {"alpha": 0.5, "every": "3ba", "input_key": "image", "act_fn": None}
        assert again.settings() == algorithm.settings()

    def test_functions_are_described(self):
        """A run with functions for keys can be saved; what they were is said."""
        settings = settings_to_data(RegistryExample(input_key=(print, len), act_fn=abs))

        assert settings["input_key"] == {"unsaved": "(function builtins.print, function builtins.len)"}
        assert settings["act_fn"] == {"unsaved": "function builtins.abs"}
        assert [name for name, data in settings.items() if is_unsaved(data)] == ["input_key", "act_fn"]

    @pytest.mark.parametrize("data", [None, {}, {"unsaved": 3}, {"unsaved": "x", "more": 1}, "unsaved"])
    def test_else_is_data(self, data):
        """Only the description itself is one."""
        assert not is_unsaved(data)

    def test_of_plain_classes(self):
        """What they are made of is not known."""
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
    def test_what_does_not_fit(self, record, text):
        """A sentence names algorithm, setting, what was expected and what to do."""
        with pytest.raises(ValueError, match=text):
            rebuild_algorithm({"name": "RegistryExample", **record}, classes=[RegistryExample])

    def test_all_problems_at_once(self):
        """Not one by one."""
        with pytest.raises(ValueError, match=r"'x'.*'y'"):
            rebuild_algorithm({"name": "RegistryExample", "settings": {"x": 1, "y": 2}}, classes=[RegistryExample])

    def test_settings_that_were_not_saved_are_the_defaults(self):
        """A setting that is newer than the run."""
        again = rebuild_algorithm({"name": "RegistryExample", "settings": {}}, classes=[RegistryExample])

        assert again.alpha == 0.2

    def test_plain_classes_without_arguments(self):
        """There is only one way to make them."""
        assert isinstance(rebuild_algorithm({"name": "PlainExample", "settings": {}}), PlainExample)

    def test_a_name_runs_nothing(self, monkeypatch):
        """Nothing is imported or evaluated to find a class."""
        monkeypatch.setattr("builtins.__import__", None)

        with pytest.raises(ValueError, match=r"is named 'os\.system'"):
            rebuild_algorithm({"name": "os.system", "settings": {}})
