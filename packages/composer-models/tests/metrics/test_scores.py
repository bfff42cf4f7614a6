"""Metrics of scores and targets."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from composer.metrics import (
    BinaryF1Score,
    CrossEntropy,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
)


def _mean_of_classes(logits, targets, ignore_index=-100):
    """Average -log softmax over counted targets, in Python floats."""
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        if target != ignore_index:
            losses.append(math.log(sum(math.exp(x) for x in row)) - row[target])
    return math.fsum(losses) / len(losses)


class TestCrossEntropy:
    def test_equals_the_formula(self):
        """The value is the mean of -log softmax at the target."""
        logits, targets = torch.randn(20, 5), torch.randint(5, (20,))
        metric = CrossEntropy()

        metric.update(logits, targets)

        assert metric.compute().item() == pytest.approx(_mean_of_classes(logits, targets), rel=1e-6)

    @given(
        classes=st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=30).filter(lambda c: max(c) >= 0),
        cuts=st.lists(st.integers(0, 30), max_size=5),
    )
    def test_does_not_depend_on_batch_split(self, classes, cuts):
        """Small and empty batches and ignored targets are weighted by their number of targets."""
        targets = torch.tensor(classes)
        logits = torch.randn(len(classes), 3, generator=torch.Generator().manual_seed(len(classes)))
        metric = CrossEntropy()
        edges = [0, *sorted(min(cut, len(classes)) for cut in cuts), len(classes)]

        for start, stop in itertools.pairwise(edges):
            metric.update(logits[start:stop], targets[start:stop])

        assert metric.compute().item() == pytest.approx(_mean_of_classes(logits, targets), rel=1e-6)

    def test_class_probabilities(self):
        """With class probabilities the value is their weighted mean of -log softmax."""
        logits, probabilities = torch.randn(6, 4), torch.rand(6, 4).softmax(dim=1)
        metric = CrossEntropy()

        metric.update(logits[:1], probabilities[:1])
        metric.update(logits[1:], probabilities[1:])

        expected = -(probabilities * logits.log_softmax(dim=1)).sum() / 6
        assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-5)

    def test_pixels(self):
        """With ids (N, H, W) and with probabilities (N, C, H, W), the mean is over pixels."""
        logits, targets = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
        by_ids, by_probabilities = CrossEntropy(), CrossEntropy()

        by_ids.update(logits, targets)
        by_probabilities.update(logits, torch.nn.functional.one_hot(targets, 3).movedim(-1, 1).float())

        expected = _mean_of_classes(logits.movedim(1, -1).reshape(-1, 3), targets.flatten())
        assert by_ids.compute().item() == pytest.approx(expected, rel=1e-6)
        assert by_probabilities.compute().item() == pytest.approx(expected, rel=1e-6)

    def test_ignore_index(self):
        """The ignored id can be set, also to a class."""
        logits, targets = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
        metric = CrossEntropy(ignore_index=2)

        metric.update(logits, targets)

        assert metric.compute().item() == pytest.approx(_mean_of_classes(logits, targets, ignore_index=2), rel=1e-6)

    def test_accumulates_in_double_precision(self):
        """A small batch changes a large sum, which single precision would lose."""
        metric = CrossEntropy()
        metric.loss_sum, metric.count = torch.tensor(2.0**24), torch.tensor(1)

        for _ in range(64):
            metric.update(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))

        assert metric.compute().item() == pytest.approx((2.0**24 + 64 * math.log(2)) / 65, rel=1e-7)

    def test_half_precision_logits_are_summed_in_float32(self):
        """Logits from autocast only have their own rounding errors."""
        logits, targets = torch.randn(4096, 4).bfloat16(), torch.randint(4, (4096,))
        metric = CrossEntropy()

        metric.update(logits, targets)

        assert metric.compute().dtype == torch.float32
        assert metric.compute().item() == pytest.approx(_mean_of_classes(logits.float(), targets), rel=1e-6)


OF_LANGUAGE = pytest.mark.parametrize("kind", [LanguageCrossEntropy, LanguagePerplexity])


def _losses_of_tokens(logits, targets, ignore_index=-100):
    """Return -log softmax of each counted token, in Python floats."""
    return [
        math.log(sum(math.exp(score) for score in row)) - row[target]
        for row, target in zip(logits.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True)
        if target != ignore_index
    ]


def _texts(lengths, size=7, seed=0):
    """Return logits and tokens of a corpus with padding."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lengths), max(lengths), size, generator=generator)
    tokens = torch.randint(size, (len(lengths), max(lengths)), generator=generator)
    tokens[torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)] = -100
    return logits, tokens


class TestLanguageCrossEntropy:
    @pytest.mark.parametrize("wrap", [lambda logits: logits, lambda logits: {"loss": None, "logits": logits}])
    def test_equals_the_formula(self, wrap):
        """Logits, alone or in a model's output, give the mean of -log softmax over counted tokens."""
        logits, tokens = _texts([5, 2, 4])
        metric = LanguageCrossEntropy()

        metric.update(wrap(logits), tokens)

        losses = _losses_of_tokens(logits, tokens)
        assert metric.compute().item() == pytest.approx(math.fsum(losses) / 11, rel=1e-6)

    def test_half_precision_logits_are_summed_in_float32(self):
        """Logits from autocast only have their own rounding errors."""
        logits, tokens = _texts([512] * 4)
        metric = LanguageCrossEntropy()

        metric.update(logits.bfloat16(), tokens)

        losses = _losses_of_tokens(logits.bfloat16().float(), tokens)
        assert metric.compute().item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)


class TestLanguagePerplexity:
    @given(
        lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any),
        cuts=st.lists(st.integers(0, 8), max_size=4),
    )
    def test_does_not_depend_on_batch_split(self, lengths, cuts):
        """The value is exp of the mean token loss, in batches of any size and with any padding."""
        logits, tokens = _texts(lengths)
        metric = LanguagePerplexity()
        edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]

        for start, stop in itertools.pairwise(edges):
            metric.update(logits[start:stop], tokens[start:stop])

        losses = _losses_of_tokens(logits, tokens)
        assert metric.compute().item() == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-5)

    def test_equals_torchmetrics(self):
        """On one batch it equals torchmetrics' perplexity."""
        logits, tokens = _texts([6, 1, 3], size=11)
        actual, expected = LanguagePerplexity(), Perplexity(ignore_index=-100)

        for metric in (actual, expected):
            metric.update(logits, tokens)

        assert actual.compute().item() == pytest.approx(expected.compute().item(), rel=1e-5)


class TestLanguageMetrics:
    @OF_LANGUAGE
    def test_vocab_size_is_deprecated(self, kind):
        """The former argument has no effect and gives a warning at the caller's line."""
        with pytest.warns(DeprecationWarning, match=rf"vocab_size is ignored: {kind.__name__} reads it") as warned:
            metric = kind(vocab_size=30522)

        metric.update(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
        assert warned[0].filename == __file__
        assert metric.compute().item() == pytest.approx(math.log(4) if kind is LanguageCrossEntropy else 4, rel=1e-6)

    @OF_LANGUAGE
    def test_invalid_input_raises(self, kind):
        """Mismatched targets and outputs without logits raise, with the value."""
        with pytest.raises(ValueError, match=r"one dimension more .* got \(2, 3, 5\) for \(2, 4\)"):
            kind().update(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
        with pytest.raises(KeyError, match=r"must have 'logits' for this metric, got \['loss'\]"):
            kind().update({"loss": torch.tensor(1.0)}, torch.zeros(2, dtype=torch.long))


@OF_LANGUAGE
def test_tokens_of_floating_point(kind):
    """Fractions are no token ids: they raise an error, and are not rounded."""
    with pytest.raises(RuntimeError, match="Long"):
        kind().update(torch.randn(2, 3, 5), torch.rand(2, 3))


class TestMaskedAccuracy:
    @given(
        pairs=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-100, 0, 1, 2])), min_size=1, max_size=30),
        cuts=st.lists(st.integers(0, 30), max_size=4),
    )
    def test_does_not_depend_on_batch_split(self, pairs, cuts):
        """The value is the fraction of correct predictions among all counted targets."""
        scores = torch.eye(3)[[guess for guess, _ in pairs]]
        targets = torch.tensor([truth for _, truth in pairs])
        metric = MaskedAccuracy()
        edges = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]

        for start, stop in itertools.pairwise(edges):
            metric.update(scores[start:stop], targets[start:stop])

        counted = [guess == truth for guess, truth in pairs if truth != -100]
        expected = sum(counted) / len(counted) if counted else math.nan
        assert metric.compute().item() == pytest.approx(expected, nan_ok=True)

    def test_tokens(self):
        """Scores (N, L, V) with targets (N, L) of a language model, also in a model's output."""
        scores, targets = torch.rand(2, 4, 6), torch.tensor([[0, 1, -100, 5], [3, -100, 2, 2]])
        alone, output = MaskedAccuracy(), MaskedAccuracy()

        alone.update(scores, targets)
        output.update({"logits": scores}, targets)

        right = (scores.argmax(-1) == targets).sum().item()
        assert alone.compute() == output.compute() == torch.tensor(right / 6)

    def test_pixels(self):
        """Scores (N, C, H, W) with targets (N, H, W) equal torchmetrics' accuracy."""
        scores, targets = torch.rand(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
        targets[0, 0] = 255
        actual, expected = MaskedAccuracy(ignore_index=255), MulticlassAccuracy(3, average="micro", ignore_index=255)

        for metric in (actual, expected):
            metric.update(scores, targets)

        assert actual.compute().item() == pytest.approx(expected.compute().item())

    def test_mismatched_targets_raise(self):
        """Targets of another shape raise."""
        with pytest.raises(ValueError, match=r"got \(2, 3\) for \(3,\)"):
            MaskedAccuracy().update(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))


class TestLossMetric:
    @given(
        st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=20),
        st.integers(1, 20),
        st.sampled_from(["mean", "none"]),
    )
    def test_does_not_depend_on_batch_split(self, values, size, reduction):
        """Mean losses and per-sample losses average to the mean over all samples."""
        preds, targets = torch.tensor(values), torch.zeros(len(values))
        metric = LossMetric(lambda one, other: F.mse_loss(one, other, reduction=reduction))

        for part, truth in zip(preds.split(size), targets.split(size), strict=True):
            metric.update(part, truth)

        expected = sum(value * value for value in values) / len(values)
        assert metric.compute().item() == pytest.approx(expected, rel=1e-5, abs=1e-12)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_integer_labels_of_a_binary_cross_entropy(self, reduction):
        """Integers in the shape of the predictions are converted, as the loss of a model converts them."""
        metric = LossMetric(torch.nn.BCEWithLogitsLoss(reduction=reduction))
        preds, targets = torch.randn(4), torch.tensor([0, 1, 1, 0])

        metric.update(preds, targets)

        torch.testing.assert_close(metric.compute(), F.binary_cross_entropy_with_logits(preds, targets.float()))

    @pytest.mark.parametrize(
        "loss", [torch.nn.CrossEntropyLoss(reduction="sum"), functools.partial(F.cross_entropy, reduction="sum")]
    )
    def test_sum_of_a_loss(self, loss):
        """The values of a loss that is a sum are added, so that they do not depend on the split into batches."""
        metric, preds, targets = LossMetric(loss), torch.randn(7, 3), torch.tensor([0, 1, 1, 2, 0, 2, 2])

        for rows in ([0, 3, 4], [1, 2], [5], [6]):
            metric.update(preds[rows], targets[rows])

        torch.testing.assert_close(metric.compute(), loss(preds, targets))

    def test_weights_of_classes(self):
        """A cross entropy with class weights and ignored labels does not depend on the split into batches."""
        loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 0.5]), ignore_index=1)
        metric, preds, targets = LossMetric(loss), torch.randn(7, 3), torch.tensor([0, 1, 1, 2, 0, 2, 2])

        for rows in ([0, 3, 4], [1, 2], [5], [6]):
            metric.update(preds[rows], targets[rows])

        torch.testing.assert_close(metric.compute(), loss(preds, targets))

    def test_scores_of_16_bits(self):
        """The loss of bfloat16 scores is computed in float32, as the model computes it."""
        loss, preds, targets = torch.nn.CrossEntropyLoss(), torch.randn(64, 3).bfloat16(), torch.arange(64) % 3
        metric = LossMetric(loss)

        metric.update(preds, targets)

        torch.testing.assert_close(metric.compute(), loss(preds.float(), targets))

    def test_empty_batch_is_ignored(self):
        """The mean of no samples is nan, and is not counted."""
        metric = LossMetric(F.mse_loss)

        metric.update(torch.zeros(0), torch.zeros(0))
        metric.update(torch.zeros(2), torch.full((2,), 3.0))

        assert metric.compute() == 9.0


def _f1(pairs):
    """Return 2 TP / (2 TP + FP + FN), 0 without positives."""
    hits = sum(guess == truth == 1 for guess, truth in pairs)
    misses = sum(guess != truth for guess, truth in pairs)
    return 2 * hits / (2 * hits + misses) if hits + misses else 0.0


class TestBinaryF1Score:
    @given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 30))
    def test_does_not_depend_on_batch_split(self, pairs, size):
        """Two logits per sample, in batches of any size, give the F1 score of all samples."""
        logits = torch.eye(2)[[guess for guess, _ in pairs]] - 0.5
        targets = torch.tensor([truth for _, truth in pairs])
        metric = BinaryF1Score()

        for scores, labels in zip(logits.split(size), targets.split(size), strict=True):
            metric.update(scores, labels)

        assert metric.compute().item() == pytest.approx(_f1(pairs))

    @pytest.mark.parametrize("shape", [(4,), (4, 1)])
    def test_single_logit(self, shape):
        """A single output per sample is a logit, also if all are in [0, 1]; also within a model's output."""
        logits, targets = torch.tensor([0.2, 0.3, 0.1, -0.4]).reshape(shape), torch.tensor([1, 0, 1, 1])
        metric = BinaryF1Score()

        metric.update({"logits": logits[:2]}, targets[:2])
        metric.update(logits[2:], targets[2:])

        assert metric.compute().item() == pytest.approx(_f1([(1, 1), (1, 0), (1, 1), (0, 1)]))
