"""The hue that ColorJitter shifts in a pipeline."""

import copy
import pickle
import threading
from math import tau

import kornia.augmentation as ka
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.enhance import adjust_hue
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion
from torchvision.transforms.v2 import functional as tv

from composer import functional as cf
from composer.functional.augmentations.hue import _shift_or_adjust, shift_hue, with_faster_hue

ROUNDING = {torch.float32: 4e-6, torch.float64: 1e-6}
"""Angles of up to 20 radians lose digits in float32, which kornia computes in the dtype of the image."""


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
        torch.testing.assert_close(shifted, adjust_hue(batch, angle % tau), rtol=0, atol=ROUNDING[dtype])

    @pytest.mark.parametrize("turns", [-0.5, -0.1, 0.0, 0.05, 0.5])
    def test_equals_torchvision(self, turns):
        """It equals torchvision's function, whose unit is turns."""
        shifted = shift_hue(images(), torch.full((4,), turns * tau))

        torch.testing.assert_close(shifted, tv.adjust_hue(images(), turns), rtol=0, atol=2e-6)

    @given(
        seed=st.integers(0, 99),
        levels=st.sampled_from([None, 2, 255]),
        angle=st.floats(-3.125, 3.125, width=32),
    )
    @settings(max_examples=40, deadline=None)
    def test_rounding(self, seed, levels, angle):
        """Within a turn, float32 differs from kornia's by less than 3e-6; at most 2.4e-6 was measured."""
        batch, angles = images(seed, levels), torch.full((4,), angle)

        torch.testing.assert_close(shift_hue(batch, angles), adjust_hue(batch, angles), rtol=0, atol=3e-6)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own formulas, at first use
    def test_forward_mode(self):
        """It has derivatives in forward mode, which are those of kornia's function."""
        batch, angles = images().double(), torch.full((4,), 0.3, dtype=torch.float64)
        direction = images(4).double()

        with forward_ad.dual_level():
            dual = forward_ad.make_dual(batch, direction)
            found, expected = (forward_ad.unpack_dual(shift(dual, angles)).tangent for shift in (shift_hue, adjust_hue))

        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_not_a_number(self):
        """A pixel that is no number stays one, and changes no other."""
        batch = images()
        batch[0, 1, 2, 3] = torch.nan

        shifted = shift_hue(batch, torch.full((4,), 0.3))

        assert shifted[0, :, 2, 3].isnan().all()
        assert shifted.isnan().sum() == 3

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

    @pytest.fixture
    def inside(self):
        """A jitter while augment_batch applies it."""
        jitter = ka.ColorJitter(hue=0.1)
        with with_faster_hue(jitter, None):
            yield jitter

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

    def test_angle_with_gradient(self, calls, inside):
        """So are angles that require gradients."""
        angle = torch.full((4,), 0.2, requires_grad=True)

        inside._hue_fn(images(), angle).sum().backward()

        assert calls == []
        assert angle.grad is not None

    def test_subclass_that_passes_a_number(self, calls):
        """A subclass may call the function with a number, as kornia's own allows."""

        class Fixed(ka.ColorJitter):
            def apply_transform(self, input, params, flags, transform=None):
                return self._hue_fn(input, 0.3)

        assert torch.equal(cf.augment_batch(images(), Fixed(hue=0.1)), adjust_hue(images(), 0.3))
        assert calls == []

    @pytest.mark.parametrize("shape", [(1, 4, 3, 9, 11), (3, 9, 11)])
    def test_other_dimensions(self, calls, inside, shape):
        """Images with other dimensions than a batch are shifted by kornia."""
        batch, angle = torch.rand(shape), torch.tensor([0.3])

        assert torch.equal(inside._hue_fn(batch, angle), adjust_hue(batch, angle))
        assert calls == []

    @pytest.mark.parametrize("channels", [1, 4])
    def test_other_channels(self, calls, channels):
        """Images that are not RGB get kornia's error."""
        with pytest.raises(ValueError, match="size must have a shape of"):
            cf.augment_batch(torch.rand(4, channels, 9, 11), ka.ColorJitter(hue=0.1))

        assert calls == []

    def test_values_out_of_range(self, calls):
        """Values outside [0, 1] are limited by the jitter as in kornia's own call."""
        batch, jitter = images() * 3 - 1, ka.ColorJitter(hue=0.1)
        draws = cf.draw_augmentation(jitter, batch.shape)

        found = cf.augment_batch(batch, jitter, params=draws)

        torch.testing.assert_close(found, jitter(batch, params=draws.params), rtol=0, atol=3e-6)
        assert len(calls) == 1

    def test_videos(self, calls):
        """The frames of videos are shifted as one batch of images."""
        videos, augmentation = torch.rand(2, 5, 3, 9, 11), ka.VideoSequential(ka.ColorJitter(hue=0.1))
        draws = cf.draw_augmentation(augmentation, videos.shape)

        found = cf.augment_batch(videos, augmentation, params=draws)

        torch.testing.assert_close(found, augmentation(videos, params=draws.params), rtol=0, atol=3e-6)
        assert calls == [(10, 3, 9, 11)]

    @pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="kornia's own call fails with torch 2.7")
    def test_forward_mode(self, calls):
        """Pipelines have derivatives in forward mode, which are those of kornia's call."""
        batch, direction, jitter = images().double(), images(4).double(), ka.ColorJitter(hue=0.1)
        draws = cf.draw_augmentation(jitter, batch.shape)

        found = torch.func.jvp(lambda one: cf.augment_batch(one, jitter, params=draws), (batch,), (direction,))
        expected = torch.func.jvp(lambda one: jitter(one, params=draws.params), (batch,), (direction,))

        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert len(calls) == 1

    def test_given_order(self, calls):
        """With its argument order, kornia calls its own function directly."""
        cf.augment_batch(images(), ka.ColorJitter(hue=0.1, order=[3]))

        assert calls == []

    def test_nested_calls(self, calls):
        """A module that augments with the same jitter leaves it to the call around it."""
        jitter = ka.ColorJitter(hue=0.1)

        class Again(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.jitter = jitter

            def forward(self, input):
                return jitter(cf.augment_batch(input, jitter))

        cf.augment_batch(images(), Again())

        assert len(calls) == 2
        assert jitter._hue_fn is adjust_hue

    def test_several_threads(self, monkeypatch):
        """A thread that ends does not change the function of one that goes on with the same module."""
        jitter, entered, ended, used = ka.ColorJitter(hue=0.1), threading.Event(), threading.Event(), []
        draws = cf.draw_augmentation(jitter, images().shape)

        def wait(module, *_):
            entered.set()
            assert ended.wait(20)
            used.append(module._hue_fn)

        hook = jitter.register_forward_pre_hook(wait)
        thread = threading.Thread(target=lambda: cf.augment_batch(images(), jitter, params=draws))
        thread.start()
        assert entered.wait(20)
        hook.remove()
        cf.augment_batch(images(), jitter, params=draws)
        ended.set()
        thread.join()

        assert used == [_shift_or_adjust]
        assert jitter._hue_fn is adjust_hue

    def test_own_calls_of_another_thread(self, calls, inside):
        """While a thread augments, a call of the module itself in another one uses kornia's function."""
        draws = cf.draw_augmentation(inside, images().shape).params
        found = []

        thread = threading.Thread(target=lambda: found.append(inside(images(), params=draws)))
        thread.start()
        thread.join()

        assert calls == []
        assert torch.equal(found[0], ka.ColorJitter(hue=0.1)(images(), params=draws))

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_copies_made_inside(self, calls, copied):
        """A module that is copied or pickled while it augments uses kornia's function when it is called itself."""
        jitter = ka.ColorJitter(hue=0.1)
        draws = cf.draw_augmentation(jitter, images().shape)
        with with_faster_hue(jitter, draws.params):
            other = copied(jitter)

        assert torch.equal(other(images(), params=draws.params), jitter(images(), params=draws.params))
        assert calls == []
        cf.augment_batch(images(), other, params=draws)
        assert len(calls) == 1
        assert other._hue_fn is adjust_hue

    def test_pickles_name_no_function_of_this_package(self, inside):
        """A pickle made while a module augments can be loaded without this package."""
        assert b"composer" not in pickle.dumps(inside)

    def test_module_without_the_attribute(self, calls):
        """A release of kornia that calls its function otherwise keeps it."""
        jitter = ka.ColorJitter(hue=0.1)
        vars(jitter)["_shift"] = vars(jitter).pop("_hue_fn")
        jitter.apply_transform = lambda image, params, *_, **__: jitter._shift(image, params["hue_factor"] * tau)

        assert not torch.equal(cf.augment_batch(images(), jitter), images())
        assert calls == []

    @pytest.mark.parametrize("container", [ka.AugmentationSequential, ka.ImageSequential, ka.PatchSequential])
    def test_containers_equal_kornia(self, calls, container):
        """In a container, the result is kornia's under the same seed, up to rounding."""
        options = {"grid_size": (2, 2), "patchwise_apply": False} if container is ka.PatchSequential else {}
        augmentation, batch = container(ka.ColorJitter(0.1, 0.1, 0.1, 0.1), **options), torch.rand(4, 3, 8, 8)
        draws = cf.draw_augmentation(augmentation, batch.shape)

        found = cf.augment_batch(batch, augmentation, params=draws)

        with torch.random.fork_rng():
            torch.manual_seed(draws.seed)
            torch.testing.assert_close(found, augmentation(batch), rtol=0, atol=4e-6)
        assert calls

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64])
    def test_dtypes_and_memory_formats(self, calls, dtype):
        """A jitter keeps both."""
        batch = (images() * (255 if dtype is torch.uint8 else 1)).to(dtype).to(memory_format=torch.channels_last)

        augmented = cf.augment_batch(batch, ka.ColorJitter(hue=0.1))

        assert augmented.dtype is dtype
        assert augmented.is_contiguous(memory_format=torch.channels_last)
        assert calls

    def test_modules_are_not_searched_without_hue(self, monkeypatch):
        """Walking through the modules of a policy takes longer than the rest of augment_batch."""
        monkeypatch.setattr(torch.nn.Module, "modules", lambda _: pytest.fail("searched"))

        cf.augment_batch(images(), ka.RandomHorizontalFlip())

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
