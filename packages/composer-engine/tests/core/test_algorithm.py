"""What every algorithm and callback offers."""

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
    def test_matches_where_it_is_declared(self):
        """Without a match of its own an algorithm runs at its events and nowhere else."""
        assert [event for event in Event if Scale().match(event, state=None)] == [Event.AFTER_LOSS]

    def test_apply_must_be_written(self):
        """An algorithm that does nothing cannot be made."""
        with pytest.raises(TypeError, match=r"abstract.*apply"):
            type("Empty", (Algorithm,), {})()

    def test_settings_are_the_constructor_s_arguments(self):
        """Settings are data, without what the algorithm remembers; they make an equal algorithm."""
        assert Scale(3.0).settings() == {"factor": 3.0}
        assert repr(Scale(**Scale(3.0).settings())) == "Scale(factor=3.0)"

    def test_settings_of_plain_classes_are_unknown(self):
        """A class in the style of the specification has no settings to tell."""
        assert type("Plain", (Algorithm,), {"apply": print})().settings() == {}

    def test_defaults(self):
        """Nothing is claimed that was not declared."""
        scale = Scale()

        assert (scale.find_unused_parameters, scale.backwards_create_graph, scale.required_on_load()) == (False,) * 3
        assert (scale.reads, scale.writes, scale.owns, scale.interpolate_loss) == (set(), set(), set(), False)
        assert scale.restore(state=None) is None

    def test_annotations_can_be_resolved(self):
        """What reads annotations at run time, as cattrs does, finds every name."""
        assert attrs.fields(attrs.resolve_types(Scale)).factor.type is float


class TestSerializable:
    @pytest.mark.parametrize("saver", [Serializable(), Scale(), Callback()])
    def test_saves_nothing_by_default(self, saver):
        """What has no progress saves nothing, and loads it back."""
        saver.load_state_dict(saver.state_dict())

        assert saver.state_dict() == {}

    def test_refuses_what_it_cannot_load(self):
        """Saved progress is not dropped without a word."""
        with pytest.raises(ValueError, match=r"Scale saves nothing and cannot load \['depth'\]"):
            Scale().load_state_dict({"depth": 3})


class TestCallback:
    def test_has_a_hook_for_each_event(self):
        """Every event has a method of its name with a docstring."""
        assert all(getattr(Callback, event.value).__doc__ for event in Event)

    @pytest.mark.parametrize("event", Event)
    def test_run_event_calls_the_hook(self, event, make, calls):
        """run_event leads to the method of the event."""
        make.callback("Watch", event.value).run_event(event, None, None)

        assert calls == [("Watch", event.value)]
