"""The cross entropy of a linear layer in chunks, compared with torch's of all logits."""

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composer import functional as cf

IDS = torch.tensor([6, 0, 3, -100, 2, 2, 5, 1, 0, -100, 4])
SETTINGS = [
    dict(zip(("label_smoothing", "z_loss", "softcap"), values, strict=True))
    for values in itertools.product([0.0, 0.1], [0.0, 0.02], [None, 2.0])
]


@pytest.fixture
def tensors():
    """Inputs, weight and bias of a layer of 7 classes, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (11, 5), (7, 5), (7,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def probabilities():
    return torch.randn(11, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)


def expected(hidden, weight, bias, targets, reduction, label_smoothing, z_loss, softcap):
    """Return the loss from all logits, by the formula."""
    logits = linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    counts = targets != -100 if targets.ndim == 1 else torch.ones(len(targets), dtype=torch.bool)
    losses = losses + z_loss * torch.where(counts, logits.exp().sum(1).log() ** 2, 0.0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}[reduction]


class TestFormula:
    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    @pytest.mark.parametrize("kind", ["ids", "probabilities"])
    @pytest.mark.parametrize("chunk_size", [1, 4, None])
    def test_agrees_with_all_logits(self, tensors, settings, reduction, kind, chunk_size):
        """Loss and gradients are those of the formula in float64."""
        hidden, weight, bias = tensors
        targets = IDS if kind == "ids" else probabilities()
        factors = torch.linspace(-1, 2, 11, dtype=torch.float64) if reduction == "none" else torch.tensor(1.7)

        loss = cf.linear_cross_entropy(
            hidden, weight, targets, bias, chunk_size=chunk_size, reduction=reduction, **settings
        )
        right = expected(hidden, weight, bias, targets, reduction, **settings)

        torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
        gradients = (torch.autograd.grad((one * factors).sum(), tensors) for one in (loss, right))
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_gradients_are_derivatives(self, tensors, reduction):
        """Finite differences confirm the gradients; a second backward pass returns the same ones."""

        def loss(hidden, weight, bias):
            options = {"chunk_size": 3, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 3.0}
            return cf.linear_cross_entropy(hidden, weight, IDS, bias, reduction=reduction, **options)

        assert torch.autograd.gradcheck(loss, tensors)

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_agrees_with_torch(self, tensors, reduction):
        """Loss and gradients are those of torch's function of the same name, which torch has from 2.13 on."""
        function = getattr(torch.nn.functional, "linear_cross_entropy", None)
        if function is None:
            pytest.skip("this torch has no linear_cross_entropy")
        hidden, weight, bias = tensors

        ours = cf.linear_cross_entropy(hidden, weight, IDS, bias, chunk_size=3, reduction=reduction)
        theirs = function(hidden, weight, IDS, linear_bias=bias, reduction=reduction)

        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        gradients = (torch.autograd.grad(one.sum(), tensors) for one in (ours, theirs))
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)

    def test_softcap(self):
        """Logits are limited by tanh."""
        logits = torch.tensor([-50.0, 0.0, 5.0], dtype=torch.float64)

        torch.testing.assert_close(cf.softcap(logits, 30.0), 30 * torch.tanh(logits / 30), rtol=1e-15, atol=0)


class TestIgnored:
    def test_no_row_counts(self, tensors):
        """Without a row that counts the mean is nan, as torch's; a step that leaves it out has gradients of 0."""
        hidden, weight, bias = tensors
        loss = cf.linear_cross_entropy(hidden, weight, torch.full((11,), -100), bias)

        torch.where(torch.tensor(True), 0.0, loss).backward()

        assert loss.isnan()
        assert [one.grad.abs().max() for one in tensors] == [0, 0, 0]

    def test_ignore_index(self, tensors):
        """Another class id can be ignored."""
        hidden, weight, bias = tensors
        ids = IDS.clamp(min=0)

        loss = cf.linear_cross_entropy(hidden, weight, ids, bias, ignore_index=0)

        torch.testing.assert_close(loss, cross_entropy(linear(hidden, weight, bias), ids, ignore_index=0))


class TestPrecision:
    def test_autocast(self, tensors):
        """Under autocast the matrix product is in 16 bits and the loss in float32, as of a linear layer."""
        hidden, weight, bias = (one.detach().float().requires_grad_() for one in tensors)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cf.linear_cross_entropy(hidden, weight, IDS, bias, chunk_size=4)
            right = cross_entropy(linear(hidden, weight, bias), IDS)

        gradients = [torch.autograd.grad(one, (hidden, weight, bias)) for one in (loss, right)]

        assert loss.dtype is torch.float32
        assert {one.dtype for one in gradients[0]} == {torch.float32}
        torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-3)

    def test_gradients_of_16_bits_are_summed_in_32(self):
        """Many chunks do not make the gradient of a bfloat16 weight less exact than one chunk."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(512, 8, generator=generator).bfloat16()
        weight, ids = torch.randn(16, 8, generator=generator).bfloat16(), torch.arange(512) % 16

        def gradient(weight, chunk_size):
            weight = weight.clone().requires_grad_()
            inputs = hidden.to(weight.dtype)
            (result,) = torch.autograd.grad(cf.linear_cross_entropy(inputs, weight, ids, chunk_size=chunk_size), weight)
            return result.double()

        exact = gradient(weight.double(), None)
        errors = [(gradient(weight, size) - exact).norm() for size in (1, 512)]

        assert errors[0] < 1.5 * errors[1]

    def test_frozen_weight(self, tensors):
        """Only gradients that are required are computed."""
        hidden, weight, bias = tensors

        cf.linear_cross_entropy(hidden, weight.detach(), IDS, bias.detach()).backward()

        assert hidden.grad is not None
        assert (weight.grad, bias.grad) == (None, None)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor))]
        )
        return result


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_tensor_of_all_logits(reduction):
    """No tensor in the forward and the backward pass is larger than a chunk of logits."""
    hidden, weight = (torch.rand(size, 4, requires_grad=True) for size in (256, 500))
    with Largest() as largest:
        loss = cf.linear_cross_entropy(hidden, weight, torch.arange(256), chunk_size=16, reduction=reduction)
        loss.mean().backward()

    assert largest.elements == 16 * 500


def test_unknown_class_raises(tensors):
    """A class id without logits raises an error with the range."""
    hidden, weight, _ = tensors

    with pytest.raises(ValueError, match=r"targets must hold class ids from 0 to 6, .*got ids from 0 to 7"):
        cf.linear_cross_entropy(hidden, weight, torch.where(IDS == 6, 7, IDS))
