"""Estimates of the remaining time, with a manual clock."""

import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.callbacks import RuntimeEstimator
from composer.core import Engine, Logger, State
from composer.loggers import InMemoryLogger
from fixtures import ManualClock, make_loader, trained


class Loop:
    """A run with 5 batches of 8 samples and 16 tokens per epoch, and given durations."""

    def __init__(self, clock, estimator, max_duration="4ep", length=5):
        self.clock = clock
        self.state = State(model=None, callbacks=estimator, max_duration=max_duration)
        self.state.set_dataloader(None, "train", length)
        self.history = InMemoryLogger()
        self.engine = Engine(self.state, Logger(self.state, self.history))
        self.engine.run_event("init")
        self.engine.run_event("fit_start")

    def batch(self, seconds):
        self.clock.now += seconds
        state = self.state
        state.timestamp = state.timestamp.to_next_batch(8, 16, dt.timedelta(seconds=seconds))
        self.engine.run_event("batch_end")
        if int(state.timestamp.batch) % 5 == 0:
            state.timestamp = state.timestamp.to_next_epoch()
            self.engine.run_event("epoch_end")
            state.timestamp = state.timestamp.to_next_iteration()
            self.engine.run_event("iteration_end")

    def evaluation(self, seconds, label="eval"):
        before = self.state.dataloader_label
        self.state.dataloader_label = label
        self.engine.run_event("eval_start")
        self.clock.now += seconds
        self.engine.run_event("eval_end")
        self.state.dataloader_label = before

    @property
    def values(self):
        return [value for _, value in self.history.data.get("time/remaining_estimate", [])]


SECONDS = {"time_unit": "seconds", "skip_batches": 0}


class TestRuntimeEstimator:
    @pytest.mark.parametrize("max_duration", ["4ep", "20ba", "160sp", "320tok", "40sec"])
    def test_in_any_unit(self, clock, max_duration):
        """For a length in any unit, the estimate is the number of remaining batches times their time."""
        loop = Loop(clock, RuntimeEstimator(**SECONDS), max_duration)

        for _ in range(20):
            loop.batch(2.0)

        assert loop.values == pytest.approx([2.0 * (19 - place) for place in range(20)])

    @pytest.mark.parametrize("skip", [1, 3])
    def test_first_batches_are_skipped(self, clock, skip):
        """Skipped batches are not measured, and nothing is logged before the first measurement."""
        loop = Loop(clock, RuntimeEstimator(skip, "seconds"), "20ba")

        for seconds in [*[100.0] * skip, 1.0, 1.0]:
            loop.batch(seconds)

        assert loop.values == [20.0 - skip - 1, 20.0 - skip - 2]

    @given(st.integers(1, 30), st.integers(1, 30))
    @settings(deadline=None)
    def test_is_exact_after_the_first_evaluation(self, batches, every):
        """With equal batches and evaluations, each later estimate is exact."""
        with pytest.MonkeyPatch.context() as patch:
            clock = ManualClock()
            patch.setattr("time.perf_counter", clock)
            loop = Loop(clock, RuntimeEstimator(**SECONDS), f"{batches}ba")
            estimates = []
            for number in range(1, batches + 1):
                loop.batch(3.0)
                estimates.append((number, clock.now, loop.values[-1]))
                if number % every == 0 or number == batches:
                    loop.evaluation(11.0)

            for number, when, remaining in estimates:
                if number > every:
                    assert when + remaining == pytest.approx(clock.now)

    @pytest.mark.parametrize(("unit", "expected"), [("minutes", 60.0), ("hours", 1.0), ("days", 1 / 24)])
    def test_time_units(self, clock, unit, expected):
        """Times are in the given unit, by default hours."""
        loop = Loop(clock, RuntimeEstimator(0, unit), "2ba")

        loop.batch(3600.0)

        assert loop.values == pytest.approx([expected])
        assert RuntimeEstimator().time_unit == "hours"

    def test_resume(self, clock):
        """Measurements are saved, also of evaluations; the interruption is excluded."""
        first = Loop(clock, RuntimeEstimator(**SECONDS))
        for _ in range(5):
            first.batch(2.0)
        first.evaluation(7.0)
        saved = first.state.state_dict()

        clock.now += 1000.0
        second = Loop(clock, RuntimeEstimator(**SECONDS))
        second.state.load_state_dict(saved)
        second.engine.run_event("fit_start")
        second.batch(2.0)

        assert second.values == pytest.approx([14 * 2.0 + 3 * 7.0])

    @pytest.mark.parametrize(
        ("options", "message"), [({"skip_batches": -1}, "skip_batches"), ({"time_unit": "h"}, "hours")]
    )
    def test_bad_arguments(self, options, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            RuntimeEstimator(**options)

    def test_real_training(self):
        """Each batch except the skipped one has an estimate, which is 0 at the end."""
        history = InMemoryLogger()

        trained(
            max_duration="2ep",
            eval_dataloader=make_loader(),
            callbacks=RuntimeEstimator(time_unit="seconds"),
            loggers=history,
        )

        values = [value for _, value in history.data["time/remaining_estimate"]]
        assert len(values) == 9
        assert all(value > 0 for value in values[:-1])
