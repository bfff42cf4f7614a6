"""The text of a plan."""

import textwrap

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

        Stages, in their order: select, reshape, augment, mix, label, loss, architecture, normalization,
        precision, layout, gradient, weights. Within a stage the list's order counts; at after_* events its
        reverse. After_forward, after_loss and after_backward reverse the stages, too, so that each
        algorithm undoes its own change.""")


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


def test_functions_at_events_are_shown(make):
    """Functions that engine.on subscribed are not folded."""
    engine = Engine(State(model=None, callbacks=make.callback("Watch", "fit_end")))

    engine.on("fit_end", lambda state, logger: None)

    assert "subscription after callbacks" in " ".join(str(engine.explain()).split())


def test_empty_plan():
    """An empty plan gives one sentence."""
    assert str(explain([])).startswith("Nothing runs at any event")


def test_callbacks_only(make):
    """Without algorithms, no stages are explained."""
    text = str(explain([], make.callback("Watch", "fit_end"), verbose=True))

    assert "once, after training\n    fit_end  Watch  callback" in text
    assert "stages" not in text
    assert "ALGORITHMS" not in text


def test_every_event_is_shown_once(make):
    """The text shows each event once."""
    for event in Event:
        lines = str(explain(make.algorithm("A", {event: Stage.LOSS}))).splitlines()

        assert sum(line.split()[:2] == [event.value, "A"] for line in lines) == 1


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


def test_moved_components_of_all_events_are_shown_at_each(make):
    """A component of all events that a pass moved at one of them is shown at each."""
    matching = make.algorithm("Matching", match=lambda *_: True)
    loss = make.algorithm("Loss", {Event.BATCH_END: Stage.LOSS})

    def matching_first(algorithms, event):
        return sorted(algorithms, key=lambda one: one is not matching)

    text = " ".join(str(explain([matching, loss], algorithm_passes=[matching_first])).split())

    assert "batch_end Matching no stage moved by matching_first; if match() Loss loss" in text


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


def test_removed_entries_and_warnings_are_shown(make):
    """An entry that a pass removed has a line at its event; warnings are last."""

    def without(algorithms, event):
        return []

    plan = explain(
        [make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}), make.algorithm("B")], algorithm_passes=[without]
    )

    lines = str(plan).splitlines()
    assert any(line.split() == ["batch_end", "(A)", "left", "out", "by", "without"] for line in lines)
    assert "WARNING: B runs at no event" in str(plan)


def test_lines_are_wrapped(make):
    """Long docstrings are wrapped."""
    algorithm = make.algorithm("A" * 20, {Event.INIT: Stage.LAYOUT}, __doc__="word " * 60, writes={"model"})

    assert max(map(len, str(explain(algorithm)).splitlines())) <= 100
