"""Throughput of a run, with a manual clock."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from composer.algorithms import SAM
from composer.callbacks import SpeedMonitor
from composer.core import Engine, Logger, State
from composer.loggers import InMemoryLogger
from fixtures import make_loader, trained, vector_batches, weights


class Loop:
    """Batches of 8 samples with given durations."""

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
        """The last window_size batches are used, or all if there are fewer."""
        loop = Loop(clock, SpeedMonitor(window_size=2))
        loop.event("fit_start")

        loop.batches(1.0, 3.0, 1.0, 0.25)

        assert loop.values("throughput/batches_per_sec") == [1.0, 0.5, 0.5, 1.6]
        assert loop.values("throughput/samples_per_sec") == [8.0, 4.0, 4.0, 12.8]

    def test_per_device_throughput(self, clock, monkeypatch):
        """Totals are divided by the number of processes."""
        monkeypatch.setenv("WORLD_SIZE", "4")
        loop = Loop(clock, SpeedMonitor(), tokens=100)
        loop.event("fit_start")

        loop.batches(2.0)

        assert loop.values("throughput/samples_per_sec") == [4.0]
        assert loop.values("throughput/device/samples_per_sec") == [1.0]
        assert loop.values("throughput/device/batches_per_sec") == [0.125]
        assert loop.values("throughput/device/tokens_per_sec") == [12.5]

    def test_evaluation_time_is_separate(self, clock):
        """Evaluation time is reported separately and does not change the throughput."""
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

    @pytest.mark.parametrize(("unit", "expected"), [("seconds", 7200.0), ("minutes", 120.0), ("hours", 2.0)])
    def test_time_units(self, clock, unit, expected):
        """Times are in the given unit."""
        loop = Loop(clock, SpeedMonitor(time_unit=unit))
        loop.event("fit_start")

        loop.batches(7200.0)

        assert loop.values("time/total") == [expected]

    def test_resume(self, clock):
        """The times of a resumed run include those before."""
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

    @pytest.mark.parametrize(
        ("options", "message"), [({"window_size": 0}, "window_size"), ({"time_unit": "h"}, "hours")]
    )
    def test_bad_arguments(self, options, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            SpeedMonitor(**options)

    def test_real_training(self):
        """A run has throughput and times, with evaluations."""
        history = InMemoryLogger()

        trained(
            max_duration="2ep",
            eval_dataloader=make_loader(),
            callbacks=SpeedMonitor(time_unit="seconds"),
            loggers=history,
        )

        latest = history.most_recent_values
        assert latest["throughput/samples_per_sec"] == pytest.approx(4 * latest["throughput/batches_per_sec"])
        assert latest["time/train"] > 0
        assert latest["time/val"] > 0


class Known(nn.Module):
    """A model with 100 operations per sample of a batch."""

    def flops_per_batch(self, batch):
        return 100 * len(batch)


def known(number):
    """Return a model with a fixed number of operations per batch."""
    model = nn.Module()
    model.flops_per_batch = number
    return model


class TestFlops:
    @pytest.mark.parametrize("model", [Known(), known(800), known(800.0)])
    def test_flops_of_the_model(self, clock, monkeypatch, model):
        """A number or a function of the batch, times the processes, over the window's time."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        loop = Loop(clock, SpeedMonitor(window_size=1, gpu_flops_available=1000.0))
        loop.state.model, loop.state.batch = model, torch.zeros(8)
        loop.event("fit_start")

        loop.batches(2.0, 4.0)

        assert loop.values("throughput/flops_per_sec") == [800.0, 400.0]
        assert loop.values("throughput/device/flops_per_sec") == [400.0, 200.0]
        assert loop.values("throughput/device/mfu") == [0.4, 0.2]

    def test_unknown_device(self, clock):
        """On the CPU there is no MFU unless the peak is given."""
        loop = Loop(clock, SpeedMonitor())
        loop.state.model = known(800)
        loop.event("fit_start")

        loop.batches(2.0)

        assert loop.values("throughput/flops_per_sec") == [400.0]
        assert loop.values("throughput/device/mfu") == []

    def test_known_gpu(self, clock, set_gpu_name):
        """The MFU refers to the manufacturer's peak."""
        set_gpu_name("Tesla T4")
        loop = Loop(clock, SpeedMonitor())
        loop.state.model, loop.state.device, loop.state.precision = known(6.5e12), torch.device("cuda", 0), "amp_fp16"
        loop.event("fit_start")

        loop.batches(1.0)

        assert loop.values("throughput/device/mfu") == [pytest.approx(0.1)]

    @pytest.mark.parametrize("algorithms", [[], [SAM()]])
    @pytest.mark.parametrize("microbatch", [None, 2])
    def test_counted_flops(self, algorithms, microbatch):
        """A layer of 4 to 3 has 2 * 4 * 3 operations per sample forward and, with constant inputs, as many backward."""
        history = InMemoryLogger()

        trained(
            network=nn.Linear(4, 3),
            train_dataloader=[batch for size in (4, 8, 6) for batch in vector_batches(1, size)],
            algorithms=algorithms,
            device_train_microbatch_size=microbatch,
            callbacks=SpeedMonitor(count_flops=True),
            loggers=history,
        )

        per_sample = 48 * (2 if algorithms else 1)
        steps = history.get_timeseries("throughput/flops_per_sec")
        samples = history.get_timeseries("throughput/samples_per_sec")["throughput/samples_per_sec"]
        assert steps["batch"] == [2, 3]
        assert steps["throughput/flops_per_sec"] == pytest.approx([per_sample * rate for rate in samples])

    def test_counting_does_not_change_training(self):
        """The weights are bit-identical, and the counting mode ends, also after an error."""
        results = [weights(trained(callbacks=SpeedMonitor(count_flops=count))) for count in (False, True)]
        with pytest.raises(RuntimeError, match="shapes"):
            trained(callbacks=SpeedMonitor(count_flops=True), train_dataloader=[(torch.ones(4, 5), torch.zeros(4))])

        assert torch.equal(*results)
        assert _get_current_dispatch_mode() is None
