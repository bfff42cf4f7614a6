"""The exchange of counts between processes, and the weights that follow."""

import pytest
import torch

from composer.distributed import BatchShare, BatchWeights, GlobalBatch, close_dist
from composer.distributed.global_batch import CountExchange
from composer.distributed.process_group import initialize_alone


@pytest.fixture(scope="module")
def group():
    """A process group of one process, in which exchanges are real."""
    initialize_alone(torch.device("cpu"))
    yield
    close_dist()


@pytest.mark.usefixtures("group")
def test_nothing_to_train_on():
    """No process has a sample."""
    exchange = CountExchange(1, 1)
    exchange.send(BatchShare(samples=0))

    with pytest.raises(ValueError, match=r"No process has a sample .* to train on in this batch"):
        exchange.receive()


class Exchange:
    """The exchange of two processes with shares of 3 and 5 samples."""

    data_size = world_size = 2
    last = GlobalBatch()

    def receive(self):
        return GlobalBatch(8, elements=8)


@pytest.mark.parametrize("usual", [None, 5])
@pytest.mark.parametrize(("samples", "weight"), [(3, 3 / 4), (5, 5 / 4)])
def test_weight_is_the_share_of_the_mean(samples, weight, usual):
    """Whether it is known at once, or follows from the usual number by a correction."""
    weights = BatchWeights(BatchShare(samples), usual, Exchange())

    assert weights.weight() * weights.correction() == pytest.approx(weight)
