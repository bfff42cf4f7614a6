"""Muon compared with torch's, with its formula and a singular value decomposition, and the assignment of parameters."""

import copy
import logging
import math
import warnings

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor
from composer.functional.training import orthogonalization
from composer.loggers import InMemoryLogger
from composer.optim import CosineAnnealingWithWarmupScheduler, Muon, muon_with_adamw
from composer.optim.division import shares_of
from fixtures import make_classifier, trained

NEEDS_TORCH_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists from 2.9 on")
SHAPES = [(6, 4), (4, 6), (5, 5), (6, 4), (1, 3)]


def make_weights(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, weights, steps=4, seed=1):
    """Step with random gradients, and return the weights."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def all_equal(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def assert_close(first, second, rate):
    """Compare weights up to the rounding of updates to 16 bits: a batch may be multiplied by another kernel."""
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=rate * 2**-7)


def kinds(model, **options):
    """Return the names of parameters by the settings of their groups."""
    groups = muon_with_adamw(model, lr=0.01, **options).param_groups
    named = {True: "Muon", False: "AdamW"}
    return {
        (named[group["use_muon"]], group["weight_decay"] > 0, group["flatten"]): group["param_names"]
        for group in groups
    }


def adamw_matrices(model):
    """Return the names of the weights of layers that AdamW optimizes, without those of norms."""
    groups = muon_with_adamw(model, lr=0.01).param_groups
    names = [
        name for group in groups if not group["use_muon"] and group["weight_decay"] for name in group["param_names"]
    ]
    return [name for name in names if name.endswith(".weight") and "norm" not in name]


def make_clip(transformers):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 20, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = {**sizes, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(config)


@NEEDS_TORCH_MUON
class TestTorch:
    @pytest.fixture(autouse=True)
    def in_bfloat16(self, monkeypatch):
        """Compute as torch, in bfloat16 also on a CPU where this is slow."""
        monkeypatch.setattr(orthogonalization, "_IS_SLOW_ON_CPU", False)

    @pytest.mark.parametrize("rule", ["original", "match_rms_adamw", None])
    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_torch(self, rule, nesterov, dtype):
        """Steps in any precision, with weight decay, equal those of torch."""
        ours, theirs = make_weights(dtype=dtype), make_weights(dtype=dtype)
        options = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": rule}

        result = train(Muon(ours, **options), ours)

        assert_close(result, train(torch.optim.Muon(theirs, **options), theirs), rate=0.02 * 2.5)

    def test_states_are_interchangeable(self):
        """A state of torch's is loaded with its settings and continues, and the other way round."""
        ours, theirs = make_weights(), make_weights()
        first = torch.optim.Muon(theirs, lr=0.02)
        train(first, theirs)
        with torch.no_grad():
            for own, other in zip(ours, theirs, strict=True):
                own.copy_(other)
        second = Muon(ours, lr=0.5)

        second.load_state_dict(copy.deepcopy(first.state_dict()))

        assert_close(train(second, ours, seed=2), train(first, theirs, seed=2), rate=0.02)
        first.load_state_dict(copy.deepcopy(second.state_dict()))
        assert_close(train(second, ours, seed=3), train(first, theirs, seed=3), rate=0.02)

    def test_state_loads_into_torch(self):
        """With the coefficients as numbers, a state that was never torch's is loaded by it, and continues."""
        ours, theirs = make_weights(), make_weights()
        first = Muon(ours, lr=0.02, ns_coefficients=(3.4445, -4.775, 2.0315))
        with torch.no_grad():
            for own, other in zip(train(first, ours), theirs, strict=True):
                other.copy_(own)
        second = torch.optim.Muon(theirs, lr=0.5)

        second.load_state_dict(copy.deepcopy(first.state_dict()))

        assert_close(train(first, ours, seed=2), train(second, theirs, seed=2), rate=0.02)


def test_divided_work_of_one_process():
    """Without other processes, the option changes nothing, is not in the saved state, and is in a copy."""
    weights = make_weights(), make_weights()
    optimizers = [
        Muon(each, lr=0.02, divide_work=divides) for each, divides in zip(weights, (True, False), strict=True)
    ]

    assert all_equal(*(train(*pair) for pair in zip(optimizers, weights, strict=True)))
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert [copy.deepcopy(optimizer).divide_work for optimizer in optimizers] == [True, False]
    with pytest.raises(TypeError, match="divide_work must be True or False"):
        Muon(weights[0], lr=0.02, divide_work="yes")


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_shares(processes):
    """Each item is in one share, and no share costs more than the mean and the most expensive item."""
    costs = [float(number**2 % 31 + 1) for number in range(50)]

    shares = shares_of(costs, processes)

    assert sorted(place for share in shares for place in share) == list(range(50))
    assert max(sum(costs[place] for place in share) for share in shares) <= sum(costs) / processes + max(costs)


class TestFormula:
    def test_step_is_the_polar_factor(self):
        """Converged coefficients make a step the product of the singular vectors, times lr * 0.2 * sqrt(max(m, n))."""
        (weight,) = make_weights([(8, 5)])
        before = weight.detach().clone()
        weight.grad = torch.randn(8, 5, generator=torch.Generator().manual_seed(3))
        left, _, right = torch.linalg.svd(weight.grad, full_matrices=False)

        Muon([weight], lr=0.1, weight_decay=0.5, ns_coefficients=(1.875, -1.25, 0.375), ns_steps=30).step()

        expected = before * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(8) * left @ right
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=3e-3)  # computed in 16 bits

    def test_updates_are_as_large_as_those_of_adamw(self):
        """With "match_rms_adamw" the root mean square of an update is about 0.2 * lr, for any shape (2502.16982)."""
        weights = make_weights([(32, 64), (128, 16), (64, 64)])
        before = [weight.detach().clone() for weight in weights]

        after = train(
            Muon(weights, lr=1.0, weight_decay=0.0, ns_coefficients="polar_express", ns_steps=8), weights, steps=1
        )

        sizes = [(one - other).square().mean().sqrt().item() for one, other in zip(after, before, strict=True)]
        assert sizes == pytest.approx([0.2] * 3, rel=0.02)

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4)])
    def test_empty_matrices(self, shape):
        """Matrices without elements, as of an empty vocabulary, are left alone, and by muon_with_adamw go to AdamW."""
        empty, (matrix,) = nn.Parameter(torch.zeros(shape)), make_weights([(4, 4)])
        before, model = matrix.detach().clone(), nn.Module()
        model.empty, model.hidden, model.head = nn.Module(), nn.Linear(3, 4), nn.Linear(4, 2)
        model.empty.weight = empty

        train(Muon([empty, matrix], lr=0.1), [empty, matrix], steps=1)

        assert not torch.equal(matrix, before)
        optimizer = muon_with_adamw(model, lr=0.1)
        train(optimizer, list(model.parameters()), steps=1)
        assert optimizer.param_groups[0]["param_names"] == ["hidden.weight"]

    def test_batches_of_matrices(self):
        """With flatten=False, a tensor of experts is stepped as separate matrices."""
        (experts,) = make_weights([(3, 6, 4)])
        separate = [nn.Parameter(one.detach().clone()) for one in experts]
        experts.grad = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
        for one, gradient in zip(separate, experts.grad, strict=True):
            one.grad = gradient

        Muon([{"params": [experts], "flatten": False}], lr=0.1).step()
        Muon(separate, lr=0.1).step()

        assert_close(experts.detach(), [one.detach() for one in separate], rate=0.1)

    def test_other_groups_are_adamw(self):
        """Groups with use_muon=False equal torch.optim.AdamW with their own rate and decay."""
        shapes = [(4,), (3, 2)]
        ours, theirs = make_weights(shapes), make_weights(shapes)
        group = {"params": ours, "use_muon": False, "lr": 0.3, "weight_decay": 0.2}

        result = train(Muon([group], betas=(0.8, 0.9), adamw_eps=1e-6), ours)

        reference = torch.optim.AdamW(theirs, 0.3, (0.8, 0.9), 1e-6, 0.2)
        assert [type(one) for one in result] == [torch.Tensor] * 2
        for one, other in zip(result, train(reference, theirs), strict=True):
            torch.testing.assert_close(one, other)

    def test_does_not_synchronize(self):
        """A step reads no value of a weight or gradient."""
        with torch.device("meta"):
            weight = nn.Parameter(torch.ones(3, 2))
            weight.grad = torch.ones(3, 2)
            optimizer = Muon([weight])
            optimizer.step()

        assert optimizer.state[weight]["momentum_buffer"].device.type == "meta"


class Transformer(nn.Module):
    """The kinds of parameters of a transformer for images and tokens."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.tokens = nn.Embedding(16, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.relative_table = nn.Parameter(torch.zeros(9, 2))
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm([5, 8])
        self.up_proj = nn.Parameter(torch.zeros(3, 8, 16))  # of three experts
        self.convolution = nn.Conv1d(8, 8, 3)
        self.aux_head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.down = nn.Linear(16, 8)
        self.output = nn.Linear(8, 4)


def normuon(weights, gradients, *, lr, decay, momentum, beta, eps):
    """Step by the formulas of arXiv:2510.05491 in float64, with Nesterov momentum and orthogonal factors as given."""
    averages = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    squares = [torch.zeros(len(weight), dtype=torch.float64) for weight in weights]
    weights = [weight.double() for weight in weights]
    for step in gradients:
        for place, gradient in enumerate(one.double() for one in step):
            averages[place] = momentum * averages[place] + (1 - momentum) * gradient
            update = ((1 - momentum) * gradient + momentum * averages[place]).bfloat16()
            factor = cf.orthogonalize(update).double()
            squares[place] = beta * squares[place] + (1 - beta) * factor.square().mean(1)
            factor = factor / (squares[place].sqrt() + eps)[:, None]
            rate = 0.2 * lr * math.sqrt(factor.numel()) / factor.norm()
            weights[place] = weights[place] - lr * decay * weights[place] - rate * factor
    return weights


class TestRows:
    """Rows that are normalized, and weights of several matrices."""

    def test_equals_the_formula(self):
        weights, generator = make_weights(), torch.Generator().manual_seed(2)
        steps = [[torch.randn(weight.shape, generator=generator) for weight in weights] for _ in range(5)]
        expected = normuon(
            [weight.detach() for weight in weights], steps, lr=0.01, decay=0.1, momentum=0.95, beta=0.9, eps=1e-7
        )
        optimizer = Muon(weights, lr=0.01, row_beta=0.9)
        for step in steps:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient
            optimizer.step()
        for weight, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.detach().double(), other, rtol=1e-5, atol=1e-6)
        assert [tuple(optimizer.state[weight]["row_exp_avg_sq"].shape) for weight in weights] == [
            (6,),
            (4,),
            (5,),
            (6,),
            (1,),
        ]

    def test_rows_move_by_similar_amounts(self):
        """Rows whose gradients differ by far move alike, unlike without the averages."""
        spreads = []
        for beta in (None, 0.95):
            weight = nn.Parameter(torch.zeros(16, 8))
            optimizer = Muon([weight], lr=1.0, weight_decay=0.0, row_beta=beta)
            scale = torch.logspace(-3, 0, 16)[:, None]
            train_with = torch.Generator().manual_seed(3)
            for _ in range(20):
                weight.grad = scale * torch.randn(16, 8, generator=train_with)
                optimizer.step()
            rows = weight.detach().norm(dim=1)
            spreads.append(float(rows.max() / rows.min()))
        assert spreads[1] < 4 < spreads[0] / 4

    @pytest.mark.parametrize("beta", [None, 0.95])
    @pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
    def test_fused_equals_separate_matrices(self, beta, rule):
        """Also parts of different sizes, and columns of the weights of Transformers' Conv1D."""
        options = {"lr": 0.01, "adjust_lr_fn": rule, "row_beta": beta}
        parts = make_weights([(8, 6), (4, 6), (4, 6)])
        fused = nn.Parameter(torch.cat([part.detach() for part in parts]))
        transposed = nn.Parameter(fused.detach().t().contiguous())
        optimizers = (
            Muon(parts, **options),
            Muon([{"params": [fused], "fused": (8, 4, 4)}], **options),
            Muon([{"params": [transposed], "fused": (8, 4, 4), "transposed": True}], **options),
        )
        generator = torch.Generator().manual_seed(4)
        for _ in range(3):
            fused.grad = torch.randn(fused.shape, generator=generator)
            transposed.grad = fused.grad.t().contiguous()
            for part, gradient in zip(parts, fused.grad.split([8, 4, 4]), strict=True):
                part.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        expected = [torch.cat([part.detach() for part in parts])]
        assert_close([fused.detach()], expected, 0.05)
        assert_close([transposed.detach().t()], expected, 0.05)
        whole = Muon(
            [other := nn.Parameter(torch.cat([part.detach() for part in make_weights([(8, 6), (4, 6), (4, 6)])]))],
            **options,
        )
        generator = torch.Generator().manual_seed(4)
        for _ in range(3):
            other.grad = torch.randn(fused.shape, generator=generator)
            whole.step()
        assert not torch.allclose(other, fused, atol=1e-3)

    def test_state_in_16_bits(self):
        """Loaded by torch, which converts states to the weights' dtype, the averages have 32 bits again."""
        weights = make_weights([(6, 4)], torch.bfloat16)
        optimizer = Muon(weights, lr=0.01, row_beta=0.9)
        train(optimizer, weights)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[weights[0]]["row_exp_avg_sq"].dtype is torch.bfloat16

        train(optimizer, weights)

        assert optimizer.state[weights[0]]["row_exp_avg_sq"].dtype is torch.float32

    def test_projections_of_gpt2(self):
        """Names of fused projections give a group of their own, with the outputs as rows."""
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=11, n_positions=8)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = muon_with_adamw(model, lr=0.01, row_beta=0.95, fused={"*.attn.c_attn": 3})
        groups = {
            (group["fused"], group["transposed"]): group["param_names"]
            for group in optimizer.param_groups
            if group["use_muon"]
        }
        assert groups[(8, 8, 8), True] == [f"transformer.h.{layer}.attn.c_attn.weight" for layer in (0, 1)]
        assert len(groups[None, True]) == 6
        model(torch.zeros(2, 8, dtype=torch.long), labels=torch.ones(2, 8, dtype=torch.long)).loss.backward()
        optimizer.step()
        state = optimizer.state[model.transformer.h[0].mlp.c_fc.weight]
        assert state["row_exp_avg_sq"].shape == (32,)

    @pytest.mark.parametrize("rank", [8, 6])
    @pytest.mark.parametrize("is_wrapped", [True, False])
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_adapters(self, rank, is_wrapped):
        """Only matrices with the outputs of the projection have its parts: not the first factor of LoRA."""
        transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=11, n_positions=8)
        lora = peft.LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
        if is_wrapped:
            cf.apply_qk_norm(model)

        optimizer = muon_with_adamw(model, lr=0.01, fused={"*.c_attn": 3})

        found = {name: group["fused"] for group in optimizer.param_groups for name in group["param_names"]}
        assert {name.split(".")[-2]: parts for name, parts in found.items() if ".c_attn." in name and parts} == {
            "base_layer": (16, 16, 16),
            "default": (16, 16, 16),
        }
        assert {parts for name, parts in found.items() if "lora_A" in name} == {None}

    def test_group_with_a_number(self):
        """In a group, each part has its number of rows."""
        with pytest.raises(ValueError, match=r"fused must be numbers of rows whose sum is 6, got 3\."):
            Muon([{"params": make_weights()[:1], "fused": 3}])

    @pytest.mark.parametrize(
        ("fused", "message"),
        [
            ({"0": 3}, "divides 8 outputs, got 3 for '0' and '0.weight'"),
            ({"0": (4, 3)}, r"whose sum is 8, got \(4, 3\)"),
            ({"1": 2}, "fused must name hidden matrices, got '1.weight', which is a parameter of AdamW"),
            ({"layer": 2}, "fused must name parameters or modules, got 'layer'"),
        ],
    )
    def test_invalid_parts(self, fused, message):
        """Parts that do not fit the outputs, and names of no hidden matrix, raise errors."""
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        with pytest.raises(ValueError, match=message):
            muon_with_adamw(model, lr=0.01, fused=fused)

    def test_invalid_decay(self):
        """A decay of 1 would never change."""
        with pytest.raises(ValueError, match=r"row_beta must lie in \[0, 1\), got 1.0"):
            Muon(make_weights(), row_beta=1.0)


class TestAssignment:
    def test_kinds_of_parameters(self):
        """Hidden matrices go to Muon; embeddings, heads, norms, tables and vectors to AdamW."""
        assert kinds(Transformer()) == {
            ("Muon", True, True): [
                "attention.in_proj_weight",
                "attention.out_proj.weight",
                "convolution.weight",
                "aux_head.0.weight",
                "down.weight",
            ],
            ("Muon", True, False): ["up_proj"],
            ("AdamW", True, True): [
                "pos_embed",
                "relative_table",
                "patch_embed.weight",
                "tokens.weight",
                "norm.weight",
                "norm.bias",
                "aux_head.1.weight",
                "output.weight",
            ],
            ("AdamW", False, True): [
                "cls_token",
                "patch_embed.bias",
                "attention.in_proj_bias",
                "attention.out_proj.bias",
                "convolution.bias",
                "aux_head.0.bias",
                "aux_head.1.bias",
                "down.bias",
                "output.bias",
            ],
        }

    def test_tied_head(self):
        """A head that shares the weight of the embedding is no matrix for Muon, and neither is another the last one."""
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
        model[2].weight = model[0].weight

        assert kinds(model)["Muon", True, True] == ["1.weight"]

    @pytest.mark.parametrize("pattern", ["0", "0.weight", "0.*", ["?.weight"]])
    def test_named_parameters(self, pattern):
        """Names of parameters or modules, and patterns, are left to AdamW."""
        model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"x": nn.Linear(4, 4)}), nn.Linear(4, 4))

        assert kinds(model, adamw=pattern)["Muon", True, True] == ["1.x.weight"]

    def test_models_of_transformers(self):
        """In GPT-2 with a tied head, all matrices of the blocks go to Muon, and both embeddings to AdamW."""
        transformers = pytest.importorskip("transformers", reason="it is an optional dependency")
        sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 4}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)

        names = kinds(transformers.GPT2LMHeadModel(config))

        assert [name.removeprefix("transformer.h.0.") for name in names["Muon", True, True]] == [
            "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"
        ]  # fmt: skip
        assert names["AdamW", True, True] == ["transformer.wte.weight", "transformer.wpe.weight"]

    @pytest.mark.parametrize(
        ("name", "options", "outputs"),
        [
            ("fasterrcnn_mobilenet_v3_large_320_fpn", {}, ["cls_logits", "bbox_pred", "cls_score", "bbox_pred"]),
            ("maskrcnn_resnet50_fpn", {}, ["cls_logits", "bbox_pred", "cls_score", "bbox_pred", "mask_fcn_logits"]),
            ("retinanet_resnet50_fpn", {}, ["cls_logits", "bbox_reg"]),
            ("fcos_resnet50_fpn", {"num_classes": 2}, ["cls_logits", "bbox_reg"]),
        ],
    )
    def test_detectors(self, name, options, outputs):
        """Scores and boxes are outputs, and the hidden layers of heads are none."""
        detection = pytest.importorskip("torchvision").models.detection
        model = getattr(detection, name)(weights=None, weights_backbone=None, **options)

        assert [path.split(".")[-2] for path in adamw_matrices(model)] == outputs

    @pytest.mark.parametrize(
        ("name", "inputs", "outputs"),
        [
            ("resnet18", [], ["fc"]),
            ("convnext_atto", ["stem.0"], ["head.fc"]),
            ("vit_tiny_patch16_224", ["patch_embed.proj"], ["head"]),
            ("deit_tiny_distilled_patch16_224", ["patch_embed.proj"], ["head", "head_dist"]),
            ("mobilenetv3_small_050", [], ["classifier"]),
            ("pvt_v2_b0", [], ["head"]),
        ],
    )
    def test_models_of_timm(self, name, inputs, outputs):
        """Patches and heads go to AdamW; stems and a ``conv_head``, which is hidden, to Muon."""
        model = pytest.importorskip("timm").create_model(name)

        assert adamw_matrices(model) == [f"{path}.weight" for path in (*inputs, *outputs)]

    def test_same_network_of_two_libraries(self):
        """ResNets and ConvNeXts of Transformers are divided as those of timm and torchvision."""
        transformers = pytest.importorskip("transformers")
        resnet = transformers.ResNetForImageClassification(transformers.ResNetConfig(depths=[2, 2, 2, 2]))
        convnext = transformers.ConvNextForImageClassification(transformers.ConvNextConfig())

        assert adamw_matrices(resnet) == ["classifier.1.weight"]
        assert adamw_matrices(convnext) == ["convnext.embeddings.patch_embeddings.weight", "classifier.weight"]

    def test_two_towers(self):
        """The projections of both towers of CLIP into one space are outputs."""
        matrices = adamw_matrices(make_clip(pytest.importorskip("transformers")))

        assert [path for path in matrices if "embedding" not in path] == [
            "visual_projection.weight",
            "text_projection.weight",
        ]
        assert sum("patch_embedding" in path for path in matrices) == 1

    def test_several_heads(self):
        """Each head is an output, also of an MLP without blocks."""
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        model.add_module("first", nn.Linear(16, 3))
        model.add_module("second", nn.Linear(16, 5))

        assert adamw_matrices(model) == ["first.weight", "second.weight"]

    def test_assignment_is_logged(self, caplog):
        """The table is logged, and is a method of the optimizer."""
        with caplog.at_level(logging.INFO, logger="composer"):
            optimizer = muon_with_adamw(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), lr=0.01)

        assert optimizer.routing() in caplog.text
        assert "Muon: 1 tensor, 32 elements\n  0.weight  8 x 4\n" in optimizer.routing()

    def test_settings(self):
        """Rates and decays of the groups are as passed."""
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

        groups = muon_with_adamw(model, 0.02, 0.3, adamw_lr=0.01, ns_coefficients="polar_express").param_groups

        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.02, 0.3), (0.01, 0.3), (0.01, 0.0)]
        assert groups[0]["ns_coefficients"] == "polar_express"


class TestErrors:
    def test_model_without_a_matrix(self):
        """A model without hidden matrices raises at construction, with the remedy."""
        for model in (nn.Linear(3, 2), nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 4))):
            with pytest.raises(ValueError, match=r"model must have a hidden matrix for Muon, .* torch\.optim\.AdamW"):
                muon_with_adamw(model, lr=0.01)

    def test_unknown_name(self):
        """A name that matches nothing raises with a suggestion."""
        model = nn.Sequential()
        model.add_module("output", nn.Linear(3, 2))

        with pytest.raises(ValueError, match="adamw must name parameters or modules, got 'outptu'; did you mean 'out"):
            muon_with_adamw(model, lr=0.01, adamw=["outptu"])

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"lr": -1.0}, ValueError, "lr must be at least 0, got -1.0"),
            ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\), got 1.0"),
            ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
            ({"ns_coefficients": "cubic"}, ValueError, "ns_coefficients must be one of 'quintic', 'polar_express'"),
            ({"ns_coefficients": (1.0, 2.0)}, TypeError, "ns_coefficients must be 'quintic', .*three numbers"),
            ({"ns_steps": 0}, ValueError, "ns_steps must be at least 1, got 0"),
            ({"eps": 0.0}, ValueError, "eps must be more than 0, got 0.0"),
            ({"adjust_lr_fn": "rms"}, ValueError, "adjust_lr_fn must be one of 'match_rms_adamw'"),
            ({"betas": (0.9, 1.0)}, ValueError, r"betas must be two numbers in \[0, 1\)"),
            ({"adamw_eps": -1.0}, ValueError, "adamw_eps must be at least 0"),
        ],
    )
    def test_invalid_settings(self, options, error, message):
        """The error has the name of the setting."""
        with pytest.raises(error, match=message):
            Muon(make_weights(), **options)


class TestInTraining:
    def test_learns_with_a_schedule(self):
        """A schedule multiplies the rates of all groups, and the training lowers the loss."""
        history, model = InMemoryLogger(), make_classifier()
        trained(
            model=model,
            optimizers=muon_with_adamw(model, lr=0.05, adamw_lr=0.01),
            schedulers=CosineAnnealingWithWarmupScheduler("5ba"),
            callbacks=LRMonitor(),
            loggers=history,
            max_duration="20ep",
        )

        losses = history.get_timeseries("loss/train/total")["loss/train/total"]
        rates = [history.get_timeseries(name)[name] for name in (f"lr-Muon/group{group}" for group in range(3))]
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
        assert len(set(rates[0])) > 90  # of 100 batches
        assert rates[1] == pytest.approx([rate / 5 for rate in rates[0]])

    def test_clipping_by_norm_warns(self):
        """Beside GradientClipping by norm there is one warning in a training, and by value none."""
        for kind, count in (("norm", 1), ("value", 0)):
            model = make_classifier()

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trained(model=model, optimizers=muon_with_adamw(model, lr=0.05), algorithms=GradientClipping(kind, 1.0))

            assert [str(one.message)[:41] for one in caught] == ["GradientClipping by norm has little effec"] * count

    def test_loss_scaler(self):
        """Scaled gradients give bit-identical results, and non-finite ones skip the step."""
        plain, scaled = make_weights(), make_weights()
        first, second = Muon(plain, lr=0.1), Muon(scaled, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

        for factor in (1.0, float("inf"), 2.0):
            for weights, optimizer in ((plain, first), (scaled, second)):
                optimizer.zero_grad()
                loss = sum((weight.square() * factor).sum() for weight in weights)
                (scaler.scale(loss) if optimizer is second else loss).backward()
            scaler.step(second)
            scaler.update()
            if factor != float("inf"):
                first.step()

        assert all_equal(plain, scaled)
