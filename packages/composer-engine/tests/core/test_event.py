"""The events and the diagram of the loop in their docstring."""

import re

import pytest

from composer.core import Event


def test_diagram_contains_every_event_once():
    """The diagram contains every event exactly once."""
    drawn = re.findall(r"<([A-Z_]+)>", Event.__doc__)

    assert sorted(drawn) == sorted(event.name for event in Event)


def test_diagram_order_matches_the_enum():
    """From top to bottom, the diagram lists the events of training and prediction in enum order."""
    drawn = [Event[name] for name in re.findall(r"<([A-Z_]+)>", Event.__doc__)]
    members = [event for event in Event if not event.startswith("eval")]

    assert [event for event in drawn if not event.startswith("eval")] == members


@pytest.mark.parametrize("event", Event)
def test_value_is_the_lower_case_name(event):
    """``run_event("batch_end")`` and ``Event.BATCH_END`` are equivalent."""
    assert event == event.value == event.name.lower()
    assert hash(event) == hash(event.value)
