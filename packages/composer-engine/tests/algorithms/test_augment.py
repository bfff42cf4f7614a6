"""Augment: augmentations of kornia on the batches of a training."""

import kornia.augmentation as ka
import kornia.augmentation.auto as kauto
import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms import Augment
from composer.core import Engine, NoEffectWarning, State


def pipeline(degrees=30.0):
    return ka.AugmentationSequential(ka.RandomAffine(degrees), ka.ColorJitter(0.2, 0.2, 0.2, 0.1))


def augmented(*algorithms, batch=0, seed=0, data=None):
    """Return a batch after AFTER_DATALOADER."""
    state = State(model=None, rank_zero_seed=seed)
    engine = Engine(state, algorithms=list(algorithms))
    for _ in range(batch):
        state.timestamp = state.timestamp.to_next_batch(samples=4)
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    state.batch = (images, torch.arange(4)) if data is None else data
    engine.run_event("after_dataloader")
    return state.batch


def test_matches_the_kernel_with_the_same_draws():
    """Images match the kernel's output for the same draws; targets and the global generator are not changed."""
    before = torch.get_rng_state()

    images, targets = augmented(Augment(pipeline()))

    state = State(model=None, rank_zero_seed=0)
    algorithm = Augment(pipeline())
    Engine(state, algorithms=algorithm)
    original = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(images, cf.augment_batch(original, pipeline(), generator=state.generator(algorithm)))
    assert torch.equal(targets, torch.arange(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_boxes_and_keypoints_are_transformed():
    """Masks, boxes with labels and keypoints are read by their keys, transformed and written back."""
    data = {
        "pixels": torch.rand(2, 3, 16, 16),
        "masks": torch.arange(256).reshape(1, 16, 16).repeat(2, 1, 1),
        "boxes": [torch.tensor([[1.0, 2.0, 5.0, 6.0]]), torch.tensor([[20.0, 0.0, 30.0, 4.0]])],
        "labels": [torch.tensor([3]), torch.tensor([4])],
        "points": torch.tensor([[[0.0, 1.0]], [[15.0, 2.0]]]),
        "names": ["a", "b"],
    }
    algorithm = Augment(
        ka.RandomHorizontalFlip(p=1.0),
        input_key="pixels",
        mask_key="masks",
        boxes_key="boxes",
        labels_key="labels",
        keypoints_key="points",
    )

    batch = augmented(algorithm, data=dict(data))

    assert torch.equal(batch["pixels"], data["pixels"].flip(-1))
    assert torch.equal(batch["masks"], data["masks"].flip(-1))
    assert [one.tolist() for one in batch["boxes"]] == [[[11, 2, 15, 6]], []]
    assert [one.tolist() for one in batch["labels"]] == [[3], []]
    assert batch["points"].tolist() == [[[15, 1]], [[0, 2]]]
    assert batch["names"] == ["a", "b"]


def test_repr_is_one_line():
    """The repr shows the pipeline with its settings in one line."""
    algorithm = Augment(pipeline())

    assert "\n" not in repr(algorithm)
    assert "degrees=30.0" in repr(algorithm)


def test_changed_pipeline_is_reported_on_resume():
    """The pipeline's settings are compared on resume, and a difference is reported."""
    saved, now = State(model=None), State(model=None)
    Engine(saved, algorithms=Augment(pipeline()))
    Engine(now, algorithms=Augment(pipeline(degrees=10.0)))

    with pytest.warns(UserWarning, match="differs") as warned:
        changed = now.load_state_dict(saved.state_dict()).changed

    assert len(warned) == len(changed) == 1
    assert "degrees=30.0" in changed[0]
    assert "degrees=10.0" in changed[0]


FLIP = ka.RandomHorizontalFlip
CROP = ka.RandomCrop((2, 2), padding=1)  # prints an argument of the same name as a container's


@pytest.mark.parametrize(
    ("make", "before", "now"),
    [
        (lambda n: kauto.RandAugment(n, 10), 2, 3),
        (lambda m: kauto.RandAugment(2, m), 10, 25),
        (lambda count: ka.ImageSequential(FLIP(), FLIP(), random_apply=count), 1, 2),
        (lambda count: ka.AugmentationSequential(FLIP(), FLIP(), random_apply=count), 1, 2),
        (lambda weight: ka.ImageSequential(FLIP(), random_apply=1, random_apply_weights=[weight]), 0.5, 0.25),
        (lambda size: ka.PatchSequential(FLIP(), grid_size=(size, size), patchwise_apply=False), 2, 4),
        (lambda name: ka.PatchSequential(CROP, padding=name, patchwise_apply=False), "same", "valid"),
        (lambda layout: ka.VideoSequential(FLIP(), data_format=layout), "BTCHW", "BCTHW"),
        (lambda same: ka.VideoSequential(FLIP(), same_on_frame=same), True, False),
        (lambda order: ka.ColorJitter(0.1, 0.1, 0.1, 0.1, order=order), [0, 1, 2, 3], [3, 2, 1, 0]),
        (lambda order: ka.AugmentationSequential(ka.ColorJiggle(0.1, order=order)), None, [0]),
        (lambda scale: ka.RandomThinPlateSpline(scale=scale), 0.2, 0.4),
        (lambda value: ka.RandomChannelDropout(fill_value=value), 0.5, 0.25),
        (lambda mode: ka.RandomPlanckianJitter(mode=mode), "blackbody", "CIED"),
    ],
)
def test_what_modules_do_not_print_is_compared(make, before, now):
    """Arguments that kornia's modules hold and do not print are described, too; equal ones are equal."""
    saved, same, other = (settings_of(make(value)) for value in (before, before, now))

    assert saved == same
    assert saved != other


def settings_of(augmentation):
    state = State(model=None)
    Engine(state, algorithms=Augment(augmentation))
    return state.state_dict()["algorithms"]


@pytest.mark.parametrize("make", [nn.Identity, lambda: ka.RandomHorizontalFlip(p=0.0)])
def test_without_effect(make):
    """A pipeline that cannot change an image is reported when it is given."""
    with pytest.warns(NoEffectWarning, match="Augment changes nothing with"):
        Augment(nn.Sequential(make(), make()))
