"""Direct preference optimization and reward models."""

import copy
import re

import pytest
import torch
from torch.nn.functional import logsigmoid
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from composer import functional as cf
from composer.models import HuggingFaceModel, PreferenceModel

WORDS, PAD = 20, 11  # another id than 0, which pads the batches
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_network(cls=LlamaForCausalLM, **settings):
    torch.manual_seed(0)
    return cls(LlamaConfig(vocab_size=WORDS, pad_token_id=PAD, bos_token_id=1, eos_token_id=2, **SIZES, **settings))


def make_reward_network():
    return make_network(LlamaForSequenceClassification, num_labels=1)


@torch.no_grad()
def scores_of(network, pairs):
    """Return the scores of answers that are computed alone, without padding, one by one."""
    sides = ("chosen", "rejected")
    return torch.tensor(
        [[network(input_ids=pair[side]["input_ids"][None]).logits.item() for side in sides] for pair in pairs]
    )


def make_pairs(count=5):
    """Return pairs with a common prompt of 3 tokens, and answers of 1 to 6."""
    generator = torch.Generator().manual_seed(1)

    def draw(size):
        return torch.randint(3, WORDS, (size,), generator=generator)

    pairs = []
    for _ in range(count):
        prompt, sizes = draw(3), torch.randint(1, 7, (2,), generator=generator).tolist()
        rows = [torch.cat([prompt, draw(size)]) for size in sizes]
        answers = [{"input_ids": row, "labels": row.where(torch.arange(len(row)) >= 3, -100)} for row in rows]
        pairs.append({"chosen": answers[0], "rejected": answers[1]})
    return pairs


@torch.no_grad()
def log_probability(network, answer):
    """Return the log-probability of the answer's tokens behind its prompt, one by one."""
    logits = network(input_ids=answer["input_ids"][None]).logits[0]
    places = (answer["labels"] != -100).nonzero().flatten().tolist()
    return sum(logits[place - 1].log_softmax(0)[answer["labels"][place]] for place in places)


def gradients(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


class TestDPO:
    def test_loss_is_that_of_the_paper(self):
        """The loss is equation 7 of the paper, with log-probabilities of the answers alone."""
        network, start, pairs = make_network().double(), make_network().double(), make_pairs()
        with torch.no_grad():
            network.lm_head.weight.add_(0.1 * torch.randn_like(network.lm_head.weight))
        references = [[log_probability(start, pair[side]) for side in ("chosen", "rejected")] for pair in pairs]
        model = PreferenceModel(network, beta=0.3)
        batch = cf.collate_pairs(PreferenceModel(start).with_reference(pairs, batch_size=2))

        outputs = model(batch)
        loss = model.loss(outputs, batch)

        margins = [
            0.3 * (log_probability(network, pair["chosen"]) - one - log_probability(network, pair["rejected"]) + other)
            for pair, (one, other) in zip(pairs, references, strict=True)
        ]
        assert batch["reference"].shape == outputs["rewards"].shape == (5, 2)
        assert torch.allclose(batch["reference"].double(), torch.tensor(references).double(), rtol=1e-5)
        assert loss.item() == pytest.approx(-logsigmoid(torch.stack(margins)).mean().item(), rel=1e-5)
        each = model.loss(outputs, batch, reduction="none")
        assert each.tolist() == pytest.approx((-logsigmoid(torch.stack(margins))).tolist(), rel=1e-5)

    def test_reference_is_that_of_the_model_as_it_is(self):
        """The reference is computed without dropout and gradients, and modes stay; the first loss is log 2."""
        model, pairs = PreferenceModel(make_network(attention_dropout=0.5)), make_pairs()
        model.train()
        model.model.lm_head.eval()

        cached = model.with_reference(pairs, batch_size=3)

        batch = cf.collate_pairs(cached)
        assert model.training
        assert not model.model.lm_head.training
        assert not batch["reference"].requires_grad
        assert all("reference" not in pair for pair in pairs)
        assert model.eval().loss(model(batch), batch).item() == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-5)
        again = cf.collate_pairs(model.with_reference(cached, batch_size=5))
        assert torch.allclose(again["reference"], batch["reference"])

    def test_microbatches_have_the_gradients_of_the_batch(self):
        """Parts of the pairs, weighted by their numbers, have the gradients of the batch."""
        model = PreferenceModel(make_network().double())
        batch = cf.collate_pairs(model.with_reference(make_pairs()))
        assert model.count_loss_terms(batch) is None

        model.loss(model(batch), batch).backward()
        expected = gradients(model)
        model.zero_grad()
        for part in (slice(0, 2), slice(2, 5)):
            few = {name: value[part] for name, value in batch.items()}
            (model.loss(model(few), few) * len(few["input_ids"]) / 5).backward()

        assert torch.allclose(gradients(model), expected, atol=1e-12)

    def test_chunked_cross_entropy(self):
        """Logits that are not stored have the same loss and gradients, without a warning."""
        model = PreferenceModel(make_network())
        batch = cf.collate_pairs(model.with_reference(make_pairs()))
        chunked = copy.deepcopy(model)
        cf.apply_chunked_cross_entropy(chunked, head="model.lm_head", chunk_size=4)

        losses = [one.loss(one(batch), batch) for one in (model, chunked)]
        for loss in losses:
            loss.backward()

        assert losses[0].item() == pytest.approx(losses[1].item())
        assert torch.allclose(gradients(model), gradients(chunked), atol=1e-6)

    def test_smoothing_is_conservative_dpo(self):
        """Smoothed by a, the loss is that of preferences that are wrong with the probability a / 2."""
        model = PreferenceModel(make_network())
        batch = cf.collate_pairs(model.with_reference(make_pairs()))
        outputs = {"rewards": torch.randn(5, 2)}
        margins = outputs["rewards"] @ torch.tensor([1.0, -1.0])

        model.loss_label_smoothing = 0.2

        expected = -0.9 * logsigmoid(margins) - 0.1 * logsigmoid(-margins)
        assert model.loss(outputs, batch).item() == pytest.approx(expected.mean().item())

    def test_adapters(self):
        """With adapters, only these have gradients, and the reference is the base model."""
        peft = pytest.importorskip("peft", reason="it has adapters")
        network, pairs = make_network(), make_pairs()
        expected = PreferenceModel(copy.deepcopy(network)).with_reference(pairs)

        model = PreferenceModel(network, peft_config=peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))

        found = model.with_reference(pairs)
        assert all(torch.allclose(one["reference"], two["reference"]) for one, two in zip(found, expected, strict=True))
        batch = cf.collate_pairs(found)
        model.loss(model(batch), batch).backward()
        assert {name.split(".")[-3] for name, each in model.named_parameters() if each.grad is not None} == {
            "lora_A",
            "lora_B",
        }


class TestReward:
    def test_loss_is_that_of_bradley_and_terry(self):
        """The loss is that of the scores of complete answers, each computed alone."""
        network, pairs = make_reward_network(), make_pairs()
        model, batch = PreferenceModel(network), cf.collate_pairs(pairs)

        outputs = model(batch)

        scores = scores_of(network, pairs)
        margins = scores @ torch.tensor([1.0, -1.0])
        assert torch.allclose(outputs["rewards"], scores, atol=1e-6)
        assert model.loss(outputs, batch).item() == pytest.approx(-logsigmoid(margins).mean().item(), rel=1e-5)

    @pytest.mark.parametrize("id", [0, 2, PAD])
    def test_padding_has_no_score(self, id):
        """The scores are those of the answers alone, whatever id pads them, which answers may contain and end with."""
        network, pairs = make_reward_network(), make_pairs()
        for place in (3, -1):
            pairs[0]["chosen"]["input_ids"][place] = id

        rewards = PreferenceModel(network)(cf.collate_pairs(pairs, pad_id=id))["rewards"]

        assert torch.allclose(rewards, scores_of(network, pairs), atol=1e-6)

    def test_decoder_without_padding_token(self):
        """A decoder needs a padding token in its configuration, by which it finds the last token."""
        network = make_reward_network()
        network.config.pad_token_id = None

        with pytest.raises(ValueError, match="no padding token is defined"):
            PreferenceModel(network)(cf.collate_pairs(make_pairs()))

    def test_encoder(self):
        """A classifier with an encoder is a reward model, too."""
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = PreferenceModel(BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=1, **sizes)))
        batch = cf.collate_pairs(make_pairs())

        assert model(batch)["rewards"].shape == (5, 2)


class TestMetrics:
    def test_accuracy_and_margin(self):
        """Accuracy is the part of pairs with a larger first reward, and the margin their mean difference."""
        model = PreferenceModel(make_reward_network(), eval_metrics=[BinaryAUROC(), MeanMetric()])
        outputs = {"rewards": torch.tensor([[1.0, 0.5], [0.2, 0.1], [0.0, 2.0], [0.3, 0.3]])}

        for metric in model.get_metrics(is_train=True).values():
            model.update_metric({}, outputs, metric)

        values = {name: metric.compute().item() for name, metric in model.get_metrics(is_train=True).items()}
        assert values == {"PreferenceAccuracy": 0.5, "RewardMargin": pytest.approx((0.5 + 0.1 - 2) / 4)}
        assert list(model.get_metrics(is_train=False)) == ["BinaryAUROC", "MeanMetric"]


class TestErrors:
    def test_models(self):
        """Other models than those with a reward raise an error."""
        with pytest.raises(TypeError, match="LlamaForSequenceClassification with num_labels=2"):
            PreferenceModel(make_network(LlamaForSequenceClassification, num_labels=2))
        sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        with pytest.raises(TypeError, match="T5ForConditionalGeneration"):
            PreferenceModel(T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes)))
        for beta in (0, -0.1, float("nan")):
            with pytest.raises(ValueError, match="beta must be more than 0"):
                PreferenceModel(make_network(), beta=beta)

    def test_logits_are_not_the_outputs(self):
        """Metrics get differences of rewards, so that there is no setting for logits."""
        with pytest.raises(ValueError, match=r"use_logits must be False.* got True"):
            PreferenceModel(make_network(), use_logits=True)

    def test_batches(self):
        """A batch of rows, and one without the reference, raise an error with the remedy."""
        model, batch = PreferenceModel(make_network()), cf.collate_pairs(make_pairs())
        remedy = re.escape("pairs = model.with_reference(pairs)")

        for wrong in (batch, {name: value[:, 0] for name, value in batch.items()}, batch["input_ids"]):
            with pytest.raises(ValueError, match=remedy):
                model(wrong)


def test_is_exported_as_its_network(tmp_path):
    """The network is written as by HuggingFaceModel."""
    model = PreferenceModel(make_network())

    model.save_pretrained(tmp_path)

    assert isinstance(model, HuggingFaceModel)
    exported = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(exported.lm_head.weight, model.model.lm_head.weight)
