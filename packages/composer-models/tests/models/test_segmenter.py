"""Tests of composer.models.ComposerSegmenter."""

import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryJaccardIndex

from composer.loss import DiceLoss
from composer.metrics import CrossEntropy, Dice, MIoU
from composer.models import ComposerSegmenter
from fixtures.models import TwoHeads

IMAGES = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
MASKS = torch.randint(3, (2, 6, 6), generator=torch.Generator().manual_seed(1))
BATCH = (IMAGES, MASKS)


@pytest.fixture(autouse=True)
def same_draws():
    """Seed every test."""
    torch.manual_seed(0)


def one_head(**settings):
    return ComposerSegmenter(nn.Conv2d(3, 3, 1), **settings)


class TestForwardAndLoss:
    def test_loss_is_the_cross_entropy_of_the_pixels(self):
        """The loss is torch's cross entropy, averaged over all pixels."""
        model = one_head()

        loss = model.loss(model(BATCH), BATCH)

        torch.testing.assert_close(loss, F.cross_entropy(model.module(IMAGES), MASKS))

    @pytest.mark.parametrize("ignored", [-1, 255])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
    def test_ignored_pixels_have_no_loss(self, ignored, dtype):
        """Ignored pixels affect neither the loss nor the gradient."""
        if ignored < 0 and dtype is torch.uint8:
            dtype = torch.int8
        masks = MASKS.clone()
        masks[0, :3] = ignored
        other = IMAGES.clone()
        other[0, :, :3] = 9.0
        model = one_head(ignore_index=ignored)

        losses = [model.loss(model((images, masks.to(dtype))), (images, masks.to(dtype))) for images in (IMAGES, other)]

        expected = F.cross_entropy(model.module(IMAGES), masks.where(masks != ignored, -100))
        torch.testing.assert_close(losses, [expected, expected])

    def test_auxiliary_head_in_training(self):
        """The loss is that of the first head plus half that of the second."""
        model = ComposerSegmenter(TwoHeads())

        outputs = model(BATCH)

        first, second = (F.cross_entropy(outputs[name], MASKS) for name in ("out", "aux"))
        assert list(outputs) == ["out", "aux"]
        torch.testing.assert_close(model.loss(outputs, BATCH), first + 0.5 * second)

    def test_evaluation_has_one_head(self):
        """In evaluation mode the outputs are the first head's scores."""
        model = ComposerSegmenter(TwoHeads()).eval()

        assert torch.equal(model(BATCH), model.module.classifier(IMAGES))
        assert torch.equal(model.eval_forward(BATCH), model.module.classifier(IMAGES))

    def test_masks_as_probabilities(self):
        """Mixed masks have class probabilities at each pixel."""
        fractions = torch.rand(2, 3, 6, 6).softmax(dim=1)
        model = one_head()

        loss = model.loss(model((IMAGES, fractions)), (IMAGES, fractions))

        expected = -(fractions * model.module(IMAGES).log_softmax(dim=1)).sum(dim=1).mean()
        torch.testing.assert_close(loss, expected)

    def test_custom_loss(self):
        """Any function of scores and masks is used for both heads."""
        dice = DiceLoss(softmax=True)
        model = ComposerSegmenter(TwoHeads(), loss_fn=dice, aux_weight=0.25)
        outputs = model(BATCH)

        loss = model.loss(outputs, BATCH)

        torch.testing.assert_close(loss, dice(outputs["out"], MASKS) + 0.25 * dice(outputs["aux"], MASKS))

    def test_learns_color_images(self):
        """A few steps on images whose color is their class lower the loss."""
        images = F.one_hot(MASKS, 3).movedim(-1, 1).float()
        model = one_head()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        losses = []

        for _ in range(20):
            loss = model.loss(model((images, MASKS)), (images, MASKS))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        assert losses[-1] < 0.3 * losses[0]


class TestMetrics:
    def test_defaults(self):
        """Training measures mIoU; validation also the cross entropy; both skip ignored pixels."""
        model = one_head(ignore_index=255)

        train, val = model.get_metrics(is_train=True), model.get_metrics(is_train=False)

        assert [sorted(train), sorted(val)] == [["MIoU"], ["CrossEntropy", "MIoU"]]
        assert train["MIoU"] is not val["MIoU"]
        assert {metric.ignore_index for metric in [*train.values(), *val.values()]} == {255}

    def test_values_match_scikit_learn(self):
        """Validation computes the Jaccard score and the cross entropy of the same outputs."""
        masks = MASKS.clone()
        masks[1, 0] = -1
        model = one_head().eval()
        outputs = model.eval_forward((IMAGES, masks))
        metrics = model.get_metrics(is_train=False)

        for metric in metrics.values():
            model.update_metric((IMAGES, masks), outputs, metric)

        counted = masks != -1
        expected = jaccard_score(
            masks[counted].numpy(), outputs.argmax(dim=1)[counted].numpy(), average="macro", zero_division=0
        )
        assert metrics["MIoU"].compute().item() == pytest.approx(100 * expected, rel=1e-6)
        torch.testing.assert_close(metrics["CrossEntropy"].compute(), F.cross_entropy(outputs, masks, ignore_index=-1))

    def test_probabilities_are_converted_to_ids(self):
        """Classification metrics receive ids; others receive probabilities."""
        fractions = torch.rand(2, 3, 6, 6).softmax(dim=1)
        model, outputs = one_head(), torch.randn(2, 3, 6, 6)
        counting, by_ids, measuring = MIoU(3), MIoU(3), CrossEntropy()

        model.update_metric((IMAGES, fractions), outputs, counting)
        model.update_metric((IMAGES, fractions), outputs, measuring)
        by_ids.update(outputs, fractions.argmax(dim=1))

        assert counting.compute() == by_ids.compute()
        assert measuring.count == 2 * 6 * 6


class TestBadInput:
    @pytest.mark.parametrize(
        ("module", "num_classes", "sentence"),
        [
            (nn.Identity(), None, "cannot be inferred from the module"),
            (nn.Conv2d(3, 1, 1), 1, "num_classes must be at least 2, got 1. The background is a class too"),
            (nn.Conv2d(3, 3, 1), 0, "num_classes must be at least 2, got 0"),
        ],
    )
    def test_invalid_num_classes(self, module, num_classes, sentence):
        """An invalid number raises at construction."""
        with pytest.raises(ValueError, match=sentence):
            ComposerSegmenter(module, num_classes)

    @pytest.mark.parametrize("batch", [IMAGES, [IMAGES]])
    def test_batches_without_masks(self, batch):
        """The forward pass needs no masks, the loss does."""
        model = one_head()

        assert torch.equal(model(batch), model.module(IMAGES))
        with pytest.raises(TypeError, match=r"takes batches \(images, masks\), got"):
            model.loss(IMAGES, batch)

    @pytest.mark.parametrize("shape", [(2, 1, 6, 6), (2, 5, 6), (6, 6)])
    def test_mismatched_masks(self, shape):
        """The error states the expected shape."""
        model = one_head()
        batch = IMAGES, torch.zeros(shape, dtype=torch.long)

        with pytest.raises(ValueError, match=r"class ids of shape \(2, 6, 6\) .* got torch.int64 of shape"):
            model.loss(model(batch), batch)

    @pytest.mark.parametrize("wrong", [3, 255])
    def test_id_out_of_range(self, wrong):
        """A mask with an id out of range raises, with the ignored id."""
        model = one_head()
        batch = IMAGES, MASKS.where(MASKS != 1, wrong)

        with pytest.raises(ValueError, match=r"from 0 to 2, and -1 is ignored\. Set ignore_index= for another"):
            model.loss(model(batch), batch)


def test_ignored_pixels_of_a_loss():
    """Metrics ignore the pixels that a custom loss ignores; the error of others names the loss."""
    model = ComposerSegmenter(nn.Conv2d(3, 3, 1), loss_fn=nn.CrossEntropyLoss(ignore_index=255))
    masks = torch.full((2, 6, 6), 255).index_fill(1, torch.tensor([0]), 1)

    for metric in model.get_metrics().values():
        model.update_metric((None, masks), torch.randn(2, 3, 6, 6), metric)
        assert metric.compute().isfinite()
    with pytest.raises(ValueError, match=r"and 255 is ignored\. Set ignore_index= for another, of loss_fn"):
        model.loss(torch.randn(2, 3, 6, 6), (None, masks - 2))


def test_several_classes_of_a_pixel():
    """MIoU compares one class of each pixel, and raises an error for masks with several."""
    masks = torch.ones(2, 3, 6, 6, dtype=torch.long)
    model = one_head(loss_fn=nn.BCEWithLogitsLoss())

    with pytest.raises(ValueError, match="MIoU is a metric of samples with one class"):
        model.update_metric((IMAGES, masks), model(IMAGES), model.get_metrics(is_train=True)["MIoU"])


class TestSamplesOfTheDiceLoss:
    """What the loss is the mean of is the weight of a microbatch, whatever dimensions and dtype the masks have."""

    volumes = torch.zeros(4, 5, 3, 3, dtype=torch.long).index_fill(0, torch.tensor(0), -1)

    @pytest.mark.parametrize("channels", [0, 1])
    @pytest.mark.parametrize("form", ["ids", "one-hot", "probabilities"])
    def test_volumes(self, form, channels):
        """Class ids of 0 count, those that are ignored do not; the losses of two parts add up to that of the batch."""
        module = nn.Sequential(nn.Identity() if channels else nn.Unflatten(1, (1, -1)), nn.Conv3d(1, 2, 1))
        model = ComposerSegmenter(module, num_classes=2, loss_fn=DiceLoss(softmax=True))
        images = torch.rand(4, 1, 5, 3, 3) if channels else torch.rand(4, 5, 3, 3)
        masks = self.volumes
        if form != "ids":
            masks = F.one_hot(masks.clamp(min=0), 2).movedim(-1, 1) * (masks >= 0).long()[:, None]
            masks = masks.float() if form == "probabilities" else masks
        parts = [(images[rows], masks[rows]) for rows in (slice(2), slice(2, 4))]

        counts = [model.count_loss_terms(part) for part in parts]
        assert counts == [1, 2]
        losses = [count * model.loss(model(part), part) for count, part in zip(counts, parts, strict=True)]
        torch.testing.assert_close(sum(losses) / 3, model.loss(model((images, masks)), (images, masks)))

    def test_one_hot_integers(self):
        """Those of images count as probabilities do: an image of zeros has no pixel that counts."""
        masks = F.one_hot(MASKS, 3).movedim(-1, 1).index_fill(0, torch.tensor(0), 0)

        assert one_head(loss_fn=DiceLoss(softmax=True)).count_loss_terms((IMAGES, masks)) == 1

    @pytest.mark.parametrize("dtype", [torch.long, torch.float32])
    def test_volumes_of_one_score(self, dtype):
        """A sigmoid's volumes and those of a binary cross entropy count without their ignored places."""
        images, masks = torch.rand(4, 1, 5, 3, 3), self.volumes.to(dtype)
        losses = (DiceLoss(sigmoid=True), 3), (nn.BCEWithLogitsLoss(), 3 * 5 * 3 * 3)
        for loss_fn, expected in losses:
            model = ComposerSegmenter(nn.Conv3d(1, 1, 1), num_classes=2, loss_fn=loss_fn)

            assert model.count_loss_terms((images, masks)) == expected


def test_binary_cross_entropy_of_several_scores_has_the_weight_of_its_samples():
    """Its mean is over all elements, also those of the ignored id."""
    labels = torch.ones(2, 3, 6, 6).index_fill(2, torch.tensor(0), -1.0)

    assert one_head(loss_fn=nn.BCEWithLogitsLoss()).count_loss_terms((IMAGES, labels)) is None


class TestOneScore:
    """Modules with one score for each pixel, the logit of class 1."""

    masks = MASKS.clamp(max=1).index_fill(1, torch.tensor(0), -1)

    def model(self, **settings):
        return ComposerSegmenter(nn.Conv2d(3, 1, 1), **settings)

    def test_loss_is_the_binary_cross_entropy_of_counted_pixels(self):
        """Ignored pixels have no loss, and are not counted."""
        model, batch = self.model(), (IMAGES, self.masks)
        scores = model(batch)

        expected = F.binary_cross_entropy_with_logits(scores[:, 0, 1:], self.masks[:, 1:].float())
        torch.testing.assert_close(model.loss(scores, batch), expected)
        assert model.num_classes == 2
        assert model.count_loss_terms(batch) == 2 * 5 * 6

    def test_losses_of_its_own(self):
        """The Dice loss with a softmax equals that with a sigmoid of both classes, and torch's loss takes weights."""
        batch, positive = (IMAGES, self.masks), torch.tensor(2.0)
        dice, weighted = self.model(loss_fn=DiceLoss(softmax=True)), self.model(loss_fn=nn.BCEWithLogitsLoss(positive))
        scores = dice(batch)

        both = torch.cat([-scores, scores], dim=1)
        torch.testing.assert_close(dice.loss(scores, batch), DiceLoss(sigmoid=True)(both, self.masks))
        labels = self.masks.clamp(min=0)
        expected = F.binary_cross_entropy_with_logits(scores[:, 0], labels.float(), positive)
        torch.testing.assert_close(weighted.loss(scores, (IMAGES, labels)), expected)

    def test_metrics(self):
        """Metrics of classes and binary ones are scikit-learn's scores of the counted pixels."""
        metrics = [MIoU(2), Dice(2, ignore_index=-1), CrossEntropy(-1), BinaryJaccardIndex(ignore_index=-1)]
        model, batch = self.model(val_metrics=metrics), (IMAGES, self.masks)
        scores = model.eval_forward(batch)
        found = model.get_metrics()
        for metric in found.values():
            model.update_metric(batch, scores, metric)

        pixels = self.masks[:, 1:].flatten(), (scores[:, 0, 1:] > 0).long().flatten()
        expected = {
            "MIoU": 100 * jaccard_score(*pixels, average="macro"),
            "Dice": f1_score(*pixels, average="macro"),
            "CrossEntropy": model.loss(scores, batch).item(),
            "BinaryJaccardIndex": jaccard_score(*pixels),
        }
        assert {name: metric.compute().item() for name, metric in found.items()} == pytest.approx(expected)

    @pytest.mark.parametrize("shape", [(2, 6, 6), (2, 1, 6, 6)])
    @pytest.mark.parametrize("loss_fn", [nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))])
    def test_binary_cross_entropy_of_torch(self, shape, loss_fn):
        """It is the mean over the counted pixels of float masks with and without a channel."""
        model, masks = self.model(loss_fn=loss_fn, ignore_index=255), self.masks.where(self.masks >= 0, 255)
        scores, batch = model(IMAGES), (IMAGES, masks.float().view(shape))

        expected = loss_fn(scores[:, 0, 1:], masks[:, 1:].float())
        torch.testing.assert_close(model.loss(scores, batch), expected)
        assert model.count_loss_terms(batch) == 2 * 5 * 6
        ignored = IMAGES, torch.full(shape, 255.0)
        loss = model.loss(scores, ignored)
        assert loss == 0
        loss.backward()
        assert not model.module.weight.grad.any()

    def test_masks_that_are_no_labels(self):
        """A mask of 0 and 255 raises in a loss that would compute with them, also after masks of 0."""
        model, masks = self.model(loss_fn=nn.BCEWithLogitsLoss()), self.masks.where(self.masks != 1, 255)
        model.loss(model(IMAGES), (IMAGES, self.masks.clamp(max=0)))

        with pytest.raises(ValueError, match=r"must be 0 or 1, got 0 to 255, and -1 is ignored\. Set"):
            model.loss(model(IMAGES), (IMAGES, masks))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
    def test_bytes_of_255_are_not_ignored(self, dtype):
        """In torch, 255 of uint8 equals -1: masks of a file with 0 and 255 raise, and are not learned as background."""
        model = self.model(loss_fn=nn.BCEWithLogitsLoss())
        batch = IMAGES, (MASKS.clamp(max=1) * 255).to(dtype)

        assert model.count_loss_terms(batch) == batch[1].numel()
        with pytest.raises(ValueError, match="must be 0 or 1, got 0 to 255"):
            model.loss(model(IMAGES), batch)

    @pytest.mark.parametrize("channel", [0, 1])
    def test_dice_loss_with_a_sigmoid(self, channel):
        """It is that of the foreground; ignored pixels change nothing."""
        model, dice = self.model(loss_fn=DiceLoss(sigmoid=True)), DiceLoss(sigmoid=True)
        scores, masks = model(IMAGES), self.masks.unsqueeze(1) if channel else self.masks

        counted = dice(scores[:, :, 1:], self.masks[:, None, 1:])
        torch.testing.assert_close(model.loss(scores, (IMAGES, masks)), counted)
        perfect = 100.0 * (self.masks[:, None] - 0.5)
        assert model.loss(perfect, (IMAGES, masks)) < 1e-3

    def test_own_loss_with_a_module_named_sigmoid(self):
        """A loss of a program gets the scores of both classes, whatever its modules are called."""

        class OwnLoss(nn.Module):
            def __init__(self):
                super().__init__()
                self.sigmoid = nn.Sigmoid()

            def forward(self, scores, masks):
                return F.cross_entropy(scores, masks, ignore_index=-1)

        scores, batch = self.model()(IMAGES), (IMAGES, self.masks)

        own, default = (self.model(loss_fn=one).loss(scores, batch) for one in (OwnLoss(), None))
        torch.testing.assert_close(own, default)

    def test_masks_are_checked_until_they_have_labels(self, monkeypatch):
        """Later batches read nothing, for which the host would wait."""
        model, reads = self.model(loss_fn=nn.BCEWithLogitsLoss()), []
        read = torch.Tensor.__bool__
        monkeypatch.setattr(torch.Tensor, "__bool__", lambda one: reads.append(one) or read(one))

        model.loss(model(IMAGES), (IMAGES, self.masks))
        first = len(reads)
        model.loss(model(IMAGES), (IMAGES, self.masks))

        assert 0 < first == len(reads)

    @pytest.mark.parametrize("loss_fn", [None, nn.BCEWithLogitsLoss()])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
    def test_transposed_masks(self, loss_fn, dtype):
        """Masks of the width and height of the images, with as many pixels, are an error."""
        model, images = self.model(loss_fn=loss_fn), torch.rand(2, 3, 4, 9)

        with pytest.raises((ValueError, RuntimeError), match=r"2, 9, 4|sizes? of"):
            model.loss(model(images), (images, torch.zeros(2, 9, 4, dtype=dtype)))

    def test_a_loss_of_its_own_may_return_a_dictionary(self):
        """It is returned as it is, as only the mean of a binary cross entropy is scaled."""
        model = self.model(loss_fn=lambda scores, masks: {"loss": scores.mean(), "masks": masks})

        assert list(model.loss(model(IMAGES), (IMAGES, self.masks))) == ["loss", "masks"]

    def test_binary_metric_of_masks_with_a_channel(self):
        """It is scikit-learn's score, also for float masks."""
        model, labels = self.model(val_metrics=BinaryJaccardIndex()), self.masks.clamp(min=0)
        scores, metric = model.eval_forward((IMAGES, labels)), model.get_metrics()["BinaryJaccardIndex"]

        for masks in (labels[:, None], labels[:, None].float()):
            metric.reset()
            model.update_metric((IMAGES, masks), scores, metric)

            expected = jaccard_score(labels.flatten(), (scores > 0).long().flatten())
            assert metric.compute().item() == pytest.approx(expected)
