"""Base classes: declarations of algorithms, hooks of callbacks, and algorithms from saved settings."""

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

from composer.core import (
    Algorithm,
    BatchKey,
    Callback,
    Event,
    LoggerDestination,
    Serializable,
    Stage,
    Time,
    algorithm_classes,
    rebuild_algorithm,
)
from composer.core.base import hook_of, intervals_of, overrides
from composer.core.saving.components import settings_to_save


@attrs.define(eq=False)
class Scale(Algorithm):
    factor: float = 2.0
    _memory: list = attrs.field(factory=list, init=False, repr=False)

    runs_at: ClassVar = {Event.AFTER_LOSS: Stage.LOSS}

    def apply(self, event, state, logger):
        state.loss = self.factor * state.loss


class TestAlgorithm:
    def test_settings_are_constructor_arguments(self):
        """Settings are the constructor's arguments, without internal state, and create an equal algorithm."""
        assert Scale(3.0).settings() == {"factor": 3.0}
        assert repr(Scale(**Scale(3.0).settings())) == "Scale(factor=3.0)"


class TestSerializable:
    @pytest.mark.parametrize("saver", [Serializable(), Scale(), Callback()])
    def test_saves_nothing_by_default(self, saver):
        """A component without state saves an empty dictionary, and loads it."""
        saver.load_state_dict(saver.state_dict())

        assert saver.state_dict() == {}

    def test_unexpected_state_raises(self):
        """A non-empty state raises instead of being ignored."""
        with pytest.raises(ValueError, match=r"Scale saves nothing and cannot load \['depth'\]"):
            Scale().load_state_dict({"depth": 3})


class TestCallback:
    def test_has_a_hook_for_each_event(self):
        """Every event has a method of its name with a docstring."""
        assert all(getattr(Callback, event.value).__doc__ for event in Event)

    @pytest.mark.parametrize("event", Event)
    def test_run_event_calls_the_hook(self, event, make, calls):
        """run_event calls the method of the event."""
        make.callback("Watch", event.value).run_event(event, None, None)

        assert calls == [("Watch", event.value)]


def test_overridden_hooks(make):
    """Methods overridden by the class or set on the object are hooks; those of Callback are not."""
    watch = make.callback("Watch", "fit_end")
    watch.epoch_end = print

    hooks = {event: hook_of(watch, event) for event in Event}

    assert [event for event, hook in hooks.items() if hook is not None] == [Event.EPOCH_END, Event.FIT_END]


def test_inherited_hooks(make):
    """Methods of an intermediate base class are hooks, also for loggers."""
    base = type(make.callback("Base", "fit_end", base=LoggerDestination))

    assert overrides(type("Derived", (base,), {})(), Callback, "fit_end")
    assert not overrides(LoggerDestination(), Callback, "wrap_call")


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("on_train_epoch_end", "epoch_end"),
        ("on_validation_end", "eval_end"),
        ("on_step_end", "batch_end"),
        ("on_after_backward", "after_backward"),
        ("on_test_epoch_end", "eval_end"),
        ("on_predict_start", "predict_start"),
    ],
)
def test_hooks_of_other_trainers(name, event):
    """A hook of Lightning or Transformers gives a warning with the event of this library, whatever its arguments."""

    def hook(self, trainer, pl_module):
        pass

    with pytest.warns(UserWarning, match=rf"Watch\.{name} is a hook of another trainer.* Define {event}\(self, state"):
        type("Watch", (Callback,), {name: hook})
    assert hasattr(Callback, event)


@pytest.mark.parametrize(
    ("name", "event"),
    [("batch_ended", "batch_end"), ("epoch_ends", "epoch_end"), ("afterbackward", "after_backward")],
)
def test_almost_the_name_of_an_event(name, event):
    """A method with the arguments of a hook and almost the name of an event gives a warning with the event."""

    def hook(self, state, logger):
        pass

    with pytest.warns(UserWarning, match=rf"Watch\.{name} is called at no event, .* did you mean '{event}'\?"):
        type("Watch", (Callback,), {name: hook})


def test_other_methods():
    """Methods with other arguments, private ones and those with other names give no warning."""

    class Watch(Callback):
        def batch_ended(self, state):
            pass

        def _batch_ended(self, state, logger):
            pass

        def describe(self, state, logger):
            pass

    assert not any(hook_of(Watch(), event) for event in Event)


def test_intervals_are_converted():
    """Events by value and intervals as strings or numbers are converted to members and times."""

    class Watch(Callback):
        def intervals(self):
            return {"batch_end": "10ba", Event.EPOCH_END: 2}

    assert intervals_of(Watch()) == {Event.BATCH_END: Time(10, "ba"), Event.EPOCH_END: Time(2, "ep")}
    assert intervals_of(Callback()) == {}


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


class TestSettings:
    def test_round_trip(self):
        """Settings are converted to data and reconstruct an equal algorithm."""
        algorithm = RegistryExample(alpha=0.5, every="3ba", input_key="image")

        settings = settings_to_save(algorithm)
        again = rebuild_algorithm({"name": "RegistryExample", "settings": settings})

        assert settings == {"alpha": 0.5, "every": "3ba", "input_key": "image", "act_fn": None}
        assert again.settings() == algorithm.settings()


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
            rebuild_algorithm({"name": "RegistryExample", **record})

    def test_unsaved_settings_use_defaults(self):
        """A setting that is newer than the checkpoint has its default."""
        again = rebuild_algorithm({"name": "RegistryExample", "settings": {}})

        assert again.alpha == 0.2

    def test_names_are_not_imported(self, monkeypatch):
        """Nothing is imported or evaluated to find a class."""
        monkeypatch.setattr("builtins.__import__", None)

        with pytest.raises(ValueError, match=r"is named 'os\.system'"):
            rebuild_algorithm({"name": "os.system", "settings": {}})
