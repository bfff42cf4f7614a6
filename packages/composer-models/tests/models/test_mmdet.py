"""Tests of composer.models.MMDetModel on small modules that follow MMDetection's documented interfaces.

The real MMDetection needs operators that have to be compiled; the session ``mmdet`` of nox trains with it.
"""

from types import SimpleNamespace

import numpy as np
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


class Version2(nn.Module):
    """The interface of version 2: for each image and class an array (n, 5)."""

    num_classes = 3

    def __init__(self, with_masks=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.with_masks = with_masks

    def forward(self, img, img_metas, return_loss=True, **kwargs):
        if return_loss:
            return self.forward_train(img, img_metas, **kwargs)
        assert isinstance(img, list)
        assert isinstance(img_metas, list)
        return self.simple_test(img[0], img_metas[0], **kwargs)

    def forward_train(self, img, img_metas, gt_bboxes, gt_labels):
        levels = [self.weight * boxes.sum() for boxes in gt_bboxes]
        return {"loss_cls": levels, "loss_bbox": self.weight * torch.ones(4), "acc": torch.tensor([99.0])}

    def simple_test(self, img, img_metas, rescale=False):
        assert rescale
        return [self._result(meta) for meta in img_metas]

    def _result(self, meta):
        result = [np.zeros((0, 5), dtype=np.float32) for _ in range(self.num_classes)]
        for box, label in zip(meta["boxes"].numpy() / meta["scale_factor"], meta["labels"].tolist(), strict=True):
            result[label] = np.vstack([result[label], [*box, 0.9 - label / 10]])
        return (result, [[] for _ in result]) if self.with_masks else result


class Preprocessor(nn.Module):
    """Stacks and scales images like version 3."""

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


class Version3(nn.Module):
    """The interface of version 3: samples with instances as attributes."""

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
def batch2():
    """Return a batch of version 2: two images, with three boxes and with none."""
    boxes, labels = [random_boxes(3), random_boxes(0)], [torch.tensor([0, 2, 2]), torch.zeros(0, dtype=torch.long)]
    pairs = zip(boxes, labels, strict=True)
    metas = [{"boxes": result * 2, "labels": ids, "scale_factor": 2.0} for result, ids in pairs]
    return {"img": torch.rand(2, 3, 32, 32), "img_metas": metas, "gt_bboxes": boxes, "gt_labels": labels}


@pytest.fixture
def batch3():
    """Return a batch of version 3: two images; the second's boxes are of MMDetection's own class."""
    value = [
        SimpleNamespace(bboxes=random_boxes(2), labels=torch.tensor([1, 0])),
        SimpleNamespace(bboxes=SimpleNamespace(tensor=random_boxes(1, seed=1)), labels=torch.tensor([1])),
    ]
    samples = [SimpleNamespace(gt_instances=one) for one in value]
    return {"inputs": [torch.full((3, 4, 4), 255.0), torch.zeros(3, 4, 4)], "data_samples": samples}


def with_one_metric(model):
    return MMDetModel(model, val_metrics=IntersectionOverUnion())


class TestVersion2:
    def test_losses(self, batch2):
        """Lists are summed, tensors averaged; other entries are ignored."""
        model = with_one_metric(Version2())

        losses = model.loss(model(batch2), batch2)

        assert sorted(losses) == ["loss_bbox", "loss_cls"]
        assert losses["loss_bbox"] == 1.0
        torch.testing.assert_close(losses["loss_cls"], batch2["gt_bboxes"][0].sum())
        sum(losses.values()).backward()
        torch.testing.assert_close(model.model.weight.grad, 1.0 + batch2["gt_bboxes"][0].sum())

    @pytest.mark.parametrize("with_masks", [False, True])
    def test_predictions(self, batch2, with_masks):
        """Arrays by class become boxes, scores and labels of each image, in original coordinates."""
        model = with_one_metric(Version2(with_masks)).eval()

        first, second = model.eval_forward(batch2)

        assert first["labels"].tolist() == [0, 2, 2]
        torch.testing.assert_close(first["scores"], torch.tensor([0.9, 0.7, 0.7]))
        torch.testing.assert_close(first["boxes"], batch2["gt_bboxes"][0])
        assert [tuple(second[name].shape) for name in ("boxes", "scores", "labels")] == [(0, 4), (0,), (0,)]

    def test_precision(self, batch2):
        """Perfect predictions have a mean average precision of 1."""
        pytest.importorskip("pycocotools", reason="mAP is computed by it")
        model = MMDetModel(Version2()).eval()
        metric = model.get_metrics(is_train=False)["MAP"]

        model.update_metric(batch2, model.eval_forward(batch2), metric)

        assert metric.compute()["map"] == pytest.approx(1.0)
        assert model.get_metrics(is_train=True) == {}


class TestVersion3:
    def test_losses(self, batch3):
        """The model's preprocessor runs first, in training mode."""
        preprocessor = Preprocessor()
        model = with_one_metric(Version3(preprocessor))

        losses = model.loss(model(batch3), batch3)

        assert losses == {"loss_cls": torch.tensor(0.5), "loss_bbox": torch.tensor(3.0)}
        assert preprocessor.calls == [True]

    def test_predictions(self, batch3):
        """Instances become boxes, scores and labels of each image, for any box class."""
        preprocessor = Preprocessor()
        model = with_one_metric(Version3(preprocessor)).eval()

        first, second = model.eval_forward(batch3)
        model.update_metric(batch3, [first, second], model.val_metrics["IntersectionOverUnion"])

        assert (first["labels"].tolist(), second["labels"].tolist()) == ([1, 0], [1])
        assert torch.equal(second["boxes"], random_boxes(1, seed=1))
        assert torch.equal(first["scores"], torch.tensor([0.8, 0.8]))
        assert model.val_metrics["IntersectionOverUnion"].compute()["iou"] == 1.0
        assert preprocessor.calls == [False]

    def test_without_a_preprocessor(self, batch3):
        """A model without one receives the batch unchanged."""
        batch = batch3 | {"inputs": torch.ones(2, 3, 4, 4)}
        model = with_one_metric(Version3())

        assert model.loss(model(batch), batch)["loss_cls"] == 1.0

    def test_preprocessor_moves_with_the_model(self, batch3):
        """The preprocessor stores a device, which is updated when the model is moved."""
        preprocessor = Preprocessor()
        model = with_one_metric(Version3(preprocessor)).to("meta")

        losses = model(batch3)

        assert preprocessor.device.type == losses["loss_cls"].device.type == "meta"

    def test_batch_is_not_modified(self, batch3):
        """A step does not modify the batch."""
        before = dict(batch3)

        with_one_metric(Version3(Preprocessor()))(batch3)

        assert batch3 == before


class TestBatches:
    def test_batches_can_be_split(self, batch2, batch3):
        """Both forms of batch are counted and split by image."""
        for batch in (batch2, batch3):
            parts = split_detection_batch(batch, 1)

            assert count_detection_samples(batch) == len(parts) == 2
            assert [parts[1][name][0] is batch[name][1] for name in batch if name != "img"] == [True] * (
                len(batch) - ("img" in batch)
            )

    def test_microbatch_losses(self, batch2):
        """A microbatch is processed as its own batch."""
        model = with_one_metric(Version2())
        first, second = split_detection_batch(batch2, 1)

        total = model.loss(model(batch2), batch2)["loss_cls"]

        parts = [model.loss(model(part), part)["loss_cls"] for part in (first, second)]
        torch.testing.assert_close(sum(parts), total)


class TestBadInput:
    @pytest.mark.parametrize("model", [nn.Linear(1, 1), "yolox_s", None])
    def test_invalid_detector(self, model):
        """An object without either version's methods raises an error with the remedy."""
        with pytest.raises(TypeError, match=rf"loss and predict .* got {type(model).__name__}\. Use MODELS\.build"):
            MMDetModel(model)

    @pytest.mark.parametrize("make", [Version2, Version3])
    def test_invalid_batches(self, make):
        """The error describes the batch."""
        with pytest.raises(TypeError, match=r"takes batches of MMDetection [23], dictionaries with .*, got tuple"):
            with_one_metric(make())((torch.zeros(1), []))

    @pytest.mark.parametrize("training", [True, False])
    def test_missing_labels(self, batch2, training):
        """A batch without labels raises, in training and evaluation."""
        del batch2["gt_labels"]

        with pytest.raises(ValueError, match="gt_labels is missing"):
            with_one_metric(Version2()).train(training)(batch2)

    def test_loss_in_evaluation(self, batch3):
        """Computing the loss in evaluation raises an error with the remedy."""
        model = with_one_metric(Version3(Preprocessor())).eval()

        with pytest.raises(TypeError, match=r"in evaluation only predictions\. Call model\.train\(\) before"):
            model.loss(model(batch3), batch3)

    def test_metric_of_training_outputs(self, batch3):
        """Metrics of training outputs raise an error with the remedy."""
        model = with_one_metric(Version3(Preprocessor()))

        with pytest.raises(TypeError, match=r"need predictions, got losses: call model\.eval\(\) before"):
            model.update_metric(batch3, model(batch3), IntersectionOverUnion())
