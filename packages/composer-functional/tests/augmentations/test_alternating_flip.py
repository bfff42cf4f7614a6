"""Alternating flips: each image is mirrored in every second epoch."""

from __future__ import annotations

import collections

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from composer import functional as cf

IMAGES = torch.arange(64.0).view(32, 1, 1, 2)  # the second pixel is larger
Sample = collections.namedtuple("Sample", ["label", "image"])


def is_mirrored(images):
    return images[..., 0, 0, 0] > images[..., 0, 0, 1]


class TestBatch:
    def test_each_image_in_every_second_epoch(self):
        """An image has both orientations in any two successive epochs, with about half of them mirrored in each."""
        epochs = torch.stack(
            [is_mirrored(cf.alternating_flip_batch(IMAGES, torch.arange(32), epoch)) for epoch in range(6)]
        )

        assert (epochs[1:] ^ epochs[:-1]).all()
        assert 8 <= epochs[0].sum() <= 24

    def test_values_do_not_change(self):
        """An image is mirrored left to right, as by torch, whatever its place in the batch."""
        images, indices = torch.rand(5, 3, 4, 6), torch.tensor([7, 3, 9, 3, 100])
        flipped = cf.alternating_flip_batch(images, indices, 0)

        turns = is_mirrored(cf.alternating_flip_batch(torch.arange(2.0).expand(5, 1, 1, 2), indices, 0))
        assert torch.equal(flipped, torch.where(turns[:, None, None, None], images.flip(-1), images))
        assert turns[1] == turns[3]
        assert len(turns.unique()) == 2

    def test_first_epoch_is_that_of_fair_coins(self):
        """In the first epoch, half of 10,000 images are mirrored, and neighbours are independent."""
        indices = torch.arange(10_000)
        turns = is_mirrored(cf.alternating_flip_batch(torch.arange(2.0).expand(10_000, 1, 1, 2), indices, 0, seed=3))

        # Three standard deviations of 10,000 coins are 150.
        assert abs(turns.sum() - 5000) < 150
        assert abs((turns[1:] ^ turns[:-1]).sum() - 5000) < 150

    def test_seed(self):
        """Another seed mirrors other images."""
        first, second = (cf.alternating_flip_batch(IMAGES, torch.arange(32), 0, seed=seed) for seed in (0, 1))

        assert not torch.equal(first, second)


class TestDataset:
    @pytest.mark.parametrize("make", [lambda image: (image, 1), lambda image: [image, 1], lambda image: image])
    def test_is_the_same_as_for_batches(self, make):
        """Samples of a data set are those of batches with the same indices."""
        data = cf.AlternatingFlip([make(image) for image in IMAGES], seed=5)
        data.set_epoch(3)

        images = torch.stack([sample if isinstance(sample, torch.Tensor) else sample[0] for sample in data])
        assert torch.equal(images, cf.alternating_flip_batch(IMAGES, torch.arange(32), 3, seed=5))

    @pytest.mark.parametrize(("make", "key"), [(lambda image: Sample(1, image), 1), (lambda x: {"image": x}, "image")])
    def test_other_keys(self, make, key):
        """The image may be at any key of a named tuple or a dictionary, whose type and other items are kept."""
        samples = list(cf.AlternatingFlip([make(image) for image in IMAGES], key=key))

        assert {type(sample) for sample in samples} == {type(make(IMAGES))}
        images = torch.stack([sample[key] for sample in samples])
        assert torch.equal(images, cf.alternating_flip_batch(IMAGES, torch.arange(32), 0))

    def test_pil_images(self):
        """PIL images are mirrored, too."""
        image = Image.new("L", (2, 1))
        image.putdata([0, 255])
        data = cf.AlternatingFlip([(image, 0)] * 32)
        first = [one.getpixel((0, 0)) for one, _ in data]
        data.set_epoch(1)

        assert {*first} == {0, 255}
        assert [255 - one.getpixel((0, 0)) for one, _ in data] == first

    @pytest.mark.parametrize("persistent", [False, True])
    def test_workers(self, persistent):
        """Workers of a loader see the epoch, also those that remain for all epochs."""
        data = cf.AlternatingFlip(list(IMAGES))
        loader = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=persistent)
        for epoch in range(3):
            data.set_epoch(epoch)
            loaded = torch.cat(list(loader))
            assert torch.equal(loaded, cf.alternating_flip_batch(IMAGES, torch.arange(32), epoch))

    def test_epoch_of_the_data_set(self):
        """A data set with epochs of its own gets each one."""
        epochs = []

        class Counted(list):
            set_epoch = epochs.append

        cf.AlternatingFlip(Counted(IMAGES)).set_epoch(3)

        assert epochs == [3]

    def test_subset(self):
        """A subset mirrors by the indices of the complete data set."""
        data = cf.AlternatingFlip(list(IMAGES))

        assert torch.equal(torch.stack(list(Subset(data, [5, 9]))), torch.stack([data[5], data[9]]))
