"""Tests of metrics in any form."""

import pytest
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from composer.models.phase_metrics import as_collection, by_name


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (MeanMetric, ["MeanMetric"]),
        (lambda: [MeanMetric(), SumMetric()], ["MeanMetric", "SumMetric"]),
        (lambda: (SumMetric(),), ["SumMetric"]),
        (lambda: {"average": MeanMetric()}, ["average"]),
        (lambda: MetricCollection([MeanMetric()], prefix="my_"), ["my_MeanMetric"]),
        (list, []),
        (dict, []),
    ],
)
def test_all_forms_are_named(value, names):
    """A metric, a list, a dict and a collection become one collection with the same metric objects."""
    metrics = value()

    named = by_name(as_collection(metrics, "val_metrics"), "val_metrics")

    assert list(named) == names
    if isinstance(metrics, (list, dict)):
        assert {id(one) for one in named.values()} == {
            id(one) for one in (metrics.values() if isinstance(metrics, dict) else metrics)
        }


def test_compute_groups_are_disabled():
    """Metrics are updated one by one, so torchmetrics must not group them."""
    named = by_name(as_collection([MeanMetric(), SumMetric()], "val_metrics"), "val_metrics")

    named["MeanMetric"].update(3.0)

    assert not named["SumMetric"].update_called


def test_metric_set_later():
    """An attribute may be set to a metric or a collection."""
    assert list(by_name(SumMetric(), "val_metrics")) == ["SumMetric"]


@pytest.mark.parametrize(
    ("value", "got"), [("accuracy", "str"), ([MeanMetric(), "accuracy"], r"\['MeanMetric', 'str'\]"), (len, "builtin")]
)
def test_non_metric_raises(value, got):
    """The error states the value and the argument."""
    with pytest.raises(TypeError, match=f"val_metrics must be a torchmetrics Metric, .* got {got}.*Import them"):
        as_collection(value, "val_metrics")
