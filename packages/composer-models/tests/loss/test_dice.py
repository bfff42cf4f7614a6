"""Tests of composer.loss.DiceLoss."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassF1Score, MulticlassJaccardIndex

from composer.loss import DiceLoss
from composer.models import ComposerSegmenter

EPSILON = 1e-5


def _one_minus_dice(p, t, squared=False, jaccard=False):
    """Compute the loss of one class of one sample from lists of numbers."""
    overlap = math.fsum(x * y for x, y in zip(p, t, strict=True))
    power = 2 if squared else 1
    total = math.fsum(x**power for x in p) + math.fsum(x**power for x in t)
    if jaccard:
        return 1 - (overlap + EPSILON / 2) / (total - overlap + EPSILON / 2)
    return 1 - (2 * overlap + EPSILON) / (total + EPSILON)


@pytest.fixture
def pair():
    """Return probabilities of 3 classes for 20 pixels of 2 images, and targets; the second image has no class 2."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 3, 4, 5, generator=generator).softmax(dim=1)
    target = torch.randint(3, (2, 4, 5), generator=generator)
    target[1] %= 2
    return probabilities, target


def _lists(tensor):
    """Return the pixels of each image and class as a list."""
    return tensor.flatten(2).tolist()


def _one_hot(target):
    return torch.nn.functional.one_hot(target, 3).movedim(-1, 1)


class TestDiceLoss:
    @pytest.mark.parametrize("squared", [False, True])
    @pytest.mark.parametrize("jaccard", [False, True])
    def test_equals_the_formula_for_each_sample_and_class(self, pair, squared, jaccard):
        """Without reduction there is one loss per sample and class."""
        probabilities, target = pair

        loss = DiceLoss(squared_pred=squared, jaccard=jaccard, reduction="none")(probabilities, target)

        expected = [
            [_one_minus_dice(p, t, squared, jaccard) for p, t in zip(*rows, strict=True)]
            for rows in zip(_lists(probabilities), _lists(_one_hot(target)), strict=True)
        ]
        torch.testing.assert_close(loss, torch.tensor(expected))

    def test_batch_sums_over_the_samples_first(self, pair):
        """With batch=True each class has one coefficient over all pixels of the batch."""
        probabilities, target = pair

        loss = DiceLoss(batch=True, reduction="none")(probabilities, target)

        expected = [
            _one_minus_dice(probabilities[:, label].flatten().tolist(), _one_hot(target)[:, label].flatten().tolist())
            for label in range(3)
        ]
        torch.testing.assert_close(loss, torch.tensor(expected))

    @pytest.mark.parametrize("batch", [False, True])
    def test_reductions(self, pair, batch):
        """Mean and sum are computed from the unreduced losses."""
        each = DiceLoss(batch=batch, reduction="none")(*pair)

        assert DiceLoss(batch=batch)(*pair).item() == pytest.approx(each.mean().item())
        assert DiceLoss(batch=batch, reduction="sum")(*pair).item() == pytest.approx(each.sum().item())

    def test_absent_classes_are_excluded(self, pair):
        """A class that is absent from a sample has no loss and is excluded from the mean."""
        each = DiceLoss(reduction="none")(*pair)

        mean, rest = DiceLoss(ignore_absent_classes=True), DiceLoss(ignore_absent_classes=True, reduction="none")

        present = [each[0, 0], each[0, 1], each[0, 2], each[1, 0], each[1, 1]]
        assert mean(*pair).item() == pytest.approx(sum(present).item() / 5)
        assert rest(*pair)[1, 2] == 0
        assert torch.equal(rest(*pair)[0], each[0])

    def test_classes_absent_from_the_batch(self, pair):
        """With batch=True only a class that no sample has is excluded."""
        probabilities, target = pair
        settings = {"batch": True, "ignore_absent_classes": True}
        each = DiceLoss(batch=True, reduction="none")(probabilities, target % 2)

        loss = DiceLoss(**settings)(probabilities, target % 2)

        assert DiceLoss(**settings)(probabilities, target).item() == pytest.approx(
            DiceLoss(batch=True)(probabilities, target).item()
        )
        assert loss.item() == pytest.approx(each[:2].mean().item())

    @pytest.mark.parametrize("squared", [False, True])
    @pytest.mark.parametrize("jaccard", [False, True])
    @pytest.mark.parametrize("batch", [False, True])
    def test_ignored_pixels_are_excluded(self, pair, squared, jaccard, batch):
        """Predictions at pixels with a negative target do not change the loss."""
        probabilities, target = pair
        ignored = torch.rand(4, 5) < 0.4
        target[:, ignored] = torch.tensor([[-1], [-100]]).expand(2, int(ignored.sum()))

        loss = DiceLoss(squared_pred=squared, jaccard=jaccard, batch=batch, reduction="none")(probabilities, target)

        counted, truth = probabilities[..., ~ignored], _one_hot(target[:, ~ignored])
        samples = [(counted.movedim(0, 1)[None], truth.movedim(0, 1)[None])] if batch else [(counted, truth)]
        expected = [
            [_one_minus_dice(p, t, squared, jaccard) for p, t in zip(*rows, strict=True)]
            for rows in zip(*map(_lists, samples[0]), strict=True)
        ]
        torch.testing.assert_close(loss, torch.tensor(expected[0] if batch else expected))

    def test_no_classes_present_gives_zero(self):
        """If no pixel has a class, the loss is 0 and not nan."""
        loss = DiceLoss(ignore_absent_classes=True)(torch.rand(1, 2, 3, 3), torch.full((1, 3, 3), -100))

        assert loss == 0

    @pytest.mark.parametrize(("jaccard", "metric"), [(False, MulticlassF1Score), (True, MulticlassJaccardIndex)])
    def test_binary_predictions_give_one_minus_the_metric(self, jaccard, metric):
        """For predictions of 0 or 1, the batch's mean is one minus torchmetrics' score."""
        generator = torch.Generator().manual_seed(1)
        guess, target = (torch.randint(3, (2, 8, 8), generator=generator) for _ in range(2))

        loss = DiceLoss(jaccard=jaccard, batch=True)(_one_hot(guess).float(), target)

        assert loss.item() == pytest.approx(1 - metric(3, average="macro")(guess, target).item(), abs=1e-5)

    @pytest.mark.parametrize(
        ("settings", "activation"),
        [({"sigmoid": True}, torch.sigmoid), ({"softmax": True}, lambda logits: logits.softmax(dim=1))],
    )
    def test_logits(self, settings, activation):
        """With sigmoid or softmax, logits are converted to probabilities first."""
        logits, target = torch.randn(2, 3, 4), torch.randint(3, (2, 4))

        loss = DiceLoss(**settings)(logits, target)

        torch.testing.assert_close(loss, DiceLoss()(activation(logits), target))

    @given(st.integers(0, 1000), st.sampled_from(list(itertools.product([False, True], repeat=4))))
    def test_lies_between_zero_and_one(self, seed, flags):
        """For all settings the loss is in [0, 1], and a perfect prediction has 0."""
        squared, jaccard, batch, absent = flags
        generator = torch.Generator().manual_seed(seed)
        probabilities = torch.rand(2, 3, 6, generator=generator)
        target = torch.randint(3, (2, 6), generator=generator)
        dice = DiceLoss(squared_pred=squared, jaccard=jaccard, batch=batch, ignore_absent_classes=absent)

        assert -1e-6 <= dice(probabilities, target).item() <= 1
        assert dice(_one_hot(target).float(), target).item() == pytest.approx(0, abs=1e-5)

    def test_gradient_descent_lowers_the_loss(self):
        """A few steps on logits lower the loss."""
        logits, target = torch.zeros(1, 2, 4, 4, requires_grad=True), torch.eye(4, dtype=torch.long)[None]
        dice = DiceLoss(softmax=True)
        optimizer = torch.optim.SGD([logits], lr=10.0)
        losses = []

        for _ in range(10):
            optimizer.zero_grad()
            loss = dice(logits, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.5 * losses[0]

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"sigmoid": True, "softmax": True}, "sigmoid and softmax are both True"),
            ({"reduction": "max"}, "reduction must be .* got 'max'"),
        ],
    )
    def test_contradictory_settings_raise(self, settings, sentence):
        """Contradictory settings raise at construction."""
        with pytest.raises(ValueError, match=sentence):
            DiceLoss(**settings)

    def test_mismatched_masks_raise(self):
        """Mismatched masks raise, with both shapes."""
        with pytest.raises(ValueError, match=r"class ids of shape \(1, 4, 4\) .* of shape \(1, 8, 8\)"):
            DiceLoss()(torch.zeros(1, 2, 4, 4), torch.zeros(1, 8, 8, dtype=torch.long))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"batch": True}, True),
        ({"ignore_absent_classes": True}, True),
        ({"batch": True, "reduction": "sum"}, False),
    ],
)
def test_which_settings_need_the_whole_batch(settings, expected):
    """Sums over samples and a mean over the classes that occur are no means over samples."""
    model = ComposerSegmenter(torch.nn.Conv2d(3, 2, 1), loss_fn=DiceLoss(softmax=True, **settings))

    assert model.loss_needs_whole_batch is expected
