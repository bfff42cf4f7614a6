"""The drawing of a plan: where boxes are, and their colours."""

import itertools
from xml.etree import ElementTree

from composer.drawing import Box, Phase, draw_plan

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*phases, everywhere=(), folded=()):
    """Return the root of a drawing."""
    return ElementTree.fromstring(draw_plan("A & B", phases, everywhere, folded))


def test_boxes_continue_on_the_next_line():
    """Boxes do not overlap, and none is outside of the paper."""
    root = drawn(Phase("every batch", 1, [("batch_end", [Box(f"Average{number}", "weights") for number in range(9)])]))

    paper, *boxes = [{key: float(one.get(key)) for key in ("x", "y", "width")} for one in root.iter(f"{SVG}rect")]
    assert len(boxes) == 9
    assert len({one["y"] for one in boxes}) > 1
    assert all(one["x"] + one["width"] < paper["width"] for one in boxes)
    for one, other in itertools.pairwise(boxes):
        assert other["y"] > one["y"] or other["x"] > one["x"] + one["width"]


def test_colours_have_a_legend():
    """Each part that is changed has its colour and a line about it; others are grey, and names are escaped."""
    boxes = [Box("MixUp", "mix", "as listed", "batch"), Box("Watch", "callback")]
    root = drawn(Phase("once", 0, []), Phase("every batch", 1, [("batch_start", boxes)]), folded=["Speed"])

    assert [one.get("class") for one in root.iter(f"{SVG}rect")] == ["paper", "batch", "other", "batch"]
    texts = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    assert texts == [
        "every batch",
        "batch_start",
        "MixUp mixas listed",
        "Watch callback",
        "Callbacks and loggers: Speed",
        "changes the batch",
    ]
    assert root.find(f"{SVG}title").text == "Plan of A & B"
