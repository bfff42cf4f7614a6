"""Tests of composer.metrics.LanguageCrossEntropy and LanguagePerplexity."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.text import Perplexity

from composer.metrics import LanguageCrossEntropy, LanguagePerplexity

BOTH = pytest.mark.parametrize("kind", [LanguageCrossEntropy, LanguagePerplexity])


def _reference_losses(logits, targets, ignore_index=-100):
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

        losses = _reference_losses(logits, tokens)
        assert metric.compute().item() == pytest.approx(math.fsum(losses) / 11, rel=1e-6)

    def test_classification(self):
        """Logits (N, C) and targets (N,) of a classification are supported."""
        logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, -100])
        metric = LanguageCrossEntropy()

        metric.update(logits, targets)

        assert metric.compute().item() == pytest.approx(math.fsum(_reference_losses(logits, targets)) / 5, rel=1e-6)

    def test_as_many_tokens_as_classes(self):
        """The classes are the last dimension, also if the sequence is as long as the vocabulary."""
        logits, tokens = _texts([7, 7], size=7)
        metric = LanguageCrossEntropy()

        metric.update(logits, tokens)

        assert metric.compute().item() == pytest.approx(math.fsum(_reference_losses(logits, tokens)) / 14, rel=1e-6)

    def test_ignore_index(self):
        """The ignored id can be set."""
        logits, tokens = _texts([5, 5])
        metric = LanguageCrossEntropy(ignore_index=3)

        metric.update(logits, tokens)

        losses = _reference_losses(logits, tokens, ignore_index=3)
        assert metric.compute().item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)

    def test_half_precision_logits_are_summed_in_float32(self):
        """Logits from autocast only have their own rounding errors."""
        logits, tokens = _texts([512] * 4)
        metric = LanguageCrossEntropy()

        metric.update(logits.bfloat16(), tokens)

        losses = _reference_losses(logits.bfloat16().float(), tokens)
        assert metric.compute().item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)

    def test_is_nan_if_all_tokens_are_padding(self):
        """The mean of no tokens is nan."""
        metric = LanguageCrossEntropy()

        metric.update(torch.zeros(2, 3, 5), torch.full((2, 3), -100))

        assert math.isnan(metric.compute().item())


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

        losses = _reference_losses(logits, tokens)
        assert metric.compute().item() == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-5)

    def test_equals_torchmetrics(self):
        """On one batch it equals torchmetrics' perplexity."""
        logits, tokens = _texts([6, 1, 3], size=11)
        actual, expected = LanguagePerplexity(), Perplexity(ignore_index=-100)

        for metric in (actual, expected):
            metric.update(logits, tokens)

        assert actual.compute().item() == pytest.approx(expected.compute().item(), rel=1e-5)

    def test_uniform_predictions(self):
        """Uniform predictions have a perplexity equal to the vocabulary size."""
        metric = LanguagePerplexity()

        metric.update(torch.zeros(2, 8, 50), torch.randint(50, (2, 8)))

        assert metric.compute().item() == pytest.approx(50, rel=1e-5)


class TestBoth:
    @BOTH
    def test_vocab_size_is_deprecated(self, kind):
        """The former argument has no effect and gives a warning at the caller's line."""
        with pytest.warns(DeprecationWarning, match=rf"vocab_size is ignored: {kind.__name__} reads it") as warned:
            metric = kind(vocab_size=30522)

        metric.update(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
        assert warned[0].filename == __file__
        assert metric.compute().item() == pytest.approx(math.log(4) if kind is LanguageCrossEntropy else 4, rel=1e-6)

    @BOTH
    def test_invalid_input_raises(self, kind):
        """Mismatched targets and outputs without logits raise, with the value."""
        with pytest.raises(ValueError, match=r"one dimension more .* got \(2, 3, 5\) for \(2, 4\)"):
            kind().update(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
        with pytest.raises(KeyError, match=r"must have 'logits' for this metric, got \['loss'\]"):
            kind().update({"loss": torch.tensor(1.0)}, torch.zeros(2, dtype=torch.long))

    @BOTH
    def test_arguments_are_passed_to_torchmetrics(self, kind):
        """dist_sync_on_step can be positional, and is preserved by pickling."""
        metric = kind(True, 5)
        metric.update(torch.zeros(1, 2, 6), torch.tensor([[0, 5]]))

        other = pickle.loads(pickle.dumps(metric))

        assert (other.dist_sync_on_step, other.ignore_index, int(other.count)) == (True, 5, 1)
