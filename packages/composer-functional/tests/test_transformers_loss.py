"""The loss of logits equals the one that a model of Transformers computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from composer.functional.transformers_loss import IGNORED, are_probabilities, predicts_next_token, task_loss

GPT2 = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
BERT = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)


def make_tokens():
    ids = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    return ids, ids.masked_fill(torch.arange(6) > torch.tensor([[5], [3], [2]]), IGNORED)


class TestTaskLoss:
    """The loss of logits and labels."""

    def test_equals_the_loss_of_a_language_model(self):
        """The mean over next tokens, without the ignored ones, is GPT-2's own loss."""
        model, (ids, labels) = GPT2LMHeadModel(GPT2).eval(), make_tokens()
        outputs = model(input_ids=ids, labels=labels)

        loss = task_loss(outputs.logits, labels, problem_type=None, shift=predicts_next_token(model), reduction="mean")

        torch.testing.assert_close(loss, outputs.loss)

    def test_equals_the_loss_of_a_model_of_images_and_text(self):
        """Models without an encoder are decoders, also if their names are those of encoder-decoder models."""
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
        config = LlavaConfig(text_config=LlamaConfig(**sizes, vocab_size=20), vision_config=vision)
        model, (ids, labels) = LlavaForConditionalGeneration(config).eval(), make_tokens()
        outputs = model(input_ids=ids, labels=labels)

        loss = task_loss(outputs.logits, labels, problem_type=None, shift=predicts_next_token(model), reduction="mean")

        torch.testing.assert_close(loss, outputs.loss)

    def test_sum_with_probabilities(self):
        """The sum for probabilities equals the sum for the ids that they stand for."""
        logits, labels = torch.randn(4, 5), torch.tensor([1, 0, 4, 2])

        total = task_loss(logits, one_hot(labels, 5).float(), problem_type=None, shift=False, reduction="sum")

        torch.testing.assert_close(total, cross_entropy(logits, labels, reduction="sum"))

    def test_rows_of_zeros_do_not_count(self):
        """The mean for probabilities is over the labels that have any mass."""
        logits, labels = torch.randn(4, 5), torch.tensor([1, 0, 4, 2])
        probabilities = one_hot(labels, 5).float()
        probabilities[2:] = 0.0

        mean = task_loss(logits, probabilities, problem_type=None, shift=False, reduction="mean")

        torch.testing.assert_close(mean, cross_entropy(logits[:2], labels[:2]))

    @pytest.mark.parametrize("as_probabilities", [False, True])
    def test_loss_of_each_sequence(self, as_probabilities):
        """Without a reduction, each sequence has the mean over its labels."""
        logits, labels = torch.randn(3, 6, 5), torch.randint(5, (3, 6))
        given = one_hot(labels, 5).float() if as_probabilities else labels

        losses = task_loss(logits, given, problem_type=None, shift=False, reduction="none")

        expected = [cross_entropy(*pair) for pair in zip(logits, labels, strict=True)]
        torch.testing.assert_close(losses, torch.stack(expected))


class TestAreProbabilities:
    """Labels that a model would misinterpret."""

    @pytest.mark.parametrize(
        ("shape", "problem", "expected"),
        [
            ((2, 3, 20), None, True),
            ((2, 3), None, False),
            ((2, 20), "single_label_classification", True),
            ((2, 20), "multi_label_classification", False),
        ],
    )
    def test_kinds_of_labels(self, shape, problem, expected):
        """Floats are probabilities for a classifier of one label, and with three dimensions for a language model."""
        model = GPT2LMHeadModel(GPT2) if problem is None else BertForSequenceClassification(BERT)
        model.config.problem_type = problem
        assert are_probabilities(torch.rand(shape), model) is expected

    def test_ids(self):
        """Ids are no probabilities."""
        assert not are_probabilities(torch.ones(2, 3, 20, dtype=torch.int64), GPT2LMHeadModel(GPT2))
