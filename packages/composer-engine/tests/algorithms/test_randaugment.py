"""RandAugment in a dataset's pipeline, and on batches."""

import copy
import warnings

import torch
from torchvision import transforms

from composer.algorithms import RandAugment
from fixtures.transforms import BatchTransform, fit_start, images


class TestRandAugment(BatchTransform):
    make = RandAugment
    bad_settings = ({"severity": 11}, {"depth": -1}, {"augmentation_set": "best"})


def test_workers_augment_each_sample():
    """Samples from worker processes are augmented, each with its own draws."""
    plain = images(transforms.ToTensor())
    augmented = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's threads
        state = fit_start(augmented, RandAugment(severity=10), num_workers=1)
        batches = [batch for batch, _ in state.train_dataloader]

    before = torch.stack([image for image, _ in plain])
    assert torch.cat(batches).shape == before.shape
    assert not torch.equal(torch.cat(batches), before)
