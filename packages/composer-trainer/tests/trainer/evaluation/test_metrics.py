"""Metrics: their values by name, and their saved states."""

import json
from pathlib import Path

import torch
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric

from composer.trainer.evaluation.metrics import compute_metrics, load_metrics, save_metrics
from fixtures.processes import run_processes


class Lists(Metric):
    """Keeps its numbers."""

    def __init__(self):
        super().__init__()
        self.add_state("numbers", [])

    def update(self, number):
        self.numbers.append(torch.tensor(number))

    def compute(self):
        return torch.stack(self.numbers).sum()


def filled(metric, *numbers):
    """Return a metric after its updates."""
    for number in numbers:
        metric.update(number)
    return metric


def test_values_of_a_collection_have_names_of_their_own():
    """A metric that returns several values has one for each part."""
    metrics = {"sum": filled(SumMetric(), 2.0), "both": filled(MetricCollection([SumMetric(), MeanMetric()]), 1.0, 4.0)}

    values = {name: value.item() for name, value in compute_metrics(metrics).items()}

    assert values == {"sum": 2.0, "both/SumMetric": 5.0, "both/MeanMetric": 2.5}


def test_loaded_metrics_continue():
    """Saved states are copies, and a metric that loads them computes the same value after the same updates."""
    original = {"mean": filled(MeanMetric(), 1.0, 2.0), "list": filled(Lists(), 3.0)}
    saved = save_metrics(original)
    other = {"mean": filled(MeanMetric(), 7.0), "list": filled(Lists(), 7.0, 8.0)}
    compute_metrics(other)  # torchmetrics caches the value

    load_metrics(other, saved, torch.device("cpu"))
    for metrics in (original, other):
        for metric in metrics.values():
            metric.update(6.0)

    assert compute_metrics(other) == compute_metrics(original) == {"mean": torch.tensor(3.0), "list": torch.tensor(9.0)}


def test_fewer_samples_than_processes():
    """Metrics with lists have the value of one process, also if another has no sample; unequal lists are an error."""
    program = Path(__file__).parent / "uneven_metrics.py"
    *expected, _ = json.loads(run_processes(program, 1)[0])

    for printed in run_processes(program, 2):
        *values, message = json.loads(printed)
        assert values == expected
        assert "'listed' (Listed)" in message
        assert "[{'scores': 2}, {'scores': 1}]" in message
