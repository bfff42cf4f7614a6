"""Vision models end to end: created in one line and trained on real or generated data, with decreasing losses.

Some tests take more than 5 seconds: the losses of real detectors and ResNets decrease only after some steps.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, jaccard_score
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from composer import DataSpec, Evaluator, Trainer
from composer.algorithms import EMA, ChannelsLast, LabelSmoothing, MixUp
from composer.loggers import InMemoryLogger
from composer.models import (
    ComposerDetector,
    Initializer,
    collate_detection,
    composer_timm,
    composer_torchvision,
    count_detection_samples,
    split_detection_batch,
)

SIZE = 64


@pytest.fixture(autouse=True)
def same_draws():
    """Start every test with the same random numbers."""
    torch.manual_seed(0)


def draw(count, seed=0):
    """Return dark images with a red and a green rectangle, a mask of their classes, and boxes with labels."""
    generator = torch.Generator().manual_seed(seed)
    images, masks, targets = 0.2 * torch.rand(count, 3, SIZE, SIZE, generator=generator), [], []
    for image in images:
        mask, boxes = torch.zeros(SIZE, SIZE, dtype=torch.long), []
        for label in (1, 2):
            width, height = torch.randint(14, 30, (2,), generator=generator).tolist()
            # One is on the left, the other on the right, so that they do not overlap.
            x = int(torch.randint(0, SIZE // 2 - width + 1, (), generator=generator)) + (label - 1) * SIZE // 2
            y = int(torch.randint(0, SIZE - height, (), generator=generator))
            image[label - 1, y : y + height, x : x + width] = 1.0
            mask[y : y + height, x : x + width] = label
            boxes.append([x, y, x + width, y + height])
        masks.append(mask)
        targets.append({"boxes": torch.tensor(boxes, dtype=torch.float), "labels": torch.tensor([1, 2])})
    return images, torch.stack(masks), targets


def digits(start, stop, batch_size=16):
    """Return handwritten digits as colour images of 32 pixels."""
    result = load_digits()
    images = torch.tensor(result.images[start:stop], dtype=torch.float)[:, None].expand(-1, 3, -1, -1) / 16
    samples = TensorDataset(F.interpolate(images, size=32), torch.tensor(result.target[start:stop]))
    return DataLoader(samples, batch_size=batch_size)


def scenes(count, seed=0, batch_size=4):
    """Return batches for segmentation."""
    images, masks, _ = draw(count, seed)
    return DataLoader(TensorDataset(images, masks), batch_size=batch_size)


def objects(count, seed=0, batch_size=4):
    """Return batches for detection, with functions that count and split them."""
    images, _, targets = draw(count, seed)
    loader = DataLoader(list(zip(images, targets, strict=True)), batch_size=batch_size, collate_fn=collate_detection)
    return DataSpec(loader, get_num_samples_in_batch=count_detection_samples, split_batch=split_detection_batch)


def fit(model, train, max_duration, rate=0.05, **settings):
    """Train, and return the trainer, the losses and all logged values."""
    log = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=train,
        optimizers=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        max_duration=max_duration,
        loggers=log,
        progress_bar=False,
        device="cpu",
        seed=0,
        **settings,
    )
    trainer.fit()
    return trainer, [float(loss) for _, loss in log.data["loss/train/total"]], log.data


class TestClassification:
    @pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
    def test_torchvision_learns_digits(self, name):
        """The loss decreases, and the logged accuracy equals scikit-learn's for the same outputs."""
        model = composer_torchvision(name, num_classes=10)

        trainer, losses, logged = fit(model, digits(0, 96), "2ep", eval_dataloader=digits(96, 126), rate=0.01)

        assert sum(losses[-3:]) < sum(losses[:3])
        outputs, labels = outputs_of(model, digits(96, 126))
        expected = accuracy_score(labels, outputs.argmax(dim=1))
        assert trainer.state.eval_metric_values["MulticlassAccuracy"].item() == pytest.approx(expected)
        assert "metrics/train/MulticlassAccuracy" in logged
        assert trainer.state.eval_metric_values["CrossEntropy"].item() == pytest.approx(
            F.cross_entropy(outputs, labels).item(), rel=1e-4
        )

    def test_timm_learns_digits_with_algorithms(self):
        """A vision transformer of timm trains with MixUp, label smoothing and an average of its weights."""
        model = composer_timm("vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8, depth=2)

        trainer, losses, _ = fit(
            model,
            digits(0, 96),
            "3ep",
            rate=0.02,
            algorithms=[MixUp(alpha=0.2), LabelSmoothing(0.1), EMA(half_life="2ba")],
            eval_dataloader=digits(96, 126),
        )

        assert sum(losses[-3:]) < sum(losses[:3])
        assert 0 <= trainer.state.eval_metric_values["MulticlassAccuracy"] <= 1

    def test_initial_weights_by_name(self):
        """A model with weights set by an Initializer trains."""
        model = composer_torchvision("resnet18", num_classes=10)
        for name in ["kaiming_normal", "bn_ones", "linear_log_constant_bias"]:
            model.apply(Initializer(name).get_initializer())

        _, losses, _ = fit(model, digits(0, 64), "1ep", rate=0.01)

        assert losses[-1] < losses[0]


def outputs_of(model, loader):
    """Return the model's outputs in evaluation mode and the targets of a data set."""
    model.eval()
    with torch.no_grad():
        pairs = [(model.eval_forward(batch), batch[1]) for batch in loader]
    return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))


class TestSegmentation:
    @pytest.mark.filterwarnings("ignore:device_train_microbatch_size=2 does not give")  # BatchNorm
    def test_deeplab_learns_scenes(self):
        """The loss of both heads falls; mIoU is scikit-learn's Jaccard score, a last batch of one image included."""
        model = composer_torchvision(
            "deeplabv3_mobilenet_v3_large", num_classes=3, weights_backbone=None, aux_loss=True
        )

        trainer, losses, logged = fit(
            model,
            scenes(8),
            "4ep",
            device_train_microbatch_size=2,
            algorithms=[ChannelsLast()],
            eval_dataloader=scenes(5, seed=1),
        )

        assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
        assert "metrics/train/MIoU" in logged
        outputs, masks = outputs_of(model, scenes(5, seed=1))
        guesses = outputs.argmax(dim=1).flatten().numpy()
        labels = sorted({*guesses.tolist(), *masks.unique().tolist()})
        expected = jaccard_score(masks.flatten().numpy(), guesses, labels=labels, average="macro", zero_division=0)
        assert trainer.state.eval_metric_values["MIoU"].item() == pytest.approx(100 * expected, rel=1e-5)

    def test_parts_of_a_batch_make_the_same_step(self):
        """With frozen BatchNorm, microbatches give the same weights."""
        weights = []
        for size in (None, 1):
            torch.manual_seed(0)
            model = composer_torchvision("lraspp_mobilenet_v3_large", num_classes=3, weights_backbone=None)
            for layer in model.modules():
                if isinstance(layer, torch.nn.BatchNorm2d):
                    layer.eval().requires_grad_(False)
            fit(model, scenes(2, batch_size=2), "1ba", device_train_microbatch_size=size)
            weights.append([parameter.detach() for parameter in model.parameters()])

        torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


class TestDetection:
    @pytest.mark.filterwarnings("ignore:device_train_microbatch_size=2 does not give")  # BatchNorm
    def test_faster_rcnn_learns_to_find_objects(self):
        """With microbatches, the loss decreases, its parts are logged, and mAP has a value."""
        model = composer_torchvision(
            "fasterrcnn_mobilenet_v3_large_320_fpn", num_classes=3, weights_backbone=None, min_size=SIZE, max_size=SIZE
        )

        trainer, losses, logged = fit(
            model,
            objects(8),
            "3ep",
            rate=0.01,
            device_train_microbatch_size=2,
            eval_dataloader=Evaluator(label="eval", dataloader=objects(3, seed=1), device_eval_microbatch_size=1),
        )

        assert losses[-1] < losses[0]
        parts = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
        assert losses[0] == pytest.approx(sum(float(logged[f"loss/train/{part}"][0][1]) for part in parts), rel=1e-5)
        assert 0 <= trainer.state.eval_metric_values["MAP/map"] <= 1
        assert "metrics/eval/MAP/map_50" in logged
        assert int(trainer.state.timestamp.sample) == 3 * 8

    def test_usual_batches_need_no_functions(self):
        """Tuples of images and targets are counted and split by images, also without boxes; any split is one step."""
        weights = []
        for size in (None, 1, 2):
            torch.manual_seed(0)
            backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8, stride=8), torch.nn.ReLU())
            backbone.out_channels = 8
            anchors = AnchorGenerator(((16,),), ((1.0,),))
            network = RetinaNet(backbone, 3, min_size=SIZE, max_size=SIZE, anchor_generator=anchors).double()
            samples = [(image.double(), target) for image, target in objects(3).dataloader.dataset]
            empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
            samples[1] = samples[1][0], empty  # three channels in each of three images
            samples[0] = samples[0][0], {"boxes": torch.tensor([]), "labels": torch.tensor([])}
            loader = DataLoader(samples, batch_size=3, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))

            model = ComposerDetector(network)
            trainer, _, _ = fit(model, loader, "1ba", device_train_microbatch_size=size, eval_dataloader=loader)

            assert int(trainer.state.timestamp.sample) == 3
            assert len(trainer.predict(loader, join=True)) == 3
            weights.append([parameter.detach() for parameter in model.parameters()])

        torch.testing.assert_close(weights[0], weights[1])
        torch.testing.assert_close(weights[0], weights[2])
