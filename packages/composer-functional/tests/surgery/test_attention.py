"""QK-norm, gates and value residuals in decoders, compared with Qwen3 and with formulas."""

import copy
import functools
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from composer import functional as cf

transformers = pytest.importorskip("transformers")
# The older names are those of all supported releases of Transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IDS = torch.arange(18).view(2, 9) * 7 % 64
METHODS = {
    "qk_norm": cf.apply_qk_norm,
    "gates": cf.apply_gated_attention,
    "gates of heads": functools.partial(cf.apply_gated_attention, elementwise=False, initial_gate=0.9),
    "values": cf.apply_value_residual,
}
each_method = pytest.mark.parametrize("apply", METHODS.values(), ids=METHODS)


def make(kind="llama", **options):
    """Return a decoder without dropout whose biases are not 0."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, **options))
    elif kind == "neox":
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, intermediate_size=48, **options))
    else:
        config = transformers.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, **options)
        model = transformers.LlamaForCausalLM(config)
    randomize(model, 0.2)
    model.loss_type = "ForCausalLM"  # otherwise the model prints a warning, which is a break of compiled graphs
    return model


def randomize(model, scale, start=1):
    """Give every parameter another random value, in place."""
    generator = torch.Generator().manual_seed(start)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[1].shape):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name))


def gradients(model, run=None):
    """Return the gradients of two forward passes before the backward pass."""
    model.zero_grad()
    run = model if run is None else run
    first, second = (run(ids, labels=IDS, use_cache=False).loss for ids in (IDS, IDS.flip(0) + 0))
    (first + 2 * second).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def weight_of(model, layer, name):
    return model.get_parameter(f"model.layers.{layer}.{name}.weight").detach()


def norm(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x):
    """Rotate pairs of features (N, heads, L, 8) by the position."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(4, dtype=x.dtype) / 4)
    first, second = x.chunk(2, -1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def llama(model, method):
    """Return the logits of Llama with a method, written out."""
    state, values = model.state_dict(), []
    x = state["model.embed_tokens.weight"][IDS]
    for number in range(3):
        get = functools.partial(weight_of, model, number)
        hidden = norm(x, get("input_layernorm"))
        inner = {"qk_norm": ("q_proj.layer", "k_proj.layer"), "values": ("q_proj", "k_proj")}.get(method)
        inner = (*(inner or ("q_proj", "k_proj")), "v_proj.layer" if method == "values" else "v_proj")
        q, k, v = ((hidden @ get(f"self_attn.{name}").T).unflatten(-1, (-1, 8)).transpose(1, 2) for name in inner)
        if method == "qk_norm":
            q, k = norm(q, get("self_attn.q_proj.norms.0")), norm(k, get("self_attn.k_proj.norms.0"))
        values.append(v)
        if method == "values" and number:
            own, first = state[f"model.layers.{number}.self_attn.v_proj.weights"]
            v = own * v + first * values[0]
        k, v = (each.repeat_interleave(2, 1) for each in (rotate(k), v))
        logits = rotate(q) @ k.transpose(-1, -2) / math.sqrt(8)
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        heads = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        output = "o_proj"
        if method.startswith("gates"):
            output = "output.o_proj"
            offset = math.log(0.9 / 0.1) if "heads" in method else 0.0
            gate = 1 / (1 + (-hidden @ get("self_attn.gate").T - offset).exp())
            heads = heads * gate.unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + heads.transpose(1, 2).flatten(2) @ get(f"self_attn.{output}").T
        hidden = norm(x, get("post_attention_layernorm"))
        x = x + (silu(hidden @ get("mlp.gate_proj").T) * (hidden @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T
    return norm(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


class TestFormulas:
    @pytest.mark.parametrize("method", METHODS)
    def test_llama(self, method):
        """In float64, Llama with fewer heads of keys computes what the formulas give."""
        model = make().double().eval()
        before = model(IDS).logits

        METHODS[method](model)
        randomize(model, 0.3, start=2)

        got = model(IDS).logits
        torch.testing.assert_close(got, llama(model, method), rtol=1e-5, atol=1e-5)  # its norms are float32
        assert (got - before).abs().max() > 0.1

    @pytest.mark.parametrize("kind", ["gpt2", "neox"])
    @pytest.mark.parametrize("method", ["qk_norm", "gates", "values"])
    def test_layers_of_queries_keys_and_values(self, kind, method):
        """In GPT-2 and GPT-NeoX, the right features are normalized, mixed and gated."""
        plain = make(kind).eval()
        model, values, gates = copy.deepcopy(plain), [], torch.rand(3, 1, 1, 4, 8)
        METHODS[method](model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".norms." in name:
                    parameter.fill_(2.5 - float(name.split(".norms.")[1][0]))  # a number: rotation does not change it
                elif name.endswith(".weights"):
                    parameter.copy_(torch.tensor([0.7, 0.4]))
        number = 0
        for module in model.modules():
            if hasattr(module, "num_heads_with_gate"):
                module.gate = Constant(torch.logit(gates[number]).flatten(-2))
                number += 1

        def attend(module, query, key, value, mask, **settings):
            layer = len(values)
            values.append(value)
            if method == "qk_norm":
                query, key = 2.5 * norm(query, 1.0), 1.5 * norm(key, 1.0)
            if method == "values" and layer:
                value = 0.7 * value + 0.4 * values[0]
            logits = query @ key.transpose(-1, -2) / math.sqrt(8)
            logits = logits.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
            heads = (logits.softmax(-1) @ value).transpose(1, 2)
            return heads * gates[layer] if method == "gates" else heads, None

        transformers.AttentionInterface.register("written out", attend)
        plain.config._attn_implementation = "written out"
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
        assert len(values) == 3

    def test_qwen3(self):
        """Llama with QK-norm is Qwen3 with the same weights."""
        model = make(rms_norm_eps=1e-6).eval()
        cf.apply_qk_norm(model)
        randomize(model, 0.3, start=2)
        config = transformers.Qwen3Config(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8)
        names = {"q_proj.norms.0": "q_norm", "k_proj.norms.0": "k_norm", "_proj.layer": "_proj"}
        state = {}
        for name, tensor in model.state_dict().items():
            for old, new in names.items():
                name = name.replace(old, new)  # noqa: PLW2901
            state[name] = tensor

        other = transformers.Qwen3ForCausalLM(config).eval()
        other.load_state_dict(state)

        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=1e-5, atol=1e-5)

    def test_softcap(self):
        """Logits that apply_chunked_cross_entropy limits are those of Gemma 2 with a final soft-cap, as is the loss."""
        sizes = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
        capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, final_logit_softcapping=2.0)).eval()
        plain = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, final_logit_softcapping=None)).eval()
        randomize(capped, 0.3)
        plain.load_state_dict(capped.state_dict())
        before = plain(IDS).logits

        cf.apply_chunked_cross_entropy(plain, softcap=2.0)

        torch.testing.assert_close(plain(IDS).logits, capped(IDS).logits)
        torch.testing.assert_close(plain.train()(IDS, labels=IDS).loss, capped.train()(IDS, labels=IDS).loss)
        assert before.abs().max() > 2 > plain.eval()(IDS).logits.abs().max()


class Constant(nn.Module):
    """Returns a tensor."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, input):
        return self.value


class TestStart:
    def test_values(self):
        """With a weight of 0 no bit changes, and the weight gets gradients."""
        model = make()
        before = model(IDS).logits

        report = cf.apply_value_residual(model, initial_weight=0.0)

        assert torch.equal(model(IDS).logits, before)
        model(IDS, labels=IDS).loss.backward()
        assert [one.new for one in report] == ["MixedValues"] * 3
        assert all(model.model.layers[n].self_attn.v_proj.weights.grad.abs().min() > 0 for n in (1, 2))

    @pytest.mark.parametrize("elementwise", [True, False])
    def test_gates(self, elementwise):
        """Each attention without biases has half of its output, exactly."""
        model = make()
        other = copy.deepcopy(model)
        cf.apply_gated_attention(model, elementwise=elementwise)
        hidden, results = torch.randn(2, 9, 32), []
        for each in (model, other):
            positions = each.model.rotary_emb(hidden, torch.arange(9)[None])
            attention = each.model.layers[1].self_attn
            results.append(attention(hidden, attention_mask=None, position_embeddings=positions)[0])

        assert torch.equal(results[0], results[1] / 2)


class TestTraining:
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo of torch 2.7
    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_compilation(self, kind):
        """All methods together are one graph, with the same gradients."""
        model = make(kind)
        for apply in METHODS.values():
            apply(model)
        expected = gradients(model)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)

        torch.testing.assert_close(gradients(model, compiled), expected, rtol=1e-4, atol=1e-6)

    @each_method
    @pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
    def test_checkpointing(self, apply, kind):
        """Blocks that are computed again, after two forward passes, have equal gradients."""
        model = make(kind)
        plain = gradients(model)
        apply(model)
        model.train()
        expected = gradients(model)

        model.gradient_checkpointing_enable({"use_reentrant": False})  # the default of Transformers 5
        assert all(map(torch.equal, gradients(model), expected))
        model.gradient_checkpointing_disable()
        cf.apply_activation_checkpointing(model)
        assert all(map(torch.equal, gradients(model), expected))
        assert any(not torch.equal(one, other) for one, other in zip(plain, expected, strict=False))

    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_together_with_a_cache(self, kind):
        """All methods in any order, a copy and a saved model: tokens with a cache are those without."""
        model = make(kind)
        for apply in (*METHODS.values(), *METHODS.values()):
            apply(model)
        content = io.BytesIO()
        torch.save(copy.deepcopy(model).eval(), content)
        content.seek(0)
        loaded = torch.load(content, weights_only=False)
        loaded.generation_config.eos_token_id = None

        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        ids = loaded.generate(IDS[:, :4], attention_mask=torch.ones(2, 4), **settings)

        assert torch.equal(model.eval()(ids).logits[:, 3:-1].argmax(-1), ids[:, 4:])
        assert model.state_dict().keys() == loaded.state_dict().keys()

    @each_method
    def test_autocast(self, apply):
        """Under autocast attention gets one dtype, and the model keeps its dtype otherwise."""
        model = make("gpt2", attn_implementation="eager")
        apply(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(IDS).logits.dtype is torch.bfloat16
        model.to(torch.bfloat16)
        assert model(IDS).logits.dtype is torch.bfloat16

    def test_reentrant_checkpointing_raises(self):
        """Values without gradients are an error, not a wrong gradient."""
        model = make()
        cf.apply_value_residual(model)
        model.train().gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()

        with pytest.raises(RuntimeError, match="does not work with reentrant checkpointing"):
            model(IDS, labels=IDS).loss.backward()

    def test_order_with_alibi(self):
        """ALiBi finds attention with gates."""
        results = []
        for first, second in ((0, 1), (1, 0)):
            model, surgery = make("gpt2").eval(), (lambda one: cf.apply_alibi(one, 32), cf.apply_gated_attention)
            surgery[first](model)
            surgery[second](model)
            results.append(model(IDS).logits)
        assert torch.equal(*results)


class TestOptimizers:
    @pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
    def test_groups(self, kind):
        """New vectors join the group of norms, new matrices that of the attention's, and all keep their names."""
        model = make(kind)
        named = [*model.named_parameters()]
        groups = [
            {"params": [pair for pair in named if pair[1].ndim < 2]},
            {"params": [pair for pair in named if pair[1].ndim > 1 and "embed" in pair[0]], "lr": 0.3},
            {"params": [pair for pair in named if pair[1].ndim > 1 and "embed" not in pair[0]]},
        ]
        optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.9)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        moments = len(optimizer.state)

        for apply in (cf.apply_gated_attention, cf.apply_value_residual, cf.apply_qk_norm):
            assert apply(model, optimizer)
            assert not apply(model, optimizer)

        held = {
            name: one
            for group in optimizer.param_groups
            for name, one in zip(group["param_names"], group["params"], strict=True)
        }
        assert {name: id(one) for name, one in held.items()} == {
            name: id(one) for name, one in model.named_parameters()
        }
        vectors, *_, matrices = (group["param_names"] for group in optimizer.param_groups)
        assert sum(".norms." in name for name in vectors) == 6
        assert sum(name.endswith(".weights") for name in vectors) == 2
        assert sum(name.endswith(".gate.weight") for name in matrices) == 3
        assert len(optimizer.state) == moments

    def test_adapters(self):
        """Layers of LoRA that are added before are normalized, afterwards they are added inside, by their names."""
        peft = pytest.importorskip("peft")
        models = []
        for before in (True, False):
            model = make()
            names = ["q_proj", "o_proj"] if before else ["q_proj.layer", "o_proj"]
            config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
            for step in ("adapt", "change") if before else ("change", "adapt"):
                if step == "change":
                    cf.apply_qk_norm(model)
                    cf.apply_gated_attention(model)
                else:
                    torch.manual_seed(3)
                    model = peft.get_peft_model(model, config)
            models.append(model.eval())
        torch.testing.assert_close(models[0](IDS).logits, models[1](IDS).logits)
        assert not models[0].base_model.model.model.layers[0].self_attn.k_proj.norms[0].weight.requires_grad
        assert models[0].base_model.model.model.layers[0].self_attn.q_proj.norms[0].weight.requires_grad
        cf.apply_qk_norm(model := make())
        with pytest.raises(ValueError, match=r"Target module NormalizedHeads[\s\S]* is not supported"):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


class Own(nn.Module):
    """An attention with one layer for queries, keys and values, in a block."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x, **settings):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.proj(heads.transpose(1, 2).flatten(2)))


LAYOUT = cf.AttentionLayout(Own, 4, "qkv", "qkv", "qkv", ("proj", "drop"))


class Stack(nn.Module):
    """Blocks that are lists themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Own(), nn.Linear(8, 8)]) for _ in range(2))

    def forward(self, x, **settings):
        for attention, linear in self.layers:
            x = linear(attention(x, **settings))
        return x


class Grouped(nn.Module):
    """Four heads of queries, and two of keys and values, in one layer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 32), nn.Linear(16, 16)


GROUPED = cf.AttentionLayout(Grouped, 4, "qkv", "qkv", "qkv", ("proj",))


class TestLayout:
    def test_own_attention(self):
        """Norms and gates act on the described layers."""
        torch.manual_seed(0)
        model, x = nn.Sequential(Own(), Own()).eval(), torch.randn(2, 5, 8)
        own = model[0]
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in own.qkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(norm(q, 1.0), norm(k, 1.0), v, is_causal=True)
        expected = own.proj(0.9 * heads.transpose(1, 2).flatten(2))

        reports = [
            cf.apply_qk_norm(model, layout=LAYOUT),
            cf.apply_gated_attention(model, None, LAYOUT, initial_gate=0.9),
        ]

        torch.testing.assert_close(model[0](x), expected)
        assert [len(report) for report in reports] == [2, 2]
        assert type(model[0].output["drop"]) is nn.Dropout

    def test_value_residual_without_arguments(self):
        """A model that passes no arguments to its attention raises, and one that does is changed."""
        model = nn.Sequential(Own(), Own())
        cf.apply_value_residual(model, layout=LAYOUT)
        with pytest.raises(TypeError, match="first_values"):
            model(torch.randn(2, 5, 8))
        with pytest.raises(RuntimeError, match="The attention got no first_values"):
            model[0](torch.randn(2, 5, 8))

    def test_value_residual_in_nested_lists(self):
        """Neither a number before the list of blocks nor one within a block is that of a layer."""
        decoder, own = make().model, Stack()
        expected = copy.deepcopy(decoder)
        model = nn.Sequential(decoder, nn.Identity())
        for one, layout in ((expected, None), (model, None), (own, LAYOUT)):
            cf.apply_value_residual(one, layout=layout)

        torch.testing.assert_close(model(IDS)[0], expected(IDS)[0], rtol=0, atol=0)
        own(torch.randn(2, 5, 8)).sum().backward()
        assert (own.layers[1][0].qkv.weights.grad != 0).all()

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda: cf.apply_qk_norm(nn.Sequential(nn.Linear(2, 2))), "must hold the attention of a decoder"),
            (lambda: cf.apply_qk_norm(qwen3()), "must not normalize its queries already, got attention with 'q_norm'"),
            (lambda: cf.apply_qk_norm(nn.Sequential(nn.Linear(2, 2)), layout=LAYOUT), "layout.module must be a class"),
            (
                lambda: cf.apply_qk_norm(nn.Sequential(Own()), layout=cf.AttentionLayout(Own, 4)),
                "layout must name layers of Own, got 'q_proj', which is missing",
            ),
            (lambda: cf.apply_value_residual(nn.Sequential(Own()), layout=LAYOUT), "must be two or more .* got 1"),
            (lambda: cf.AttentionLayout(Own, 0), "head_dim must be at least 1, got 0"),
            (lambda: cf.AttentionLayout(Own, 4, "q", "kv", "kv"), "must be three layers or one"),
            (lambda: cf.AttentionLayout(Own, 4, output=()), "output at least one"),
            (lambda: cf.apply_qk_norm(nn.Sequential(Grouped()), layout=GROUPED), "as many queries as keys and values"),
        ],
    )
    def test_errors(self, call, text):
        """Each error names what was expected."""
        with pytest.raises(ValueError, match=text):
            call()


def qwen3():
    return transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, intermediate_size=8, num_key_value_heads=2))
