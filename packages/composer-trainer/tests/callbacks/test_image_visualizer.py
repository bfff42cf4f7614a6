"""Logged images of the model's input."""

import pytest
import torch
from torch import nn

from composer.algorithms import MixUp
from composer.callbacks import ImageVisualizer
from composer.core import Evaluator, LoggerDestination
from composer.models import ComposerModel
from fixtures import make_classifier, trained


class ImageRecorder(LoggerDestination):
    """Stores logged images."""

    def __init__(self):
        self.pages = []

    def log_images(self, images, name="Images", channels_last=False, step=None, *, masks=None, **details):
        self.pages.append(
            {"images": images, "name": name, "channels_last": channels_last, "step": step, "masks": masks}
        )


class Recorded(ComposerModel):
    """Records its images, and returns a score for each of 3 classes per pixel."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Conv2d(3, 3, 1)
        self.seen = []

    def forward(self, batch):
        self.seen.append(batch[0].detach().clone())
        return self.scores(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1], ignore_index=-100)


def segmentation_batches(count=3, size=6):
    generator = torch.Generator().manual_seed(1)
    masks = torch.randint(3, (size, 4, 4), generator=generator)
    masks[0, 0, 0] = -100
    return [(torch.rand(size, 3, 4, 4, generator=generator), masks) for _ in range(count)]


def fit(model, callbacks, batches, **options):
    album = ImageRecorder()
    trained(model=model, train_dataloader=batches, callbacks=callbacks, loggers=album, **options)
    return album.pages


class TestInputs:
    def test_images_after_algorithms(self):
        """The images are those after MixUp, as passed to the model."""
        model = make_classifier(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), train_metrics=[])
        recorded = []
        model.module.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0].clone()))
        batches = [(images, torch.arange(6) % 3) for images, _ in segmentation_batches()]

        pages = fit(model, ImageVisualizer("1ba"), batches, algorithms=MixUp(alpha=1.0))

        assert [page["step"] for page in pages] == [0, 1, 2]
        assert all(torch.equal(page["images"], images) for page, images in zip(pages, recorded, strict=True))
        assert not torch.equal(pages[0]["images"], batches[0][0])

    def test_interval_and_number(self):
        """The first images of every interval-th batch are logged."""
        batches = segmentation_batches(5)

        pages = fit(Recorded(), ImageVisualizer("2ba", num_images=2), batches)

        assert [(page["step"], page["name"], len(page["images"])) for page in pages] == [
            (2, "Images/Train", 2),
            (4, "Images/Train", 2),
        ]
        assert torch.equal(pages[0]["images"], batches[2][0][:2])
        assert pages[0]["masks"] is None

    def test_bytes(self):
        """8-bit images are scaled to [0, 1]."""

        class OfBytes(Recorded):
            def forward(self, batch):
                return self.scores(batch[0].float())

        images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)

        pages = fit(OfBytes(), ImageVisualizer("1ba"), [(images, torch.zeros(1, 1, 1, dtype=torch.long))])

        assert pages[0]["images"].flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])

    def test_wrong_key(self):
        """A value that is not an image raises with its description, and with the mode for lists of images."""
        message = r"input_key=1 is a tensor of shape \(6, 4, 4\).*, or mode='detection' for lists of images with boxes"
        with pytest.raises(ValueError, match=message):
            fit(Recorded(), ImageVisualizer("1ba", input_key=1), segmentation_batches(1))

    @pytest.mark.parametrize(("options", "message"), [({"mode": "both"}, "mode"), ({"num_images": 0}, "num_images")])
    def test_bad_arguments(self, options, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            ImageVisualizer(**options)


class TestSegmentation:
    def test_masks(self):
        """Masks are the argmax of the scores and the target; ignored pixels are an extra class."""
        model, batches = Recorded(), segmentation_batches(1)
        with torch.no_grad():
            expected = model.scores(batches[0][0]).argmax(dim=1)

        (page,) = fit(model, ImageVisualizer("1ba", mode="segmentation", num_images=4), batches)

        truth = batches[0][1][:4].clone()
        truth[0, 0, 0] = 3
        assert torch.equal(page["masks"]["prediction"], expected[:4])
        assert torch.equal(page["masks"]["ground truth"], truth)

    def test_evaluation(self):
        """The first batch of each evaluation is logged."""
        batches = segmentation_batches(2)

        pages = fit(
            Recorded(),
            ImageVisualizer("0ba", mode="segmentation"),
            batches,
            eval_dataloader=Evaluator(label="eval", dataloader=segmentation_batches(3), metric_names=[]),
            eval_interval="1ba",
        )

        assert [(page["name"], page["step"]) for page in pages] == [("Images/Eval", 1), ("Images/Eval", 2)]
        assert torch.equal(pages[0]["images"], segmentation_batches(3)[0][0])
        assert set(pages[0]["masks"]) == {"prediction", "ground truth"}


def test_in_tensorboard(tmp_path):
    """The images are in TensorBoard's files."""
    loggers = pytest.importorskip("composer.loggers")
    if not hasattr(loggers, "TensorboardLogger"):
        pytest.skip("there is no TensorboardLogger")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(
        model=Recorded(),
        train_dataloader=segmentation_batches(1),
        callbacks=ImageVisualizer("1ba", num_images=2),
        loggers=loggers.TensorboardLogger(log_dir=str(tmp_path)),
    )

    written = {path.parent for path in tmp_path.rglob("events.*")}
    tags = [
        tag
        for folder in written
        for tag in accumulator.EventAccumulator(str(folder), size_guidance={"images": 0}).Reload().Tags()["images"]
    ]
    assert any(tag.startswith("Images/Train") for tag in tags)


def test_masks_of_one_score():
    """With one score for each pixel, class 1 is predicted where it is positive."""

    class Binary(Recorded):
        def forward(self, batch):
            return batch[0][:, :1] * self.scores.weight[0, 0, 0, 0].abs()

        def loss(self, outputs, batch):
            return nn.functional.binary_cross_entropy_with_logits(outputs, batch[1])

    batches, model = [(torch.rand(6, 3, 4, 4) - 0.5, (torch.rand(6, 1, 4, 4) > 0.5).float())], Binary()
    expected = (batches[0][0][:, 0] > 0).long()

    masks = fit(model, ImageVisualizer("1ba", mode="segmentation"), batches)[0]["masks"]

    assert torch.equal(masks["prediction"], expected)
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(masks["ground truth"], batches[0][1][:, 0])
