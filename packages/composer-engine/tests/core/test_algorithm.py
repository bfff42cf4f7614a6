"""The interface of algorithms and callbacks."""

from typing import ClassVar

import attrs
import pytest

from composer.core import Algorithm, Callback, Event, Serializable, Stage


@attrs.define(eq=False)
class Scale(Algorithm):
    factor: float = 2.0
    _memory: list = attrs.field(factory=list, init=False, repr=False)

    runs_at: ClassVar = {Event.AFTER_LOSS: Stage.LOSS}

    def apply(self, event, state, logger):
        state.loss = self.factor * state.loss


class TestAlgorithm:
    def test_match_uses_declared_events(self):
        """By default an algorithm matches its declared events only."""
        assert [event for event in Event if Scale().match(event, state=None)] == [Event.AFTER_LOSS]

    def test_apply_is_abstract(self):
        """An algorithm without ``apply`` cannot be instantiated."""
        with pytest.raises(TypeError, match=r"abstract.*apply"):
            type("Empty", (Algorithm,), {})()

    def test_settings_are_constructor_arguments(self):
        """Settings are the constructor's arguments, without internal state, and create an equal algorithm."""
        assert Scale(3.0).settings() == {"factor": 3.0}
        assert repr(Scale(**Scale(3.0).settings())) == "Scale(factor=3.0)"

    def test_plain_classes_have_no_settings(self):
        """A class that is not an attrs class has no settings."""
        assert type("Plain", (Algorithm,), {"apply": print})().settings() == {}

    def test_defaults(self):
        """By default nothing is declared."""
        scale = Scale()

        assert (scale.find_unused_parameters, scale.backwards_create_graph, scale.required_on_load()) == (False,) * 3
        assert (scale.reads, scale.writes, scale.owns, scale.interpolate_loss) == (set(), set(), set(), False)
        assert scale.restore(state=None) is None

    def test_annotations_resolve(self):
        """Annotations resolve at run time, as cattrs requires."""
        assert attrs.fields(attrs.resolve_types(Scale)).factor.type is float


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
