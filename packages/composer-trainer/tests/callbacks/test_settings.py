"""Settings that callbacks reject at construction."""

import inspect

import attrs
import pytest

from composer import callbacks
from composer.callbacks import (
    ActivationMonitor,
    CheckpointSaver,
    EarlyStopper,
    ExportForInferenceCallback,
    Generate,
    GradientNoiseScale,
    ImageVisualizer,
    LoadCheckpoint,
    MemoryMonitor,
    MemorySnapshot,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMetricsMonitor,
    ThresholdStopper,
)
from composer.checkpoint import KeepBest


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (GradientNoiseScale, "batch_log_interval"),
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
def test_invalid_counts_raise(callback, name, value, error):
    """A string, a fraction and a negative number raise with the parameter's name."""
    with pytest.raises(error, match=rf"^{name} must be .*, got '?{value}'?\."):
        callback(**{name: value})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda passed: EarlyStopper("loss", "train", min_delta=passed), "min_delta"),
        (lambda passed: GradientNoiseScale(smoothing=passed), "smoothing"),
        (lambda passed: SpeedMonitor(gpu_flops_available=passed), "gpu_flops_available"),
        (lambda passed: SystemMetricsMonitor(sample_seconds=passed), "sample_seconds"),
    ],
    ids=["min_delta", "smoothing", "gpu_flops_available", "sample_seconds"],
)
@pytest.mark.parametrize(("value", "error"), [("10", TypeError), (float("nan"), ValueError), (-1, ValueError)])
def test_invalid_amounts_raise(make, name, value, error):
    """A string, NaN and a negative number raise with the parameter's name."""
    with pytest.raises(error, match=rf"^{name} must (be|lie) .*, got '?{value}'?\."):
        make(value)


def _flags():
    classes = [one for one in vars(callbacks).values() if inspect.isclass(one) and attrs.has(one)]
    return [(one, field) for one in classes for field in attrs.fields(one) if field.init and field.type == "bool"]


@pytest.mark.parametrize(("callback", "field"), _flags(), ids=lambda one: getattr(one, "name", None) or one.__name__)
def test_flags_reject_strings(callback, field):
    """A string for a flag raises, as every non-empty string is truthy."""
    names = {other.name for other in attrs.fields(callback) if other.init and other.default is attrs.NOTHING}
    required = dict.fromkeys(names, "eval/loss")
    if callback is ThresholdStopper:
        required["threshold"] = 0.9

    with pytest.raises(TypeError, match=f"{field.name} must be True or False, got 'no'"):
        callback(**required | {field.name: "no"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Generate(5, "1ep"), "prompts must be a string or a list of strings, got 5"),
        (lambda: Generate("a", "1ep", batch_size="2"), "batch_size must be an int, got '2'"),
        (lambda: MemoryMonitor(memory_keys=5), "memory_keys must be None or a dictionary"),
        (lambda: ActivationMonitor(ignore_module_types=5), "ignore_module_types must be a string or a list of strings"),
        (lambda: MemorySnapshot(filename=5), "filename must be a string or a path, got 5"),
        (lambda: OOMObserver(folder=5), "folder must be a string or a path, got 5"),
        (lambda: ExportForInferenceCallback("onnx", 5), "save_path must be a string or a path, got 5"),
        (lambda: LoadCheckpoint(5), "load_path must be a string or a path, got 5"),
        (lambda: LoadCheckpoint("a", load_weights_only="no"), "load_weights_only must be True or False, got 'no'"),
        (lambda: CheckpointSaver(filename=5), r"filename \(save_filename\) must be a string or a path, got 5"),
        (lambda: CheckpointSaver(overwrite="no"), "overwrite must be True or False, got 'no'"),
        (lambda: KeepBest(5), "metric must be the name of a metric"),
        (lambda: KeepBest("loss", count="3"), "count must be an int, got '3'"),
    ],
)
def test_wrong_types_raise(make, message):
    """A value of the wrong type raises with the parameter's name."""
    with pytest.raises(TypeError, match=f"^{message}"):
        make()
