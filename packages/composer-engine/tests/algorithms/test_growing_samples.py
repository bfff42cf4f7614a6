"""ProgressiveResizing and SeqLengthWarmup: samples start small."""

import pytest
import torch

from composer.algorithms import ProgressiveResizing, SeqLengthWarmup
from composer.core import Engine, State


def sizes_over_a_training(algorithm, batch, size_of, epochs=10):
    """Return the batch's size in each of ten batches."""
    state = State(model=None, max_duration=f"{epochs}ba")
    engine = Engine(state, algorithms=algorithm)
    sizes = []
    for _ in range(epochs):
        state.batch = batch()
        engine.run_event("after_dataloader")
        sizes.append(size_of(state.batch))
        state.timestamp = state.timestamp.to_next_batch(samples=2)
    return sizes


class TestProgressiveResizing:
    def test_images_grow_between_delay_and_finetuning(self):
        """Size is half for the first half, full for the last fifth, and grows in multiples of four in between."""
        sizes = sizes_over_a_training(
            ProgressiveResizing(), lambda: (torch.rand(2, 3, 32, 32), torch.arange(2)), lambda batch: batch[0].shape[-1]
        )

        # At 50, 60 and 70 per cent a third more each of 16 to 32: 16, 21.3, 26.7, to the nearest multiple of four.
        assert sizes == [16, 16, 16, 16, 16, 16, 20, 28, 32, 32]

    def test_sizes_lists_all_sizes(self):
        """`sizes` lists exactly the sizes that occur."""
        algorithm = ProgressiveResizing(initial_scale=0.3, delay_fraction=0.1, size_increment=8)
        batch = lambda: (torch.rand(2, 3, 64, 64), torch.arange(2))  # noqa: E731

        sizes = sizes_over_a_training(algorithm, batch, lambda batch: batch[0].shape[-1], epochs=50)

        assert set(sizes) <= set(algorithm.sizes(64))
        assert all(size % 8 == 0 for size in sizes)

    @pytest.mark.parametrize("mode", ["resize", "crop"])
    def test_masks_are_resized(self, mode):
        """With resize_targets, targets of the images' size are resized."""
        algorithm = ProgressiveResizing(mode=mode, resize_targets=True)
        batch = lambda: (torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32))  # noqa: E731

        sizes = sizes_over_a_training(algorithm, batch, lambda batch: [each.shape[-1] for each in batch])

        assert all(image == mask for image, mask in sizes)
        assert sizes[0] == [16, 16]

    def test_missing_max_duration_raises(self):
        """Fractions without a max_duration raise."""
        state = State(model=None)
        engine = Engine(state, algorithms=ProgressiveResizing())
        state.batch = (torch.rand(2, 3, 32, 32), torch.arange(2))

        with pytest.raises(ValueError, match="max_duration"):
            engine.run_event("after_dataloader")

    @pytest.mark.parametrize(
        "settings",
        [
            {"mode": "stretch"},
            {"initial_scale": 0},
            {"finetune_fraction": 1.5},
            {"delay_fraction": -0.1},
            {"size_increment": 0},
            {"delay_fraction": 0.7, "finetune_fraction": 0.7},
        ],
    )
    def test_bad_settings(self, settings):
        """Settings out of range raise, with their names."""
        with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
            ProgressiveResizing(**settings)


class TestSeqLengthWarmup:
    @pytest.fixture
    def tokens(self):
        """Two tokenized sequences of 64 tokens."""
        return lambda: {
            "input_ids": torch.arange(128).view(2, 64),
            "attention_mask": torch.ones(2, 64, dtype=torch.long),
            "labels": torch.arange(128).view(2, 64),
        }

    def test_sequences_grow(self, tokens):
        """The sequence length grows in steps from the first to the last length, for all tensors of the batch."""
        algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=64, step_size=8)
        shapes = sizes_over_a_training(algorithm, tokens, lambda batch: {each.shape[1] for each in batch.values()})

        # 8 + 56 * (0, 0.2, 0.4, 0.6, 0.8) in whole steps of 8.
        assert shapes == [{8}, {16}, {24}, {40}, {48}, {64}, {64}, {64}, {64}, {64}]

    def test_truncate_false_reshapes(self, tokens):
        """With truncate=False, only tokens that do not fill a complete row are dropped."""
        algorithm = SeqLengthWarmup(duration=1.0, min_seq_length=16, max_seq_length=64, step_size=16, truncate=False)
        batches = []

        sizes_over_a_training(algorithm, tokens, batches.append, epochs=1)

        assert batches[0]["input_ids"].shape == (8, 16)
        assert sorted(batches[0]["input_ids"].flatten().tolist()) == list(range(128))

    def test_length_above_the_batch_has_no_effect(self, tokens):
        """A length above that of the sequences does not change the batch."""
        algorithm = SeqLengthWarmup(duration=0.0, max_seq_length=1024)
        shapes = sizes_over_a_training(algorithm, tokens, lambda batch: batch["input_ids"].shape[1], epochs=1)

        assert shapes == [64]

    @pytest.mark.parametrize(
        "settings",
        [
            {"duration": 1.5},
            {"min_seq_length": 0},
            {"max_seq_length": 4},
            {"step_size": 0},
            {"min_seq_length": 2.5},
        ],
    )
    def test_bad_settings(self, settings):
        """Settings out of range raise, with their names."""
        with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
            SeqLengthWarmup(**settings)
