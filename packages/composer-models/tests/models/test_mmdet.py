"""Tests of composer.models.MMDetModel on small modules that follow MMDetection's documented interfaces.

The real MMDetection needs operators that have to be compiled; the session ``mmdet`` of nox trains with it.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchmetrics.detection import IntersectionOverUnion

from composer.models import MMDetModel, count_detection_samples, split_detection_batch


def random_boxes(count, seed=0):
    """Return boxes in an image of 32 by 32."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=generator) * 16
    return torch.cat([corners, corners + 4 + torch.rand(count, 2, generator=generator) * 10], dim=1)


class Preprocessor(nn.Module):
    """Stacks and scales images like MMDetection 3."""

    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")
        self.calls = []

    def to(self, device):
        self.device = torch.device(device)
        return super().to(device)

    def forward(self, data, training=False):
        self.calls.append(training)
        return {"inputs": torch.stack(data["inputs"]).to(self.device) / 255, "data_samples": data["data_samples"]}


class Detector(nn.Module):
    """The interface of MMDetection 3: samples with instances as attributes."""

    def __init__(self, preprocessor=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        if preprocessor is not None:
            self.data_preprocessor = preprocessor

    def loss(self, batch_inputs, batch_data_samples):
        assert batch_inputs.shape[0] == len(batch_data_samples)
        return {"loss_cls": self.weight * batch_inputs.mean(), "loss_bbox": [self.weight.expand(2)] * 3, "acc": 1}

    def predict(self, batch_inputs, batch_data_samples, rescale=True):
        for sample in batch_data_samples:
            value = sample.gt_instances
            boxes = value.bboxes if isinstance(value.bboxes, torch.Tensor) else value.bboxes.tensor
            scores = torch.full((len(boxes),), 0.8)
            sample.pred_instances = SimpleNamespace(bboxes=boxes, scores=scores, labels=value.labels)
        return batch_data_samples


@pytest.fixture
def batch():
    """Return a batch: two images; the second's boxes are of MMDetection's own class."""
    value = [
        SimpleNamespace(bboxes=random_boxes(2), labels=torch.tensor([1, 0])),
        SimpleNamespace(bboxes=SimpleNamespace(tensor=random_boxes(1, seed=1)), labels=torch.tensor([1])),
    ]
    samples = [SimpleNamespace(gt_instances=one) for one in value]
    return {"inputs": [torch.full((3, 4, 4), 255.0), torch.zeros(3, 4, 4)], "data_samples": samples}


def with_one_metric(model):
    return MMDetModel(model, val_metrics=IntersectionOverUnion())


class TestOutputs:
    def test_losses(self, batch):
        """The model's preprocessor runs first, in training mode."""
        preprocessor = Preprocessor()
        model = with_one_metric(Detector(preprocessor))

        losses = model.loss(model(batch), batch)

        assert losses == {"loss_cls": torch.tensor(0.5), "loss_bbox": torch.tensor(3.0)}
        assert preprocessor.calls == [True]

    def test_predictions(self, batch):
        """Instances become boxes, scores and labels of each image, for any box class."""
        preprocessor = Preprocessor()
        model = with_one_metric(Detector(preprocessor)).eval()

        first, second = model.eval_forward(batch)
        model.update_metric(batch, [first, second], model.val_metrics["IntersectionOverUnion"])

        assert (first["labels"].tolist(), second["labels"].tolist()) == ([1, 0], [1])
        assert torch.equal(second["boxes"], random_boxes(1, seed=1))
        assert torch.equal(first["scores"], torch.tensor([0.8, 0.8]))
        assert model.val_metrics["IntersectionOverUnion"].compute()["iou"] == 1.0
        assert preprocessor.calls == [False]

    def test_precision(self, batch):
        """Perfect predictions have a mean average precision of 1."""
        pytest.importorskip("pycocotools", reason="mAP is computed by it")
        model = MMDetModel(Detector(Preprocessor())).eval()
        metric = model.get_metrics(is_train=False)["MAP"]

        model.update_metric(batch, model.eval_forward(batch), metric)

        assert metric.compute()["map"] == pytest.approx(1.0)
        assert model.get_metrics(is_train=True) == {}

    def test_preprocessor_moves_with_the_model(self, batch):
        """The preprocessor stores a device, which is updated when the model is moved."""
        preprocessor = Preprocessor()
        model = with_one_metric(Detector(preprocessor)).to("meta")

        losses = model(batch)

        assert preprocessor.device.type == losses["loss_cls"].device.type == "meta"


class TestBatches:
    def test_batches_can_be_split(self, batch):
        """Batches are counted and split by image."""
        parts = split_detection_batch(batch, 1)

        assert count_detection_samples(batch) == len(parts) == 2
        assert all(parts[1][name][0] is batch[name][1] for name in batch)


class TestBadInput:
    @pytest.mark.parametrize("model", [nn.Linear(1, 1), "yolox_s", None])
    def test_invalid_detector(self, model):
        """An object without the methods of a detector raises an error with the remedy."""
        with pytest.raises(TypeError, match=rf"loss and predict, got {type(model).__name__}\. Use MODELS\.build"):
            MMDetModel(model)

    def test_invalid_batches(self):
        """The error describes the batch."""
        with pytest.raises(TypeError, match=r"takes batches of MMDetection 3, dictionaries with .*, got tuple"):
            with_one_metric(Detector())((torch.zeros(1), []))
