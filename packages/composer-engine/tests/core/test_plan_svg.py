"""The SVG of a plan."""

import itertools
from xml.etree import ElementTree

import pytest

from composer.core import Event, Stage, explain

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    """Return the visible texts of a drawing; one that is not well-formed raises an error."""
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def boxes(svg, kind):
    """Return the boxes of a kind as (left, top, right, bottom), without the samples of the legend."""
    found = [one.attrib for one in ElementTree.fromstring(svg).iter(f"{SVG}rect") if one.get("class") == kind]
    sizes = [[float(one[name]) for name in ("x", "y", "width", "height")] for one in found]
    return [(x, y, x + width, y + height) for x, y, width, height in sizes if height > 14]


@pytest.mark.parametrize("event", Event)
def test_each_event_is_drawn(make, event):
    """The drawing has the event, its phase and the component."""
    drawn = texts(explain(make.algorithm("A", {event: Stage.LOSS})).to_svg())

    assert drawn[1:3] == [event.value, "A loss"]


def test_boxes_have_the_colour_of_what_their_stage_changes(make):
    """Stages of the batch, the loss, the model and the weights have a class each, which the legend names."""
    stages = (Stage.MIX, Stage.LABEL, Stage.LAYOUT, Stage.GRADIENT)

    svg = explain([make.algorithm(one.name, {Event.BATCH_END: one}) for one in stages]).to_svg()

    assert [len(boxes(svg, kind)) for kind in ("batch", "loss", "model", "weights", "other")] == [1, 1, 1, 1, 0]
    assert texts(svg)[-4:] == [f"changes the {kind}" for kind in ("batch", "loss", "model", "weights")]


def test_boxes_do_not_overlap(make):
    """Many components at one event continue on further lines, within the drawing."""
    algorithms = [make.algorithm(f"Algorithm{number}", {Event.BATCH_END: Stage.MIX}) for number in range(12)]

    svg = explain(algorithms).to_svg()

    drawn = boxes(svg, "batch")
    width, height = map(float, ElementTree.fromstring(svg).get("viewBox").split()[2:])
    assert len({top for _, top, _, _ in drawn}) > 1
    assert all(right <= width and bottom <= height for _, _, right, bottom in drawn)
    for one, other in itertools.combinations(drawn, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_callbacks_are_folded_unless_verbose(make):
    """One line names the callbacks; with verbose=True each has a box at its events."""
    callback = make.callback("Watch", "fit_end")

    assert texts(explain([], callback).to_svg()) == ["Callbacks and loggers: Watch"]
    assert texts(explain([], callback, verbose=True).to_svg())[1:] == ["fit_end", "Watch callback"]


def test_names_are_escaped(make):
    """Names with characters of XML give a well-formed drawing."""
    algorithm = make.algorithm("A<B>&'\"", {Event.FIT_END: Stage.LOSS})

    assert "A<B>&'\" loss" in texts(explain(algorithm).to_svg())


def test_reasons_are_tooltips(make):
    """The reason for a place is the title of its text."""
    both = [make.algorithm(one.name, {Event.BEFORE_LOSS: one}) for one in (Stage.MIX, Stage.LABEL)]

    titles = [one.text for one in ElementTree.fromstring(explain(both).to_svg()).iter(f"{SVG}title")]

    assert titles == ["Plan of MIX, LABEL", "label after mix"]


def test_is_deterministic_and_displayed_by_notebooks(make):
    """Two plans of the same components give the same text, which notebooks display."""
    kind = type(make.algorithm("A", {Event.FIT_END: Stage.LOSS}))

    assert explain(kind())._repr_svg_() == explain(kind()).to_svg()


def test_empty_plan():
    """A plan without any component is a valid drawing without text."""
    assert texts(explain([]).to_svg()) == []
