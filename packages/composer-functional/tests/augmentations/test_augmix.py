"""AugMix on batches and on single images; what both share with RandAugment is tested there."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from composer import functional as cf


def double(img: Tensor, level: float) -> Tensor:
    """Make an image brighter, for any level."""
    return img * 2


def add_level(img: Tensor, level: float) -> Tensor:
    """Add the level."""
    return img + level


def reference_mix(images: Tensor, draws: cf.AugMixDraws) -> Tensor:
    """Blend chains by the formula in float64, each computed with mixing 1."""
    shape = (-1, 1, 1, 1)
    kept = (1 - draws.mixing.double()).view(shape)
    mixed = kept.to(images.device) * images.double()
    one = torch.ones(1, images.shape[0])
    for chain, weight in enumerate(draws.weights):
        operations, magnitudes = draws.operations[:, chain, None], draws.magnitudes[:, chain, None]
        changed = cf.augmix_batch(images, draws=cf.AugMixDraws(operations, magnitudes, one, one[0]))
        mixed += (draws.mixing.double() * weight).view(shape).to(images.device) * changed.double()
    return mixed


class TestBatch:
    @pytest.mark.parametrize("width", [1, 2, 4])
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
    def test_matches_the_formula(self, dtype: torch.dtype, width: int, device: torch.device):
        """The output is (1 - mixing) of the image plus mixing of the weighted chains; bytes are rounded once."""
        white = 255 if dtype == torch.uint8 else 1
        images = (torch.rand(12, 3, 9, 8, device=device) * white).to(dtype)
        draws = cf.draw_augmix(12, 5, width=width)

        output = cf.augmix_batch(images, draws=draws)

        tolerance = 0.502 if dtype == torch.uint8 else 1e-6
        assert (output.double() - reference_mix(images, draws)).abs().max() <= tolerance

    @given(
        seed=st.integers(0, 2**40),
        count=st.integers(1, 5),
        channels=st.sampled_from([1, 3]),
        size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
        dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]),
        depth=st.integers(-1, 3),
    )
    def test_properties(self, seed, count, channels, size, dtype, depth):
        """Draws are reproducible; shape, dtype and range are preserved, and the input is not modified."""
        white = 255 if dtype == torch.uint8 else 1
        images = (torch.rand(count, channels, *size) * white).to(dtype)
        before = images.clone()

        first, second = (
            cf.augmix_batch(images, 7, depth, generator=torch.Generator().manual_seed(seed)) for _ in range(2)
        )
        draws = cf.draw_augmix(count, 7, depth, generator=torch.Generator().manual_seed(seed))

        assert torch.equal(first, second)
        assert torch.equal(first, cf.augmix_batch(images, draws=draws))
        assert (first.shape, first.dtype) == (images.shape, dtype)
        assert 0 <= first.min() <= first.max() <= white + 1e-6
        assert torch.equal(images, before)

    def test_compiles_to_one_graph(self):
        """With draws as inputs, one graph is compiled."""
        graphs = []
        compiled = torch.compile(
            cf.augmix_batch, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
        )
        images = torch.rand(6, 3, 9, 8)

        for _ in range(2):
            draws = cf.draw_augmix(6, width=2)

            torch.testing.assert_close(
                compiled(images, draws=draws), cf.augmix_batch(images, draws=draws), atol=1e-6, rtol=0
            )
        assert len(graphs) == 1


class TestDrawAugmix:
    def test_shapes(self):
        """There is a weight for each chain of each sample; the chains' weights sum to one."""
        draws = cf.draw_augmix(7, depth=2, width=4)

        assert draws.operations.shape == draws.magnitudes.shape == (2, 4, 7)
        assert (draws.weights.shape, draws.mixing.shape) == ((4, 7), (7,))
        torch.testing.assert_close(draws.weights.sum(0), torch.ones(7))
        assert (draws.operations > 0).all()

    def test_random_depth_is_one_two_or_three(self):
        """Chains have 1, 2 or 3 operations with equal probability, and none after an end."""
        operations = cf.draw_augmix(1000, generator=torch.Generator().manual_seed(1)).operations

        lengths = (operations > 0).sum(0)
        assert torch.equal(operations > 0, torch.arange(3)[:, None, None] < lengths)
        counts = torch.bincount(lengths.flatten(), minlength=4)
        assert counts[0] == 0
        assert stats.chisquare(counts[1:].tolist()).pvalue > 0.001

    @pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
    def test_weight_distributions(self, alpha: float):
        """Each Dirichlet weight has a Beta marginal distribution; mixing is Beta distributed too."""
        draws = cf.draw_augmix(2000, width=3, alpha=alpha, generator=torch.Generator().manual_seed(1))

        one_of_three = stats.kstest(draws.weights[1].tolist(), stats.beta(alpha, 2 * alpha).cdf)
        assert one_of_three.pvalue > 0.001
        assert stats.kstest(draws.mixing.tolist(), stats.beta(alpha, alpha).cdf).pvalue > 0.001


class TestImage:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_tensor_equals_batch_of_one(self, dtype: torch.dtype):
        """The same draw gives the same result as in a batch."""
        images, draws = (torch.rand(1, 3, 9, 8) * 255).to(dtype), cf.draw_augmix(1)

        output = cf.augmix_image(images[0], draws=draws)

        assert torch.equal(output, cf.augmix_batch(images, draws=draws)[0])

    @given(seed=st.integers(0, 2**40))
    def test_pil_images_match_the_formula(self, seed: int):
        """RandAugment's chains, without interpolated operations, are weighted and rounded once."""
        img = to_pil_image(torch.randint(256, (3, 9, 14), dtype=torch.uint8))
        draws = cf.draw_augmix(1, augmentation_set="all", generator=torch.Generator().manual_seed(seed))
        pointwise = draws.operations.where((draws.operations < 9) | (draws.operations > 11), 0)
        draws = cf.AugMixDraws(pointwise, draws.magnitudes, draws.weights, draws.mixing)

        output = cf.augmix_image(img, draws=draws)

        expected = (1 - draws.mixing) * pil_to_tensor(img)
        for chain, weight in enumerate(draws.weights):
            steps = cf.RandAugmentDraws(draws.operations[:, chain], draws.magnitudes[:, chain])
            expected = expected + draws.mixing * weight * pil_to_tensor(cf.randaugment_image(img, draws=steps))
        assert (output.mode, output.size) == (img.mode, img.size)
        assert (pil_to_tensor(output) - expected).abs().max() <= 0.501

    def test_draws_depend_on_the_generator(self):
        """A PIL image is augmented with its generator's draws and not modified."""
        img = to_pil_image(torch.randint(256, (1, 9, 14), dtype=torch.uint8))
        before = img.tobytes()

        first, second = (cf.augmix_image(img, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        other = cf.augmix_image(img, generator=torch.Generator().manual_seed(2))

        assert first.mode == "L"
        assert first.tobytes() == second.tobytes() != other.tobytes()
        assert img.tobytes() == before

    def test_custom_functions(self):
        """Chains of functions are blended by the same formula; -1 ends a chain."""
        img = torch.ones(1, 2, 2)
        draws = cf.AugMixDraws(
            torch.tensor([[[0], [1]], [[0], [-1]]]),
            torch.tensor([[[0.0], [3.0]], [[0.0], [2.0]]]),
            torch.tensor([[0.25], [0.75]]),
            torch.tensor([0.5]),
        )

        output = cf.augmix_image(img, augmentation_set=[double, add_level], draws=draws)
        in_bytes = cf.augmix_image((img * 10).byte(), augmentation_set=[double, add_level], draws=draws)

        torch.testing.assert_close(output, torch.full((1, 2, 2), 0.5 + 0.5 * (0.25 * 4 + 0.75 * 4)))
        assert in_bytes.dtype == torch.uint8
        assert (in_bytes == round(5 + 0.5 * (0.25 * 40 + 0.75 * 13))).all()


class TestTransform:
    def test_settings(self):
        """The transform applies, shows and pickles its settings."""
        transform = pickle.loads(pickle.dumps(cf.augmix(4, 2, 2, 0.5, "safe")))
        img = torch.rand(3, 8, 8)
        torch.manual_seed(2)
        output = transform(img)
        torch.manual_seed(2)

        assert torch.equal(output, cf.augmix_image(img, 4, 2, 2, 0.5, "safe"))
        assert repr(transform) == (
            "AugmentAndMixTransform(severity=4, depth=2, width=2, alpha=0.5, augmentation_set='safe')"
        )
