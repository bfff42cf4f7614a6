"""Growth in depth, compared with deep models into which the weights are written by name."""

import copy
import dataclasses
import re

import pytest
import torch
from torch import nn

from composer import functional as cf

IDS = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_attention_heads": 2}


def gpt2(depth=2):
    """Return a GPT-2 without dropout in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 32}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=depth, **sizes, **drops)).double()


def llama(depth=2):
    """Return a Llama in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=depth, num_key_value_heads=1, **SIZES)
    return transformers.LlamaForCausalLM(config).double()


def qwen(depth=2):
    """Return a Qwen 2 in float64, whose second half of layers attends to a window of four tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kinds = [kind for kind in ("full_attention", "sliding_attention") for _ in range(depth // 2)]
    config = transformers.Qwen2Config(
        num_hidden_layers=depth,
        num_key_value_heads=1,
        layer_types=kinds,
        sliding_window=4,
        use_sliding_window=True,
        **SIZES,
    )
    return transformers.Qwen2ForCausalLM(config).double()


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A configuration that cannot be changed by assignment."""

    n_layer: int
    layer_types: tuple


class Plain(nn.Module):
    """torch's encoder between two linear layers, in float64."""

    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(32, 16)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32)
        for parameter in self.encoder.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.double()

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))


MODELS = {
    "gpt2": (gpt2, "transformer.h", ("attn.c_proj", "mlp.c_proj")),
    "llama": (llama, "model.layers", ("self_attn.o_proj", "mlp.down_proj")),
    "qwen": (qwen, "model.layers", ("self_attn.o_proj", "mlp.down_proj")),
    "plain": (Plain, "encoder.layers", ("self_attn.out_proj", "linear2")),
}
each_model = pytest.mark.parametrize("kind", MODELS)


def logits(model):
    outputs = model(IDS)
    return getattr(outputs, "logits", outputs)


def step(model, optimizer):
    """Make a step for the next token."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    optimizer.step()


def trained(kind, steps=3):
    """Return a model after some steps, and its AdamW with two groups."""
    model = MODELS[kind][0]()
    weights = list(model.parameters())
    matrices = {"params": [one for one in weights if one.ndim > 1], "weight_decay": 0.1}
    others = {"params": [one for one in weights if one.ndim < 2], "weight_decay": 0.0, "lr": 0.02}
    optimizer = torch.optim.AdamW([matrices, others], lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def source_name(name, path, sources):
    """Return the name of the weight that a weight of the deep model gets."""
    return re.sub(rf"^{re.escape(path)}\.(\d+)\.", lambda found: f"{path}.{sources[int(found[1])]}.", name)


def reference_model(kind, model, optimizer, sources):
    """Return a deep model of the library's own constructor and an AdamW, with all values written by name."""
    make, path, _ = MODELS[kind]
    deep, state = make(len(sources)), model.state_dict()
    if kind == "qwen" and sources[1] == 1:
        deep = type(model)(type(model.config)(**{**deep.config.to_dict(), "layer_types": model.config.layer_types * 2}))
        deep.double()
    deep.load_state_dict({name: state[source_name(name, path, sources)] for name in deep.state_dict()})
    shallow = dict(model.named_parameters())
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    again = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]}])
    again.param_groups.clear()
    for name, parameter in deep.named_parameters():
        origin = shallow[source_name(name, path, sources)]
        place = next(
            place for place, one in enumerate(optimizer.param_groups) if any(origin is p for p in one["params"])
        )
        groups[place]["params"].append(parameter)
        again.state[parameter] = copy.deepcopy(optimizer.state[origin])
    again.param_groups.extend(groups)
    return deep, again


class TestApplyDepthStacking:
    @each_model
    @pytest.mark.parametrize(("order", "sources"), [("stack", [0, 1, 0, 1]), ("interleave", [0, 0, 1, 1])])
    def test_reference(self, kind, order, sources):
        """Outputs and five further steps equal those of a deep model with values written by name, bit for bit."""
        model, optimizer = trained(kind)
        deep, again = reference_model(kind, model, optimizer, sources)

        report = cf.apply_depth_stacking(model, order=order, optimizers=optimizer)

        assert len(report) == 2
        assert list(model.state_dict()) == list(deep.state_dict())
        assert torch.equal(logits(model), logits(deep))
        for _ in range(5):
            step(model, optimizer)
            step(deep, again)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), deep.parameters(), strict=True))

    @each_model
    @pytest.mark.parametrize("order", ["stack", "interleave"])
    def test_zero_layers_keep_the_function(self, kind, order):
        """With the ends of the residual branches at 0, outputs are the same bits, and these layers learn."""
        model, optimizer = trained(kind)
        before = logits(model)
        _, path, zero = MODELS[kind]

        cf.apply_depth_stacking(model, 3, order, zero_layers=zero, optimizers=optimizer)

        assert torch.equal(logits(model), before)
        copied = model.get_submodule(path)[4 if order == "stack" else 1]
        weights = [weight for name in zero for weight in copied.get_submodule(name).parameters()]
        assert not any(weight in optimizer.state for weight in weights)
        step(model, optimizer)
        assert all(weight.any() for weight in weights)

    def test_plain_stacking_changes_outputs(self):
        """Without zero layers the outputs are others."""
        model, _ = trained("plain")
        before = logits(model)

        cf.apply_depth_stacking(model)

        assert not torch.allclose(logits(model), before)

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen"])
    def test_generation_with_a_cache(self, kind):
        """A grown model of Transformers generates the same with and without its cache, and is saved with its depth."""
        model, _ = trained(kind)
        cf.apply_depth_stacking(model)
        model.eval()

        texts = [
            model.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=use, pad_token_id=0)
            for use in (True, False)
        ]

        assert torch.equal(*texts)
        assert model.config.num_hidden_layers == 4
        assert all(block.config is model.config for block in model.modules() if hasattr(block, "config"))
        again = type(model)(type(model.config)(**model.config.to_dict())).double()
        again.load_state_dict(model.state_dict())
        assert torch.equal(logits(again), logits(model))

    def test_names_in_optimizers(self):
        """An optimizer of named parameters has the new names, also with a prefix, and no parameter twice."""
        model = Plain()
        optimizer = torch.optim.SGD([(f"net.{name}", one) for name, one in model.named_parameters()], lr=0.1)

        cf.apply_depth_stacking(model, 3, "interleave", optimizers=optimizer)

        (group,) = optimizer.param_groups
        assert dict(zip(group["param_names"], group["params"], strict=True)) == {
            f"net.{name}": one for name, one in model.named_parameters()
        }
        assert len(group["params"]) == len(list(model.parameters()))

    def test_shared_and_frozen_parameters(self):
        """What blocks share stays shared; copies of frozen parameters are frozen, and in no optimizer."""
        model = Plain()
        first, second = model.encoder.layers
        second.norm1 = first.norm1
        first.linear1.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)

        cf.apply_depth_stacking(model, optimizers=optimizer)

        layers = model.encoder.layers
        assert len({layer.norm1 for layer in layers}) == 1
        assert [layer.linear1.weight.requires_grad for layer in layers] == [False, True, False, True]
        assert {*optimizer.param_groups[0]["params"]} == {one for one in model.parameters() if one.requires_grad}

    def test_depths(self):
        """The module with the list states its depth; one of another size stays."""
        model = Plain()
        model.encoder.n_layer, model.encoder.depth = 2, 5

        cf.apply_depth_stacking(model)

        assert (model.encoder.num_layers, model.encoder.n_layer, model.encoder.depth) == (4, 4, 5)

    def test_depths_around(self):
        """The modules around the list state it too, under several names; others than depths stay, also if equal."""
        model = nn.Sequential(Plain())
        model.num_blocks = model[0].n_block = model[0].num_heads = model[0].block_size = 2

        cf.apply_depth_stacking(model)

        assert (model.num_blocks, model[0].n_block, model[0].num_heads, model[0].block_size) == (4, 4, 2, 2)

    @pytest.mark.parametrize("kind", [dict, Frozen, lambda **_: "text"], ids=["dictionary", "frozen", "text"])
    def test_configurations(self, kind):
        """A dictionary and an immutable dataclass have the new depth afterwards; other values stay."""
        model = Plain()
        model.config = kind(n_layer=2, layer_types=("a", "b"))

        cf.apply_depth_stacking(model)

        changed = {"n_layer": 4, "layer_types": ("a", "b", "a", "b")}
        assert model.config == (changed if kind is dict else Frozen(**changed) if kind is Frozen else "text")

    def test_no_blocks(self):
        """A model without repeated blocks stays as it is, with an empty report."""
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))

        assert not cf.apply_depth_stacking(model)
        assert len(model) == 3

    def test_a_single_block_is_named(self):
        """A list of one block is grown if its path is given."""
        model = Plain(1)

        report = cf.apply_depth_stacking(model, 4, blocks="encoder.layers")

        assert [entry.paths for entry in report] == [(f"encoder.layers.{place}",) for place in (1, 2, 3)]

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"factor": 1}, ValueError, "factor"),
            ({"factor": 1.5}, TypeError, "factor"),
            ({"order": "x"}, ValueError, "order must be"),
            ({"blocks": "encoder"}, ValueError, "blocks must be the path.*'encoder'.*'encoder.layers'"),
            ({"zero_layers": "linear2"}, TypeError, "zero_layers must be a list of names"),
            (
                {"zero_layers": ["linear3"]},
                ValueError,
                "zero_layers must be names within a block, got 'linear3'.*self_attn",
            ),
            ({"optimizers": 3}, TypeError, "optimizers"),
        ],
    )
    def test_refused_arguments(self, arguments, error, text):
        """An invalid argument is named before anything changes."""
        model = Plain()

        with pytest.raises(error, match=text):
            cf.apply_depth_stacking(model, **arguments)

        assert len(model.encoder.layers) == 2

    def test_refused_models(self):
        """Two lists, different blocks, and an encoder with a decoder are errors that state the reason."""
        transformers = pytest.importorskip("transformers")
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=2, **sizes))
        two, different = Plain(), Plain()
        two.other = Plain()
        different.encoder.layers[1].linear2 = nn.Linear(24, 16, bias=False)

        with pytest.raises(ValueError, match="an encoder and a decoder"):
            cf.apply_depth_stacking(t5)
        with pytest.raises(ValueError, match=r"equal and separate modules, got 'encoder.layers', whose 1\. member"):
            cf.apply_depth_stacking(different)
        with pytest.raises(ValueError, match=r"the one list to repeat, got None.*'encoder\.layers', 'other\.encoder"):
            cf.apply_depth_stacking(two)
