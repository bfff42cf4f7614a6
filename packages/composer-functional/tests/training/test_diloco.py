"""The outer step compared with SGD of torch."""

import pytest
import torch

from composer import functional as cf


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (4,), ())]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_equals_sgd(momentum, nesterov):
    """Three steps are bit-identical with torch's, whose gradient is the difference; no argument is changed."""
    weights, momenta = tensors(0), [torch.zeros_like(one) for one in tensors(0)]
    expected = [torch.nn.Parameter(one) for one in tensors(0)]
    optimizer = torch.optim.SGD(expected, lr=0.7, momentum=momentum, nesterov=nesterov)
    for seed in (1, 2, 3):
        differences = tensors(seed)
        given = [one.clone() for one in (*weights, *differences, *momenta)]
        result = cf.compute_outer_step(weights, differences, momenta, 0.7, momentum, nesterov=nesterov)
        assert all(map(torch.equal, given, (*weights, *differences, *momenta)))
        weights, momenta = result
        for weight, difference in zip(expected, differences, strict=True):
            weight.grad = difference
        optimizer.step()

    assert all(map(torch.equal, weights, expected))


def test_mean():
    """Without momentum and with a rate of 1, the result is the mean of the weights."""
    (before,), replicas = tensors(0)[:1], [tensors(seed)[0] for seed in (1, 2)]
    mean = (replicas[0] + replicas[1]) / 2

    (result,), _ = cf.compute_outer_step([before], [before - mean], [torch.zeros_like(before)], 1.0, 0.0)

    torch.testing.assert_close(result, mean, rtol=0, atol=1e-15)


def test_nothing():
    """Without weights there is nothing to compute."""
    assert cf.compute_outer_step([], [], []) == ([], [])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": 0}, ValueError, "lr must be"),
        ({"momentum": 1}, ValueError, "momentum must lie in"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False"),
        ({"momenta": []}, ValueError, "must be as many tensors, got 1, 1 and 0"),
    ],
)
def test_errors(options, error, message):
    """Settings out of range, of another type, and other numbers of tensors raise an error."""
    one = [torch.zeros(2)]
    with pytest.raises(error, match=message):
        cf.compute_outer_step(**{"weights": one, "differences": one, "momenta": one} | options)
