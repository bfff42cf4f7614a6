"""The overridden hooks of a callback, and their intervals."""

import pytest

from composer.core import Callback, Event, LoggerDestination, Time
from composer.core.callback import hook_of, intervals_of, overrides


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
    [("batch_ended", "batch_end"), ("on_epoch_end", "epoch_end"), ("afterbackward", "after_backward")],
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
