"""The exchange of counts between processes, the clock on which they agree, and the weights that follow."""

import itertools

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


class Steps:
    """Batches of 4 samples in one process."""

    def __init__(self):
        self.exchange = CountExchange(1, 1)

    def step(self, seconds=0.001, *, is_regular=True, **counts):
        """Take a step; return whether its counts were exchanged, and the batch."""
        own = BatchShare(**{"samples": 4, "counted": 4, "seconds": seconds, **counts})
        self.exchange.begin(own, 4, is_regular=is_regular)
        is_exchanged = self.exchange._work is not None
        return is_exchanged, self.exchange.finish()

    def exchanged(self, steps, *seconds, **counts):
        """Return the numbers of the steps in which counts were exchanged."""
        return [number for number in range(steps) if self.step(*seconds, **counts)[0]]


@pytest.mark.usefixtures("group")
class TestExchanges:
    def test_regular_batches_are_exchanged_rarely(self):
        """The number of batches between two exchanges doubles, up to 128."""
        gaps = [later - one for one, later in itertools.pairwise(Steps().exchanged(800))]

        assert gaps[:4] == [3, 7, 15, 31]
        assert set(gaps[6:]) == {129}

    def test_slow_steps_exchange_in_time(self):
        """At most a quarter of a second passes between exchanges; slower steps exchange always."""
        assert Steps().exchanged(9, 0.1) == [0, 2, 4, 6, 8]
        assert Steps().exchanged(4, 0.2) == [0, 1, 2, 3]

    def test_number_of_microbatches_stays(self):
        """Between exchanges a process pads its microbatches to the number that another had in the last exchange."""
        run = Steps()

        batches = [run.step(microbatches=2)[1], *(run.step(microbatches=1)[1] for _ in range(3))]

        assert [batch.microbatches for batch in batches] == [2, 2, 2, 1]

    @pytest.mark.parametrize("counts", [{"is_regular": False}, {"tokens": 7}, {"counted": 3}], ids=str)
    def test_other_batches_are_always_exchanged(self, counts):
        """Partial batches, tokens, and samples that an algorithm removed."""
        assert Steps().exchanged(3, **counts) == [0, 1, 2]

    @pytest.mark.parametrize(
        ("counts", "found"),
        [
            ({"counted": 3}, "and 3 remain"),
            ({"tokens": 5}, "5 tokens"),
            ({"has_terms": True}, r"count_loss_terms\(\) changed its type"),
        ],
    )
    def test_unexpected_counts_raise(self, counts, found):
        """An algorithm that removes samples without saying so, after processes have agreed that none does."""
        run = Steps()
        run.step()

        with pytest.raises(RuntimeError, match=f"{found}.* selects_samples of an algorithm that removes samples"):
            run.step(**counts)

    def test_nothing_to_train_on(self):
        """No process has a sample."""
        with pytest.raises(ValueError, match=r"No process has a sample .* to train on in this batch"):
            Steps().step(samples=0, counted=0)


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
