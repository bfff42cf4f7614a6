"""Evaluators and when they are due."""

import pytest

from composer.core import (
    DataSpec,
    Evaluator,
    Event,
    MetricValues,
    State,
    Timestamp,
    ensure_evaluator,
    evaluate_periodically,
)


def due_events(evaluate, batches, batches_per_epoch=4):
    """Return where ``evaluate`` says yes in a training of so many batches: (event, batch)."""
    state = State(model=None, max_duration=f"{batches}ba")
    due = []

    def ask(event, later):
        state.previous_timestamp, state.timestamp = state.timestamp, later
        if evaluate(state, event):
            due.append((event.value, int(state.timestamp.batch)))

    for batch in range(1, batches + 1):
        ask(Event.BATCH_END, state.timestamp.to_next_batch())
        if batch % batches_per_epoch == 0:
            ask(Event.EPOCH_END, state.timestamp.to_next_epoch())
    ask(Event.FIT_END, state.timestamp)
    return due


class TestEvaluatePeriodically:
    def test_batches(self):
        """Every third batch, and at the end."""
        assert due_events(evaluate_periodically("3ba"), 8) == [("batch_end", 3), ("batch_end", 6), ("fit_end", 8)]

    def test_epochs(self):
        """Every epoch; the end of training adds none where an epoch has just ended."""
        assert due_events(evaluate_periodically(1), 8) == [("epoch_end", 4), ("epoch_end", 8)]

    def test_fraction_of_the_training(self):
        """Twice in the training."""
        assert due_events(evaluate_periodically("0.5dur"), 8) == [("batch_end", 4), ("batch_end", 8)]

    def test_end_can_be_left_out(self):
        """Without ``eval_at_fit_end`` only the interval counts."""
        assert due_events(evaluate_periodically("3ba", eval_at_fit_end=False), 4) == [("batch_end", 3)]

    def test_zero_is_never(self):
        """No evaluation, not even at the end."""
        assert due_events(evaluate_periodically(0), 8) == []

    def test_can_be_shared(self):
        """Two evaluators with one function get the same answers, at the end, too."""
        shared = evaluate_periodically("3ba")
        state = State(model=None, max_duration="4ba")
        state.timestamp = Timestamp(batch=4)

        assert [shared(state, Event.FIT_END) for _ in range(2)] == [True, True]


class TestEvaluator:
    def test_wraps_the_loader(self):
        """The loader becomes a DataSpec."""
        assert isinstance(Evaluator(label="a", dataloader=[1]).dataloader, DataSpec)

    @pytest.mark.parametrize(("given", "names"), [(None, None), ("acc", ["acc"]), (("a", "b"), ["a", "b"])])
    def test_metric_names(self, given, names):
        """One name or several, kept as a list."""
        assert Evaluator(label="a", dataloader=[], metric_names=given).metric_names == names

    def test_interval_may_be_a_function(self):
        """A function of one's own is kept."""

        def always(state, event):
            return True

        assert Evaluator(label="a", dataloader=[], eval_interval=always).eval_interval is always

    @pytest.mark.parametrize(
        "settings",
        [
            {"label": ""},
            {"subset_num_batches": 0},
            {"subset_num_batches": -2},
            {"device_eval_microbatch_size": 0},
            {"eval_interval": "-1ep"},
        ],
    )
    def test_refuses_what_is_out_of_range(self, settings):
        """Empty labels and impossible numbers are errors at once."""
        with pytest.raises(ValueError, match=r"label|subset_num_batches|device_eval_microbatch_size|interval"):
            Evaluator(**{"label": "a", "dataloader": [], **settings})

    def test_ensure_evaluator(self):
        """An evaluator passes through; a loader is labelled "eval" and gets the default metrics."""
        evaluator = Evaluator(label="a", dataloader=[])

        made = ensure_evaluator([1], ["acc"])

        assert ensure_evaluator(evaluator) is evaluator
        assert (made.label, made.metric_names, made.dataloader.dataloader) == ("eval", ["acc"], [1])


class TestMetricValues:
    def test_one_evaluator_needs_no_label(self):
        """The metric's name alone finds the value, as in MosaicML Composer."""
        values = MetricValues(eval={"Accuracy": 0.5})

        assert values["Accuracy"] == values["eval"]["Accuracy"] == values.get("Accuracy") == 0.5
        assert "Accuracy" in values
        assert "Loss" not in values
        assert values.get("Loss", 7) == 7

    def test_a_metric_of_two_evaluators_needs_a_label(self):
        """Which of the two is meant is not guessed."""
        values = MetricValues(easy={"Accuracy": 0.9}, hard={"Accuracy": 0.5})

        with pytest.raises(KeyError, match=r"'Accuracy' is a metric of easy, hard: read \['easy'\]\['Accuracy'\]"):
            values["Accuracy"]

    def test_unknown_name_gets_the_nearest(self):
        """The error names what may have been meant, a label or a metric."""
        with pytest.raises(KeyError, match=r"no evaluator or metric 'Acuracy'.*'Accuracy'"):
            MetricValues(eval={"Accuracy": 0.5})["Acuracy"]

    def test_values_without_a_label_are_replaced_by_an_evaluation(self):
        """Those of an earlier release's checkpoint do not hide the new ones."""
        values = MetricValues(Accuracy=0.1, Loss=2.0)

        values.record("eval", {"Accuracy": 0.5})

        assert values == {"Loss": 2.0, "eval": {"Accuracy": 0.5}}
        assert values["Accuracy"] == 0.5

    def test_assigned_values_can_be_looked_up(self):
        """A loop of one's own may assign any dictionary to the state."""
        state = State(model=None)

        state.eval_metric_values = {"eval": {"Accuracy": 0.5}}

        assert state.eval_metric_values["Accuracy"] == 0.5


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"label": ""}, ValueError, "label must be a text"),
        ({"label": 5}, TypeError, "label must be a text of one letter or more, got 5"),
        ({"metric_names": 5}, TypeError, "metric_names must be a text or a list of texts, got 5"),
        ({"metric_names": [5]}, TypeError, r"metric_names must be a text or a list of texts, got \[5\]"),
        ({"subset_num_batches": "2"}, TypeError, "subset_num_batches must be a number of batches.*got '2'"),
        ({"subset_num_batches": 1.5}, TypeError, "subset_num_batches must be a number of batches.*got 1.5"),
        ({"device_eval_microbatch_size": "2"}, TypeError, "device_eval_microbatch_size must be .*got '2'"),
        ({"device_eval_microbatch_size": 0}, ValueError, "device_eval_microbatch_size must be .*got 0"),
    ],
)
def test_bad_arguments(options, kind, message):
    """What is of the wrong kind or out of range is refused by its name."""
    with pytest.raises(kind, match=message):
        Evaluator(**{"label": "eval", "dataloader": [], **options})
