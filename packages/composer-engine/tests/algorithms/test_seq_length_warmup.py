"""SeqLengthWarmup: sequences start short."""

import warnings

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

    @pytest.mark.parametrize(
        ("settings", "warns"),
        [
            ({"max_seq_length": 48}, True),
            ({"max_seq_length": 64}, False),
            ({"max_seq_length": 48, "truncate": False}, False),
            ({"max_seq_length": 8}, False),
        ],
    )
    def test_last_length_below_that_of_the_data(self, tokens, sizes_over_a_training, settings, warns):
        """Tokens lost after the warm-up, too, give one warning with the setting; a constant length gives none."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sizes_over_a_training(SeqLengthWarmup(0.5, min_seq_length=8, **settings), tokens, len)

        found = [str(one.message) for one in caught]
        assert len(found) == warns
        assert all("cuts sequences of 64 tokens to max_seq_length=48" in one for one in found)
        assert all("Set max_seq_length=64" in one for one in found)
