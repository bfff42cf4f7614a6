"""Tests of composer.models.ComposerDetector and its batches."""

import itertools

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.detection import IntersectionOverUnion
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

from composer.models import ComposerDetector, collate_detection, count_detection_samples, split_detection_batch

SIZE = 48


def tiny_faster_rcnn(num_classes=3):
    """Return torchvision's Faster R-CNN on a backbone of three convolutions."""
    widths = [3, 16, 32, 32]
    layers = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
    ]
    backbone = nn.Sequential(*layers)
    backbone.out_channels = widths[-1]
    return FasterRCNN(
        backbone,
        min_size=SIZE,
        max_size=SIZE,
        rpn_anchor_generator=AnchorGenerator(((12, 20, 28),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=4, sampling_ratio=2),
        box_head=TwoMLPHead(widths[-1] * 16, 64),
        box_predictor=FastRCNNPredictor(64, num_classes),
        rpn_pre_nms_top_n_train=50,
        rpn_post_nms_top_n_train=20,
        rpn_pre_nms_top_n_test=50,
        rpn_post_nms_top_n_test=20,
    )


def draw(count, seed=0):
    """Return dark images with a red or a green rectangle each, and its box."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        label = int(torch.randint(1, 3, (), generator=generator))
        width, height = torch.randint(12, 28, (2,), generator=generator).tolist()
        x = int(torch.randint(0, SIZE - width, (), generator=generator))
        y = int(torch.randint(0, SIZE - height, (), generator=generator))
        image = 0.2 * torch.rand(3, SIZE, SIZE, generator=generator)
        image[label - 1, y : y + height, x : x + width] = 1.0
        box = torch.tensor([[x, y, x + width, y + height]], dtype=torch.float)
        samples.append((image, {"boxes": box, "labels": torch.tensor([label])}))
    return samples


@pytest.fixture(autouse=True)
def same_draws():
    """Seed every test."""
    torch.manual_seed(0)


@pytest.fixture
def model():
    """Return a detector with a metric that needs no optional package."""
    return ComposerDetector(tiny_faster_rcnn(), val_metrics=[IntersectionOverUnion()])


@pytest.fixture
def batch():
    """Return four images with their boxes."""
    return collate_detection(draw(4))


class TestForwardAndLoss:
    def test_training_returns_losses(self, model, batch):
        """In training, outputs and loss are the four losses, as scalars with gradients."""
        outputs = model(batch)

        losses = model.loss(outputs, batch)

        assert sorted(losses) == ["loss_box_reg", "loss_classifier", "loss_objectness", "loss_rpn_box_reg"]
        assert all(loss.shape == () and loss.requires_grad for loss in losses.values())
        assert all(losses[name] is outputs[name] for name in losses)

    def test_predictions_in_evaluation(self, model, batch):
        """In evaluation there is a prediction per image, independent of targets."""
        model.eval()
        images, targets = batch

        with torch.no_grad():
            recorded, hidden = model.eval_forward(batch), model((images, targets[::-1]))

        assert [sorted(one) for one in recorded] == [["boxes", "labels", "scores"]] * 4
        assert all(torch.equal(one["boxes"], other["boxes"]) for one, other in zip(recorded, hidden, strict=True))
        assert model.eval_forward(batch, recorded) is recorded

    def test_images_of_several_sizes(self, model):
        """Images may differ in size, and have no objects."""
        empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
        batch = [torch.rand(3, 40, 48), torch.rand(3, 48, 32)], [empty, draw(1)[0][1]]

        assert all(torch.isfinite(loss) for loss in model(batch).values())

    @pytest.mark.parametrize("place", [0, 1])
    def test_empty_tensors_without_a_shape(self, model, place):
        """An image without objects may have ``torch.tensor([])`` as boxes and labels, with the losses of (0, 4)."""
        samples = draw(2)
        image, _ = samples[place]
        losses = []
        for boxes, labels in ((torch.zeros(0, 4), torch.zeros(0).long()), (torch.tensor([]), torch.tensor([]))):
            samples[place] = image, {"boxes": boxes, "labels": labels}
            batch = collate_detection(samples)
            torch.manual_seed(1)
            losses.append(model(batch))

        torch.testing.assert_close(*losses)
        assert batch[1][place]["boxes"] is boxes

    @pytest.mark.parametrize(
        ("target", "found"),
        [
            ({"boxes": torch.zeros(3), "labels": torch.zeros(3).long()}, r"1 has boxes \(3,\)"),
            ({"boxes": torch.zeros(3, 5), "labels": torch.zeros(3).long()}, r"1 has boxes \(3, 5\)"),
            ({"boxes": torch.zeros(1, 4), "labels": torch.zeros(1)}, r"labels \(1,\) of torch.float32"),
        ],
    )
    def test_wrong_targets(self, model, target, found):
        """The error names the image, and what it has."""
        samples = draw(2)
        samples[1] = samples[1][0], target

        with pytest.raises(ValueError, match=rf"boxes' \(n, 4\) and 'labels' \(n,\) of integers; .*{found}"):
            model(collate_detection(samples))

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("form", [list, np.asarray])
    @pytest.mark.parametrize("name", ["boxes", "labels"])
    def test_targets_that_are_no_tensors(self, model, batch, name, form, training):
        """They are an error that names the image, also without objects and in evaluation."""
        images, targets = batch
        for values in ([], targets[1][name].tolist()):
            wrong = [targets[0], {**targets[1], name: form(values)}, *targets[2:]]
            with pytest.raises(TypeError, match=f"'{name}' must be tensors, got (list|ndarray) for image 1"):
                model.train(training)((images, wrong))

    def test_predictions_without_targets(self, model, batch):
        """Images alone, in a list, a tensor or a tuple of one of these, are predicted as those with targets."""
        model.eval()
        images = batch[0][:2]
        expected = [prediction["scores"] for prediction in model((images, batch[1][:2]))]

        for alone in (images, tuple(images), torch.stack(images), (images,), [torch.stack(images)]):
            assert count_detection_samples(alone) == 2
            torch.testing.assert_close([prediction["scores"] for prediction in model(alone)], expected)

    def test_learns_to_find_rectangles(self, model):
        """After some steps on rectangles the loss is lower, and mAP on other images is higher."""
        pytest.importorskip("pycocotools", reason="mAP is computed by it")
        model = ComposerDetector(model.module)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        loader = DataLoader(draw(32), batch_size=8, collate_fn=collate_detection)
        losses, precisions = [], [_precision(model)]

        for _ in range(14):
            for batch in loader:
                loss = sum(model.loss(model(batch), batch).values())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        precisions.append(_precision(model))

        assert sum(losses[-4:]) < 0.75 * sum(losses[:4])
        assert precisions[1] > precisions[0] + 0.2


def _precision(model):
    """Return mAP at an overlap of 0.5 on separate images."""
    metric = model.get_metrics(is_train=False)["MAP"]
    metric.reset()
    model.eval()
    with torch.no_grad():
        batch = collate_detection(draw(8, seed=1))
        model.update_metric(batch, model.eval_forward(batch), metric)
    model.train()
    return metric.compute()["map_50"].item()


class TestMetrics:
    def test_defaults(self):
        """Validation computes mAP; training has no predictions and no metrics."""
        pytest.importorskip("pycocotools", reason="mAP is computed by it")
        model = ComposerDetector(tiny_faster_rcnn())

        assert list(model.get_metrics(is_train=False)) == ["MAP"]
        assert model.get_metrics(is_train=True) == {}

    def test_custom_metrics(self, model, batch):
        """Another box metric is updated with predictions and targets."""
        metric = model.get_metrics(is_train=False)["IntersectionOverUnion"]
        _, targets = batch
        predictions = [target | {"scores": torch.ones(1)} for target in targets]

        model.update_metric(batch, predictions, metric)

        assert metric.compute()["iou"] == 1.0

    def test_metric_of_another_task(self, model, batch):
        """An accuracy raises an error that states which metrics are supported."""
        with pytest.raises(TypeError, match=r"MulticlassAccuracy cannot be updated with lists of boxes .*metrics\.MAP"):
            model.update_metric(batch, model.eval()(batch), MulticlassAccuracy(3))


class TestBadInput:
    @pytest.mark.parametrize(
        ("batch", "got"),
        [
            (torch.zeros(2, 3, 8, 8), "Tensor"),
            (([], [], []), "tuple of 3"),
            ({"images": []}, r"dict with keys \['images'\]"),
        ],
    )
    def test_invalid_batches(self, model, batch, got):
        """Other batches raise an error that names the collate function."""
        with pytest.raises(TypeError, match=rf"takes batches \(images, targets\), got {got}\. .*collate_detection"):
            model(batch)

    def test_loss_in_evaluation(self, model, batch):
        """Computing the loss in evaluation raises an error with the remedy."""
        with pytest.raises(TypeError, match=r"in evaluation only predictions\. Call model\.train\(\) before"):
            model.loss(model.eval()(batch), batch)


class TestBatches:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
    @pytest.mark.parametrize(
        "form",
        [
            lambda images, targets: (images, targets),
            lambda images, targets: [images, targets],
            lambda images, targets: (torch.stack(images), tuple(targets)),
            lambda images, targets: {"inputs": images, "data_samples": targets},
        ],
        ids=["tuple", "list", "tensor", "dict"],
    )
    def test_split_batch(self, batch, form, size):
        """Microbatches have at most the given size and the same form, and concatenate to the batch."""
        complete = form(*batch)

        parts = split_detection_batch(complete, size)

        assert [count_detection_samples(part) for part in parts[:-1]] == [min(size, 4)] * (len(parts) - 1)
        assert sum(map(count_detection_samples, parts)) == count_detection_samples(complete) == 4
        assert {type(part) for part in parts} == {type(complete)}
        of = [list(part.values()) if isinstance(part, dict) else part for part in parts]
        images, targets = batch
        assert all(torch.equal(a, b) for a, b in zip([one for part in of for one in part[0]], images, strict=True))
        assert [one for part in of for one in part[1]] == targets

    def test_collate(self):
        """Samples become a list of images and a list of targets, in order."""
        samples = draw(3)

        images, targets = collate_detection(samples)

        assert all(image is sample[0] for image, sample in zip(images, samples, strict=True))
        assert all(target is sample[1] for target, sample in zip(targets, samples, strict=True))


class TestObjects:
    """Losses that are divided by the objects of a batch."""

    @staticmethod
    def make(name):
        torch.manual_seed(0)
        small = {"weights": None, "weights_backbone": None, "num_classes": 3, "min_size": 64, "max_size": 64}
        small = small if name.startswith("fcos") else {key: small[key] for key in [*small][:3]}
        model = ComposerDetector(getattr(torchvision.models.detection, name)(**small), val_metrics=[])
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        return model

    @pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn"])
    def test_images_count_by_their_objects(self, name):
        """Half of the images are empty: by objects, the losses of single images add up to that of the batch nearly."""
        model, samples = self.make(name), draw(4)
        empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
        samples[1], samples[2] = ((samples[number][0], empty) for number in (1, 2))
        batch = collate_detection(samples)

        with torch.no_grad():
            expected = sum(model.loss(model(batch), batch).values())
            parts = split_detection_batch(batch, 1)
            losses = torch.stack([sum(model.loss(model(part), part).values()) for part in parts])
        terms = torch.stack([model.count_loss_terms(part) for part in parts])

        assert terms.tolist() == [1, 0, 0, 1]
        assert model.count_loss_terms(batch) == 2
        assert model.loss_needs_whole_batch
        torch.testing.assert_close((losses * terms / terms.sum()).sum(), expected, rtol=0.1, atol=0)
        assert losses.mean() < 0.6 * expected

    @pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"])
    def test_masks_and_keypoints_need_the_batch(self, name):
        """Their losses are means over objects that the forward pass finds, beside others that are means over images."""
        with torch.device("meta"):
            module = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, num_classes=2)
        model = ComposerDetector(module, val_metrics=[])

        assert model.loss_needs_whole_batch
        assert model.count_loss_terms(collate_detection(draw(2))) is None

    def test_other_detectors_count_images(self):
        """The losses of Faster R-CNN are means over images."""
        model = ComposerDetector(tiny_faster_rcnn(), val_metrics=[])

        assert model.count_loss_terms(collate_detection(draw(2))) is None
        assert not model.loss_needs_whole_batch
