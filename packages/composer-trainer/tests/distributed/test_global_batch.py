"""The weights of losses from the counts of all processes."""

import pytest

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
