"""The plan as text and as a drawing, and functions at events."""

import functools
import itertools
import textwrap
from xml.etree import ElementTree

import pytest

from composer.core import Callback, Engine, Event, Logger, Stage, State, explain


def test_recipe(make):
    """The exact text of a small recipe."""
    blurpool = make.algorithm(
        "BlurPool",
        {Event.INIT: Stage.ARCHITECTURE},
        writes={"model"},
        owns={"the pools", "the strided convolutions"},
        __doc__="Blur before ``stride``.\n\nMore.",
    )
    smoothing = make.algorithm(
        "LabelSmoothing",
        {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL},
        reads={"batch.target", "outputs"},
        writes={"batch.target"},
        __doc__="Be a little less sure.",
    )
    mixup = make.algorithm("MixUp", {Event.BEFORE_FORWARD: Stage.MIX, Event.BEFORE_LOSS: Stage.MIX})

    text = str(explain([blurpool, smoothing, mixup], make.callback("Watch", "before_loss", "eval_end")))

    assert text == textwrap.dedent("""\
        ALGORITHMS, as listed
          BlurPool        Blur before stride.
                          changes model; owns the pools and the strided convolutions
          LabelSmoothing  Be a little less sure.
                          changes batch.target; reads outputs
          MixUp           does not declare what it reads and changes

        PLAN, from the first event to the last, and at each event from top to bottom
          EVENT             RUNS            STAGE         WHY HERE
          once, before training
            init            BlurPool        architecture
          every microbatch
            before_forward  MixUp           mix
            before_loss     MixUp           mix
                            LabelSmoothing  label         label after mix
            after_loss      LabelSmoothing  label

        Callbacks and loggers (explain(verbose=True) shows where): Watch

        Stages, in their order: select, reshape, augment, mix, label, loss,
        architecture, normalization, precision, layout, gradient, weights. Within a
        stage the list's order counts; at after_* events its reverse. After_forward,
        after_loss and after_backward reverse the stages, too, so that each algorithm
        undoes its own change.""")


def test_verbose_plan_shows_callbacks_at_their_events(make):
    """With verbose=True, callbacks and loggers are shown at their events, and no line names them."""
    mixup = make.algorithm("MixUp", {Event.BEFORE_LOSS: Stage.MIX})

    text = str(explain(mixup, make.callback("Watch", "before_loss", "eval_end"), verbose=True))

    assert "Watch  callback  after algorithms" in text
    assert "every evaluation\n    eval_end     Watch  callback" in text
    assert "Callbacks and loggers" not in text


def test_folded_names_are_in_the_order_of_their_calls(make):
    """Callbacks are named before loggers, each once, also where loggers are called first."""
    state = State(model=None, callbacks=[make.callback("B", "init", "fit_end"), make.callback("A", "fit_start")])
    engine = Engine(state, Logger(state, make.destination("L", "init", "batch_end")))

    lines = str(engine.explain()).splitlines()

    assert lines == ["Callbacks and loggers (explain(verbose=True) shows where): B, A, L"]
    assert engine.explain(verbose=True).folded() == []


def test_components_of_all_events_have_one_line(make):
    """A component of all events is shown once, with whether it is called directly or through match."""

    class Recorder(Callback):
        def run_event(self, event, state, logger):
            pass

    text = str(explain(make.algorithm("Matching", match=lambda *_: True), Recorder(), verbose=True))

    assert "at every event" in text
    assert text.count("if match(); see below") == 1
    assert text.count("own run_event") == 1
    assert "batch_end" not in text


def test_rule_for_algorithms_without_a_stage(make):
    """The rule below the plan is correct: last, first in reverse, architecture before training."""
    matching = make.algorithm("Matching", match=lambda *_: True)
    weights = make.algorithm("Weights", dict.fromkeys(Event, Stage.WEIGHTS), runs_at_events=lambda self: self.runs_at)

    plan = explain([weights, matching])

    text = " ".join(str(plan).split())
    assert "Without a stage: after all others; first where stages are reversed; as architecture before " in text
    first = {event for event, (one, _) in plan.entries.items() if one.key == "Matching"}
    assert first == {
        *(Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD),
        *(Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START),
    }
    assert "Without a stage" not in str(explain(weights))


def test_algorithms_with_match_are_marked(make):
    """Algorithms with their own match are marked at their events."""
    text = str(explain(make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}, match=lambda *_: True)))

    assert "batch_end  A     weights  if match()" in text


def test_intervals_are_shown(make):
    """The interval of a hook is shown at its event, after the reason for its position."""

    class Recorder(Callback):
        def run_event(self, event, state, logger):
            pass

        def intervals(self):
            return {Event.BATCH_END: "10ba"}

    plan = explain(make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}), Recorder(), verbose=True)

    lines = str(plan).splitlines()

    assert any(line.split()[:2] == ["fit_start", "Recorder"] and "every" not in line for line in lines)
    assert "Recorder  callback  after algorithms; every 10ba" in "\n".join(lines)


def test_warnings_are_shown(make):
    """Warnings are last."""
    assert "WARNING: B runs at no event" in str(explain([make.algorithm("B")]))


SVG = "{http://www.w3.org/2000/svg}"


def texts_of(svg):
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
    drawn = texts_of(explain(make.algorithm("A", {event: Stage.LOSS})).to_svg())

    assert drawn[1:3] == [event.value, "A loss"]


def test_boxes_have_the_colour_of_what_their_stage_changes(make):
    """Stages of the batch, the loss, the model and the weights have a class each, which the legend names."""
    stages = (Stage.MIX, Stage.LABEL, Stage.LAYOUT, Stage.GRADIENT)

    svg = explain([make.algorithm(one.name, {Event.BATCH_END: one}) for one in stages]).to_svg()

    assert [len(boxes(svg, kind)) for kind in ("batch", "loss", "model", "weights", "other")] == [1, 1, 1, 1, 0]
    assert texts_of(svg)[-4:] == [f"changes the {kind}" for kind in ("batch", "loss", "model", "weights")]


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

    assert texts_of(explain([], callback).to_svg()) == ["Callbacks and loggers: Watch"]
    assert texts_of(explain([], callback, verbose=True).to_svg())[1:] == ["fit_end", "Watch callback"]


def report(state, logger):
    """Do nothing."""


class Reporter:
    def __call__(self, state, logger):
        """Do nothing."""


class TestOn:
    def test_called_between_callbacks_and_loggers(self, state, make, calls):
        """It runs after algorithms and callbacks, and before loggers."""
        state.callbacks = make.callback("C", "batch_end")
        logger = Logger(state, make.destination("L", "batch_end"))
        engine = Engine(state, logger, algorithms=make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}))

        engine.on("batch_end", lambda *args: calls.append(("function", *args)))
        engine.run_event("batch_end")

        assert [call[0] for call in calls] == ["A", "C", "function", "L"]
        assert calls[2][1:] == (state, logger)

    def test_every(self, state):
        """It is called when the interval is passed."""
        due = []
        engine = Engine(state)
        engine.on(Event.BATCH_END, lambda state, logger: due.append(int(state.timestamp.batch)), every="3ba")
        for _ in range(7):
            state.timestamp = state.timestamp.to_next_batch()
            engine.run_event("batch_end")

        assert due == [3, 6]

    def test_removed(self, state, calls):
        """It is not called from the next event on; others are. Removing it again does nothing."""
        engine = Engine(state)
        first, second = (
            engine.on("fit_end", functools.partial(lambda n, s, logger: calls.append(n), n)) for n in (1, 2)
        )
        engine.run_event("fit_end")
        first.remove()
        first.remove()
        engine.run_event("fit_end")
        second.remove()
        engine.run_event("fit_end")

        assert calls == [1, 2, 2]


class TestPlan:
    def test_name_and_interval_are_in_the_plan(self, state):
        """The text and the data have the qualified name and the interval."""
        engine = Engine(state)
        engine.on("batch_end", report, every="10ba")
        engine.on("epoch_end", Reporter.__call__.__get__(Reporter()))

        lines = str(engine.explain()).splitlines()
        entry = engine.explain().to_dict()["events"]["batch_end"][0]

        assert any(line.split() == ["batch_end", "report", "subscription", "every", "10ba"] for line in lines)
        assert any(line.split() == ["epoch_end", "Reporter.__call__", "subscription"] for line in lines)
        assert (entry["name"], entry["kind"], entry["every"]) == ("report", "subscription", "10ba")


class TestErrors:
    def test_non_callable_raises(self, state):
        """A value that cannot be called raises."""
        with pytest.raises(TypeError, match=r"function must be a function f\(state, logger\), got 'report'"):
            Engine(state).on("batch_end", "report")

    def test_invalid_event_or_interval_raises(self, state):
        """A misspelled event and an interval that is never due raise."""
        engine = Engine(state)

        with pytest.raises(ValueError, match="There is no event 'batch_ends'; did you mean 'batch_end'"):
            engine.on("batch_ends", report)
        with pytest.raises(ValueError, match=r"Engine.on: every='1ep' would never be due at 'batch_end'"):
            engine.on("batch_end", report, every=1)
        assert engine.explain().entries == {}
