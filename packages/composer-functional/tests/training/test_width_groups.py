"""Learning rates over widths and depths: the rules, the coordinate check, and the best rates of two sizes."""

from functools import partial

import pytest
import torch
from torch import nn

from composer import functional as cf

WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 4, 8, 16, 32)


class Mlp(nn.Module):
    """Residual blocks, whose branches have the factor 1 / depth, between an embedding and a head of zeros."""

    exponent = 1

    def __init__(self, width, depth=2, tokens=8):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x) / len(self.blocks) ** self.exponent
        return self.head(self.norm(x))


class Unscaled(Mlp):
    """The same without the factor."""

    exponent = 0


class Transformer(Mlp):
    """The same with a layer of attention, whose heads have one size."""

    def __init__(self, width, depth=2, tokens=8):
        super().__init__(width, depth, tokens)
        self.layer = nn.TransformerEncoderLayer(width, width // 16, 2 * width, 0.0, batch_first=True, norm_first=True)

    def forward(self, ids):
        return super().forward(ids) + self.head(self.layer(self.embedding(ids)))


def rates(model, base, **options):
    """Return the factors of the rate, and the decay, of each parameter by name."""
    groups = cf.width_groups(model, base, lr=1.0, weight_decay=0.1, **options)
    found = {id(one): (group["lr"], group["weight_decay"]) for group in groups for one in group["params"]}
    return {name: found[id(one)] for name, one in model.named_parameters()}


class TestRules:
    def test_width_and_depth(self):
        """Hidden matrices and the head have rates by their inputs, and the same product with the decay."""
        found = rates(Mlp(96, depth=5), Mlp(32, depth=2))

        assert found["embedding.weight"] == found["norm.weight"] == found["head.bias"] == (1.0, 0.0)
        assert found["blocks.4.0.weight"] == found["blocks.4.1.bias"] == (1.0, 0.0)
        for name in ("blocks.0.1.weight", "blocks.4.3.weight", "head.weight"):
            assert found[name] == pytest.approx((1 / 3, 0.3))

    def test_decoupled_decay(self):
        """Optimizers that do not multiply the decay by the rate get the same one for each width."""
        found = rates(Mlp(64), Mlp(16), decoupled=True)

        assert {decay for name, (_, decay) in found.items() if name.endswith("1.weight")} == {0.1}

    def test_fan_in_differs_from_fan_out(self):
        """The inputs decide, also of convolutions; an input layer keeps its rate."""

        def make(width):
            return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 2 * width, 3), nn.Linear(2 * width, 5))

        assert [rate for rate, _ in rates(make(40), make(8)).values()] == [1, 1, 0.2, 1, 0.2, 1]

    def test_transformers_linear_layer(self):
        """The layer of GPT-2 has its inputs in the first dimension, and a tied head is an embedding."""
        from transformers import GPT2Config, GPT2LMHeadModel

        def make(width):
            config = GPT2Config(vocab_size=20, n_positions=8, n_embd=width, n_layer=1, n_head=2)
            with torch.device("meta"):
                return GPT2LMHeadModel(config)

        found = {name: rate for name, (rate, _) in rates(make(32), make(8)).items()}

        in_four_times_the_width = found["transformer.h.0.mlp.c_proj.weight"]
        assert in_four_times_the_width == found["transformer.h.0.attn.c_attn.weight"] == 0.25
        assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == 1
        assert found["transformer.h.0.ln_1.weight"] == 1

    def test_embeddings_of_unit_scaling(self):
        """u-µP's embeddings have rates by the square root of the width."""
        assert rates(Mlp(128), Mlp(32), embedding_exponent=0.5)["embedding.weight"] == (0.5, 0.0)

    def test_frozen(self):
        """Frozen parameters are left out, and a frozen model raises an error."""
        model = Mlp(32)
        model.embedding.requires_grad_(False)
        assert sum(len(group["params"]) for group in cf.width_groups(model, Mlp(32), 0.1)) == 16
        with pytest.raises(ValueError, match="require gradients"):
            cf.width_groups(model.requires_grad_(False), Mlp(32), 0.1)

    @pytest.mark.parametrize("base", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])
    def test_another_base(self, base):
        """A base model with other parameters raises an error that names one."""
        with pytest.raises(ValueError, match=r"'embedding.weight' of the shape \(8, 32\) is missing"):
            cf.width_groups(Mlp(32), base, 0.1)

    @pytest.mark.parametrize("groups", [lambda width: 1, lambda width: 4, lambda width: width])
    def test_transposed_convolution(self, groups):
        """Its inputs are in the first dimension, those of one group; the outputs do not matter."""

        def make(width):
            return nn.ConvTranspose2d(width, 3 * width, 3, groups=groups(width), bias=False)

        expected = (8 // groups(8)) / (40 // groups(40))
        assert rates(make(40), make(8))["weight"] == pytest.approx((expected, 0.1 / expected))

    def test_other_layers_with_known_inputs(self):
        """Attention and recurrent layers have rates by their inputs."""
        found = rates(nn.MultiheadAttention(32, 2), nn.MultiheadAttention(8, 2))
        assert found["in_proj_weight"][0] == found["out_proj.weight"][0] == 0.25
        found = rates(nn.LSTM(4, 32), nn.LSTM(4, 8))
        assert (found["weight_ih_l0"][0], found["weight_hh_l0"][0]) == (1, 0.25)

    @pytest.mark.parametrize("shape", [(4, 8, 8), (16, 8)])
    def test_unknown_inputs(self, shape):
        """Stacked matrices, such as experts, and matrices such as CLIP's positions raise an error, if not frozen."""
        model = nn.Module()
        model.layer, model.table = nn.Linear(8, 8), nn.Parameter(torch.ones(shape))
        with pytest.raises(ValueError, match=r"'table' of the shape .* is of Module, no layer .* Freeze it"):
            cf.width_groups(model, model, 0.1)
        model.table.requires_grad_(False)
        assert [len(group["params"]) for group in cf.width_groups(model, model, 0.1)] == [2]


def train_on(model, groups, lr):
    """Return the optimizer, and the loss of fixed tokens."""
    optimizer = torch.optim.Adam(groups or model.parameters(), lr=lr)
    ids = torch.arange(8).repeat(2, 1)
    return optimizer, lambda model: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())


def slopes(make, sizes=WIDTHS, *, scaled):
    """Return the slope of the logarithm of each layer's changes over that of the size, of blocks that all have."""
    changes = []
    for size in sizes:
        torch.manual_seed(0)
        model = make(size).double()
        groups = cf.width_groups(model, make(sizes[0]), 0.003) if scaled else None
        changes.append(cf.activation_changes(model, *train_on(model, groups, 0.003), steps=4))
    x = torch.tensor(sizes).log2()
    x = x - x.mean()
    y = torch.tensor([[one[name] for name in changes[0]] for one in changes]).log2()
    return dict(zip(changes[0], ((x @ y) / (x @ x)).tolist(), strict=True))


class TestCoordinates:
    @pytest.mark.parametrize("make", [Mlp, Transformer])
    def test_changes_do_not_depend_on_the_width(self, make):
        """The changes of all layers are flat over eight times the width with the groups, and grow without them."""
        flat, steep = slopes(make, scaled=True), slopes(make, scaled=False)

        assert max(map(abs, flat.values())) < 0.1
        assert min(steep[name] for name in ("blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3", "head")) > 0.6

    def test_changes_do_not_depend_on_the_depth(self):
        """With the factor of the branches, the changes are flat over 16 times the depth, and grow without it."""
        flat, steep = (slopes(partial(make, 64), DEPTHS, scaled=True) for make in (Mlp, Unscaled))

        assert max(abs(flat[name]) for name in ("norm", "head")) < 0.05
        assert max(abs(flat[name]) for name in flat if name.startswith("blocks") and not name.endswith("0")) < 0.1
        assert steep["norm"] > 0.3

    def test_a_layer_alone(self):
        """The changes are those of the weights after the steps; layers without parameters are left out."""
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        first, x = model[0].weight.detach().clone(), torch.rand(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bias = model[0].bias.detach().clone()

        found = cf.activation_changes(model, optimizer, lambda model: model(x).square().mean(), steps=3)

        expected = (nn.functional.linear(x, model[0].weight - first, model[0].bias - bias)).abs().mean()
        assert list(found) == ["0", "2"]
        assert found["0"] == pytest.approx(expected.item(), rel=1e-4)


def losses_by_rate(make, width, depth=2, *, scaled=True):
    """Return the losses after ten steps, by the logarithm of the rate."""
    losses = {}
    for power in range(-7, 0):
        torch.manual_seed(0)
        model = make(width, depth, tokens=64)
        groups = cf.width_groups(model, make(32, tokens=64), 2.0**power) if scaled else model.parameters()
        optimizer = torch.optim.Adam(groups, lr=2.0**power)
        batches = torch.randint(64, (10, 32), generator=torch.Generator().manual_seed(1))
        for ids in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids), ids * 5 % 64).backward()
            optimizer.step()
        with torch.no_grad():
            losses[power] = nn.functional.cross_entropy(model(torch.arange(64)), torch.arange(64) * 5 % 64).item()
    return losses


def test_the_best_rate_of_a_small_model_is_good_in_a_wide_one():
    """The best rates of 32 and of 256 features are neighbours; without groups they differ by a factor of 4 or more."""
    small, wide, unscaled = (
        losses_by_rate(Mlp, width, scaled=scaled) for width, scaled in ((32, True), (256, True), (256, False))
    )
    best = min(small, key=small.get)

    assert abs(min(wide, key=wide.get) - best) <= 1
    assert min(unscaled, key=unscaled.get) <= best - 2
    assert wide[best] < small[best]
    assert unscaled[best] > 5 * wide[best]


def test_the_best_rate_of_a_shallow_model_is_good_in_a_deep_one():
    """The best rates of 2 and of 16 blocks are neighbours; without the factor, that of 2 is bad for 16 blocks."""
    (shallow, deep), (_, unscaled) = (
        [losses_by_rate(make, 32, depth) for depth in (2, 16)] for make in (Mlp, Unscaled)
    )
    best = min(shallow, key=shallow.get)

    assert abs(min(deep, key=deep.get) - best) <= 1
    assert deep[best] < shallow[best]
    assert unscaled[best] > 5 * deep[best]
