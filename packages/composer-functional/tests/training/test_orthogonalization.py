"""Orthogonalization compared with singular value decompositions, and with torch's Muon."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.functional.training.orthogonalization import _POLAR_EXPRESS, _SAFETY

QUINTIC = (3.4445, -4.7750, 2.0315)
CLASSIC = (1.875, -1.25, 0.375)
"""The polynomial of degree 5 that converges to 1 from every singular value in (0, 1]."""
SHAPES = [(6, 6), (3, 9), (9, 3), (1, 4), (2, 4, 7, 5)]


def matrices(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(values, schedule, factor=1.0):
    """Return U p(S / norm) V^T, with the polynomials applied to the singular values."""
    left, singular, right = torch.linalg.svd(values, full_matrices=False)
    singular = singular / (factor * torch.linalg.vector_norm(singular, dim=-1, keepdim=True))
    for a, b, c in schedule:
        singular = a * singular + b * singular**3 + c * singular**5
    return left @ (singular[..., None] * right)


class TestSingularValues:
    """The result has the singular vectors of the input."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_quintic_is_the_polynomial_of_the_singular_values(self, shape):
        """Five steps in float64 equal the five polynomials of the singular values."""
        given = matrices(shape)

        result = cf.orthogonalize(given, dtype=torch.float64)

        torch.testing.assert_close(result, reference(given, [QUINTIC] * 5), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("steps", [1, 5, 8, 10])
    def test_polar_express_is_the_polynomial_of_each_step(self, shape, steps):
        """Each step has its own coefficients, and the last are repeated."""
        given = matrices(shape)
        schedule = [*_POLAR_EXPRESS, CLASSIC, CLASSIC][:steps]

        result = cf.orthogonalize(given, "polar_express", steps, dtype=torch.float64)

        torch.testing.assert_close(result, reference(given, schedule, _SAFETY), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_converges_to_the_polar_factor(self, shape):
        """Repeated often enough, the classic polynomial gives the product of the singular vectors."""
        given = matrices(shape)
        left, _, right = torch.linalg.svd(given, full_matrices=False)

        result = cf.orthogonalize(given, CLASSIC, steps=40, dtype=torch.float64)

        torch.testing.assert_close(result, left @ right, rtol=1e-9, atol=1e-9)

    def test_quintic_maps_into_the_stated_interval(self):
        """Singular values from 0.01 to 1 reach 0.68 to 1.14, and with Polar Express 0.98 to 1.01 in 6 steps."""
        singular = torch.logspace(-2, 0, 400, dtype=torch.float64)
        quintic, polar = singular.clone(), singular / _SAFETY
        for step in range(6):
            a, b, c = _POLAR_EXPRESS[step]
            polar = a * polar + b * polar**3 + c * polar**5
        for a, b, c in [QUINTIC] * 5:
            quintic = a * quintic + b * quintic**3 + c * quintic**5

        assert (quintic.min() > 0.68, quintic.max() < 1.14) == (True, True)
        assert (polar.min() > 0.98, polar.max() < 1.01) == (True, True)

    def test_first_polynomial_is_optimal(self):
        """Without the safety factor its extremes alternate between two values on [0.0241, 1] (Chebyshev's criterion).

        The paper replaces its lower bound of 0.001 by this one in the first step.
        """
        a, b, c = (one * _SAFETY**power for one, power in zip(_POLAR_EXPRESS[0], (1, 3, 5), strict=True))
        singular = torch.linspace(0.02407327424182761, 1, 200_001, dtype=torch.float64)

        values = a * singular + b * singular**3 + c * singular**5

        turning = values.diff()[1:].sign() != values.diff()[:-1].sign()
        low, high, next_low, next_high = [values[0], *values[1:-1][turning], values[-1]]
        torch.testing.assert_close(low, next_low, rtol=1e-4, atol=0)
        torch.testing.assert_close(high, next_high, rtol=1e-4, atol=0)


class TestTorch:
    """The default is torch's."""

    @pytest.mark.parametrize("shape", [(8, 8), (5, 3), (3, 7), (64, 128), (130, 70), (1, 5)])
    def test_bits_are_those_of_torch(self, shape):
        """A batch in 16 bits equals torch's computation of each matrix, bit for bit."""
        muon = pytest.importorskip("torch.optim._muon", reason="torch.optim.Muon exists from torch 2.9 on")
        given = matrices((3, *shape)).float()

        result = cf.orthogonalize(given, dtype=torch.bfloat16)

        expected = [muon._zeropower_via_newtonschulz(one, QUINTIC, 5, 1e-7) for one in given]
        assert torch.equal(result, torch.stack(expected))


@pytest.mark.parametrize(("capability", "dtype"), [("avx2", "float32"), ("default", "bfloat16")])
@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="only these processors have AVX2")
def test_default_precision_is_fast(capability, dtype):
    """It is bfloat16, unless the CPU is known to multiply slowly in it."""
    program = "import torch; from composer import functional as cf; print(cf.orthogonalize(torch.ones(2, 2)).dtype)"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == f"torch.{dtype}"


class TestLaws:
    @given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.floats(1e-3, 1e3))
    @settings(max_examples=40, deadline=None)
    def test_scale_and_transposition(self, rows, columns, seed, scale):
        """The result does not depend on the scale, and that of the transpose is the transpose."""
        given = matrices((rows, columns), seed)

        result = cf.orthogonalize(given, dtype=torch.float64)

        torch.testing.assert_close(cf.orthogonalize(given * scale, dtype=torch.float64), result, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(cf.orthogonalize(given.mT, dtype=torch.float64), result.mT, rtol=1e-7, atol=1e-9)

    def test_autocast_changes_nothing(self):
        """The precision is that of the argument, also under autocast to another one."""
        given = matrices((4, 6)).float()

        with torch.autocast("cpu", torch.bfloat16):
            found = cf.orthogonalize(given, dtype=torch.float32)

        assert torch.equal(found, cf.orthogonalize(given, dtype=torch.float32))

    def test_zeros_remain(self):
        """A matrix of zeros, as the gradient of an unused layer, gives no NaN."""
        assert torch.equal(cf.orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4, dtype=torch.bfloat16))

    def test_input_does_not_change(self):
        """Also in the precision of the input."""
        given = matrices((4, 3))
        before = given.clone()

        cf.orthogonalize(given, dtype=torch.float64)

        assert torch.equal(given, before)

    def test_coefficients_of_each_step(self):
        """A sequence has one triple for each step; three numbers are those of all steps."""
        given = matrices((4, 3))

        mixed = cf.orthogonalize(given, [QUINTIC, CLASSIC], steps=3, dtype=torch.float64)

        expected = reference(given, [QUINTIC, CLASSIC, CLASSIC])
        torch.testing.assert_close(mixed, expected, rtol=1e-9, atol=1e-9)
