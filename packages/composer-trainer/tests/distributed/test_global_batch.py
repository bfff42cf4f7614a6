"""The weights of losses, as computed from the counts of all processes."""

import pytest
import torch

from composer.distributed import BatchShare, BatchWeights, GlobalBatch


class Exchange:
    """The exchange of two processes with shares of 3 and 5 samples."""

    data_size = world_size = 2
    last = GlobalBatch()

    def finish(self):
        return GlobalBatch(8, counted=8)


@pytest.mark.parametrize("usual", [None, 5])
@pytest.mark.parametrize(("samples", "weight"), [(3, 3 / 4), (5, 5 / 4)])
def test_weight_is_the_share_of_the_mean(samples, weight, usual):
    """Whether it is known at once, or follows from the usual number by a correction."""
    weights = BatchWeights(BatchShare(samples), usual, Exchange())

    assert weights.weight() * weights.correction() == pytest.approx(weight)


def test_terms_below_one():
    """Terms may be weights of classes, whose sum may be small; a batch without terms has the weight 0."""
    batch = BatchWeights(BatchShare(2, has_terms=True))

    for terms, expected in (([0.01, 0.03], [0.25, 0.75]), ([0.0, 0.0], [0.0, 0.0])):
        weighed = batch.weigh([(0, 0.5), (1, 0.5)], [*torch.tensor(terms)], torch.device("cpu"))
        assert [float(weight) for _, weight in weighed] == pytest.approx(expected)


def test_only_unusual_batches_are_corrected():
    """The usual number of samples in all processes needs no factor."""
    assert BatchWeights(BatchShare(4), 4, Exchange()).correction() == 1
