"""Replacing the head of real models by one that computes its loss in chunks."""

import copy

import pytest
import timm
import torch
import transformers
from torch import nn

from composer import functional as cf
from composer.functional.surgery.replace import Replacement

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=3.0)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, output_router_logits=True)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def batch():
    ids = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:7] = -100
    return {"input_ids": ids, "labels": labels}


def with_adapters(name):
    """Return the model with adapters of PEFT, and a copy of its head that is trained."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(make(name), settings)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_and_a_head():
    """PEFT's copy of the head is found, and its loss and gradient are those without chunks."""
    model = with_adapters("llama")
    changed = copy.deepcopy(model)
    [replaced] = cf.apply_chunked_cross_entropy(changed, chunk_size=3)

    losses = [one(**batch()).loss for one in (changed, model)]
    gradients = [loss.backward() or one.lm_head.weight.grad for loss, one in zip(losses, (changed, model), strict=True)]

    assert replaced.paths == ("base_model.model.lm_head.modules_to_save.default",)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
class TestTransformers:
    def test_same_loss_and_gradients(self, name):
        """Loss and gradients are those of the model's own head, with its scales, limits and further losses."""
        model = make(name)
        changed = copy.deepcopy(model)
        report = cf.apply_chunked_cross_entropy(changed, chunk_size=3)

        losses = [one(**batch()).loss for one in (changed, model)]
        for loss in losses:
            loss.backward()

        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
        for new, old in zip(changed.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(new.grad, old.grad, rtol=1e-4, atol=1e-6)
        assert [one.new for one in report] == ["ChunkedHead"]

    def test_evaluation_is_unchanged(self, name):
        """In evaluation the outputs are bit-identical, and the weights have the same names."""
        model = make(name)
        changed = copy.deepcopy(model)
        cf.apply_chunked_cross_entropy(changed)

        outputs = [one.eval()(**batch()).logits for one in (changed, model)]

        assert torch.equal(*outputs)
        assert list(changed.state_dict()) == list(model.state_dict())


class TestSurgery:
    def test_head_by_name(self):
        """The head keeps its parameters, hooks, dtype and mode."""
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)).double().eval()
        weight = model[1].weight

        report = cf.apply_chunked_cross_entropy(model, "1", z_loss=0.1)

        assert report.replacements == (Replacement(("1",), "Linear", "ChunkedHead"),)
        assert (model[1].weight is weight, model[1].z_loss, model[1].training) == (True, 0.1, False)
        assert not cf.apply_chunked_cross_entropy(model, "1")

    def test_head_of_timm(self):
        """Timm's classifier is found."""
        model = timm.create_model("resnet10t", num_classes=5)

        report = cf.apply_chunked_cross_entropy(model)

        assert [one.paths for one in report] == [("fc",)]

    def test_tied_weights_stay_tied(self):
        """The head of GPT-2 shares its weight with the embedding."""
        model = make("gpt2")

        cf.apply_chunked_cross_entropy(model)

        assert model.lm_head.weight is model.transformer.wte.weight

    @pytest.mark.parametrize(
        ("model", "head", "text"),
        [
            (nn.Sequential(nn.Flatten(), nn.Linear(2, 3)), None, "the head of Sequential is not found.*are '1'"),
            (nn.Sequential(nn.Linear(2, 3)), "fc", "got 'fc', with which the head of Sequential is not found"),
            (
                nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
                "1",
                "the head of Sequential is of .*ReLU.* Leave the head out of adapters",
            ),
            (nn.Sequential(nn.ReLU()), None, "not found. Its last linear layers are none"),
        ],
    )
    def test_head_that_is_not_found_raises(self, model, head, text):
        """The error names the linear layers."""
        with pytest.raises(ValueError, match=text):
            cf.apply_chunked_cross_entropy(model, head)
