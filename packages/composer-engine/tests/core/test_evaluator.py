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
    """Return where ``evaluate`` is true in a training of that many batches: (event, batch)."""
    state = State(model=None, max_duration=f"{batches}ba")
    due = []

    def is_due(event, later):
        state.previous_timestamp, state.timestamp = state.timestamp, later
        if evaluate(state, event):
            due.append((event.value, int(state.timestamp.batch)))

    for batch in range(1, batches + 1):
        is_due(Event.BATCH_END, state.timestamp.to_next_batch())
        if batch % batches_per_epoch == 0:
            is_due(Event.EPOCH_END, state.timestamp.to_next_epoch())
    is_due(Event.FIT_END, state.timestamp)
    return due


class TestEvaluatePeriodically:
    def test_batches(self):
        """The evaluator runs every third batch, and at the end."""
        assert due_events(evaluate_periodically("3ba"), 8) == [("batch_end", 3), ("batch_end", 6), ("fit_end", 8)]

    def test_epochs(self):
        """It runs every epoch, and not again at the end of training directly after an epoch."""
        assert due_events(evaluate_periodically(1), 8) == [("epoch_end", 4), ("epoch_end", 8)]

    def test_fraction_of_the_training(self):
        """It runs twice in the training."""
        assert due_events(evaluate_periodically("0.5dur"), 8) == [("batch_end", 4), ("batch_end", 8)]

    def test_no_evaluation_at_fit_end(self):
        """Without ``eval_at_fit_end`` only the interval is used."""
        assert due_events(evaluate_periodically("3ba", eval_at_fit_end=False), 4) == [("batch_end", 3)]

    def test_zero_disables(self):
        """It never runs, also not at the end."""
        assert due_events(evaluate_periodically(0), 8) == []

    def test_function_can_be_shared(self):
        """Two evaluators with one function get the same results, also at the end."""
        shared = evaluate_periodically("3ba")
        state = State(model=None, max_duration="4ba")
        state.timestamp = Timestamp(batch=4)

        assert [shared(state, Event.FIT_END) for _ in range(2)] == [True, True]


class TestEvaluator:
    def test_wraps_the_loader(self):
        """The loader is converted to a DataSpec."""
        assert isinstance(Evaluator(label="a", dataloader=[1]).dataloader, DataSpec)

    @pytest.mark.parametrize(("value", "names"), [(None, None), ("acc", ["acc"]), (("a", "b"), ["a", "b"])])
    def test_metric_names(self, value, names):
        """One name or several are stored as a list."""
        assert Evaluator(label="a", dataloader=[], metric_names=value).metric_names == names

    def test_interval_may_be_a_function(self):
        """A custom function is accepted."""

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
    def test_invalid_settings_raise(self, settings):
        """Empty labels and numbers out of range raise at construction."""
        with pytest.raises(ValueError, match=r"label|subset_num_batches|device_eval_microbatch_size|interval"):
            Evaluator(**{"label": "a", "dataloader": [], **settings})

    def test_ensure_evaluator(self):
        """An evaluator is returned unchanged; a loader gets the label "eval" and the default metrics."""
        evaluator = Evaluator(label="a", dataloader=[])

        created = ensure_evaluator([1], ["acc"])

        assert ensure_evaluator(evaluator) is evaluator
        assert (created.label, created.metric_names, created.dataloader.dataloader) == ("eval", ["acc"], [1])


class TestMetricValues:
    def test_metric_name_of_a_single_evaluator(self):
        """The metric's name alone selects the value, as in MosaicML Composer."""
        values = MetricValues(eval={"Accuracy": 0.5})

        assert values["Accuracy"] == values["eval"]["Accuracy"] == values.get("Accuracy") == 0.5
        assert "Accuracy" in values
        assert "Loss" not in values
        assert values.get("Loss", 7) == 7

    def test_ambiguous_metric_name_raises(self):
        """A metric of two evaluators requires a label."""
        values = MetricValues(easy={"Accuracy": 0.9}, hard={"Accuracy": 0.5})

        with pytest.raises(KeyError, match=r"'Accuracy' is a metric of easy, hard: read \['easy'\]\['Accuracy'\]"):
            values["Accuracy"]

    def test_unknown_name_suggests_a_similar_one(self):
        """The error suggests a label or a metric."""
        with pytest.raises(KeyError, match=r"no evaluator or metric 'Acuracy'.*'Accuracy'"):
            MetricValues(eval={"Accuracy": 0.5})["Acuracy"]

    def test_values_without_a_label_are_replaced_by_an_evaluation(self):
        """Values of an earlier release's checkpoint do not hide new ones."""
        values = MetricValues(Accuracy=0.1, Loss=2.0)

        values.record("eval", {"Accuracy": 0.5})

        assert values == {"Loss": 2.0, "eval": {"Accuracy": 0.5}}
        assert values["Accuracy"] == 0.5

    def test_assigned_values_can_be_looked_up(self):
        """A custom loop may assign any dictionary to the state."""
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
    """A value of the wrong type or out of range raises, with the parameter's name."""
    with pytest.raises(kind, match=message):
        Evaluator(**{"label": "eval", "dataloader": [], **options})
