"""The hooks of a callback that are called, and how often."""

from composer.core import Callback, Event, LoggerDestination, Time
from composer.core.callback import hook_of, intervals_of, overrides


def test_only_what_is_overridden_is_a_hook(make):
    """A class's own method and one that was put on the object are hooks; what Callback has is none."""
    watch = make.callback("Watch", "fit_end")
    watch.epoch_end = print

    hooks = {event: hook_of(watch, event) for event in Event}

    assert [event for event, hook in hooks.items() if hook is not None] == [Event.EPOCH_END, Event.FIT_END]


def test_what_is_inherited_counts(make):
    """A method of a base class in between is a method of one's own; also of loggers."""
    base = type(make.callback("Base", "fit_end", base=LoggerDestination))

    assert overrides(type("Derived", (base,), {})(), Callback, "fit_end")
    assert not overrides(LoggerDestination(), Callback, "wrap_call")


def test_intervals_are_times_by_member():
    """Events by value and intervals as text or number become members and times."""

    class Watch(Callback):
        def intervals(self):
            return {"batch_end": "10ba", Event.EPOCH_END: 2}

    assert intervals_of(Watch()) == {Event.BATCH_END: Time(10, "ba"), Event.EPOCH_END: Time(2, "ep")}
    assert intervals_of(Callback()) == {}
