"""Tests of composer.models.HuggingFaceModel."""

import copy
import math
import pickle
import sys
from collections.abc import Mapping

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.nn import functional as F
from torchmetrics import Accuracy, MeanSquaredError, Metric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAccuracy, MultilabelAveragePrecision
from torchmetrics.text import Perplexity
from transformers import PretrainedConfig, SegformerConfig, SegformerForSemanticSegmentation

from composer import functional as cf
from composer.metrics import CrossEntropy, LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy, MIoU
from composer.models import HuggingFaceModel

SMALL_SEGFORMER = {
    "depths": [1] * 4,
    "hidden_sizes": [8] * 4,
    "num_attention_heads": [1] * 4,
    "decoder_hidden_size": 8,
}
KINDS = ["classifier", "masked", "gpt2", "t5", "llama", "bart"]


def _value(model, metric, *batches):
    """Return the value of a metric over batches."""
    for batch in batches:
        model.update_metric(batch, model.eval_forward(batch), metric)
    return metric.compute().item()


class Described(nn.Linear):
    """A module of its own with a configuration, which returns losses without labels."""

    def __init__(self):
        super().__init__(2, 2)
        self.config = PretrainedConfig()

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return {"logits": logits, "loss": logits.square().mean()}


class LossOfOutput(Metric):
    """Averages the loss that the model returns."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0))
        self.add_state("batches", torch.tensor(0))

    def update(self, output: Mapping | torch.Tensor, target):
        self.total += output["loss"]
        self.batches += 1

    def compute(self):
        return self.total / self.batches


class TestMetricsOfTheOutput:
    @pytest.mark.filterwarnings("ignore:model must be")
    def test_without_labels(self):
        """A metric of the program gets the model's output, and None as labels."""
        model, batch = HuggingFaceModel(Described()), {"input_ids": torch.rand(4, 2)}

        assert _value(model, LossOfOutput(), batch) == pytest.approx(model(batch)["loss"].item())
        with pytest.raises(ValueError, match="has no 'labels', without which a metric cannot be computed"):
            _value(model, MeanSquaredError(), batch)

    def test_a_mapping_is_declared(self, make_model, make_batch):
        """With labels, the annotation of the metric decides that it gets the output and not the logits."""
        model, batch = HuggingFaceModel(make_model("gpt2")).eval(), make_batch("gpt2")

        assert _value(model, LossOfOutput(), batch) == pytest.approx(model(batch)["loss"].item())


class TestBinaryMetrics:
    def test_two_scores(self, make_model, make_batch):
        """A metric of two classes gets the probability of class 1, as the F1 score and the AUROC of scikit-learn."""
        model, batch = HuggingFaceModel(make_model("classifier", num_labels=2)).eval(), make_batch("classifier")
        batch["labels"] = torch.arange(8) % 2
        logits, labels = model(batch)["logits"].detach(), batch["labels"].numpy()

        assert _value(model, BinaryF1Score(), batch) == pytest.approx(f1_score(labels, logits.argmax(1).numpy()))
        scores = logits.diff(dim=1)[:, 0].numpy()
        assert _value(model, BinaryAUROC(), batch) == pytest.approx(roc_auc_score(labels, scores))


class TestTraining:
    @pytest.mark.parametrize("kind", KINDS[:-1])
    def test_learns_real_text(self, kind, make_model, make_batch, tokenizer):
        """A few steps on lines of source code lower the loss by a fifth."""
        model = HuggingFaceModel(make_model(kind), tokenizer, metrics=[LanguageCrossEntropy()])
        batches = [make_batch(kind), make_batch(kind, skip=8)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []

        for step in range(20):
            loss = model.loss(model(batches[step % 2]), batches[step % 2])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


class TestForward:
    def test_unknown_arguments_are_removed(self, make_model, make_batch):
        """Strings and indices in the batch are not passed to the model; the batch keeps them and its type."""
        model, batch = HuggingFaceModel(make_model("classifier")).eval(), make_batch("classifier")
        plain = model(batch)

        batch["text"], batch["idx"] = ["a"] * 8, torch.arange(8)
        outputs = model(batch)

        assert torch.equal(outputs["logits"], plain["logits"])
        assert set(batch) == {"input_ids", "attention_mask", "labels", "text", "idx"}

    def test_cache_is_disabled_in_training(self, make_model, make_batch):
        """Training does not use the generation cache unless requested."""
        model, batch = HuggingFaceModel(make_model("gpt2")), dict(make_batch("gpt2"))

        assert "past_key_values" not in model(batch)
        assert "past_key_values" in model({**batch, "use_cache": True})

    def test_invalid_batches_raise(self, make_model):
        """A pair, or a mapping with other names, raises an error with the remedy."""
        model = HuggingFaceModel(make_model("classifier"))

        with pytest.raises(TypeError, match=r"as a mapping of names to tensors, got tuple"):
            model((torch.zeros(1), torch.zeros(1)))
        with pytest.raises(ValueError, match=r"batch has \['image'\], none of which BertForSequenceClassification"):
            model({"image": torch.zeros(1)})

    @pytest.mark.parametrize("kind", ["gpt2", "classifier"])
    def test_probabilities_are_not_passed_to_the_model(self, kind, make_model, make_batch):
        """With probabilities as labels, the model only computes logits."""
        model = HuggingFaceModel(make_model(kind, problem_type="single_label_classification"))
        batch = make_batch(kind)
        ids = batch["labels"].clamp(min=0)
        batch["labels"] = F.one_hot(ids, model(batch)["logits"].shape[-1]).float()

        outputs = model(batch)

        assert "loss" not in outputs
        assert model.loss(outputs, batch).isfinite()


class TestLoss:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_models_loss(self, kind, make_model, make_batch):
        """The loss of the model's forward pass is used."""
        model, batch = HuggingFaceModel(make_model(kind)), make_batch(kind)
        outputs = model(batch)

        assert torch.equal(model.loss(outputs, batch), outputs["loss"])

    @pytest.mark.parametrize(
        ("kind", "name"), [("gpt2", "attention_mask"), ("gpt2", "assistant_masks"), ("t5", "completion_mask")]
    )
    def test_labels_outside_of_masks_are_reported(self, kind, name, make_model, make_batch):
        """Labels that a mask of their shape excludes give one warning; labels that are ignored give none."""
        model, batch = HuggingFaceModel(make_model(kind)), dict(make_batch(kind))
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["labels"] = batch["labels"].clamp(min=0)
        batch[name] = mask = torch.ones_like(batch["labels"])
        mask[:, 3:] = 0
        outputs = model(batch)

        with pytest.warns(UserWarning, match=f"The loss counts tokens where {name} is 0: set their labels to -100"):
            model.loss(outputs, batch)
        model.loss(outputs, batch)
        other = HuggingFaceModel(make_model(kind))
        batch["labels"] = batch["labels"].where(mask == 1, -100)
        other.loss(other(batch), batch)

    def test_labels_are_checked_in_training(self, make_model, make_batch):
        """An evaluation before it does not count as the check of the first step."""
        model, batch = HuggingFaceModel(make_model("gpt2")), dict(make_batch("gpt2"))
        batch["labels"] = batch["labels"].clamp(min=0)
        padded = {**batch, "attention_mask": torch.ones_like(batch["labels"]).tril()}

        model.loss(model.eval()(padded), padded)
        model.train()
        with pytest.warns(UserWarning, match="The loss counts tokens where attention_mask is 0"):
            model.loss(model(padded), padded)

    @pytest.mark.filterwarnings("ignore:The loss counts tokens where attention_mask:UserWarning")
    @pytest.mark.parametrize("kind", KINDS)
    def test_replaced_labels(self, kind, make_model, make_batch):
        """For labels replaced after the forward pass, the model's loss is computed again."""
        model, batch = HuggingFaceModel(make_model(kind)).eval(), make_batch(kind)
        outputs = model(batch)
        mirrored = {**batch, "labels": batch["labels"].flip(0)}

        loss = model.loss(outputs, mirrored)

        decoded = {"decoder_input_ids": model.model._shift_right(batch["labels"])} if kind == "t5" else {}
        torch.testing.assert_close(loss, model(mirrored | decoded)["loss"])
        assert loss != outputs["loss"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_probabilities(self, kind, make_model, make_batch):
        """Smoothed labels weight the classes by the formula; ignored labels stay ignored."""
        model, batch = HuggingFaceModel(make_model(kind)).eval(), make_batch(kind)
        outputs = model(batch)
        rows, ids = outputs["logits"].flatten(0, -2), batch["labels"].flatten()
        smoothed = cf.smooth_labels(rows, ids, smoothing=0.2).reshape(outputs["logits"].shape)

        loss = model.loss(outputs, {**batch, "labels": smoothed})

        logits, labels = outputs["logits"], batch["labels"]
        if kind in {"gpt2", "llama"}:
            logits, labels = logits[:, :-1], labels[:, 1:]
        expected = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.2)
        torch.testing.assert_close(loss, expected)

    @pytest.mark.parametrize("kind", KINDS)
    def test_per_sample_loss(self, kind, make_model, make_batch):
        """Without reduction each sample has its own loss, over its labels."""
        model, batch = HuggingFaceModel(make_model(kind)).eval(), make_batch(kind, count=3)

        losses = model.loss(model(batch), batch, reduction="none")

        alone = [model({name: value[n : n + 1] for name, value in batch.items()})["loss"] for n in range(3)]
        torch.testing.assert_close(losses, torch.stack(alone))

    @pytest.mark.parametrize(
        ("problem", "num_labels", "shape"),
        [("regression", 1, (8,)), ("regression", 3, (8, 3)), ("multi_label_classification", 3, (8, 3))],
    )
    def test_regression_and_multilabel(self, problem, num_labels, shape, make_model, make_batch):
        """For regression and multi-label targets, the model's loss is used."""
        model = HuggingFaceModel(make_model("classifier", problem_type=problem, num_labels=num_labels)).eval()
        batch = {**make_batch("classifier"), "labels": torch.rand(shape)}
        outputs = model(batch)

        again = model.loss(outputs, {**batch, "labels": batch["labels"].clone()})
        of_each = model.loss(outputs, batch, reduction="none")

        torch.testing.assert_close(again, outputs["loss"])
        torch.testing.assert_close(of_each.mean(), outputs["loss"])


@pytest.mark.parametrize("kind", ["gpt2", "masked", "t5"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_batch_without_labels(kind, smoothing, make_model, make_batch):
    """If all labels are ignored, the loss is 0 and has gradients of 0."""
    model, batch = HuggingFaceModel(make_model(kind)).train(), make_batch(kind)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model._label_smoothing = smoothing
    outputs = model(batch)

    loss = model.loss(outputs, batch)
    loss.backward()

    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


class TestPixels:
    """Scores of pixels ``(N, C, h, w)`` are resized to the labels, as the model's own loss does."""

    def test_segmentation(self):
        """Metrics, a smoothed loss and the losses of samples are torch's, without the ignored pixels."""
        model = HuggingFaceModel(SegformerForSemanticSegmentation(SegformerConfig(num_labels=5, **SMALL_SEGFORMER)))
        labels = torch.randint(5, (2, 32, 32)).index_fill(1, torch.tensor(3), 255)
        batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": labels}
        outputs = model.eval().forward(batch)

        scores = F.interpolate(outputs["logits"], size=(32, 32), mode="bilinear")
        metric = MIoU(5, ignore_index=255)
        metric.update(scores, labels)
        assert _value(model, MIoU(5, ignore_index=255), batch) == metric.compute()
        own = outputs["loss"]
        torch.testing.assert_close(F.cross_entropy(scores, labels, ignore_index=255), own)
        assert _value(model, CrossEntropy(255), batch) == pytest.approx(own.item(), rel=1e-5)
        each = model.loss(outputs, batch, reduction="none")
        torch.testing.assert_close(each.mean(), own)
        model.loss_label_smoothing = 0.1
        smoothed = F.cross_entropy(scores, labels, ignore_index=255, label_smoothing=0.1)
        torch.testing.assert_close(model.loss(outputs, batch), smoothed)


class TestFurtherLosses:
    """A model's own loss has further parts, and an algorithm changes the labels after the forward pass."""

    def outputs(self, **changes):
        """Return a mixture of experts, its outputs for a batch, the batch, and the batch with smoothed labels."""
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        config = transformers.MixtralConfig(**sizes, **heads, router_aux_loss_coef=0.5, **changes)
        torch.manual_seed(0)
        model = HuggingFaceModel(transformers.MixtralForCausalLM(config))
        batch = {"input_ids": torch.randint(40, (2, 8)), "labels": torch.randint(40, (2, 8))}
        outputs = model(batch)
        smoothed = cf.smooth_labels(outputs["logits"].movedim(-1, 1), batch["labels"], 0.3).movedim(1, -1)
        return model, outputs, batch, {**batch, "labels": smoothed}

    @pytest.mark.parametrize("routed", [True, False])
    def test_they_stay(self, routed):
        """Only the part of the task changes: the balance of the experts is in both losses."""
        model, outputs, batch, smoothed = self.outputs(output_router_logits=routed)
        logits, labels = outputs["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        plain, smooth = F.cross_entropy(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.3)
        balance = 0.5 * outputs["aux_loss"] if routed else torch.tensor(0.0)

        assert model.loss(outputs, batch).item() == pytest.approx((plain + balance).item())
        for _ in range(2):
            assert model.loss(outputs, smoothed).item() == pytest.approx((smooth + balance).item())
        assert not routed or balance > 0.1


class TestCounts:
    @pytest.mark.parametrize(
        ("settings", "labels"),
        [
            ({"num_labels": 1}, torch.tensor([3, 1])),
            ({"problem_type": "regression", "num_labels": 1}, torch.rand(2, 1)),
            ({"problem_type": "multi_label_classification"}, torch.ones(2, 2, dtype=torch.long)),
            ({}, None),
        ],
    )
    def test_samples_are_counted(self, make_model, settings, labels):
        """Numbers, several labels for a sample and batches without labels need no count of their own."""
        assert HuggingFaceModel(make_model("classifier", **settings)).count_loss_terms({"labels": labels}) is None

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("LlavaForConditionalGeneration", {}),
            ("ElectraForPreTraining", {"embedding_size": 8}),
            ("BertForQuestionAnswering", {}),
            ("ViTForMaskedImageModeling", {"image_size": 8, "patch_size": 2, "encoder_stride": 2}),
        ],
    )
    def test_the_mean_of_a_batch_is_that_of_its_parts(self, name, settings):
        """Next tokens, real tokens, answers within the text and masked patches are counted as the model's loss does."""
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
        parts_of_llava = {"text_config": transformers.LlamaConfig(**sizes, vocab_size=30), "vision_config": vision}
        cls = getattr(transformers, name)
        config = cls.config_class(**(parts_of_llava if name.startswith("Llava") else sizes | settings))
        model = HuggingFaceModel(cls(config)).eval()
        ids, mask = torch.randint(1, 20, (4, 6)), torch.arange(6) < torch.tensor([[6], [5], [2], [1]])
        labels = (torch.rand(4, 6) > 0.5).long()
        labels = labels if name.startswith("Electra") else ids.where(mask, -100)
        places, ends = torch.tensor([[1, 9, 9, 2], [1, 9, 3, 2]])  # one answer is cut off at its start
        patches = {"pixel_values": torch.randn(4, 3, 8, 8), "bool_masked_pos": torch.arange(16) < 4 * places[:, None]}
        positions = {"start_positions": places, "end_positions": ends}
        text = {"input_ids": ids, "attention_mask": mask.long(), **positions, "labels": labels}
        batch = patches if name.startswith("ViT") else text

        parts = [{key: value[place] for key, value in batch.items()} for place in (slice(0, 1), slice(1, 4))]
        counts = [model.count_loss_terms(part) for part in parts]
        losses = [model.loss(model(part), part) for part in parts]

        weighted = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
        torch.testing.assert_close(weighted, model.loss(model(batch), batch))

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_speech(self, reduction):
        """The loss of CTC is a sum by default; it has no count."""
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        conv = {"conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,), "num_conv_pos_embedding_groups": 2}
        config = transformers.Wav2Vec2Config(**sizes, **conv, vocab_size=5, ctc_loss_reduction=reduction)
        model = HuggingFaceModel(transformers.Wav2Vec2ForCTC(config))

        assert model.loss_is_sum is (reduction == "sum")
        assert model.count_loss_terms({"labels": torch.tensor([[1, 2]])}) is None

    @pytest.mark.parametrize(
        ("name", "settings", "expected"),
        [
            ("CLIPModel", {}, True),
            ("SiglipModel", {}, True),
            ("BertForPreTraining", {}, True),
            ("GPT2DoubleHeadsModel", {}, True),
            ("Wav2Vec2ForPreTraining", {}, True),
            ("YolosForObjectDetection", {}, True),
            ("MaskFormerForInstanceSegmentation", {}, True),
            ("MixtralForCausalLM", {"output_router_logits": True}, True),
            ("Qwen2MoeForCausalLM", {"output_router_logits": True}, True),
            ("Qwen2MoeForCausalLM", {"output_router_logits": True, "router_aux_loss_coef": 0.0}, False),
            ("MixtralForCausalLM", {}, False),
            ("BertForMaskedLM", {}, False),
            ("BertForQuestionAnswering", {}, False),
            ("ViTMAEForPreTraining", {}, False),
            ("ViTForImageClassification", {}, False),
        ],
    )
    def test_losses_that_are_no_mean(self, name, settings, expected):
        """Contrastive losses, the balance of experts, several kinds of labels and objects are recognized."""
        transformers = pytest.importorskip("transformers")
        cls = getattr(transformers, name)
        with torch.device("meta"):
            model = HuggingFaceModel(cls(cls.config_class(num_hidden_layers=1, **settings)))

        assert model.loss_needs_whole_batch is expected

    @pytest.mark.parametrize(("starts", "ends", "share"), [([3], [40], 0), ([50, 40], [50, 2], 1), ([9], [50], None)])
    def test_answers_with_one_end_outside_the_text(self, starts, ends, share):
        """The loss is that of the end within the text, 0 without any, and not the NaN of Transformers."""
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        model = HuggingFaceModel(transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=9, **sizes)))
        text = torch.arange(9).expand(len(starts), -1)
        batch = {"input_ids": text, "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}

        outputs = model.eval()(batch)
        loss = model.loss(outputs, batch)
        loss.backward()

        logits = [outputs.start_logits[-1], outputs.end_logits[-1]]
        expected = 0.0 if share is None else -logits[share].log_softmax(0)[(3, 2)[share]].item()
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())

    def test_an_own_loss_is_not_judged(self):
        """The loss of a subclass may be any; it declares it itself."""
        transformers = pytest.importorskip("transformers")

        class Own(HuggingFaceModel):
            def loss(self, outputs, batch):
                return outputs.logits_per_text.square().mean()

        with torch.device("meta"):
            model = Own(transformers.CLIPModel(transformers.CLIPConfig()))

        assert not model.loss_needs_whole_batch


class TestLossOfEvaluation:
    """Without metrics, the evaluation has the loss."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_value(self, kind, make_model, make_batch):
        """Over batches with other numbers of labels it is the mean over all labels."""
        model = HuggingFaceModel(make_model(kind)).eval()
        batches = [make_batch(kind, count) for count in (5, 2)]
        [(name, metric)] = model.get_metrics(is_train=False).items()

        value = _value(model, metric, *batches)

        counts = [int((batch["labels"] != -100).sum()) - len(batch["labels"]) * model.shift_labels for batch in batches]
        losses = [model(batch)["loss"].item() for batch in batches]
        mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
        assert (name, value) == ("loss", pytest.approx(mean, rel=1e-5))
        assert abs(mean - sum(losses) / 2) > 1e-5
        assert model.get_metrics(is_train=True) == {}

    def test_half_precision(self, make_model, make_batch):
        """A loss in 32 bits of weights in 16 bits keeps its digits."""
        model, batch = HuggingFaceModel(make_model("gpt2").bfloat16()).eval(), make_batch("gpt2")
        own = model(batch)["loss"]
        assert own.dtype is torch.float32
        assert own.item() != own.bfloat16().item()

        assert _value(model, model.get_metrics(is_train=False)["loss"], batch) == pytest.approx(own.item(), rel=1e-6)

    def test_batches_without_labels_do_not_count(self, make_model, make_batch):
        """Also batches of prompts."""
        model, batch = HuggingFaceModel(make_model("gpt2")).eval(), make_batch("gpt2")
        metric = model.get_metrics(is_train=False)["loss"]
        expected = _value(model, model.get_metrics(is_train=False)["loss"], batch)

        value = _value(model, metric, {name: one for name, one in batch.items() if name != "labels"}, batch)

        assert value == pytest.approx(expected)

    @pytest.mark.parametrize("options", [{"metrics": []}, {"use_logits": True}, {"eval_metrics": []}])
    def test_none(self, options, make_model):
        """Metrics that are stated to be none remain none, and so do logits without a loss."""
        assert HuggingFaceModel(make_model("gpt2"), **options).get_metrics(is_train=False) == {}

    def test_overridden(self, make_model):
        """A class with its own evaluation has what it states."""

        class Own(HuggingFaceModel):
            def eval_forward(self, batch, outputs=None):
                return batch

        assert Own(make_model("gpt2")).get_metrics(is_train=False) == {}


class TestMetrics:
    @pytest.mark.parametrize("use_logits", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    def test_agree_with_the_loss(self, kind, use_logits, make_model, make_batch):
        """Three cross entropy metrics with different class dimensions equal the model's loss."""
        model, batch = HuggingFaceModel(make_model(kind), use_logits=use_logits).eval(), make_batch(kind)
        own = model(batch)["loss"].item()
        metrics = [LanguageCrossEntropy(), CrossEntropy()]

        values = [_value(model, metric, batch) for metric in metrics]

        assert values == pytest.approx([own, own], rel=1e-5)

    def test_perplexity_of_a_corpus(self, make_model, make_batch):
        """Over batches of different size and padding it is exp of the mean loss of all tokens."""
        model = HuggingFaceModel(make_model("gpt2"), use_logits=True).eval()
        batches = [make_batch("gpt2", count, skip) for count, skip in ((5, 0), (2, 5), (1, 7))]

        value = _value(model, LanguagePerplexity(), *batches)

        losses = [
            loss
            for batch in batches
            for row, ids in zip(model(batch)["logits"].tolist(), batch["labels"].tolist(), strict=True)
            for scores, target in zip(row[:-1], ids[1:], strict=True)
            if target != -100
            for loss in [math.log(sum(map(math.exp, scores))) - scores[target]]
        ]
        assert value == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-4)

    def test_torchmetrics(self, make_model, make_batch):
        """Classification and text metrics of torchmetrics receive each token with its scores."""
        model, batch = HuggingFaceModel(make_model("gpt2")).eval(), make_batch("gpt2")
        size = model.config.vocab_size
        outputs = model.eval_forward(batch)
        own = model.loss(outputs, batch).item()

        accuracy = _value(model, MulticlassAccuracy(size, average="micro", ignore_index=-100), batch)

        guesses, labels = outputs["logits"].argmax(-1)[:, :-1], batch["labels"][:, 1:]
        counted = labels != -100
        assert accuracy == pytest.approx((guesses[counted] == labels[counted]).float().mean().item())
        assert _value(model, MaskedAccuracy(), batch) == pytest.approx(accuracy)
        assert _value(model, Perplexity(ignore_index=-100), batch) == pytest.approx(math.exp(own), rel=1e-5)

    def test_labels_of_several_classes(self, make_model, make_batch):
        """Logits are those of probabilities, also if all of a batch are between 0 and 1."""
        settings = {"problem_type": "multi_label_classification", "num_labels": 3}
        model, batch = HuggingFaceModel(make_model("classifier", **settings)), make_batch("classifier")
        logits, labels = torch.rand(8, 3), torch.randint(2, (8, 3))
        metric, expected = MultilabelAveragePrecision(3), MultilabelAveragePrecision(3)
        logits[4:] -= 1
        expected.update(logits.sigmoid(), labels)

        for row in range(8):
            one = {**batch, "labels": labels[row : row + 1]}
            model.update_metric(one, logits[row : row + 1], metric)

        torch.testing.assert_close(metric.compute(), expected.compute())

    def test_padding_does_not_change_metrics(self, make_model, make_batch):
        """A padded line counts as alone."""
        model, batch = HuggingFaceModel(make_model("gpt2")).eval(), make_batch("gpt2", count=4)
        lengths = batch["attention_mask"].sum(1).tolist()
        alone = [{n: v[k : k + 1, :length] for n, v in batch.items()} for k, length in enumerate(lengths)]

        together, apart = (_value(model, LanguageCrossEntropy(), *some) for some in ([batch], alone))

        assert min(lengths) < max(lengths)
        assert together == pytest.approx(apart, rel=1e-5)

    def test_use_logits_computes_no_loss(self, make_model, make_batch):
        """The labels are not passed to the model, and stay in the batch."""
        model, batch = HuggingFaceModel(make_model("t5"), use_logits=True).eval(), make_batch("t5")
        complete = model(batch)
        before = {name: value.clone() for name, value in batch.items()}

        logits = model.eval_forward(batch)

        torch.testing.assert_close(logits, complete["logits"])
        assert model.eval_forward(batch, complete) is complete["logits"]
        assert {name: value.tolist() for name, value in batch.items()} == {n: v.tolist() for n, v in before.items()}

    def test_complete_output(self, make_model, make_batch):
        """Without use_logits, evaluation returns the output with its loss, and reuses given outputs."""
        model, batch = HuggingFaceModel(make_model("gpt2")).eval(), make_batch("gpt2")

        outputs = model.eval_forward(batch)

        assert {"loss", "logits"} <= set(outputs)
        assert model.eval_forward(batch, outputs) is outputs

    def test_evaluation_metrics(self, make_model):
        """Evaluation may have its own metrics; shared ones are copied; none are required."""
        shared = CrossEntropy()
        model = HuggingFaceModel(make_model("classifier"), metrics=shared, eval_metrics=[shared, MaskedAccuracy()])

        assert list(model.get_metrics(is_train=True)) == ["CrossEntropy"]
        assert set(model.get_metrics(is_train=False)) == {"CrossEntropy", "MaskedAccuracy"}
        assert model.get_metrics(is_train=False)["CrossEntropy"] is not shared
        assert HuggingFaceModel(make_model("classifier"), metrics=[]).get_metrics() == {}

    def test_invalid_metrics(self, make_model, make_batch):
        """A mismatched number of classes, missing labels and a non-metric raise."""
        model, batch = HuggingFaceModel(make_model("gpt2")), make_batch("gpt2")

        with pytest.raises(ValueError, match=r"counts 7 classes, but the logits of shape \(8, \d+, \d+\) do not"):
            _value(model, MulticlassAccuracy(7), batch)
        with pytest.raises(ValueError, match=r"no 'labels', without which a metric"):
            model.update_metric({"input_ids": None}, model(batch), CrossEntropy())
        with pytest.raises(TypeError, match=r"metrics must be a torchmetrics Metric.*got str"):
            HuggingFaceModel(model.model, metrics="accuracy")

    @pytest.mark.parametrize("use_logits", [True, False])
    def test_metrics_of_batches(self, use_logits, make_model, make_batch):
        """A metric that needs the batch gets it, with the outputs and the labels of the evaluation."""
        received = []

        class OfBatch(MeanSquaredError):
            needs_batch = True

            def update(self, batch, outputs, labels):
                received.append((batch, outputs, labels))

        model, batch = HuggingFaceModel(make_model("gpt2"), use_logits=use_logits).eval(), make_batch("gpt2")
        outputs = model.eval_forward(batch)

        model.update_metric(batch, outputs, OfBatch())

        ((seen, shown, labels),) = received
        assert seen is batch
        assert shown is outputs
        assert torch.equal(labels[:, :-1], batch["labels"][:, 1:])
        assert isinstance(shown, torch.Tensor) is use_logits


class TestLabels:
    @pytest.mark.parametrize("use_logits", [False, True])
    @pytest.mark.parametrize("kind", ["gpt2", "classifier", "masked", "t5"])
    def test_own_update_metric(self, kind, use_logits, make_model, make_batch):
        """A subclass updates metrics with the labels of eval_forward, as with MosaicML Composer: the same values."""

        class Own(HuggingFaceModel):
            def update_metric(self, batch, outputs, metric):
                metric.update(outputs if isinstance(outputs, torch.Tensor) else outputs["logits"], self.labels)

        bare = make_model(kind).eval()
        models = [cls(bare, use_logits=use_logits) for cls in (HuggingFaceModel, Own)]
        batch = make_batch(kind)
        before = batch["labels"].clone()

        usual, own = (_value(model, LanguageCrossEntropy(), batch) for model in models)

        assert own == pytest.approx(usual, rel=1e-6)
        assert torch.equal(batch["labels"], before)


class TestSpecification:
    def test_bert_example(self, make_model, make_batch):
        """The page's block: a BERT classifier with two metrics trains and is evaluated."""
        model = make_model("classifier", num_labels=2)

        with pytest.warns(DeprecationWarning, match="vocab_size is ignored"):
            metrics = [LanguageCrossEntropy(vocab_size=30522), Accuracy(task="multiclass", num_classes=2)]
        composer_model = HuggingFaceModel(model, metrics=metrics)

        batch = make_batch("classifier")
        values = {
            name: _value(composer_model.eval(), metric, batch)
            for name, metric in composer_model.get_metrics(is_train=False).items()
        }
        outputs = composer_model(batch)
        right = (outputs["logits"].argmax(-1) == batch["labels"]).float().mean().item()
        assert values["MulticlassAccuracy"] == pytest.approx(right)
        assert values["LanguageCrossEntropy"] == pytest.approx(outputs["loss"].item(), rel=1e-5)


class TestGenerate:
    @pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
    def test_equals_greedy_decoding(self, kind, make_model, make_batch, tokenizer):
        """Greedy generation gives the most probable tokens of the forward pass, one by one."""
        model = HuggingFaceModel(make_model(kind), tokenizer).train()
        prompt = make_batch(kind, count=1)["input_ids"][:, :5]

        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)

        assert model.training
        assert model.model.training
        model.eval()
        decoded = torch.full((1, 1), tokenizer.pad_token_id) if kind == "t5" else prompt
        for _ in range(4):
            own = {"input_ids": prompt, "decoder_input_ids": decoded} if kind == "t5" else {"input_ids": decoded}
            decoded = torch.cat([decoded, model(own)["logits"][:, -1:].argmax(-1)], dim=1)
            if decoded[0, -1] == tokenizer.eos_token_id:
                break
        assert tokens.tolist() == decoded.tolist()

    @pytest.mark.parametrize("kind", ["gpt2", "t5"])
    def test_answers_to_prompts(self, kind, make_model, make_batch, tokenizer):
        """A batch of prompts is evaluated with the texts that follow them, and lists of right answers as labels."""

        class Compared(Metric):
            needs_batch = True

            def update(self, batch, outputs, labels):
                self.seen = outputs, labels

            def compute(self):
                return torch.tensor(0.0)

        model, metric = HuggingFaceModel(make_model(kind), tokenizer), Compared()
        prompts = make_batch(kind, count=2)["input_ids"][:, :5]
        settings = {"max_new_tokens": 3, "do_sample": False}
        batch = {"mode": "generate", "input_ids": prompts, "labels": [["a"], ["b"]], "generation_kwargs": settings}
        batch["attention_mask"] = torch.ones_like(prompts)

        model.update_metric(batch, model.eval_forward(batch), metric)

        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
        answers = tokens if kind == "t5" else tokens[:, 5:]
        assert metric.seen == ([tokenizer.decode(one, skip_special_tokens=True) for one in answers], [["a"], ["b"]])
        with pytest.raises(ValueError, match="needs a tokenizer"):
            HuggingFaceModel(model.model).eval_forward(batch)

    def test_padding_comes_from_the_tokenizer(self, make_model, make_batch, tokenizer):
        """A left-padded prompt is continued as alone; finished sequences are padded."""
        model = HuggingFaceModel(make_model("gpt2", pad_token_id=None), tokenizer)
        prompt = make_batch("gpt2", count=1)["input_ids"][:, :4]
        padded = F.pad(prompt, (3, 0), value=tokenizer.pad_token_id)
        mask = padded != tokenizer.pad_token_id

        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        amid = model.generate(
            torch.cat([padded, torch.ones_like(padded)]),
            attention_mask=torch.cat([mask, torch.ones_like(mask)]).long(),
            max_new_tokens=3,
            do_sample=False,
            eos_token_id=alone[0, -1].item(),
        )

        first = alone[0, 4:].tolist().index(alone[0, -1].item())
        expected = alone[0, 4 : 5 + first].tolist()
        assert amid[0, 7 : 7 + len(expected)].tolist() == expected
        assert set(amid[0, 7 + len(expected) :].tolist()) <= {tokenizer.pad_token_id}


class TestConstruction:
    @pytest.mark.parametrize("kind", KINDS)
    def test_causal_models_are_detected(self, kind, make_model):
        """Decoders that shift labels themselves are distinguished from other models."""
        assert HuggingFaceModel(make_model(kind)).shift_labels is (kind in {"gpt2", "llama"})

    def test_bad_arguments(self, make_model):
        """A value that is not a model or a tokenizer, and a model that returns tuples, raise."""
        with pytest.raises(TypeError, match=r"model must be a transformers.PreTrainedModel .* got Linear"):
            HuggingFaceModel(nn.Linear(1, 1))
        with pytest.warns(UserWarning, match=r"got Described\. .* used as of one of Transformers") as caught:
            HuggingFaceModel(Described())
        assert caught[0].filename == __file__
        with pytest.raises(TypeError, match=r"tokenizer must be one of Transformers', got str"):
            HuggingFaceModel(make_model("gpt2"), "gpt2")
        with pytest.raises(ValueError, match=r"config.return_dict is False"):
            HuggingFaceModel(make_model("gpt2", return_dict=False))

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_are_independent(self, duplicate, make_model, make_batch):
        """A copy computes the same with its own weights."""
        model, batch = HuggingFaceModel(make_model("gpt2"), metrics=[CrossEntropy()]).eval(), make_batch("gpt2")
        expected = model(batch)["loss"]

        other = duplicate(model)

        assert torch.equal(other.loss(other(batch), batch), expected)
        assert other.model.transformer.wte.weight is other.model.lm_head.weight
        assert other.model.lm_head.weight is not model.model.lm_head.weight

    def test_state_dict_has_the_models_names(self, make_model):
        """Weights have the names of the Transformers model with a prefix; metrics are not included."""
        bare = make_model("masked")
        model = HuggingFaceModel(bare, metrics=[CrossEntropy()])

        assert list(model.state_dict()) == [f"model.{name}" for name in bare.state_dict()]


class TestExtras:
    def test_without_transformers(self, monkeypatch):
        """The error states how to install it."""
        monkeypatch.setitem(sys.modules, "transformers", None)

        with pytest.raises(ModuleNotFoundError, match=r'pip install "composer-models\[huggingface\]"'):
            HuggingFaceModel(nn.Linear(1, 1))

    def test_without_peft(self, monkeypatch, make_model):
        """With an adapter configuration, the error states how to install PEFT."""
        monkeypatch.setitem(sys.modules, "peft", None)

        with pytest.raises(ModuleNotFoundError, match=r'pip install "composer-models\[peft\]"'):
            HuggingFaceModel(make_model("gpt2"), peft_config=object())
