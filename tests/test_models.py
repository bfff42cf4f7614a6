"""Transformers' models end to end: trained on real text, saved, resumed and exported."""

import inspect
import json
import textwrap

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import (
    EMA,
    Alibi,
    GatedLinearUnits,
    GradientClipping,
    LabelSmoothing,
    SelectiveBackprop,
    SeqLengthWarmup,
)
from composer.loggers import InMemoryLogger
from composer.metrics import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
LINES = [line.strip() for line in inspect.getsource(json.decoder).splitlines() if len(line.strip()) > 20]


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer trained on the sources of two modules."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["[PAD]", "[EOS]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*LINES, inspect.getsource(textwrap)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", eos_token="[EOS]", model_max_length=32, padding_side="right"
    )


@pytest.fixture
def build(tokenizer):
    """Return a function that wraps a new model of a kind, with the same weights in each call."""
    import transformers

    size, eos, pad = len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id
    ends = {"vocab_size": size, "bos_token_id": eos, "eos_token_id": eos, "pad_token_id": pad}
    gpt2 = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, "loss_type": "ForCausalLMLoss"}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": pad}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    bert = ends | BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kinds = {
        "classifier": (transformers.BertForSequenceClassification, transformers.BertConfig, bert),
        "masked": (transformers.BertForMaskedLM, transformers.BertConfig, bert),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, ends | gpt2 | no_dropout),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, ends | BERT),
        "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, ends | t5),
    }

    def make(kind, **settings):
        torch.manual_seed(0)
        cls, config, own = kinds[kind]
        metrics = [LanguageCrossEntropy(), MaskedAccuracy()]
        return HuggingFaceModel(cls(config(**own)), tokenizer, metrics=metrics, **settings)

    return make


@pytest.fixture
def load(tokenizer):
    """Return a function that makes a loader of padded lines, with the labels of a task."""

    def collate(kind, lines):
        batch = tokenizer(lines, padding=True, truncation=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        if kind == "classifier":
            batch["labels"] = torch.tensor(["=" in line for line in lines]).long()
        else:
            ids = batch["input_ids"][:, :8] if kind == "t5" else batch["input_ids"]
            batch["labels"] = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        return batch

    def make(kind, count=48, batch_size=8):
        return DataLoader(LINES[:count], batch_size, collate_fn=lambda lines: collate(kind, lines))

    return make


def trainer_for(model, loader, duration="2ep", **settings):
    """Return a trainer of a model; ``settings`` override the defaults."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    usual = {"optimizers": torch.optim.AdamW(trained, lr=0.003), "seed": 1, "progress_bar": False, "device": "cpu"}
    return Trainer(model=model, train_dataloader=loader, max_duration=duration, **usual | settings)


def logits_of(model, loader):
    """Return a bare model's logits for the first batch of a loader."""
    batch = next(iter(loader))
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


class TestTraining:
    @pytest.mark.parametrize("kind", ["classifier", "gpt2", "t5"])
    def test_learns_text(self, kind, build, load):
        """A few epochs over real lines lower the loss and the evaluation's cross entropy, which is logged."""
        logger = InMemoryLogger()
        trainer = trainer_for(build(kind), load(kind), "4ep", eval_dataloader=load(kind, 16), loggers=logger)
        before = trainer.eval()["eval"]

        trainer.fit()

        losses = [float(loss) for _, loss in logger.data["loss/train/total"]]
        assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
        after = trainer.state.eval_metric_values
        assert after["LanguageCrossEntropy"] < before["LanguageCrossEntropy"]
        assert {"metrics/train/MaskedAccuracy", "metrics/eval/LanguageCrossEntropy"} <= set(logger.data)

    def test_tokens_are_the_clock(self, build, load):
        """Training may last a number of tokens, which are counted in the batches."""
        trainer = trainer_for(build("gpt2"), load("gpt2"), "500tok")

        with pytest.warns(UserWarning, match="max_duration in tokens counts padding"):
            trainer.fit()

        assert 500 <= int(trainer.state.timestamp.token) < 500 + 8 * 32

    def test_microbatches(self, build, load):
        """Tokenizers' batches are split; classification, with one label per sample, produces the same weights."""
        weights = []
        for size in (None, 3):
            model = build("classifier")
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = trainer_for(
                model, load("classifier", 16), "1ep", device_train_microbatch_size=size, optimizers=sgd
            )
            trainer.fit()
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))

        torch.testing.assert_close(weights[0], weights[1])

    def test_prediction(self, build, load):
        """Prediction gives outputs with logits for each batch."""
        trainer = trainer_for(build("gpt2"), load("gpt2"))

        outputs = trainer.predict(load("gpt2", 16))

        assert [output["logits"].shape[0] for output in outputs] == [8, 8]

    def test_perplexity(self, build, load):
        """Evaluated with other metrics than training, the perplexity is exp of the cross entropy."""
        model = build("gpt2", eval_metrics=[LanguagePerplexity(), LanguageCrossEntropy()], use_logits=True)
        trainer = trainer_for(model, load("gpt2"))

        values = trainer.eval(load("gpt2", 20, batch_size=7))["eval"]

        assert values["LanguagePerplexity"].item() == pytest.approx(values["LanguageCrossEntropy"].exp().item())


class TestAlgorithms:
    @pytest.mark.parametrize(
        ("kind", "algorithms"),
        [
            ("gpt2", [Alibi(max_sequence_length=32)]),
            ("masked", [Alibi(max_sequence_length=32, train_sequence_length_scaling=1.0), GatedLinearUnits()]),
            ("gpt2", [SeqLengthWarmup(duration=0.5, max_seq_length=32), GradientClipping("norm", 1.0)]),
            ("classifier", [EMA(half_life="4ba"), LabelSmoothing(target_key="labels")]),
            ("gpt2", [LabelSmoothing(target_key="labels")]),
            ("gpt2", [SelectiveBackprop(start=0.0, end=1.0, input_key="input_ids", target_key="labels")]),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(type(one).__name__ for one in value),
    )
    def test_train_the_wrapped_model(self, kind, algorithms, build, load):
        """Algorithms for transformers change the wrapped model, and it learns."""
        logger = InMemoryLogger()
        trainer = trainer_for(build(kind), load(kind), "4ep", algorithms=algorithms, loggers=logger)

        trainer.fit()

        losses = [float(loss) for _, loss in logger.data["loss/train/total"]]
        assert sum(losses[-6:]) < sum(losses[:6])


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("kind", "name"), [("classifier", "ep{epoch}-ba{batch}"), ("gpt2", "ep{epoch}-ba{batch}.pt")]
    )
    def test_from_fine_tuning_to_export(self, kind, name, build, load, tokenizer, tmp_path):
        """Model and tokenizer are loaded from a checkpoint and exported to a folder for Transformers: equal logits."""
        import transformers

        model = build(kind)
        with trainer_for(model, load(kind), save_folder=str(tmp_path / "saved"), save_filename=name) as trainer:
            trainer.fit()
        (checkpoint,) = (tmp_path / "saved").glob("ep2-*")

        again, tokens = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)
        write_huggingface_pretrained_from_composer_checkpoint(checkpoint, tmp_path / "exported")

        exported = type(again).from_pretrained(tmp_path / "exported", local_files_only=True)
        expected = logits_of(model.model, load(kind))
        assert torch.equal(logits_of(again, load(kind)), expected)
        assert torch.equal(logits_of(exported, load(kind)), expected)
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
        assert read(LINES[:4])["input_ids"] == tokens(LINES[:4])["input_ids"] == tokenizer(LINES[:4])["input_ids"]

    @pytest.mark.parametrize("weights_only", [False, True])
    @pytest.mark.parametrize(
        ("kind", "name"), [("classifier", "ep{epoch}-ba{batch}.pt"), ("gpt2", "ep{epoch}-ba{batch}")]
    )
    def test_averages_are_exported(self, kind, name, weights_only, build, load, tmp_path):
        """The averages of EMA, which the model is evaluated with, are loaded from a checkpoint."""
        model, ema = build(kind), EMA("10ba")
        settings = {"save_folder": str(tmp_path), "save_weights_only": weights_only, "algorithms": ema}
        settings["save_filename"] = name
        with trainer_for(model, load(kind), **settings) as trainer:
            trainer.fit()
        (checkpoint,) = tmp_path.glob("ep2-*")

        again, _ = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)

        expected = logits_of(ema.get_ema_model(model).model, load(kind))
        assert torch.equal(logits_of(again, load(kind)), expected)
        assert not torch.equal(expected, logits_of(model.model, load(kind)))

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    @pytest.mark.parametrize("with_adapters", [False, True])
    def test_resuming(self, with_adapters, build, load, tmp_path):
        """A resumed training produces bit-identical weights; with adapters, only these are saved."""
        peft = pytest.importorskip("peft", reason="PEFT is an extra")

        def make():
            config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            return build("llama", peft_config=config if with_adapters else None)

        uninterrupted, half, resumed = make(), make(), make()
        trainer_for(uninterrupted, load("llama")).fit()
        with trainer_for(half, load("llama"), save_folder=str(tmp_path)) as trainer:
            trainer.fit(duration="1ep")
        (checkpoint,) = tmp_path.glob("ep1-*")
        trainer_for(resumed, load("llama"), load_path=str(checkpoint)).fit()

        actual, expected = dict(resumed.named_parameters()), dict(uninterrupted.named_parameters())
        assert {name for name in actual if not torch.equal(actual[name], expected[name])} == set()
        from safetensors import safe_open

        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            saved = set(file.keys())
        assert saved == {name for name in actual if "lora_" in name or not with_adapters}

    def test_loss_of_the_checkpoint(self, build, load, tmp_path):
        """The exported model has the cross entropy that the evaluation logged."""
        settings = {"save_folder": str(tmp_path), "eval_dataloader": load("gpt2", 16)}
        with trainer_for(build("gpt2"), load("gpt2"), **settings) as trainer:
            trainer.fit()
        (checkpoint,) = tmp_path.glob("ep2-*")

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(checkpoint)

        total, count = 0.0, 0
        for batch in load("gpt2", 16):
            with torch.no_grad():
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            labels = batch["labels"][:, 1:].flatten()
            total += F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum").item()
            count += (labels != -100).sum().item()
        logged = trainer.state.eval_metric_values["LanguageCrossEntropy"].item()
        assert logged == pytest.approx(total / count, rel=1e-5)
