"""Tests of HuggingFaceModel with PEFT adapters."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint

peft = pytest.importorskip("peft", reason="PEFT is an extra")

# PEFT asks Transformers by a former name whether activations are kept.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def _lora(**settings):
    return peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"]} | settings)


def _train(model, batch, steps=5):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        losses.append(model.loss(model(batch), batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.fixture
def wrap(make_model, tokenizer):
    """Return a function that wraps a Llama with fixed weights and adapters."""

    def make(kind="llama", config=None, tokenizer=tokenizer, **settings):
        config = _lora() if config is None else config
        return HuggingFaceModel(make_model(kind), tokenizer, peft_config=config, **settings)

    return make


@pytest.fixture
def save(tmp_path, sign):
    """Return a function that writes a model as a checkpoint folder."""

    def write(model):
        folder = tmp_path / "ep1-ba10"
        folder.mkdir(exist_ok=True)
        save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "model.safetensors")
        (folder / "state.json").write_text(json.dumps({"integrations": model.get_metadata()}))
        sign(folder)
        return folder

    return write


class TestConfiguration:
    def test_names_in_small_letters(self, wrap):
        """The types of adapter and task are found in small letters, too."""
        config = _lora()
        config.peft_type, config.task_type = "lora", "causal_lm"

        assert type(wrap(config=config).model) is peft.PeftModelForCausalLM


class TestModes:
    def test_model_of_from_pretrained(self, make_model):
        """A base model in evaluation mode trains below new adapters, except for norms with running statistics."""
        base = make_model("llama")
        base.norm = torch.nn.BatchNorm1d(2)
        model = HuggingFaceModel(base.eval(), peft_config=_lora())

        assert [module for module in model.modules() if not module.training] == [base.norm]

    def test_part_in_evaluation_mode(self, make_model):
        """The modes of a base model that the program has set for a part stay, so that a training reports them."""
        base = make_model("llama").train()
        base.lm_head.eval()
        model = HuggingFaceModel(base, peft_config=_lora())

        assert [module for module in model.modules() if not module.training] == [base.lm_head]


class TestTraining:
    def test_only_adapters_are_trained(self, wrap, make_batch):
        """The loss decreases, and only adapter weights change."""
        model, batch = wrap(), make_batch("llama")
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        losses = _train(model, batch, steps=10)

        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert losses[-1] < losses[0]
        assert changed == {name for name in before if "lora_" in name} != set()

    @pytest.mark.parametrize("use_logits", [True, False])
    def test_metric_of_prompt_tuning(self, wrap, make_batch, use_logits):
        """Virtual tokens, which come first, have no labels: the cross entropy is the loss."""
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = wrap(config=config, metrics=[LanguageCrossEntropy()], use_logits=use_logits).eval()
        batch, [metric] = make_batch("llama"), model.get_metrics(is_train=False).values()

        model.update_metric(batch, model.eval_forward(batch), metric)

        torch.testing.assert_close(metric.compute(), model.loss(model(batch), batch).detach())

    @pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT passes it
    @pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
    def test_loss_of_prompts(self, wrap, make_batch, kind):
        """The loss is the sum of that of each sample divided by the labels that count, also if it is computed again."""
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
        batch = make_batch("llama", count=3)
        model = wrap(config=config).eval()
        for row, length in enumerate((9, 2, 5)):
            batch["labels"][row, length:] = -100
        singles = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]

        sums = [model.loss(model(one), one) * model.count_loss_terms(one) for one in singles]
        loss = model.loss(model(batch), batch)
        changed = batch | {"labels": batch["labels"].clone()}

        torch.testing.assert_close(sum(sums) / model.count_loss_terms(batch), loss)
        torch.testing.assert_close(model.loss(model(batch), changed), loss)

    def test_generates(self, wrap, make_batch):
        """Generation works with adapters."""
        prompt = make_batch("llama", count=1)["input_ids"][:, :4]

        tokens = wrap().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)

        assert tokens.shape == (1, 6)

    def test_bad_arguments(self, wrap, make_model):
        """Two sets of adapters, and an invalid configuration, raise."""
        with pytest.raises(ValueError, match="has adapters of PEFT already"):
            HuggingFaceModel(wrap().model, peft_config=_lora())
        with pytest.raises(TypeError, match=r"peft_config must be .* got dict"):
            HuggingFaceModel(make_model("llama"), peft_config={"r": 2})


class TestStateDict:
    def test_contains_only_adapters(self, wrap):
        """The state dict has only adapters, by their names in the model."""
        state = wrap().state_dict()

        layer = "model.base_model.model.model.layers.0.self_attn.q_proj"
        assert set(state) == {f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"}

    def test_can_include_the_base_model(self, wrap):
        """On request it includes the base model, and is loaded strictly."""
        model = wrap(should_save_peft_only=False)

        assert set(model.state_dict()) == {f"model.{name}" for name in model.model.state_dict()}
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(wrap().state_dict())

    def test_round_trip(self, wrap, make_batch):
        """Adapters load strictly onto the same base model, with equal outputs."""
        model, batch = wrap(), make_batch("llama")
        _train(model, batch)

        other = wrap()
        before = other.eval()(batch)["logits"]
        result = other.load_state_dict(copy.deepcopy(model.state_dict()))

        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert torch.equal(other(batch)["logits"], model.eval()(batch)["logits"])
        assert not torch.equal(other(batch)["logits"], before)

    def test_modules_to_save(self, wrap, make_batch):
        """Modules that PEFT trains completely are saved too."""
        config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], task_type="SEQ_CLS")
        model, batch = wrap("classifier", config), make_batch("classifier")
        _train(model, batch)

        other = wrap("classifier", config)
        other.load_state_dict(copy.deepcopy(model.state_dict()))

        assert torch.equal(other.eval()(batch)["logits"], model.eval()(batch)["logits"])
        assert len(model.state_dict()) == 4

    def test_resized_embeddings(self, make_model, make_batch, tokenizer):
        """Embeddings resized for the tokenizer are saved, as no base model has them."""

        def make(seed, config):
            bare = make_model("llama", vocab_size=300)
            torch.manual_seed(seed)
            return HuggingFaceModel(bare, tokenizer, allow_embedding_resizing=True, peft_config=config).eval()

        for config in (_lora(), _lora(target_modules=["q_proj", "embed_tokens"])):
            model, other, batch = make(1, config), make(2, config), make_batch("llama")
            other.load_state_dict(model.state_dict())

            assert torch.equal(other(batch)["logits"], model(batch)["logits"])


class TestCheckpoint:
    def test_with_the_base_model(self, wrap, make_batch, save):
        """A checkpoint of everything restores the model with its adapters."""
        model, batch = wrap(should_save_peft_only=False), make_batch("llama")
        _train(model, batch)

        again, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(save(model))

        assert isinstance(again, peft.PeftModel)
        assert torch.equal(again(**batch)["logits"], model.eval()(batch)["logits"])
        assert tokenizer is not None

    def test_adapters_only(self, wrap, make_model, make_batch, save, tmp_path):
        """A checkpoint of adapters is applied to the given base model."""
        from transformers import LlamaForCausalLM

        make_model("llama").save_pretrained(tmp_path / "base")
        bare = LlamaForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
        model, batch = HuggingFaceModel(bare, peft_config=_lora()), make_batch("llama")
        _train(model, batch)

        again, _ = HuggingFaceModel.hf_from_composer_checkpoint(save(model), base_model=tmp_path / "base")

        assert torch.equal(again(**batch)["logits"], model.eval()(batch)["logits"])

    def test_a_checkpoint_does_not_choose_the_base_model(self, make_model, save, tmp_path):
        """The base model is not read from the path in the checkpoint."""
        from transformers import LlamaForCausalLM

        make_model("llama").save_pretrained(tmp_path / "base")
        bare = LlamaForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
        folder = save(HuggingFaceModel(bare, peft_config=_lora()))

        with pytest.raises(
            ValueError, match=r"adapters alone, .*/base'\. Pass its folder or name as base_model="
        ) as one:
            HuggingFaceModel.hf_from_composer_checkpoint(folder)
        with pytest.raises(ValueError, match="base_model=") as other:
            write_huggingface_pretrained_from_composer_checkpoint(folder, tmp_path / "exported")

        assert str(one.value) == str(other.value)
        assert not (tmp_path / "exported").exists()

    def test_export(self, wrap, make_model, make_batch, save, tmp_path):
        """PEFT reads the exported folder."""
        model, batch = wrap(should_save_peft_only=False), make_batch("llama")
        _train(model, batch)

        write_huggingface_pretrained_from_composer_checkpoint(save(model), tmp_path / "exported")

        again = peft.PeftModel.from_pretrained(make_model("llama"), tmp_path / "exported")
        assert torch.equal(again.eval()(**batch)["logits"], model.eval()(batch)["logits"])

    @pytest.mark.parametrize("is_wrapped", [True, False])
    def test_export_of_embeddings_resized_before(self, is_wrapped, make_model, save, tmp_path):
        """Rows that a program has added itself, as for new tokens, are in the checkpoint and in the exported folder."""
        bare = make_model("llama", vocab_size=300)
        bare.save_pretrained(tmp_path / "base")

        def resized(seed):
            base = type(bare).from_pretrained(tmp_path / "base", local_files_only=True)
            torch.manual_seed(seed)
            base.resize_token_embeddings(304, mean_resizing=False)
            return base

        base, config = resized(1), _lora()
        model = HuggingFaceModel(peft.get_peft_model(base, config)) if is_wrapped else None
        model = model or HuggingFaceModel(base, peft_config=config)
        batch = {"input_ids": torch.arange(294, 304).view(2, 5)}
        write_huggingface_pretrained_from_composer_checkpoint(
            save(model), tmp_path / "exported", base_model=tmp_path / "base"
        )

        again = peft.PeftModel.from_pretrained(resized(5), tmp_path / "exported")
        assert torch.equal(again.eval()(**batch)["logits"], model.eval()(batch)["logits"])

    @pytest.mark.parametrize("alone", [True, False])
    def test_export_of_resized_embeddings(self, alone, make_model, make_batch, tokenizer, save, tmp_path):
        """PEFT reads the rows of new tokens from the exported folder."""
        bare = make_model("llama", vocab_size=300)
        bare.save_pretrained(tmp_path / "base")
        options = {"allow_embedding_resizing": True, "peft_config": _lora(), "should_save_peft_only": alone}
        model, batch = HuggingFaceModel(bare, tokenizer, **options), make_batch("llama")
        _train(model, batch)

        write_huggingface_pretrained_from_composer_checkpoint(
            save(model), tmp_path / "exported", base_model=tmp_path / "base" if alone else None
        )

        torch.manual_seed(5)  # other values of the new rows
        base = type(bare).from_pretrained(tmp_path / "base", local_files_only=True)
        base.resize_token_embeddings(len(tokenizer))
        again = peft.PeftModel.from_pretrained(base, tmp_path / "exported")
        assert torch.equal(again.eval()(**batch)["logits"], model.eval()(batch)["logits"])
