"""Former names work for one release."""

import pytest

from composer.algorithms import LabelSmoothing
from composer.core import Algorithm, Event, ExclusiveResource, Owned, Stage, State, Time, Timestamp
from composer.core.conflicts import find_conflicts


class Former(Algorithm):
    """An algorithm that uses the former names."""

    def places(self):
        """Return the events at which it runs."""
        return {Event.AFTER_LOSS: Stage.LOSS}

    def apply(self, event, state, logger):
        """Change nothing."""


def test_methods_warn_and_return_the_same():
    """A former name returns the same value, with a warning that states the present name."""
    state = State(model=None)
    state.timestamp = Timestamp(batch=3)

    with pytest.warns(DeprecationWarning, match="has_reached"):
        assert state.reached(Time(3, "ba"))
    with pytest.warns(DeprecationWarning, match="counts"):
        assert state.timestamp.held == state.timestamp.counts
    with pytest.warns(DeprecationWarning, match="runs_at_events"):
        assert LabelSmoothing().places() == LabelSmoothing().runs_at_events()


def test_overridden_method_is_called():
    """An algorithm that overrides the former name runs at the events that it returns."""
    with pytest.warns(DeprecationWarning, match=r"Former\.places"):
        assert Former().runs_at_events() == {Event.AFTER_LOSS: Stage.LOSS}


def test_owned_is_an_exclusive_resource():
    """A resource under its former name conflicts with one under its present name."""

    class One(Former):
        owns = frozenset({ExclusiveResource("the layer norms")})

    with pytest.warns(DeprecationWarning, match="ExclusiveResource"):

        class Two(Former):
            owns = frozenset({Owned("the layer norms", remedy="Keep one.")})

    assert len(find_conflicts([One(), Two()])) == 1
