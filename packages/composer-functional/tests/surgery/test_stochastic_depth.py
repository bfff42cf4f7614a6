"""Stochastic depth applied to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composer import functional as cf


class Block(nn.Linear):
    """A residual block x + f(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x).tanh()


class OtherBlock(Block):
    """A block that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - super().forward(x)


RULE = cf.ResidualRule(lambda block, x: nn.functional.linear(x, block.weight, block.bias).tanh())


def _resnet(depth: int) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, f"resnet{depth}")(num_classes=3)


def _rates(model: nn.Module) -> list[float]:
    return [block.drop_rate for block in model.modules() if isinstance(block, cf.StochasticDepthBlock)]


RESNETS = [(18, "ResNetBasicBlock", 8), (50, "ResNetBottleneck", 16)]


class TestApplyStochasticDepth:
    @pytest.mark.parametrize(("depth", "name", "count"), RESNETS)
    def test_replaces_the_blocks_of_a_resnet(self, depth: int, name: str, count: int):
        """Every block is replaced; state dict names, parameters and outputs without drops are equal."""
        model = _resnet(depth)
        plain = copy.deepcopy(model)
        parameters = list(model.parameters())
        images = torch.rand(2, 3, 32, 32)

        report = cf.apply_stochastic_depth(model, name, drop_rate=0.0)

        assert len(report) == count
        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == list(plain.state_dict())
        assert torch.equal(model(images), plain(images))
        model.load_state_dict(plain.state_dict())

    @pytest.mark.parametrize("method", ["block", "sample"])
    @pytest.mark.parametrize(("depth", "name", "_"), RESNETS)
    def test_resnet_parts_equal_the_plain_block(self, depth: int, name: str, _: int, method: str):
        """With a very small rate, which computes the parts separately, outputs equal the plain network's."""
        model = _resnet(depth).double()
        plain = copy.deepcopy(model)
        images = torch.rand(4, 3, 64, 64, dtype=torch.float64)

        cf.apply_stochastic_depth(model, name, method, drop_rate=1e-14)
        model.train(method == "sample")
        plain.train(method == "sample")

        torch.testing.assert_close(model(images), plain(images))

    @pytest.mark.parametrize(
        ("distribution", "rates"), [("linear", [0.1, 0.2, 0.3, 0.4]), ("uniform", [0.4, 0.4, 0.4, 0.4])]
    )
    def test_distribution(self, distribution: str, rates: list[float]):
        """Linear rates are l / L of the last one's."""
        model = nn.Sequential(Block(4, 4), nn.Sequential(Block(4, 4), nn.ReLU(), Block(4, 4)), Block(4, 4))

        cf.apply_stochastic_depth(model, Block, drop_rate=0.4, drop_distribution=distribution)

        assert _rates(model) == pytest.approx(rates)

    def test_dropped_branches_have_no_gradient(self):
        """Computed branches have gradients, dropped ones none."""
        model = _resnet(18)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cf.apply_stochastic_depth(model, "ResNetBasicBlock", drop_rate=0.5, optimizers=optimizer)
        blocks = [block for block in model.modules() if isinstance(block, cf.StochasticDepthBlock)]

        computed: list[nn.Module] = []
        for block in blocks:
            block.conv1.register_forward_hook(lambda module, args, output: computed.append(module))

        for _ in range(3):
            optimizer.zero_grad()
            computed.clear()
            model(torch.rand(2, 3, 32, 32)).square().sum().backward()
            before = copy.deepcopy(list(model.parameters()))
            optimizer.step()
            moved = [not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]

            assert [block.conv1 for block in blocks if block.conv1.weight.grad is not None] == computed
            assert moved == [parameter.grad is not None for parameter in model.parameters()]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))

    def test_transformer_blocks_by_their_class(self):
        """Blocks of a vision transformer compute x + f(x) and need no rule."""
        from torchvision.models import VisionTransformer
        from torchvision.models.vision_transformer import EncoderBlock

        model = VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=3)
        nn.init.normal_(model.heads.head.weight)
        plain = copy.deepcopy(model).eval()
        images = torch.rand(4, 3, 32, 32)

        report = cf.apply_stochastic_depth(model, EncoderBlock, "sample", 0.5)

        assert [entry.new for entry in report] == ["StochasticEncoderBlock"] * 2
        assert not torch.equal(model.train()(images), plain(images))
        assert torch.equal(model.eval()(images), plain(images))

    def test_language_model_blocks_by_their_class(self):
        """The same holds for GPT-2; with all blocks dropped outputs are those of the embeddings."""
        from transformers import GPT2Config, GPT2Model
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=32, use_cache=False)
        model = GPT2Model(config).eval()
        if isinstance(model.h[0](torch.rand(1, 2, 16)), tuple):  # Transformers 4
            pytest.skip("this version's GPT-2 blocks return tuples, which raise an error")
        tokens = torch.arange(8)[None]
        expected = model.ln_f(model.wte(tokens) + model.wpe(tokens))

        cf.apply_stochastic_depth(model, GPT2Block, drop_rate=1.0, drop_distribution="uniform")

        torch.testing.assert_close(model(tokens).last_hidden_state, expected)

    def test_blocks_by_a_rule(self):
        """A mapping names the parts of a class, or selects the class; blocks are numbered across both."""
        model = nn.Sequential(Block(4, 4), nn.Sequential(OtherBlock(4, 4)), Block(4, 4)).eval()
        x = torch.randn(3, 4)
        first, other, last = model[0], model[1][0], model[2]

        cf.apply_stochastic_depth(model, {Block: RULE, OtherBlock: None}, drop_rate=0.6)

        hidden = x + 0.8 * nn.Linear.forward(first, x).tanh()
        hidden = hidden + 0.6 * (other.forward(hidden) - hidden)
        torch.testing.assert_close(model(x), hidden + 0.4 * nn.Linear.forward(last, hidden).tanh())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("Bottleneck",), "target_layer_name must be one of 'ResNetBottleneck', 'ResNetBasicBlock', got 'Bottl"),
            ((Block, "row"), "stochastic_method must be one of 'block', 'sample', got 'row'"),
            ((Block, "block", 1.5), r"drop_rate must lie in \[0, 1\], got 1.5"),
            ((Block, "block", float("nan")), r"drop_rate must lie in \[0, 1\], got nan"),
            ((Block, "block", 0.5, "cubic"), "drop_distribution must be one of 'linear', 'uniform', got 'cubic'"),
        ],
    )
    def test_bad_settings_raise(self, arguments, message: str):
        """The error names the setting, and the model does not change."""
        model = nn.Sequential(Block(4, 4))

        with pytest.raises(ValueError, match=message):
            cf.apply_stochastic_depth(model, *arguments)

        assert type(model[0]) is Block


class TestSetDropRates:
    def test_sets_all_rates(self):
        """The rates of all blocks are set, linear or uniform."""
        model = nn.Sequential(Block(4, 4), nn.Sequential(Block(4, 4)))
        cf.apply_stochastic_depth(model, Block)

        cf.set_drop_rates(model, 0.1)
        linear = _rates(model)
        cf.set_drop_rates(model, 0.3, "uniform")

        assert linear == [0.05, 0.1]
        assert _rates(model) == [0.3, 0.3]

    def test_model_without_stochastic_blocks_raises(self):
        """A model without stochastic blocks raises."""
        with pytest.raises(ValueError, match=r"got one without\. Call apply_stochastic_depth first"):
            cf.set_drop_rates(nn.Sequential(Block(4, 4)), 0.1)
