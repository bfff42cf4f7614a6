"""How fast a run is, by a clock that the tests hold in their hands."""

import pytest
import torch

from composer import Trainer
from composer.callbacks import SpeedMonitor, speed_monitor
from composer.core import Engine, Logger, State
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that goes on when it is told to: ``clock.now += 2.0``."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    held = Clock()
    monkeypatch.setattr(speed_monitor, "time", held)
    return held


class Loop:
    """Batches of 8 samples, each of which takes as long as one says."""

    def __init__(self, clock, monitor, tokens=0):
        self.clock, self.tokens = clock, tokens
        self.state = State(model=None, callbacks=monitor)
        self.history = InMemoryLogger()
        self.logger = Logger(self.state, self.history)
        self.engine = Engine(self.state, self.logger)
        self.event("init")

    def event(self, name, after=0.0):
        self.clock.now += after
        self.engine.run_event(name)

    def batches(self, *seconds):
        for each in seconds:
            self.state.timestamp = self.state.timestamp.to_next_batch(samples=8, tokens=self.tokens)
            self.event("batch_end", after=each)

    def values(self, name):
        return [value for _, value in self.history.data.get(name, [])]


class TestSpeedMonitor:
    def test_throughput_over_the_window(self, clock):
        """The last window_size batches count; before there are as many, those that there are."""
        loop = Loop(clock, SpeedMonitor(window_size=2))
        loop.event("fit_start")

        loop.batches(1.0, 3.0, 1.0, 0.25)

        assert loop.values("throughput/batches_per_sec") == [1.0, 0.5, 0.5, 1.6]
        assert loop.values("throughput/samples_per_sec") == [8.0, 4.0, 4.0, 12.8]

    def test_tokens_only_where_there_are_any(self, clock):
        """Batches without tokens have no tokens per second."""
        with_tokens, without = Loop(clock, SpeedMonitor(), tokens=100), Loop(clock, SpeedMonitor())
        for loop in (with_tokens, without):
            loop.event("fit_start")
            loop.batches(2.0)

        assert with_tokens.values("throughput/tokens_per_sec") == [50.0]
        assert without.values("throughput/tokens_per_sec") == []

    def test_each_process_has_its_share(self, clock, monkeypatch):
        """What is counted over all processes is divided by their number."""
        monkeypatch.setattr(speed_monitor, "_world_size", lambda: 4)
        loop = Loop(clock, SpeedMonitor(), tokens=100)
        loop.event("fit_start")

        loop.batches(2.0)

        assert loop.values("throughput/samples_per_sec") == [4.0]
        assert loop.values("throughput/device/samples_per_sec") == [1.0]
        assert loop.values("throughput/device/batches_per_sec") == [0.125]
        assert loop.values("throughput/device/tokens_per_sec") == [12.5]

    def test_evaluation_is_no_training(self, clock):
        """Its time is counted apart, and makes training no slower."""
        loop = Loop(clock, SpeedMonitor(time_unit="seconds"))
        loop.event("fit_start")
        loop.batches(1.0)
        loop.event("eval_before_all", after=0.5)
        loop.event("eval_after_all", after=10.0)
        loop.batches(0.5)

        assert loop.values("throughput/batches_per_sec") == [1.0, 1.0]
        assert loop.values("time/train") == [1.0, 1.5, 2.0]
        assert loop.values("time/val") == [0.0, 10.0, 10.0]
        assert loop.values("time/total") == [1.0, 11.5, 12.0]

    def test_pause_between_two_fits_is_no_training(self, clock):
        """Only time within fit counts, and evaluations by themselves."""
        loop = Loop(clock, SpeedMonitor(time_unit="seconds"))
        loop.event("fit_start")
        loop.batches(1.0)
        loop.event("fit_end", after=1.0)
        loop.event("eval_before_all", after=1000.0)
        loop.event("eval_after_all", after=3.0)
        loop.event("fit_start", after=1000.0)
        loop.batches(1.0)

        assert loop.values("time/train")[-1] == 3.0
        assert loop.values("time/val")[-1] == 3.0

    @pytest.mark.parametrize(("unit", "expected"), [("seconds", 7200.0), ("minutes", 120.0), ("hours", 2.0)])
    def test_time_units(self, clock, unit, expected):
        """Times are in the unit that was asked for."""
        loop = Loop(clock, SpeedMonitor(time_unit=unit))
        loop.event("fit_start")

        loop.batches(7200.0)

        assert loop.values("time/total") == [expected]

    def test_hours_by_default(self):
        """The default unit is the hour."""
        assert SpeedMonitor().time_unit == "hours"

    def test_goes_on_after_a_resume(self, clock):
        """The times of a resumed run include what was spent before."""
        first = SpeedMonitor(time_unit="seconds")
        loop = Loop(clock, first)
        loop.event("fit_start")
        loop.batches(4.0)

        second = SpeedMonitor(time_unit="seconds")
        second.load_state_dict(first.state_dict())
        resumed = Loop(clock, second)
        resumed.event("fit_start", after=1000.0)
        resumed.batches(1.0)

        assert resumed.values("time/train") == [5.0]
        assert resumed.values("throughput/batches_per_sec") == [1.0]

    def test_no_time_has_passed(self, clock):
        """A clock that is too coarse gives no throughput instead of an error."""
        loop = Loop(clock, SpeedMonitor())
        loop.event("fit_start")

        loop.batches(0.0)

        assert loop.values("throughput/batches_per_sec") == []

    @pytest.mark.parametrize(
        ("options", "message"), [({"window_size": 0}, "window_size"), ({"time_unit": "h"}, "hours")]
    )
    def test_bad_arguments(self, options, message):
        """What is out of range is refused at once, by name."""
        with pytest.raises(ValueError, match=message):
            SpeedMonitor(**options)

    def test_in_a_real_training(self):
        """A trainer's run has throughput and times, with evaluations."""
        network = torch.nn.Linear(3, 2)
        history = InMemoryLogger()
        data = [(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 3
        trainer = Trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=data,
            eval_dataloader=data,
            optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
            max_duration="2ep",
            callbacks=SpeedMonitor(time_unit="seconds"),
            loggers=history,
            progress_bar=False,
            device="cpu",
            precision="fp32",
        )
        trainer.fit()
        trainer.close()

        latest = history.most_recent_values
        assert latest["throughput/samples_per_sec"] == pytest.approx(4 * latest["throughput/batches_per_sec"])
        assert latest["time/train"] > 0
        assert latest["time/val"] > 0
