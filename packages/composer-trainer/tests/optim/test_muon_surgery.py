"""Layers that change after Muon is created are trained as by one that is created afterwards."""

import copy
import functools

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.optim import muon_with_adamw

transformers = pytest.importorskip("transformers")
IDS = torch.arange(18).view(2, 9) * 7 % 32


def gpt2():
    """Return a decoder whose projections are Conv1D."""
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, **dropouts)
    return transformers.GPT2LMHeadModel(config)


def bert():
    """Return an encoder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes, **dropouts))


def adapted():
    """Return a Llama whose norms are frozen, with trained adapters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"]))


class Block(nn.Module):
    """A block with one projection of queries, keys and values, and a convolution of 3 x 3, without biases."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)

    def forward(self, input):
        """Return the sum of both."""
        return input + self.proj(self.qkv(input)) + self.conv(input.transpose(1, 2).unsqueeze(-1))[..., 0].mT


class Blocks(nn.Module):
    """Blocks with tied embeddings, and a norm."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32, 16), nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(16)

    def forward(self, ids, labels):
        """Return logits."""
        logits = self.norm(self.blocks(self.embedding(ids))) @ self.embedding.weight.T
        return transformers.modeling_outputs.CausalLMOutput(nn.functional.cross_entropy(logits.mT, labels), logits)


def blocks():
    """Return a small model of your own."""
    torch.manual_seed(0)
    return Blocks()


def trained(model, optimizer):
    """Train for three steps, and return the parameters by their names."""
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    return dict(model.named_parameters())


BOTH = {"row_beta": 0.95, "fused": {"*.c_attn": 3}}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT
@pytest.mark.parametrize(
    ("make", "settings", "apply"),
    [
        (gpt2, {"row_beta": 0.95}, cf.apply_gated_attention),
        (gpt2, {"fused": {"*.c_attn": 3}}, cf.apply_gated_attention),
        (gpt2, BOTH, functools.partial(cf.apply_gated_attention, elementwise=False)),
        (gpt2, BOTH, cf.apply_qk_norm),
        (gpt2, {"fused": {"*.c_attn": 3}}, cf.apply_value_residual),
        (gpt2, BOTH, cf.apply_depth_stacking),
        (adapted, {}, cf.apply_qk_norm),
        (adapted, {"row_beta": 0.95}, cf.apply_value_residual),
        (bert, {"row_beta": 0.95}, cf.apply_gated_linear_units),
        (blocks, {"fused": {"*.qkv": 3}}, functools.partial(cf.apply_factorization, min_features=1, latent_features=5)),
        (blocks, {"row_beta": 0.95}, functools.partial(cf.apply_squeeze_excite, min_channels=1)),
    ],
)
def test_equals_an_optimizer_of_the_changed_model(make, settings, apply):
    """The first steps after the change are those of an optimizer that has seen the changed model, bit for bit."""
    model = make()
    optimizer = muon_with_adamw(model, 0.1, **settings)
    assert apply(model, optimizers=optimizer)
    other = copy.deepcopy(model)

    changed, expected = trained(model, optimizer), trained(other, muon_with_adamw(other, 0.1, **settings))

    assert [name for name in expected if not torch.equal(changed[name], expected[name])] == []
    assert len(optimizer.state) == sum(one.requires_grad for one in expected.values())
