"""Gated linear units applied to models of Transformers."""

from __future__ import annotations

import copy
import subprocess
import sys
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
    def test_report(self, name: str):
        """Each block's first layer is replaced, and nothing else changes."""
        report = cf.apply_gated_linear_units(MAKE[name]())

        assert [entry.paths for entry in report] == [(UNITS[name],), (UNITS[name].replace(".0.", ".1."),)]
        assert {entry.new for entry in report} == {"GatedLinearUnit"}

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

    @pytest.mark.parametrize("gated_bias", [True, False])
    @pytest.mark.parametrize("beside_bias", [True, False])
    def test_parameters(self, name: str, gated_bias: bool, beside_bias: bool):
        """The number of parameters follows from the settings, also in the state dict."""
        model = MAKE[name]()
        before = set(model.state_dict())

        cf.apply_gated_linear_units(model, gated_layer_bias=gated_bias, non_gated_layer_bias=beside_bias)

        expected = {"gated_layer.weight", "non_gated_layer.weight"}
        expected |= {"gated_layer.bias"} if gated_bias else set()
        expected |= {"non_gated_layer.bias"} if beside_bias else set()
        units = {f"{path}.{each}" for path in (UNITS[name], UNITS[name].replace(".0.", ".1.")) for each in expected}
        removed = {
            f"{path}.{each}" for path in (FIRST[name], FIRST[name].replace(".0.", ".1.")) for each in ("weight", "bias")
        }
        assert set(model.state_dict()) == before - removed | units
        assert {each for each, _ in model.named_parameters() if UNITS[name] in each} == {
            f"{UNITS[name]}.{each}" for each in expected
        }

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

    @pytest.mark.parametrize("activation", [nn.ReLU(), torch.relu])
    def test_custom_activation(self, name: str, activation: Any):
        """A module or a function replaces the model's activation."""
        model = MAKE[name]().eval()
        cf.apply_gated_linear_units(model, act_fn=activation)
        unit = model.get_submodule(UNITS[name])
        hidden = torch.randn(3, WIDTH)

        gated, beside = (hidden @ _weight(each).T for each in (unit.gated_layer, unit.non_gated_layer))

        torch.testing.assert_close(unit(hidden), gated.clamp(min=0) * beside)
        if name == "gpt2":
            block = model.get_submodule(BLOCKS[name])
            torch.testing.assert_close(block.act(gated), gated)

    def test_activation_with_a_parameter(self, name: str):
        """The optimizer receives the activation's parameter."""
        model = MAKE[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        cf.apply_gated_linear_units(model, optimizer, nn.PReLU())

        in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
        assert in_optimizer == {id(each) for each in model.parameters()}

    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_optimizer_updates_all_parameters(self, name: str, make: Any):
        """An existing optimizer has each of the model's parameters once, with the state of preserved ones."""
        model = MAKE[name]()
        groups = [
            {"params": [each for _, each in model.named_parameters() if each.ndim == 1], "weight_decay": 0.0},
            {"params": [each for _, each in model.named_parameters() if each.ndim > 1], "weight_decay": 0.1},
        ]
        optimizer = make(groups)
        ids = torch.arange(48).view(4, 12)
        nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        first = model.get_submodule(FIRST[name])
        state = optimizer.state[first.weight]

        cf.apply_gated_linear_units(model, optimizer, non_gated_layer_bias=True)
        before = {each: parameter.detach().clone() for each, parameter in model.named_parameters()}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

        in_optimizer = [id(each) for group in optimizer.param_groups for each in group["params"]]
        assert sorted(in_optimizer) == sorted(id(each) for each in model.parameters())
        assert optimizer.state[first.weight] is state
        assert not [each for each, parameter in model.named_parameters() if torch.equal(parameter, before[each])]
        beside = model.get_submodule(UNITS[name]).non_gated_layer
        assert any(each is beside.weight for each in optimizer.param_groups[1]["params"])
        assert any(each is beside.bias for each in optimizer.param_groups[0]["params"])

    def test_layer_properties_are_preserved(self, name: str, device: torch.device):
        """Dtype, device, mode, frozen parameters and hooks are preserved."""
        model = MAKE[name]().to(device=device, dtype=torch.bfloat16).eval().requires_grad_(False)
        called: list[nn.Module] = []
        first = model.get_submodule(FIRST[name])
        first.register_forward_hook(lambda module, *_: called.append(module))
        block = model.get_submodule(UNITS[name].removesuffix(".c_fc"))
        block.register_forward_hook(lambda module, *_: called.append(module))
        activation = getattr(block, "act", None) or block.intermediate_act_fn
        activation.register_forward_hook(lambda module, *_: called.append(module))

        cf.apply_gated_linear_units(model, non_gated_layer_bias=True)
        output = model(torch.randint(3, 50, (2, 8), device=device)).logits

        assert {each.dtype for each in (output, *model.parameters())} == {torch.bfloat16}
        assert {each.device.type for each in (output, *model.parameters())} == {device.type}
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not any(module.training for module in model.modules())
        assert called == [first, activation, model.get_submodule(UNITS[name].removesuffix(".c_fc"))]

    def test_is_idempotent(self, name: str):
        """Gated layers are not gated again."""
        model = MAKE[name]()
        cf.apply_gated_linear_units(model)
        before, state = str(model), torch.get_rng_state()

        report = cf.apply_gated_linear_units(model, act_fn=nn.ReLU())

        assert not report
        assert str(model) == before
        assert torch.equal(torch.get_rng_state(), state)

    def test_copies_and_state_dicts(self, name: str):
        """A copy, and a second model with the same state, compute the same."""
        model, other = MAKE[name]().eval(), MAKE[name]().eval()
        for each in (model, other):
            cf.apply_gated_linear_units(each)
        ids = torch.randint(3, 50, (2, 8))

        other.load_state_dict(model.state_dict())

        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
        assert torch.equal(other(ids).logits, model(ids).logits)

    def test_compiles_and_exports(self, name: str):
        """The unit compiles to one graph and can be exported."""
        model = MAKE[name]().eval()
        cf.apply_gated_linear_units(model)
        block = model.get_submodule(UNITS[name].removesuffix(".c_fc"))
        hidden = torch.randn(2, 5, WIDTH)

        compiled = torch.compile(block, fullgraph=True, backend="eager")(hidden)
        exported = torch.export.export(block, (hidden,)).module()(hidden)

        torch.testing.assert_close(compiled, block(hidden))
        torch.testing.assert_close(exported, block(hidden))

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

    @pytest.mark.parametrize("activation", [nn.ReLU, "relu", 1])
    def test_invalid_activation_raises(self, name: str, activation: object):
        """A class is not an activation; the model does not change."""
        model = MAKE[name]()
        before = str(model)

        with pytest.raises(TypeError, match="act_fn must be a module or a function of one tensor"):
            cf.apply_gated_linear_units(model, act_fn=activation)

        assert str(model) == before

    def test_non_module_raises(self):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
            cf.apply_gated_linear_units([_bert()])

    def test_does_not_import_transformers(self):
        """If Transformers is not imported, the error does not import it."""
        code = (
            "import sys; from torch import nn; from composer import functional as cf\n"
            "try: cf.apply_gated_linear_units(nn.Sequential(nn.Linear(2, 2)))\n"
            "except ValueError: print('transformers' in sys.modules)"
        )

        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert run.stdout.strip() == "False"


def test_factorized_layers_raise():
    """After other surgery an error is raised, and nothing changes."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=50, **sizes))
    cf.apply_factorization(model, min_features=32, latent_features=4)
    kinds = [type(module) for module in model.modules()]

    with pytest.raises(ValueError, match="first"):
        cf.apply_gated_linear_units(model)

    assert [type(module) for module in model.modules()] == kinds


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

    def test_second_time_changes_nothing(self):
        """Blocks with a gate are not changed again."""
        model = nn.Sequential(OwnBlock())
        cf.apply_gated_linear_units(model, **OWN)

        assert not cf.apply_gated_linear_units(model, **OWN)

    @pytest.mark.parametrize("missing", OWN)
    def test_incomplete_description_raises(self, missing: str):
        """All three arguments are needed."""
        with pytest.raises(ValueError, match="must be described by all of feed_forward_module"):
            cf.apply_gated_linear_units(nn.Sequential(OwnBlock()), **{**OWN, missing: None})

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
