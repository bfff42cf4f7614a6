"""Gated linear units applied to models of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
)

from composer import functional as cf

TOKENS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTH = 16
INNER = 24


def _bert(**settings: Any) -> BertForMaskedLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**TOKENS, **sizes, max_position_embeddings=12, **settings))


def _gpt2(**settings: Any) -> GPT2LMHeadModel:
    sizes = {"n_embd": WIDTH, "n_inner": INNER, "n_layer": 2, "n_head": 2, "n_positions": 12}
    return GPT2LMHeadModel(GPT2Config(**TOKENS, **sizes, **settings))


MAKE = {"bert": _bert, "gpt2": _gpt2}
BLOCKS = {"bert": "bert.encoder.layer.0", "gpt2": "transformer.h.0.mlp"}
UNITS = {"bert": "bert.encoder.layer.0.intermediate", "gpt2": "transformer.h.0.mlp.c_fc"}
FIRST = {"bert": "bert.encoder.layer.0.intermediate.dense", "gpt2": "transformer.h.0.mlp.c_fc"}


@pytest.fixture(params=MAKE)
def name(request: pytest.FixtureRequest) -> str:
    """Each family of models."""
    return request.param


def _weight(layer: Any) -> torch.Tensor:
    """The matrix that a layer multiplies by; GPT-2 stores it transposed."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.T


def _feed_forward(name: str, block: Any, hidden: torch.Tensor) -> torch.Tensor:
    if name == "gpt2":
        return block(hidden)
    return block.output(block.intermediate(hidden), hidden)


class TestApplyGatedLinearUnits:
    @pytest.mark.parametrize("gated_bias", [True, False])
    @pytest.mark.parametrize("beside_bias", [True, False])
    def test_formula(self, name: str, gated_bias: bool, beside_bias: bool):
        """The block matches the paper, with its biases, residual connection and norm."""
        model = MAKE[name]().eval()
        cf.apply_gated_linear_units(model, gated_layer_bias=gated_bias, non_gated_layer_bias=beside_bias)
        unit, block = model.get_submodule(UNITS[name]), model.get_submodule(BLOCKS[name])
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.3)
        hidden = torch.randn(2, 5, WIDTH)

        output = _feed_forward(name, block, hidden)

        gated, beside = (hidden @ _weight(each).T for each in (unit.gated_layer, unit.non_gated_layer))
        gated = gated + unit.gated_layer.bias if gated_bias else gated
        beside = beside + unit.non_gated_layer.bias if beside_bias else beside
        # BERT's GELU is exact, GPT-2's the approximation by tanh.
        inner = nn.functional.gelu(gated, approximate="none" if name == "bert" else "tanh") * beside
        last = block.output.dense if name == "bert" else block.c_proj
        expected = inner @ _weight(last).T + last.bias
        if name == "bert":
            norm = block.output.LayerNorm
            expected = nn.functional.layer_norm(expected + hidden, (WIDTH,), norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(output, expected)

    def test_first_weight_is_the_same_object(self, name: str):
        """The weight object is preserved, and its bias if requested."""
        model = MAKE[name]()
        first = model.get_submodule(FIRST[name])
        weight, bias, values = first.weight, first.bias, first.weight.detach().clone()

        cf.apply_gated_linear_units(model, gated_layer_bias=True)

        unit = model.get_submodule(UNITS[name])
        assert unit.gated_layer.weight is weight
        assert unit.gated_layer.bias is bias
        assert torch.equal(weight, values)

    def test_new_weights_match_the_old_distribution(self, name: str):
        """The new weight has mean 0 and the old one's standard deviation; the new bias is 0."""
        model = MAKE[name]()
        first = model.get_submodule(FIRST[name])
        nn.init.uniform_(first.weight, -3, 5)

        cf.apply_gated_linear_units(model, non_gated_layer_bias=True)

        beside = model.get_submodule(UNITS[name]).non_gated_layer
        assert beside.weight.shape == first.weight.shape
        assert abs(beside.weight.mean().item()) < 0.5
        assert beside.weight.std().item() == pytest.approx(first.weight.std().item(), rel=0.15)
        assert beside.weight.abs().max() > 5
        assert (beside.bias == 0).all()

    def test_weights_depend_on_the_generator(self, name: str):
        """New weights depend only on the generator, and the global one is not used."""
        models = [MAKE[name]() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        state = torch.get_rng_state()

        for model in models:
            cf.apply_gated_linear_units(model, generator=torch.Generator().manual_seed(3))

        assert torch.equal(torch.get_rng_state(), state)
        for old, new in zip(*(model.state_dict().values() for model in models), strict=True):
            assert torch.equal(old, new)
        units = [models[0].get_submodule(UNITS[name].replace(".0.", f".{place}.")) for place in (0, 1)]
        assert not torch.equal(*(unit.non_gated_layer.weight for unit in units))

    def test_activation_with_a_parameter(self, name: str):
        """The optimizer receives the activation's parameter."""
        model = MAKE[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        cf.apply_gated_linear_units(model, optimizer, nn.PReLU())

        in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
        assert in_optimizer == {id(each) for each in model.parameters()}

    def test_works_with_alibi(self, name: str):
        """Both surgeries work together, in any order."""
        ids = torch.randint(3, 50, (2, 20))
        logits = []

        for order in (1, -1):
            torch.manual_seed(3)
            model = MAKE[name]().eval()
            generator = torch.Generator().manual_seed(4)
            steps = [
                lambda model: cf.apply_alibi(model, 64),
                lambda model, generator=generator: cf.apply_gated_linear_units(model, generator=generator),
            ]
            assert all(step(model) for step in steps[::order])
            logits.append(model(ids).logits)

        assert torch.equal(*logits)


class TestErrors:
    def test_unknown_architecture_raises(self):
        """The error lists the supported architectures and the alternative."""
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)

        with pytest.raises(ValueError, match=r"GPT-2 or BERT .*got a TransformerEncoder .*feed_forward_module"):
            cf.apply_gated_linear_units(model)

    def test_llama_raises(self):
        """Llama's blocks are gated already."""
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}

        with pytest.raises(ValueError, match="got a LlamaModel, whose blocks have one already"):
            cf.apply_gated_linear_units(LlamaModel(LlamaConfig(**TOKENS, **sizes)))


class OwnBlock(nn.Module):
    """A custom feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.act = nn.ReLU()
        self.down = nn.Linear(6, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(hidden)))


OWN = {"feed_forward_module": OwnBlock, "first_layer_attribute": "up", "activation_attribute": "act"}


class TestOwnBlock:
    def test_formula(self):
        """Each block multiplies the activation by the new layer, whose weight joins the optimizer."""
        model = nn.Sequential(OwnBlock(), nn.Linear(4, 4), OwnBlock())
        optimizer = torch.optim.AdamW(model.parameters())

        report = cf.apply_gated_linear_units(model, optimizer, **OWN)

        hidden, block = torch.randn(3, 4), model[2]
        gated = (hidden @ block.up.gated_layer.weight.T).relu() * (hidden @ block.up.non_gated_layer.weight.T)
        torch.testing.assert_close(block(hidden), block.down(gated))
        assert [entry.paths for entry in report] == [("0.up",), ("2.up",)]
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert trained == {id(parameter) for parameter in model.parameters()}

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"feed_forward_module": "OwnBlock"}, TypeError, "feed_forward_module must be a class of modules"),
            ({"feed_forward_module": nn.Conv2d}, ValueError, "a class that is in the model, got Conv2d"),
            ({"first_layer_attribute": "fc"}, ValueError, "attributes of OwnBlock .* got 'fc'"),
            ({"activation_attribute": "gelu"}, ValueError, "attributes of OwnBlock .* got 'gelu'"),
            ({"first_layer_attribute": "act"}, ValueError, "must be those of the original model, got a ReLU"),
        ],
    )
    def test_wrong_description_raises(self, change: dict[str, Any], error: type[Exception], message: str):
        """The message names the argument, and the model is unchanged."""
        model = nn.Sequential(OwnBlock())
        before = str(model)

        with pytest.raises(error, match=message):
            cf.apply_gated_linear_units(model, **{**OWN, **change})

        assert str(model) == before
