"""Muon on weights that several processes share."""

import pytest


@pytest.mark.parametrize("kind", ["fsdp", "replicate x shard", "shard x tp"])
def test_steps_are_those_of_one_process(four_muons, kind):
    """With FSDP2, replicas and tensor parallelism, also of uneven parts, weights are bit-identical with one process."""
    for result in four_muons:
        assert result[kind]["differing"] == []
        assert result[kind]["compared"] == 10


@pytest.mark.parametrize(("kind", "share"), [("fsdp", 4), ("replicate x shard", 2), ("shard x tp", 2)])
def test_momentum_is_sharded(four_muons, kind, share):
    """Each process has its part of the momentum."""
    held, complete = zip(*(result[kind]["elements"] for result in four_muons), strict=True)

    assert max(held) < 1.3 * complete[0] / share


def test_partial_sums(four_muons):
    """Gradients that are partial sums over processes are reduced first."""
    assert all(result["partial sums"] for result in four_muons)


@pytest.mark.parametrize("kind", ["fsdp", "shard x tp"])
def test_cautious_steps(four_muons, kind):
    """The remaining elements are counted over all processes; results are those of one process up to rounding."""
    assert all(result[kind]["cautious"] < 1e-6 for result in four_muons)


@pytest.mark.parametrize("kind", ["fsdp", "shard x tp"])
def test_rows_and_parts(four_muons, kind):
    """Normalized rows, and matrices that are two, are bit-identical with one process."""
    assert all(result[kind]["rows"] == [] for result in four_muons)


def test_compensation_is_sharded(four_muons):
    """Kahan summation of sharded weights is bit-identical with one process."""
    assert all(result["kahan"] for result in four_muons)


def test_stochastic_rounding(four_muons):
    """Replicas remain equal with different seeds in the processes; the two shards of each have different noise."""
    equal = [[one % 2 == other % 2 for other in range(4)] for one in range(4)]

    assert all(result["stochastic"] == equal for result in four_muons)


class TestDividedWork:
    """Each process orthogonalizes its share of the matrices."""

    @pytest.mark.parametrize(
        "kind", ["plain", "rows and parts", "transposed", "cautious", "stochastic", "small windows"]
    )
    def test_equals_the_undivided_step(self, four_muons, kind):
        """Weights and the complete state are bit-identical in all processes, and either continues the other."""
        for result in four_muons:
            found = result["divided"][kind]
            assert (found["weights"], found["state"], found["continued"]) == (True, True, True)

    def test_each_process_has_its_share(self, four_muons):
        """Of nine matrices, one with more work, each process orthogonalizes two or three; one collective has all."""
        counts = [result["divided"]["plain"]["counts"] for result in four_muons]

        assert [undivided for undivided, _, _ in counts] == [9] * 4
        assert sorted(own for _, own, _ in counts) == [2, 2, 2, 3]
        assert [exchanges for _, _, exchanges in counts] == [1] * 4

    def test_windows(self, four_muons):
        """Above a number of elements, results are exchanged in several collectives."""
        counts = [result["divided"]["small windows"]["counts"] for result in four_muons]

        assert sum(own for _, own, _ in counts) == 9
        assert {exchanges for _, _, exchanges in counts} == {5}

    @pytest.mark.parametrize("kind", ["fsdp", "replicate x shard", "shard x tp"])
    def test_sharded_weights(self, four_muons, kind):
        """Weights that processes share, with normalized rows and parts, are bit-identical with one process."""
        assert all(result[kind]["divided"] == [] for result in four_muons)

    @pytest.mark.parametrize("difference", ["shape", "values"])
    def test_errors(self, four_muons, difference):
        """Matrices that differ, such as those of a model that was not broadcast, raise an error in all processes."""
        message = "divide_work=True requires the same matrices in all processes"
        assert all(result["divided"][difference].startswith(message) for result in four_muons)
