"""The plan: what runs when, and conflicts."""

import json
from pathlib import Path

import pytest

from composer.core import Callback, Event, Stage, explain
from composer.core.passes import sort_to_back
from composer.core.planning import build_plan


def entries(plan, event):
    return [(entry.key, entry.why) for entry in plan.entries.get(event, ())]


class TestWhatRunsWhere:
    def test_algorithms_then_callbacks_then_loggers(self, make):
        """Callbacks run after algorithms, and loggers after callbacks."""
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

    def test_loggers_run_first_at_init(self, make):
        """At INIT other components may already log."""
        plan = build_plan(
            [make.algorithm("A", {Event.INIT: Stage.LAYOUT})],
            [make.callback("C", "init")],
            [make.destination("L", "init")],
        )

        assert entries(plan, Event.INIT) == [
            ("L", ""),
            ("A", "after loggers"),
            ("C", "after algorithms"),
        ]

    def test_loggers_among_the_callbacks(self, make):
        """A logger that is passed as a callback runs with the other loggers: first at INIT, and last elsewhere."""
        plan = build_plan(
            [make.algorithm("A", dict.fromkeys([Event.INIT, Event.FIT_END], Stage.LAYOUT))],
            [make.destination("L", "init", "fit_end"), make.callback("C", "init", "fit_end")],
            [make.destination("M", "init", "fit_end")],
        )

        assert [entry.key for entry in plan.entries[Event.INIT]] == ["L", "M", "A", "C"]
        assert [entry.key for entry in plan.entries[Event.FIT_END]] == ["A", "C", "L", "M"]

    def test_only_overridden_hooks_are_planned(self, make):
        """A callback is called only at events whose hook it overrides."""
        plan = build_plan([], [make.callback("C", "epoch_end", "fit_end")])

        assert [*plan.entries] == [Event.EPOCH_END, Event.FIT_END]

    def test_overridden_run_event_is_called_everywhere(self):
        """An overridden run_event is called at every event."""

        class Everything(Callback):
            def run_event(self, event, state, logger):
                pass

        assert [*build_plan([], [Everything()]).entries] == [*Event]

    def test_match_without_declared_events_is_called_everywhere(self, make):
        """Without declared events, match is called at each event."""
        plan = build_plan([make.algorithm("A", match=lambda self, event, state: False)])

        assert [*plan.entries] == [*Event]
        assert all(entry.asked and entry.stage is None for [entry] in plan.entries.values())

    def test_events_may_depend_on_settings(self, make):
        """The events that ``runs_at_events`` returns are used, not all that the class declares."""
        both = {Event.BATCH_END: Stage.WEIGHTS, Event.EPOCH_END: Stage.WEIGHTS}
        algorithm = make.algorithm("A", both, runs_at_events=lambda self: {Event.EPOCH_END: Stage.WEIGHTS})

        assert [*build_plan([algorithm]).entries] == [Event.EPOCH_END]


class TestReasons:
    def test_stage(self, make):
        """The reason of the later stage names the earlier one."""
        label = make.algorithm("Label", {Event.BEFORE_LOSS: Stage.LABEL, Event.AFTER_LOSS: Stage.LABEL})
        mix = make.algorithm("Mix", {Event.BEFORE_LOSS: Stage.MIX, Event.AFTER_LOSS: Stage.MIX})

        plan = build_plan([label, mix])

        assert entries(plan, Event.BEFORE_LOSS) == [("Mix", ""), ("Label", "label after mix")]
        assert entries(plan, Event.AFTER_LOSS) == [("Label", ""), ("Mix", "reversed: mix after label")]

    def test_list(self, make):
        """Within a stage list order applies, reversed at AFTER_* events."""
        algorithms = [make.algorithm(n, dict.fromkeys(Event, Stage.AUGMENT)) for n in "AB"]

        plan = build_plan(algorithms)

        assert entries(plan, Event.BATCH_END) == [("A", ""), ("B", "as listed")]
        assert entries(plan, Event.AFTER_LOAD) == [("B", ""), ("A", "first in, last out")]

    def test_user_pass(self, make):
        """A moved entry's reason is the pass; other entries do not mention it."""
        algorithms = [make.algorithm(n, {Event.BATCH_END: Stage.WEIGHTS}) for n in "ABC"]

        def run_last(algorithms_, event):
            return sort_to_back(algorithms_, type(algorithms[0]))

        plan = explain(algorithms, algorithm_passes=[run_last])

        assert entries(plan, Event.BATCH_END) == [("B", ""), ("C", "as listed"), ("A", "ordered by run_last")]

    def test_pass_against_the_stages(self, make):
        """Where a pass overrules the stages, the stage is not given as the reason."""
        mix, label = (make.algorithm(s.name, {Event.BEFORE_LOSS: s}) for s in (Stage.MIX, Stage.LABEL))
        weights = make.algorithm("W", {Event.BEFORE_LOSS: Stage.WEIGHTS})

        def run_last(algorithms, event):
            return sort_to_back(algorithms, type(mix))

        plan = explain([mix, label, weights], algorithm_passes=[run_last])

        assert entries(plan, Event.BEFORE_LOSS) == [
            ("LABEL", ""),
            ("W", "weights after label"),
            ("MIX", "ordered by run_last"),
        ]

    def test_entries_after_a_moved_one(self, make):
        """An entry after a moved one gives the pass as the reason, not its stage."""
        stages = (Stage.MIX, Stage.LABEL, Stage.WEIGHTS)
        algorithms = [make.algorithm(s.name, {Event.BEFORE_LOSS: s, Event.AFTER_LOSS: s}) for s in stages]

        def last_first(algorithms, event):
            return [algorithms[-1], *algorithms[:-1]]

        plan = explain(algorithms, algorithm_passes=[last_first])

        assert entries(plan, Event.BEFORE_LOSS) == [
            ("WEIGHTS", ""),
            ("MIX", "ordered by last_first"),
            ("LABEL", "label after mix"),
        ]
        assert entries(plan, Event.AFTER_LOSS) == [
            ("MIX", ""),
            ("WEIGHTS", "ordered by last_first"),
            ("LABEL", "reversed: label after weights"),
        ]

    def test_entries_without_a_stage(self, make):
        """They run last, first if stages are reversed, and as architecture before training, with these reasons."""
        matching = make.algorithm("M", match=lambda *_: True)
        weights = make.algorithm("W", dict.fromkeys((Event.BATCH_END, Event.AFTER_LOSS, Event.INIT), Stage.WEIGHTS))

        plan = explain([weights, matching])

        assert entries(plan, Event.BATCH_END) == [("W", ""), ("M", "no stage after weights")]
        assert entries(plan, Event.INIT) == [("M", ""), ("W", "weights after no stage")]
        assert entries(plan, Event.AFTER_LOSS) == [
            ("M", ""),
            ("W", "reversed: weights after no stage"),
        ]


class TestChecks:
    def test_repeated_object_raises(self, make):
        """The same object at two positions would run twice and be saved once."""
        algorithm, callback = make.algorithm("A"), make.callback("C")

        for twice in (lambda: explain([algorithm, algorithm]), lambda: explain([], [callback, callback])):
            with pytest.raises(ValueError, match=r"is given twice; give it once, or make a second [AC]"):
                twice()

    @pytest.mark.parametrize(
        "runs_at", [{"after_los": Stage.LOSS}, {Event.AFTER_LOSS: 60}, {Event.AFTER_LOSS}, [Event.INIT]]
    )
    def test_unknown_event_raises(self, make, runs_at):
        """A misspelled event raises when the plan is built."""
        with pytest.raises(TypeError, match=r"A.runs_at must map events to stages"):
            explain([make.algorithm("A", runs_at)])

    def test_algorithm_without_events_warns(self, make):
        """An algorithm with neither events nor match gives a warning."""
        assert "A runs at no event: declare runs_at" in explain(make.algorithm("A")).warnings[0]

    def test_files_that_others_have_left_open_are_not_warnings_of_the_plan(self, make):
        """A pass during which the garbage collector closes a file gives no warning."""

        def collecting(algorithms, event):
            Path(__file__).open()  # noqa: SIM115  (it is closed at once)
            return algorithms

        assert explain([make.algorithm("A", {"batch_end": Stage.LOSS})], (), [collecting]).warnings == ()


class TestData:
    def test_to_json(self, make):
        """The JSON has the declarations, the order with reasons, and the warnings."""
        algorithm = make.algorithm(
            "A", {Event.BATCH_END: Stage.WEIGHTS}, reads={"model", "loss"}, writes={"model"}, __doc__="Do :class:`x.Y`."
        )

        watch = make.callback("C", "batch_end")
        watch.intervals = lambda: {"batch_end": "10ba"}

        plan = explain([algorithm, make.algorithm("B")], watch)

        assert json.loads(plan.to_json()) == {
            "algorithms": [
                {
                    "name": "A",
                    "summary": "Do x.Y.",
                    "reads": ["loss", "model"],
                    "writes": ["model"],
                    "owns": [],
                },
                {"name": "B", "summary": "", "reads": [], "writes": [], "owns": []},
            ],
            "events": {
                "batch_end": [
                    {
                        "name": "A",
                        "kind": "algorithm",
                        "stage": "weights",
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
                        "asked_each_time": False,
                        "why": "after algorithms",
                        "every": "10ba",
                        "reads": [],
                        "writes": [],
                    },
                ]
            },
            "warnings": list(plan.warnings),
        }

    def test_same_components_make_equal_plans(self, make):
        """Plans can be compared."""
        algorithm = make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS})

        assert explain(algorithm) == explain([algorithm])
