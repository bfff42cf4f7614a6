"""Residual blocks that are dropped randomly."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf


class Plain(nn.Module):
    """A block x + f(x) that counts its computations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + factor * self.linear(x).tanh()


class Parts(nn.Module):
    """A block with a shortcut of another shape and an in-place activation."""

    def __init__(self, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6 if shortcut is None else 4)
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear(x) + (x if self.shortcut is None else self.shortcut(x)))


class Pair(nn.Linear):
    """A block that returns more than a tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


def _shortcut_of(block, x):
    return x if block.shortcut is None else block.shortcut(x)


RULE = cf.ResidualRule(lambda block, x: block.linear(x), _shortcut_of, lambda block, x: block.relu(x))


def _stochastic(block: nn.Module, rate: float, method: str = "block", rule: cf.ResidualRule | None = None) -> nn.Module:
    return cf.StochasticDepthBlock.around(copy.deepcopy(block), rate, method, rule)


class TestStochasticDepthBlock:
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("method", ["block", "sample"])
    @pytest.mark.parametrize(("make", "rule"), [(Plain, None), (Parts, RULE)])
    def test_rate_zero_is_the_plain_block(self, make, rule, method: str, training: bool):
        """With rate 0 outputs are bit-identical to the plain block's, and nothing is drawn."""
        plain = make().train(training)
        block = _stochastic(plain, 0.0, method, rule)
        x = torch.randn(5, 6)
        state = torch.get_rng_state()

        output = block(x)

        assert torch.equal(output, plain(x))
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("method", ["block", "sample"])
    def test_rate_one_is_the_shortcut(self, method: str):
        """With rate 1 the output is the activated shortcut, and the branch is not computed."""
        shortcut = nn.Linear(6, 4)
        called: list[nn.Module] = []
        parts = Parts(shortcut)
        x = torch.randn(5, 6)
        block = _stochastic(parts, 1.0, method, RULE)
        block.linear.register_forward_hook(lambda module, args, output: called.append(module))

        output = block(x)

        assert torch.equal(output, shortcut(x).relu())
        assert not called

    def test_block_is_dropped_for_the_complete_batch(self):
        """Each output is the plain block's or the input; a fraction of drop_rate is not computed."""

        class Fresh(Plain):
            """A class of which no block has been dropped before: the first one is computed once, to check it."""

        plain = Fresh()
        block = _stochastic(plain, 0.3)
        x = torch.randn(2, 6)

        outputs = [block(x) for _ in range(600)]

        preserved = sum(torch.equal(output, plain(x)) for output in outputs)
        assert preserved + sum(torch.equal(output, x) for output in outputs) == 600
        assert block.calls == preserved + 1
        assert abs(preserved / 600 - 0.7) < 0.07

    def test_draws_equal_torchvision(self):
        """With the same seed a block is dropped exactly when torchvision drops a batch."""
        from torchvision.ops import stochastic_depth

        block = _stochastic(Plain(), 0.4)
        x = torch.randn(2, 6)
        actual, expected = [], []

        for seed in range(60):
            torch.manual_seed(seed)
            expected.append(bool(stochastic_depth(torch.ones(2, 6), 0.4, "batch").any()))
            torch.manual_seed(seed)
            actual.append(not torch.equal(block(x), x))

        assert actual == expected
        assert set(actual) == {True, False}

    @pytest.mark.parametrize(("make", "rule"), [(Plain, None), (Parts, RULE)])
    def test_evaluation_scales_the_branch(self, make, rule):
        """With "block", evaluation scales the branch by (1 - drop_rate), its expectation in training."""
        plain = make().eval()
        x = torch.randn(5, 6)
        branch = plain.linear(x).tanh() if rule is None else plain.linear(x)

        output = _stochastic(plain, 0.3, "block", rule)(x)

        expected = x + 0.7 * branch
        torch.testing.assert_close(output, expected if rule is None else expected.relu())

    @pytest.mark.parametrize(("make", "rule"), [(Plain, None), (Parts, RULE)])
    def test_samples_are_dropped_independently(self, make, rule):
        """With "sample", remaining branches are scaled as by torchvision."""
        from torchvision.ops import stochastic_depth

        plain = make()
        x = torch.randn(500, 6)
        branch = plain.linear(x).tanh() if rule is None else plain.linear(x)
        scaled = stochastic_depth(branch, 0.25, "row")
        factor = (scaled / branch)[scaled.any(1)][0, 0].item()

        output = _stochastic(plain, 0.25, "sample", rule)(x)

        dropped, preserved = x, x + factor * branch
        if rule is not None:
            dropped, preserved = dropped.relu(), preserved.relu()
        is_kept = torch.isclose(output, preserved, atol=1e-5).all(1)
        is_dropped = torch.isclose(output, dropped, atol=1e-6).all(1)
        assert factor == pytest.approx(4 / 3)
        assert (is_kept ^ is_dropped).all()
        assert abs(is_kept.float().mean() - 0.75) < 0.08

    @pytest.mark.parametrize("rule", [None, RULE])
    def test_dropped_block_does_not_alias_its_input(self, rule):
        """Later in-place operations do not change the input; gradients are those of the shortcut."""
        block = _stochastic(Parts(), 1.0, "block", rule)
        x = torch.tensor([[-1.0, 2.0, 3.0, -4.0, 5.0, 6.0]], requires_grad=True)
        hidden = x.sigmoid()
        before = hidden.detach().clone()

        output = block(hidden)
        output = output.mul_(2) if rule is None else output * 2  # after a ReLU in place nothing may change in place
        output.sum().backward()

        assert torch.equal(hidden, before)
        torch.testing.assert_close(x.grad, 2 * before * (1 - before))
        assert all(parameter.grad is None for parameter in block.parameters())

    def test_other_arguments_are_passed_on(self):
        """Arguments after the input are passed on."""
        plain = Plain()
        block = _stochastic(plain, 0.5).eval()
        x = torch.randn(5, 6)

        output = block(x, factor=3.0)

        torch.testing.assert_close(output, x + 0.5 * 3 * plain.linear(x).tanh())

    @given(rate=st.floats(0, 1), training=st.booleans(), method=st.sampled_from(["block", "sample"]))
    def test_shape_and_dtype_are_preserved(self, rate: float, training: bool, method: str):
        """The output has the shape and dtype of the input, for any draws."""
        for dtype in (torch.float64, torch.bfloat16):
            block = _stochastic(Plain().to(dtype).train(training), rate, method)

            output = block(torch.randn(3, 2, 6, dtype=dtype))

            assert (output.shape, output.dtype) == ((3, 2, 6), dtype)

    def test_deepcopy_and_pickle(self):
        """Copies and unpickled blocks have the same class and settings."""
        block = cf.StochasticDepthBlock.around(nn.Linear(4, 4), 0.25, "sample")
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)

        for again in (copy.deepcopy(block), torch.load(file, weights_only=False)):
            assert type(again) is type(block)
            assert (again.drop_rate, again.stochastic_method, again.rule) == (0.25, "sample", None)
            assert torch.equal(again.weight, block.weight)

    @pytest.mark.parametrize(
        ("block", "message"),
        [(Pair(6, 6), "got tuple"), (nn.Linear(6, 4), r"of its input's shape \(5, 6\), got shape")],
    )
    @pytest.mark.parametrize("training", [True, False])
    def test_block_without_residual_raises(self, block: nn.Module, message: str, training: bool):
        """A block that is not x + f(x) raises an error with the remedy."""
        stochastic = _stochastic(block.train(training), 0.01)

        with pytest.raises(TypeError, match=rf"{message}.* pass a ResidualRule"):
            stochastic(torch.randn(5, 6))

    def test_evaluation_by_sample_is_the_plain_block(self):
        """With "sample", training scales the branch, so that evaluation does not."""
        plain = Plain().eval()
        x = torch.randn(5, 6)

        output = _stochastic(plain, 0.5, "sample")(x)

        assert torch.equal(output, plain(x))

    @pytest.mark.parametrize("rate", [0.999999, 1.0])
    def test_dropped_block_without_residual_raises(self, rate: float):
        """A block that is not x + f(x) raises the same error if it is dropped."""

        class Never(Pair):
            """A class of which no block has been dropped before."""

        stochastic = _stochastic(Never(6, 6), rate)

        with pytest.raises(TypeError, match=r"Never must return .*, got tuple.* pass a ResidualRule"):
            stochastic(torch.randn(5, 6))
