"""The hue that ColorJitter shifts in a pipeline."""

from math import tau

import kornia.augmentation as ka
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.enhance import adjust_hue
from torchvision.transforms.v2 import functional as tv

from composer import functional as cf
from composer.functional.augmentations.hue import shift_hue


def images(seed=3, levels=None, count=4):
    """Return random images; with few levels, they have greys and equal channels."""
    drawn = torch.rand(count, 3, 9, 11, generator=torch.Generator().manual_seed(seed))
    return drawn if levels is None else (drawn * levels).round() / levels


class TestShiftHue:
    @settings(max_examples=60, deadline=None)
    @given(
        angles=st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4),
        seed=st.integers(0, 99),
        levels=st.sampled_from([None, 1, 2, 255]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_equals_kornia(self, angles, seed, levels, dtype):
        """It equals kornia's function up to rounding, with greys, black, white and ties, in any number of turns."""
        batch, angle = images(seed, levels).to(dtype), torch.tensor(angles)
        before = batch.clone()

        shifted = shift_hue(batch, angle)

        assert shifted.dtype is dtype
        assert torch.equal(batch, before)
        torch.testing.assert_close(shifted, adjust_hue(batch, angle % tau), rtol=0, atol=4e-6)

    @pytest.mark.parametrize("turns", [-0.5, -0.1, 0.0, 0.05, 0.5])
    def test_equals_torchvision(self, turns):
        """It equals torchvision's function, whose unit is turns."""
        shifted = shift_hue(images(), torch.full((4,), turns * tau))

        torch.testing.assert_close(shifted, tv.adjust_hue(images(), turns), rtol=0, atol=2e-6)

    def test_each_image_has_its_shift(self):
        """A part of the batch has the same bits as in the complete batch."""
        angles = torch.tensor([0.1, -0.2, 0.3, 0.4])

        assert torch.equal(shift_hue(images(), angles)[1:3], shift_hue(images()[1:3], angles[1:3]))


class TestPipelines:
    @pytest.fixture
    def calls(self, monkeypatch):
        """A list of the shapes that our function shifted."""
        shapes = []

        def recorded(image, angle):
            shapes.append(tuple(image.shape))
            return shift_hue(image, angle)

        monkeypatch.setattr("composer.functional.augmentations.hue.shift_hue", recorded)
        return shapes

    @pytest.mark.parametrize("nested", [False, True])
    def test_used(self, calls, nested):
        """It is used in single and nested augmentations, and the modules are afterwards as before."""
        jitter = ka.ColorJitter(hue=0.1)
        augmentation = ka.AugmentationSequential(ka.ImageSequential(jitter)) if nested else jitter
        own = jitter._hue_fn

        cf.augment_batch(images(), augmentation)

        assert calls == [(4, 3, 9, 11)]
        assert jitter._hue_fn is own is adjust_hue

    def test_gradients(self, calls):
        """Images that require gradients are shifted by kornia, and differentiable."""
        batch, jitter = images().requires_grad_(), ka.ColorJitter(hue=0.1)

        cf.augment_batch(batch, jitter).sum().backward()

        assert calls == []
        assert batch.grad.abs().sum() > 0
        with torch.no_grad():
            cf.augment_batch(batch, jitter)
        assert len(calls) == 1

    def test_other_functions_are_kept(self, calls):
        """A module whose function was replaced, as by compile(), keeps it."""
        jitter = ka.ColorJitter(hue=0.1)
        jitter._hue_fn = lambda image, angle: torch.zeros_like(image)

        assert not cf.augment_batch(images(), jitter).any()
        assert calls == []

    def test_restored_after_an_error(self, monkeypatch):
        """The modules are as before if the augmentation raises."""
        monkeypatch.setattr("composer.functional.augmentations.hue.shift_hue", lambda image, angle: 1 / 0)
        jitter = ka.ColorJitter(hue=0.1)

        with pytest.raises(ZeroDivisionError):
            cf.augment_batch(images(), jitter)

        assert jitter._hue_fn is adjust_hue
