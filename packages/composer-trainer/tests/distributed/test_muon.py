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
