"""The plan: what runs when, and which algorithms may run together."""

import json

import pytest

from composer.core import Callback, Event, Stage, explain
from composer.core.passes import sort_to_back
from composer.core.plan import build_plan, component_keys


def entries(plan, event):
    return [(entry.key, entry.why) for entry in plan.entries.get(event, ())]


class TestWhatRunsWhere:
    def test_algorithms_then_callbacks_then_loggers(self, make):
        """What watches sees what algorithms did, and loggers see it all."""
        plan = build_plan(
            [make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS})],
            [make.callback("C", "batch_end")],
            [make.destination("L", "batch_end")],
        )

        assert [(entry.key, entry.kind) for entry in plan.entries[Event.BATCH_END]] == [
            ("A", "algorithm"),
            ("C", "callback"),
            ("L", "logger"),
        ]

    def test_loggers_open_first_at_init(self, make):
        """At INIT the others may already want to log."""
        plan = build_plan(
            [make.algorithm("A", {Event.INIT: Stage.LAYOUT})],
            [make.callback("C", "init")],
            [make.destination("L", "init")],
        )

        assert entries(plan, Event.INIT) == [
            ("L", ""),
            ("A", "loggers open first"),
            ("C", "callbacks come after algorithms"),
        ]

    def test_only_overridden_hooks(self, make):
        """A callback is called where it does something, and nowhere else."""
        plan = build_plan([], [make.callback("C", "epoch_end", "fit_end")])

        assert [*plan.entries] == [Event.EPOCH_END, Event.FIT_END]

    def test_hook_that_was_put_on_the_object(self, make):
        """Also a method that an object got after it was made is called."""
        callback = make.callback("C")
        callback.epoch_end = print

        assert [*build_plan([], [callback]).entries] == [Event.EPOCH_END]

    def test_run_event_of_ones_own_is_called_everywhere(self):
        """An overridden run_event is called at every event."""

        class Everything(Callback):
            def run_event(self, event, state, logger):
                pass

        assert [*build_plan([], [Everything()]).entries] == [*Event]

    def test_match_alone_is_asked_everywhere(self, make):
        """An algorithm in the style of the specification declares nothing; its match is called at each event."""
        plan = build_plan([make.algorithm("A", match=lambda self, event, state: False)])

        assert [*plan.entries] == [*Event]
        assert all(entry.asked and entry.stage is None for [entry] in plan.entries.values())

    def test_declared_events_narrow_down_a_match(self, make):
        """With both, match is called at the declared events only."""
        plan = build_plan([make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS}, match=lambda *_: True)])

        assert {event: entry.asked for event, [entry] in plan.entries.items()} == {Event.BATCH_END: True}

    def test_places_may_depend_on_settings(self, make):
        """What ``runs_at_events`` returns counts, not all that the class declares."""
        both = {Event.BATCH_END: Stage.WEIGHTS, Event.EPOCH_END: Stage.WEIGHTS}
        algorithm = make.algorithm("A", both, runs_at_events=lambda self: {Event.EPOCH_END: Stage.WEIGHTS})

        assert [*build_plan([algorithm]).entries] == [Event.EPOCH_END]

    def test_second_of_a_class_is_numbered(self, make):
        """Two components of one class have two names, which stay the same at all events."""
        algorithm = make.algorithm("CutOut", {Event.BATCH_END: Stage.WEIGHTS, Event.AFTER_LOSS: Stage.WEIGHTS})

        plan = build_plan([algorithm, type(algorithm)()])

        assert [entry.key for entry in plan.entries[Event.BATCH_END]] == ["CutOut", "CutOut.1"]
        assert [entry.key for entry in plan.entries[Event.AFTER_LOSS]] == ["CutOut.1", "CutOut"]

    def test_keys(self):
        """Each class counts for itself, from its second object on."""
        assert [*component_keys(["a", 1, "b", 2, "c"]).values()] == ["str", "int", "str.1", "int.1", "str.2"]


class TestReasons:
    def test_stage(self, make):
        """The reason of the later stage names the earlier one."""
        label = make.algorithm("Label", {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL})
        mix = make.algorithm("Mix", {Event.BEFORE_LOSS: Stage.MIX, Event.AFTER_LOSS: Stage.MIX})

        plan = build_plan([label, mix])

        assert entries(plan, Event.BEFORE_LOSS) == [("Mix", ""), ("Label", "label comes after mix")]
        assert entries(plan, Event.AFTER_LOSS) == [("Label", ""), ("Mix", "undone in reverse: mix comes after label")]

    def test_list(self, make):
        """Within a stage the list decides, and its reverse after something."""
        algorithms = [make.algorithm(n, dict.fromkeys(Event, Stage.AUGMENT)) for n in "AB"]

        plan = build_plan(algorithms)

        assert entries(plan, Event.BATCH_END) == [("A", ""), ("B", "as listed")]
        assert entries(plan, Event.AFTER_LOAD) == [("B", ""), ("A", "listed first, so last out")]

    def test_pass_of_the_user(self, make):
        """The reason of a moved entry is the pass; the entries that it passed do not mention it."""
        algorithms = [make.algorithm(n, {Event.BATCH_END: Stage.WEIGHTS}) for n in "ABC"]

        def run_last(algorithms_, event):
            return sort_to_back(algorithms_, type(algorithms[0]))

        plan = explain(algorithms, algorithm_passes=[run_last])

        assert entries(plan, Event.BATCH_END) == [("B", ""), ("C", "as listed"), ("A", "moved by run_last")]
        assert plan.entries[Event.BATCH_END][-1].placed_by == ("run_last",)

    def test_pass_against_the_stages(self, make):
        """Where a pass overrules the stages, the rule is not claimed."""
        mix, label = (make.algorithm(s.name, {Event.BEFORE_LOSS: s}) for s in (Stage.MIX, Stage.LABEL))
        weights = make.algorithm("W", {Event.BEFORE_LOSS: Stage.WEIGHTS})

        def run_last(algorithms, event):
            return sort_to_back(algorithms, type(mix))

        plan = explain([mix, label, weights], algorithm_passes=[run_last])

        assert entries(plan, Event.BEFORE_LOSS) == [
            ("LABEL", ""),
            ("W", "weights comes after label"),
            ("MIX", "moved by run_last"),
        ]

    def test_those_behind_who_was_moved_claim_no_rule(self, make):
        """An entry after a moved one does not give its stage as the reason."""
        stages = (Stage.MIX, Stage.LABEL, Stage.WEIGHTS)
        algorithms = [make.algorithm(s.name, {Event.BEFORE_LOSS: s, Event.AFTER_LOSS: s}) for s in stages]

        def last_first(algorithms, event):
            return [algorithms[-1], *algorithms[:-1]]

        plan = explain(algorithms, algorithm_passes=[last_first])

        assert entries(plan, Event.BEFORE_LOSS) == [
            ("WEIGHTS", "moved by last_first"),
            ("MIX", ""),
            ("LABEL", "label comes after mix"),
        ]
        assert entries(plan, Event.AFTER_LOSS) == [
            ("MIX", "moved by last_first"),
            ("WEIGHTS", ""),
            ("LABEL", "undone in reverse: label comes after weights"),
        ]

    def test_what_has_no_stage(self, make):
        """It is last, first if stages are reversed, and architecture before training, with these reasons."""
        matching = make.algorithm("M", match=lambda *_: True)
        weights = make.algorithm("W", dict.fromkeys((Event.BATCH_END, Event.AFTER_LOSS, Event.INIT), Stage.WEIGHTS))

        plan = explain([weights, matching])

        assert entries(plan, Event.BATCH_END) == [("W", ""), ("M", "what has no stage comes after weights")]
        assert entries(plan, Event.INIT) == [("M", ""), ("W", "weights comes after what has no stage")]
        assert entries(plan, Event.AFTER_LOSS) == [
            ("M", ""),
            ("W", "undone in reverse: weights comes after what has no stage"),
        ]

    def test_left_out(self, make):
        """What a pass leaves out is not lost from sight."""
        plan = explain([make.algorithm("A", {Event.FIT_END: Stage.WEIGHTS})], algorithm_passes=[lambda *_: []])

        assert plan.entries == {}
        assert [(one.name, one.event, one.by) for one in plan.left_out] == [("A", Event.FIT_END, "<lambda>")]


class TestChecks:
    def test_one_object_twice(self, make):
        """The same object in two places would run twice and be saved once."""
        algorithm, callback = make.algorithm("A"), make.callback("C")

        for twice in (lambda: explain([algorithm, algorithm]), lambda: explain([], [callback, callback])):
            with pytest.raises(ValueError, match=r"is given twice; give it once, or make a second [AC]"):
                twice()

    @pytest.mark.parametrize(
        "runs_at", [{"after_los": Stage.LOSS}, {Event.AFTER_LOSS: 60}, {Event.AFTER_LOSS}, [Event.INIT]]
    )
    def test_declarations_are_checked(self, make, runs_at):
        """A misspelt event would never run: it is an error when the plan is made."""
        with pytest.raises(TypeError, match=r"A.runs_at must map events to stages"):
            explain([make.algorithm("A", runs_at)])

    @pytest.mark.parametrize("declared", ["reads", "writes", "owns"])
    @pytest.mark.parametrize("words", ["loss", {"loss", 1}])
    def test_words_are_checked(self, make, declared, words):
        """A text alone would be taken for its letters."""
        with pytest.raises(TypeError, match=rf"A\.{declared} must be a set of words, \{{\"loss\", \"model\"\}}, got"):
            explain(make.algorithm("A", {Event.BATCH_END: Stage.LOSS}, **{declared: words}))

    def test_events_may_be_declared_by_value(self, make):
        """A text that is an event is as good as the member."""
        assert [*explain([make.algorithm("A", {"batch_end": Stage.LOSS})]).entries] == [Event.BATCH_END]

    def test_algorithm_that_runs_nowhere_is_warned_about(self, make):
        """An algorithm with neither events nor match causes a warning."""
        assert "A runs at no event: declare runs_at" in explain(make.algorithm("A")).warnings[0]

    def test_warnings_of_passes_are_in_the_plan_once(self, make):
        """Two interpolations at several events cause one warning."""
        places = {Event.BEFORE_FORWARD: Stage.MIX, Event.AFTER_LOSS: Stage.LOSS}

        plan = explain([make.algorithm(n, places, interpolate_loss=True) for n in "AB"])

        assert len(plan.warnings) == 1
        assert "A and B all interpolate the loss" in plan.warnings[0]


class TestData:
    def test_to_json(self, make):
        """The whole plan as data: what algorithms declare, what runs where and why, and what was warned about."""
        algorithm = make.algorithm(
            "A", {Event.BATCH_END: Stage.WEIGHTS}, reads={"model", "loss"}, writes={"model"}, __doc__="Do :class:`x.Y`."
        )

        watch = make.callback("C", "batch_end")
        watch.intervals = lambda: {"batch_end": "10ba"}

        plan = explain([algorithm, make.algorithm("B")], watch)

        assert json.loads(plan.to_json()) == {
            "algorithms": [
                {"name": "A", "summary": "Do x.Y.", "reads": ["loss", "model"], "writes": ["model"], "owns": []},
                {"name": "B", "summary": "", "reads": [], "writes": [], "owns": []},
            ],
            "events": {
                "batch_end": [
                    {
                        "name": "A",
                        "kind": "algorithm",
                        "stage": "weights",
                        "placed_by": [],
                        "asked_each_time": False,
                        "why": "",
                        "every": None,
                        "reads": ["loss", "model"],
                        "writes": ["model"],
                    },
                    {
                        "name": "C",
                        "kind": "callback",
                        "stage": None,
                        "placed_by": [],
                        "asked_each_time": False,
                        "why": "callbacks come after algorithms",
                        "every": "10ba",
                        "reads": [],
                        "writes": [],
                    },
                ]
            },
            "left_out": [],
            "warnings": list(plan.warnings),
        }

    def test_same_components_make_equal_plans(self, make):
        """Plans can be compared."""
        algorithm = make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS})

        assert explain(algorithm) == explain([algorithm])
