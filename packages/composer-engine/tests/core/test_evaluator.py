"""Evaluators and when they are due."""

import pytest

from composer.core import DataSpec, Evaluator, Event, State, Timestamp, ensure_evaluator, evaluate_periodically


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
