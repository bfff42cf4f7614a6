"""Settings that callbacks refuse at construction."""

import inspect

import attrs
import pytest

from composer import callbacks
from composer.callbacks import (
    EarlyStopper,
    ImageVisualizer,
    MemoryMonitor,
    MemorySnapshot,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMetricsMonitor,
)


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (ImageVisualizer, "num_images"),
        (MemoryMonitor, "dist_aggregate_batch_interval"),
        (MemorySnapshot, "skip_batches"),
        (MemorySnapshot, "max_entries"),
        (OOMObserver, "max_entries"),
        (OptimizerMonitor, "batch_log_interval"),
        (RuntimeEstimator, "skip_batches"),
        (SpeedMonitor, "window_size"),
    ],
)
@pytest.mark.parametrize(("value", "error"), [("10", TypeError), (2.5, TypeError), (-1, ValueError)])
def test_counts_are_whole_numbers(callback, name, value, error):
    """A text, a fraction and a negative number are refused by the parameter's name."""
    with pytest.raises(error, match=rf"^{name} must be .*, got '?{value}'?\."):
        callback(**{name: value})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda given: EarlyStopper("loss", "train", min_delta=given), "min_delta"),
        (lambda given: SpeedMonitor(gpu_flops_available=given), "gpu_flops_available"),
        (lambda given: SystemMetricsMonitor(sample_seconds=given), "sample_seconds"),
    ],
    ids=["min_delta", "gpu_flops_available", "sample_seconds"],
)
@pytest.mark.parametrize(("value", "error"), [("10", TypeError), (float("nan"), ValueError), (-1, ValueError)])
def test_amounts_are_numbers(make, name, value, error):
    """A text, NaN and a negative number are refused by the parameter's name."""
    with pytest.raises(error, match=rf"^{name} must be .*, got '?{value}'?\."):
        make(value)


def _flags():
    classes = [one for one in vars(callbacks).values() if inspect.isclass(one) and attrs.has(one)]
    return [(one, field) for one in classes for field in attrs.fields(one) if field.init and field.type == "bool"]


@pytest.mark.parametrize(("callback", "field"), _flags(), ids=lambda one: getattr(one, "name", None) or one.__name__)
def test_flags_accept_no_text(callback, field):
    """A text for a flag is an error, as every text counts as true."""
    required = {other.name: "loss" for other in attrs.fields(callback) if other.init and other.default is attrs.NOTHING}
    if "threshold" in required:
        required["threshold"] = 0.9

    with pytest.raises(TypeError, match=f"{field.name} must be True or False, got 'no'"):
        callback(**required | {field.name: "no"})
