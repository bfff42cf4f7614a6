"""SeqLengthWarmup: sequences start short."""

import pytest
import torch

from composer.algorithms import SeqLengthWarmup


class TestSeqLengthWarmup:
    @pytest.fixture
    def tokens(self):
        """Two tokenized sequences of 64 tokens."""
        return lambda: {
            "input_ids": torch.arange(128).view(2, 64),
            "attention_mask": torch.ones(2, 64, dtype=torch.long),
            "labels": torch.arange(128).view(2, 64),
        }

    def test_sequences_grow(self, tokens, sizes_over_a_training):
        """The sequence length grows in steps from the first to the last length, for all tensors of the batch."""
        algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=64, step_size=8)
        shapes = sizes_over_a_training(algorithm, tokens, lambda batch: {each.shape[1] for each in batch.values()})

        # 8 + 56 * (0, 0.2, 0.4, 0.6, 0.8) in whole steps of 8.
        assert shapes == [{8}, {16}, {24}, {40}, {48}, {64}, {64}, {64}, {64}, {64}]

    def test_truncate_false_reshapes(self, tokens, sizes_over_a_training):
        """With truncate=False, only tokens that do not fill a complete row are dropped."""
        algorithm = SeqLengthWarmup(duration=1.0, min_seq_length=16, max_seq_length=64, step_size=16, truncate=False)
        batches = []

        sizes_over_a_training(algorithm, tokens, batches.append, epochs=1)

        assert batches[0]["input_ids"].shape == (8, 16)
        assert sorted(batches[0]["input_ids"].flatten().tolist()) == list(range(128))

    def test_length_above_the_batch_has_no_effect(self, tokens, sizes_over_a_training):
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
