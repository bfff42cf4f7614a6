"""Tests of composer.metrics.MAP."""

import pytest
import torch
from torchmetrics.detection import MeanAveragePrecision

from composer.metrics import MAP

pytest.importorskip("pycocotools", reason="MAP is computed by pycocotools")


def _image(boxes, labels, scores=None):
    result = {"boxes": torch.tensor(boxes, dtype=torch.float).reshape(-1, 4), "labels": torch.tensor(labels).long()}
    return result if scores is None else result | {"scores": torch.tensor(scores, dtype=torch.float)}


TARGETS = [
    _image([[0, 0, 10, 10], [20, 20, 40, 40]], [1, 2]),
    _image([[5, 5, 25, 35]], [1]),
    _image([[50, 50, 90, 90]], [3]),
]
PREDICTIONS = [
    _image([[0, 0, 10, 9], [20, 20, 40, 40]], [1, 2], [0.9, 0.6]),
    _image([[5, 5, 25, 30], [60, 60, 70, 70]], [1, 1], [0.8, 0.7]),
    _image([], [], []),
]


def _drawn(seed, images=12, classes=3):
    """Return predictions, some of them close to the targets."""
    generator = torch.Generator().manual_seed(seed)
    predictions, targets = [], []
    for _ in range(images):
        count = int(torch.randint(0, 4, (), generator=generator))
        corners = torch.rand(count, 2, generator=generator) * 60
        boxes = torch.cat([corners, corners + 5 + torch.rand(count, 2, generator=generator) * 30], dim=1)
        labels = torch.randint(classes, (count,), generator=generator)
        targets.append({"boxes": boxes, "labels": labels})
        moved = boxes + torch.randn(count, 4, generator=generator)
        wrong = torch.where(torch.rand(count, generator=generator) < 0.8, labels, 0)
        predictions.append({"boxes": moved, "labels": wrong, "scores": torch.rand(count, generator=generator)})
    return predictions, targets


class TestMAP:
    def test_worked_example(self):
        """Class 2 is found exactly, class 3 not at all, class 1 with overlaps of 0.9 and 5/6."""
        metric = MAP(class_metrics=True)

        metric.update(PREDICTIONS, TARGETS)

        values = {name: value.item() for name, value in metric.compute().items() if "per_class" not in name}
        assert values["map_class_2"] == pytest.approx(1.0)
        assert values["map_class_3"] == 0.0
        # Both count up to an overlap of 0.8, one up to 0.9 (its recall is a half: 51 of the 101 points).
        assert values["map_class_1"] == pytest.approx((7 + 2 * 51 / 101) / 10, abs=1e-3)
        assert values["map_50"] == pytest.approx(2 / 3)
        assert values["map"] == pytest.approx((values["map_class_1"] + 1.0 + 0.0) / 3)

    @pytest.mark.parametrize("class_metrics", [False, True])
    def test_equals_torchmetrics(self, class_metrics):
        """Each value equals that of MeanAveragePrecision for the same boxes."""
        predictions, targets = _drawn(seed=0)
        actual, reference = MAP(class_metrics), MeanAveragePrecision(class_metrics=class_metrics)

        for start in range(0, 12, 5):
            actual.update(predictions[start : start + 5], targets[start : start + 5])
        reference.update(predictions, targets)

        result, expected = actual.compute(), reference.compute()
        for name in ("map", "map_50", "map_75", "map_small", "map_medium", "mar_1", "mar_10", "mar_100", "mar_large"):
            assert result[name] == expected[name]
        for name in ("map_per_class", "mar_100_per_class"):
            assert torch.equal(result[name], expected[name])
        if class_metrics:
            for label in range(3):
                assert result[f"map_class_{label}"] == expected["map_per_class"][label]
                assert result[f"mar_100_class_{label}"] == expected["mar_100_per_class"][label]

    @pytest.mark.parametrize("class_metrics", [False, True])
    @pytest.mark.parametrize(
        ("predictions", "targets"),
        [(PREDICTIONS, TARGETS), (PREDICTIONS[:0], TARGETS[:0]), (PREDICTIONS[2:], TARGETS[2:])],
        ids=["several classes", "no image", "one class"],
    )
    def test_all_values_have_names(self, class_metrics, predictions, targets):
        """For any detections, there is a scalar for each name; those of the classes also have one name together."""
        metric = MAP(class_metrics)
        metric.update(predictions, targets)

        values = metric.compute()

        assert {"map", "map_50", "mar_100"} <= values.keys()
        assert all(value.numel() == 1 for name, value in values.items() if "per_class" not in name)
        assert any("_class_" in name for name in values) == (class_metrics and bool(targets))

    @pytest.mark.parametrize(
        ("predictions", "targets", "sentence"),
        [
            ([{"boxes": torch.zeros(0, 4)}], TARGETS[:1], "`preds` to contain the `"),
            (PREDICTIONS[:1], [{"boxes": torch.zeros(0, 4)}], "`target` to contain the `labels` key"),
            (PREDICTIONS, TARGETS[:1], "same length"),
            (torch.zeros(2, 3), TARGETS[:2], "`preds` to be of type Sequence"),
        ],
    )
    def test_invalid_detections_raise(self, predictions, targets, sentence):
        """Torchmetrics reports what is missing."""
        with pytest.raises(ValueError, match=sentence):
            MAP().update(predictions, targets)


def test_without_pycocotools(monkeypatch):
    """The error states how to install it, and the alternative."""

    def missing(self, **kwargs):
        raise ModuleNotFoundError("`MAP` metric requires that `pycocotools` is installed.")

    monkeypatch.setattr(MeanAveragePrecision, "__init__", missing)

    with pytest.raises(ModuleNotFoundError, match=r'pip install "composer-models\[detection\]".*val_metrics=\[\]'):
        MAP()
