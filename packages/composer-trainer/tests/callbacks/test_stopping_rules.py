"""Rules that end a training."""

import datetime as dt
import inspect
import math

import pytest
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics import Metric

from composer.callbacks import EarlyStopper
from composer.core import State, Time, Timestamp
from composer.core.evaluator import more_is_better


class Declared(Metric):
    """A metric that declares that less is better."""

    higher_is_better = False

    def update(self): ...

    def compute(self): ...


class TestComparison:
    def better(self, comp=None, monitor="Distance"):
        """Return a function that compares two values of a metric that declares that less is better."""
        state = State(model=None)
        state.eval_metrics = {"eval": {"Distance": Declared()}}
        stopper = EarlyStopper(monitor, "eval", comp)
        return lambda value, other: stopper.is_better(value, other, state)

    @pytest.mark.parametrize("monitor", ["Distance", "Distance/part"])
    def test_declared_by_the_metric(self, monitor):
        """The metric decides, also for one of its parts."""
        better = self.better(monitor=monitor)

        assert (better(0.1, 0.2), better(0.2, 0.1), better(0.1, 0.1)) == (True, False, False)

    def test_every_metric_of_torchmetrics(self):
        """Whatever its name is, a classification metric goes the way that it declares."""
        declared = {
            name: metric.higher_is_better
            for name, metric in vars(torchmetrics.classification).items()
            if inspect.isclass(metric) and getattr(metric, "higher_is_better", None) is not None
        }

        assert len(declared) > 40
        assert {*declared.values()} == {True, False}
        for name, more in declared.items():
            assert more_is_better({name: getattr(torchmetrics.classification, name)}, name) is more

    def test_undeclared(self):
        """A metric that declares nothing improves downwards if it is a loss by its name."""
        metrics = dict.fromkeys(("val_loss", "Perplexity", "Score"), torchmetrics.MeanMetric())

        assert [more_is_better(metrics, name) for name in (*metrics, "other_loss")] == [False, False, None, None]

    @pytest.mark.parametrize("comp", ["greater", "gt"])
    def test_aliases(self, comp):
        """Both names are accepted, and replace what the metric declares."""
        assert self.better(comp)(0.2, 0.1)


def stop_epoch(values, max_duration=None, comp="greater", **options):
    """Return the epoch after which a training ends with these values, or None."""
    stopper, state = EarlyStopper("metric", "eval", comp, **options), State(model=None, max_duration=max_duration)
    for epoch, value in enumerate(values, start=1):
        clock = {"batch": 10 * epoch, "sample": 80 * epoch, "total_wct": dt.timedelta(seconds=2 * epoch)}
        state.timestamp = Timestamp(epoch=epoch, **clock)
        if stopper.judge(value, state):
            return epoch
    return None


def reference(values, patience, min_delta):
    """Return the same for a maximized metric, by a plain loop."""
    best, at = None, 1
    for epoch, value in enumerate(values, start=1):
        if not math.isnan(value) and (best is None or value > best + min_delta):
            best, at = value, epoch
        if epoch - at > patience:
            return epoch
    return None


class TestPatience:
    @pytest.mark.parametrize(
        ("patience", "ends"),
        [
            (Time(0, "ep"), 3),
            (Time(1, "ep"), 4),
            (Time(2, "ep"), 5),
            (Time(10, "ba"), 4),
            (Time(159, "sp"), 4),
            (Time(160, "sp"), 5),
            (Time(3.9, "sec"), 4),
            (Time(4.0, "sec"), 5),
            (Time(0.1, "dur"), 5),
        ],
    )
    def test_in_any_unit(self, patience, ends):
        """With the best value after the second epoch, the training stops after more than the patience."""
        values = [0.1, 0.5, 0.4, 0.3, 0.2, 0.1]

        assert stop_epoch(values, patience=patience, max_duration=Time(20, "ep")) == ends

    def test_fraction_without_max_duration_raises(self):
        """A training without a length has no fractions."""
        with pytest.raises(ValueError, match=r"patience=0\.1dur is a fraction of the training, which has no length"):
            stop_epoch([0.5], patience="0.1dur")

    @given(
        st.lists(st.one_of(st.integers(0, 8).map(float), st.just(math.nan)), max_size=12),
        st.integers(0, 4),
        st.integers(0, 3).map(float),
    )
    def test_equals_a_plain_count(self, values, patience, min_delta):
        """For any values, it stops where a plain counter does."""
        expected = reference(values, patience, min_delta)

        assert stop_epoch(values, patience=patience, min_delta=min_delta) == expected
