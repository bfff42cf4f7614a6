"""ProgressiveResizing: images start small."""

import pytest
import torch

from composer.algorithms import ProgressiveResizing


class TestProgressiveResizing:
    def test_images_grow_between_delay_and_finetuning(self, sizes_over_a_training):
        """Size is half for the first half, full for the last fifth, and grows in multiples of four in between."""
        sizes = sizes_over_a_training(
            ProgressiveResizing(), lambda: (torch.rand(2, 3, 32, 32), torch.arange(2)), lambda batch: batch[0].shape[-1]
        )

        # At 50, 60 and 70 per cent a third more each of 16 to 32: 16, 21.3, 26.7, to the nearest multiple of four.
        assert sizes == [16, 16, 16, 16, 16, 16, 20, 28, 32, 32]

    def test_sizes_lists_all_sizes(self, sizes_over_a_training):
        """`sizes` lists exactly the sizes that occur."""
        algorithm = ProgressiveResizing(initial_scale=0.3, delay_fraction=0.1, size_increment=8)
        batch = lambda: (torch.rand(2, 3, 64, 64), torch.arange(2))  # noqa: E731

        sizes = sizes_over_a_training(algorithm, batch, lambda batch: batch[0].shape[-1], epochs=50)

        assert set(sizes) <= set(algorithm.sizes(64))
        assert all(size % 8 == 0 for size in sizes)

    @pytest.mark.parametrize("mode", ["resize", "crop"])
    def test_both_sides_are_multiples(self, mode, sizes_over_a_training):
        """Height and width of images and masks are multiples of size_increment, as a U-Net needs them."""
        algorithm = ProgressiveResizing(mode=mode, size_increment=32, resize_targets=True)
        batch = lambda: (torch.rand(2, 1, 256, 320), torch.rand(2, 128, 160))  # noqa: E731

        sizes = sizes_over_a_training(algorithm, batch, lambda batch: (batch[0].shape[2:], batch[1].shape[1:]), 20)

        assert {height % 32 + width % 32 for (height, width), _ in sizes} == {0}
        assert len({*sizes}) > 3
        assert all((2 * rows, 2 * columns) == tuple(image) for image, (rows, columns) in sizes)

    @pytest.mark.parametrize("mode", ["resize", "crop"])
    def test_masks_are_resized(self, mode, sizes_over_a_training):
        """With resize_targets, targets of the images' size are resized."""
        algorithm = ProgressiveResizing(mode=mode, resize_targets=True)
        batch = lambda: (torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32))  # noqa: E731

        sizes = sizes_over_a_training(algorithm, batch, lambda batch: [each.shape[-1] for each in batch])

        assert all(image == mask for image, mask in sizes)
        assert sizes[0] == [16, 16]
