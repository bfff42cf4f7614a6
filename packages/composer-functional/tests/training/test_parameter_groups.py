"""Parameter groups compared with those of timm, of BEiT's formula, and of Transformers."""

from __future__ import annotations

import re

import pytest
import timm
import torch
import torchvision
import transformers
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from composer import functional as cf

LR, WEIGHT_DECAY, LAYER_DECAY = 0.1, 0.05, 0.75


def by_name(model, groups):
    """Return the learning rate and the decay of each parameter by its first name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    listed = [
        (names[parameter], (group.get("lr"), group["weight_decay"]))
        for group in groups
        for parameter in group["params"]
    ]
    assert len(listed) == len(dict(listed))
    return dict(listed)


def grouped(model, **options):
    """Return the learning rate and the decay of each parameter in this library's groups."""
    return by_name(model, cf.parameter_groups(model, LR, weight_decay=WEIGHT_DECAY, **options))


def layered(model):
    """Return the depth of each parameter, from its learning rate."""
    rates = {name: rate for name, (rate, _) in grouped(model, layer_decay=0.5).items()}
    smallest = min(rates.values())
    return {name: round(torch.tensor(rate / smallest).log2().item(), 3) for name, rate in rates.items()}


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
TIMM = [
    ("vit_tiny_patch16_224", {**VIT, "depth": 3}),
    ("beit_base_patch16_224", {**VIT, "depth": 2}),
    ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "embed_dim": 12, "num_heads": (1, 2, 3, 6)}),
    ("resnet18", {}),
    ("convnext_atto", {}),
]


@pytest.mark.parametrize(("name", "options"), TIMM, ids=[name for name, _ in TIMM])
class TestTimm:
    def test_layer_decay(self, name, options):
        """Rates and decays are those of timm's param_groups_layer_decay, with as many groups."""
        model = timm.create_model(name, **options)
        skipped = getattr(model, "no_weight_decay", set)()
        expected = param_groups_layer_decay(model, WEIGHT_DECAY, skipped, layer_decay=LAYER_DECAY)

        groups = cf.parameter_groups(model, LR, weight_decay=WEIGHT_DECAY, layer_decay=LAYER_DECAY)

        rates = [{**group, "lr": pytest.approx(LR * group["lr_scale"])} for group in expected]
        assert by_name(model, groups) == by_name(model, rates)
        assert len(groups) == len(expected)

    def test_weight_decay(self, name, options):
        """Without layer_decay there are the two groups of timm's param_groups_weight_decay."""
        model = timm.create_model(name, **options)
        skipped = getattr(model, "no_weight_decay", set)()
        expected = param_groups_weight_decay(model, WEIGHT_DECAY, no_weight_decay_list=skipped)

        groups = cf.parameter_groups(model, weight_decay=WEIGHT_DECAY)

        assert by_name(model, groups) == by_name(model, expected)
        assert len(groups) == 2

    def test_within_another_module(self, name, options):
        """The groups of a model within another one are the same."""
        model = timm.create_model(name, **options)

        within = grouped(nn.ModuleDict({"module": model}), layer_decay=LAYER_DECAY)

        assert within == {f"module.{key}": one for key, one in grouped(model, layer_decay=LAYER_DECAY).items()}


class TestTorchvision:
    def test_resnet(self):
        """A ResNet has the groups of timm's, whose parameters have the same names."""
        ours = torchvision.models.resnet18()
        others = timm.create_model("resnet18")

        assert grouped(ours, layer_decay=LAYER_DECAY) == grouped(others, layer_decay=LAYER_DECAY)

    def test_vision_transformer(self):
        """Positions, the class token, biases and norms do not decay; depths are those of the blocks."""
        model = torchvision.models.VisionTransformer(32, 8, 3, 2, 24, 48, num_classes=5)
        depths, groups = layered(model), grouped(model)

        assert {name for name, (_, decay) in groups.items() if decay} == {
            name
            for name, one in model.named_parameters()
            if one.ndim > 1 and not name.endswith(("_token", "embedding"))
        }
        assert {name: depths[name] for name in ("class_token", "conv_proj.weight", "encoder.pos_embedding")} == {
            "class_token": 0,
            "conv_proj.weight": 0,
            "encoder.pos_embedding": 0,
        }
        assert all(
            depths[name] == int(name.split("encoder_layer_")[1][0]) + 1 for name in depths if "encoder_layer_" in name
        )
        assert depths["encoder.ln.weight"] == depths["heads.head.weight"] == 4

    def test_convnext(self):
        """Scales of shape (C, 1, 1) do not decay; a layer between two blocks has the depth of the second."""
        model = torchvision.models.convnext_tiny(num_classes=5)
        depths, groups = layered(model), grouped(model)

        assert groups["features.1.0.layer_scale"] == (LR, 0.0)
        assert groups["features.1.0.block.0.weight"] == (LR, WEIGHT_DECAY)
        assert depths["features.0.0.weight"] == 0
        assert depths["features.1.2.block.3.weight"] == 3
        assert depths["features.2.1.weight"] == depths["features.3.0.block.0.weight"] == 4
        assert depths["classifier.2.weight"] == 19


def bert():
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2))


def llama():
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def vit():
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2
    )
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("name", ["relative_position_bias_table", "pos", "pos_embed"])
def test_positions_of_two_dimensions(name):
    """Positions of a model's own do not decay, as in the lists of timm's models; other products do."""
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.ones(9, 4)))
    model.table = nn.Parameter(torch.ones(9, 4))

    assert {key: decay for key, (_, decay) in grouped(model).items()} == {name: 0.0, "table": WEIGHT_DECAY}


class TestTransformers:
    @pytest.mark.parametrize("make", [bert, gpt2, llama])
    def test_names_without_decay(self, make):
        """With decayed embeddings, what decays is what Transformers' Trainer decays."""
        model = make()
        norms = [type(module) for module in model.modules() if "Norm" in type(module).__name__]
        decayed = get_parameter_names(model, norms, ["bias"])

        groups = grouped(model, no_decay=())

        trained = {name for name, _ in model.named_parameters()}
        assert {name for name, (_, decay) in groups.items() if decay} == trained.intersection(decayed)

    def test_tied_embeddings(self):
        """A tied embedding occurs once, does not decay, and has the depth of the embedding."""
        model = gpt2()

        groups, depths = grouped(model), layered(model)

        assert model.lm_head.weight is model.transformer.wte.weight
        assert groups["transformer.wte.weight"] == groups["transformer.wpe.weight"] == (LR, 0.0)
        assert "lm_head.weight" not in groups
        assert depths["transformer.wte.weight"] == 0
        assert depths["transformer.ln_f.weight"] == 3

    @pytest.mark.parametrize("make", [bert, vit])
    def test_depths_of_beit(self, make):
        """Embeddings have depth 0, layer k depth k + 1, all that follows the number of layers plus 1."""

        def depth(name):
            if ".embeddings." in name:
                return 0
            layer = re.search(r"\.layers?\.(\d+)\.", name)
            return 4 if layer is None else int(layer[1]) + 1

        model = make()

        assert layered(model) == {name: depth(name) for name, _ in model.named_parameters()}


def deepest(model):
    return max(layered(model).values())


# Networks with stages in Transformers, with timm's of the same kind.
STAGES = {
    "ResNet": ({}, "resnet50"),
    "ConvNext": ({}, "convnext_tiny"),
    "Swin": ({}, "swin_tiny_patch4_window7_224"),
    "Swinv2": ({}, "swinv2_tiny_window8_256"),
    "Bit": ({}, "resnetv2_50x1_bit"),
    "FocalNet": ({}, "focalnet_tiny_srf"),
    "Hiera": ({}, "hiera_base_224"),
}
TORCHVISION = {
    "resnet50": "resnet50",
    "swin_t": "swin_tiny_patch4_window7_224",
    "densenet121": "densenet121",
    "mobilenet_v2": "mobilenetv2_100",
    "efficientnet_b0": "efficientnet_b0",
    "efficientnet_v2_s": "tf_efficientnetv2_s",
}


class TestStages:
    @pytest.mark.parametrize("name", STAGES)
    def test_depths_in_transformers(self, name):
        """Blocks in stages are counted as by timm: neither the stages nor the layers of a block."""
        options, of_timm = STAGES[name]
        with torch.device("meta"):
            config = getattr(transformers, f"{name}Config")(**options)
            model = getattr(transformers, f"{name}ForImageClassification")(config)

        assert deepest(model) == deepest(timm.create_model(of_timm))

    @pytest.mark.parametrize("name", TORCHVISION)
    def test_depths_in_torchvision(self, name):
        """Neither stems, layers between stages, nor convolutions with their norm are blocks."""
        with torch.device("meta"):
            model = getattr(torchvision.models, name)()

        assert deepest(model) == deepest(timm.create_model(TORCHVISION[name]))

    def test_resnet_of_transformers(self):
        """Each parameter of a ResNet has the depth of timm's, block by block."""
        config = transformers.ResNetConfig(depths=[2, 1, 2, 1], hidden_sizes=[8, 8, 8, 8], embedding_size=8)
        depths = layered(transformers.ResNetForImageClassification(config))

        def depth(name):
            if "embedder" in name:
                return 0
            place = re.search(r"stages\.(\d)\.layers\.(\d)", name)
            return 7 if place is None else 1 + [0, 2, 3, 5][int(place[1])] + int(place[2])

        assert depths == {name: depth(name) for name in depths}

    def test_layers_in_lists_beside_the_stages(self):
        """In PVT, patch embeddings are no blocks: each has the depth of the first block of its stage, or 0."""
        config = transformers.PvtConfig(depths=[2, 1, 2, 2], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1] * 4)
        depths = layered(transformers.PvtForImageClassification(config))

        found = [depths[f"pvt.encoder.patch_embeddings.{stage}.projection.weight"] for stage in range(4)]
        assert found == [0, 3, 4, 6]
        assert depths["pvt.encoder.block.3.1.attention.self.query.weight"] == 7
        assert depths["classifier.weight"] == 8

    def test_norms_of_embeddings(self):
        """In BART, the norms of the embeddings are before the layers, though they are registered after them."""
        sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 11}
        sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
        config = transformers.BartConfig(encoder_layers=2, decoder_layers=2, **sizes)
        depths = layered(transformers.BartForSequenceClassification(config))

        assert depths["model.encoder.layernorm_embedding.weight"] == 0
        assert depths["model.decoder.layernorm_embedding.weight"] == depths["model.decoder.layers.0.fc1.weight"] == 3
        assert depths["classification_head.dense.weight"] == 5

    def test_stages_with_another_layer(self):
        """The stages of LeViT, of which two have a layer that is different, consist of blocks."""
        with torch.device("meta"):
            model = transformers.LevitForImageClassification(transformers.LevitConfig(depths=[2, 2, 2]))

        # An attention and an MLP are two residual layers; between stages are a smaller attention and an MLP.
        assert deepest(model) == 3 * 2 * 2 + 2 * 2 + 1

    def test_blocks_with_experts_or_sublayers(self):
        """Experts, the sublayers of T5 and an excitation within a block are no blocks of their own."""
        sizes = {"num_layers": 3, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 11}
        t5 = layered(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))

        class Mixture(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.MultiheadAttention(8, 2)
                self.router = nn.Linear(8, 4)
                self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))

        assert t5["decoder.block.0.layer.2.DenseReluDense.wi.weight"] == 4  # after the encoder's three
        assert deepest(nn.Sequential(nn.Linear(4, 8), *(Mixture() for _ in range(3)), nn.Linear(8, 2))) == 4


class TestTowers:
    def test_towers_have_their_own_depths(self):
        """In CLIP the last layer of each tower is one factor below the projections, however long the other is."""
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        text = {**sizes, "num_hidden_layers": 2, "vocab_size": 20, "eos_token_id": 2, "bos_token_id": 1}
        vision = {**sizes, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
        config = transformers.CLIPConfig(text_config={**text, "pad_token_id": 0}, vision_config=vision)
        depths = layered(transformers.CLIPModel(config))

        def depth(name):
            layers = 2 if name.startswith("text_model") else 3
            layer = re.search(r"layers\.(\d)", name)
            below = layers + 1 if "embedding" in name or "pre_layrnorm" in name else 0
            return 4 - (below if layer is None else layers - int(layer[1]))

        assert depths == {name: depth(name) for name in depths}

    def test_other_parts_are_a_chain(self):
        """An encoder and a decoder, and stages that are attributes, come one after the other."""

        class Stage(nn.Module):
            def __init__(self, inputs, outputs):
                super().__init__()
                self.embed = nn.Linear(inputs, outputs)
                self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(outputs, 1, 8) for _ in range(2)))

        stages = nn.ModuleDict({"first": Stage(3, 8), "second": Stage(8, 16), "head": nn.Linear(16, 2)})
        transformer = nn.Transformer(8, 2, 2, 2, 8, batch_first=True)

        assert deepest(stages) == 5
        assert deepest(nn.ModuleDict({"embed": nn.Embedding(9, 8), "body": transformer})) == 5


class TestRules:
    def test_frozen_parameters_are_left_out(self):
        """As with timm, frozen parameters are in no group."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)

        assert set(grouped(model)) == {"1.weight", "1.bias"}

    def test_layer_of_one_output(self):
        """The weight of a linear layer or a convolution with one output decays, though its first dimension is 1."""
        model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(4, 1), nn.Linear(1, 4))

        groups = grouped(model)

        assert {name for name, (_, decay) in groups.items() if decay} == {"0.weight", "1.weight", "2.weight"}

    @pytest.mark.parametrize(
        ("no_decay", "decay"), [((), WEIGHT_DECAY), ((nn.Embedding,), 0.0), ((nn.Linear,), WEIGHT_DECAY)]
    )
    def test_types_without_decay(self, no_decay, decay):
        """no_decay replaces the types of embeddings."""
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))

        groups = grouped(model, no_decay=no_decay)

        assert groups["0.weight"] == (LR, decay)
        assert groups["1.weight"] == (LR, 0.0 if no_decay == (nn.Linear,) else WEIGHT_DECAY)

    def test_optimizer_trains_with_its_rates(self):
        """An optimizer of torch takes the groups, and one step of SGD moves each layer by its own rate and decay."""
        model = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2)))
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        groups = cf.parameter_groups(model, LR, weight_decay=WEIGHT_DECAY, layer_decay=0.5)
        optimizer = torch.optim.SGD(groups, lr=100.0)
        for one in model.parameters():
            one.grad = torch.ones_like(one)

        optimizer.step()

        for name, one in model.named_parameters():
            rate = LR * 0.5 ** (1 - int(name[0]))
            decay = WEIGHT_DECAY if one.ndim > 1 else 0.0
            torch.testing.assert_close(one.detach(), before[name] - rate * (1 + decay * before[name]))

    def test_decay_of_the_optimizer(self):
        """Without weight_decay, what decays has that of the optimizer, and biases and norms have none."""
        model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)), nn.Linear(8, 3))
        expected = cf.parameter_groups(model, LR, weight_decay=WEIGHT_DECAY, layer_decay=0.5)

        groups = cf.parameter_groups(model, LR, layer_decay=0.5)

        optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
        assert by_name(model, optimizer.param_groups) == by_name(model, expected)
        assert len(groups) == len(expected)
        assert torch.optim.AdamW(cf.parameter_groups(model)).param_groups[0]["weight_decay"] == 0.01

    def test_without_repeated_blocks_raises(self):
        """A model without blocks has no depths."""
        with pytest.raises(
            ValueError, match=r"layer_decay requires a model with repeated blocks, .* got Linear without"
        ):
            grouped(nn.Linear(4, 2), layer_decay=0.5)
