"""Samples are distributed and counted once."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
)

from composer import distributed as cd
from composer.core import DataSpec

NUMBERS = st.integers(1, 40)


def counted_by(rank, dataset, world_size, batch_size, microbatch_size, *, drop_last=False):
    """Return the samples that a process counts in an evaluation of its loader."""
    sampler = cd.get_sampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, drop_last=drop_last)
    loader, spec = DataLoader(dataset, batch_size=batch_size, sampler=sampler), DataSpec([])
    num_real, num_seen, counted = cd.num_real_samples_in_loader(loader), 0, []
    for batch in loader:
        left = None if num_real is None else max(0, num_real - num_seen)
        for part, counts in cd.real_parts(spec.split_batch(batch, microbatch_size), left, spec):
            counted += part.tolist() if counts else []
        num_seen += len(batch)
    return counted


class TestCounting:
    @given(NUMBERS, st.integers(1, 9), NUMBERS, NUMBERS)
    def test_every_sample_is_counted_once(self, samples, world_size, batch_size, microbatch_size):
        """Each sample is counted once over all processes, for any sizes."""
        counted = [
            sample
            for rank in range(world_size)
            for sample in counted_by(rank, range(samples), world_size, batch_size, microbatch_size)
        ]

        assert sorted(counted) == list(range(samples))

    @given(NUMBERS, st.integers(1, 9))
    def test_counts_agree_with_torch(self, samples, world_size):
        """The function agrees with torch's sampler: samples whose position is in the dataset are real."""
        for rank in range(world_size):
            length = len(DistributedSampler(range(samples), num_replicas=world_size, rank=rank))
            expected = sum(rank + place * world_size < samples for place in range(length))

            assert cd.num_real_samples(samples, world_size, rank) == expected

    @given(NUMBERS, st.integers(1, 9), NUMBERS)
    def test_dropped_samples_stay_dropped(self, samples, world_size, batch_size):
        """With drop_last nothing is repeated, so that all samples are counted."""
        counted = [
            sample
            for rank in range(world_size)
            for sample in counted_by(rank, range(samples), world_size, batch_size, 3, drop_last=True)
        ]

        assert len(counted) == len(set(counted)) == samples // world_size * world_size

    def test_two_processes_count_once(self, two_processes):
        """Under torchrun, seven samples in batches of 1, 2, 3 and 5."""
        for result in two_processes:
            assert result["samplers"]["counted"] == {size: [float(x) for x in range(7)] for size in "1235"}


class TestGetSampler:
    def test_epochs_have_different_orders(self):
        """Each epoch has its own order, equal in every run."""
        loader = DataLoader(range(50), sampler=cd.get_sampler(range(50), shuffle=True), batch_size=None)
        orders = []
        for epoch in (0, 1, 0):
            cd.set_epoch(loader, epoch)
            orders.append([int(sample) for sample in loader])

        assert orders[0] == orders[2] != orders[1]
        assert sorted(orders[1]) == list(range(50))

    def test_set_epoch_of_batch_samplers(self):
        """set_epoch of a batch sampler is called too."""

        class Batches(list):
            def set_epoch(self, epoch):
                self.epoch = epoch

        batches = Batches([[0], [1]])

        cd.set_epoch(DataLoader(range(3), batch_sampler=batches), 4)

        assert batches.epoch == 4

    def test_iterable_dataset_raises(self):
        """An iterable dataset cannot be sampled."""

        class Stream(IterableDataset):
            def __len__(self):
                return 3

            def __iter__(self):
                return iter(range(3))

        for dataset in (Stream(), iter([1])):
            with pytest.raises(TypeError, match=r"dataset must have a length .* got (Stream|list_iterator)"):
                cd.get_sampler(dataset)


class TestChecks:
    def test_loaders_of_one_process_raise(self, two_processes):
        """A loader without batches, or with an unknown length, in one process only raises an error in all processes."""
        first, second = (result["samplers"] for result in two_processes)
        assert second["empty"].startswith("ValueError: train_dataloader has no batches: ")
        assert first["empty"].startswith(
            "ValueError: Preparing the training data failed in process 1: ValueError: train_"
        )
        assert "got [True, False] by rank" in first["kinds"]
        assert first["kinds"] == second["kinds"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("plain", "ValueError: eval_dataloader would give each of the 2 processes the same samples"),
            (
                "shuffled",
                "as its sampler is a RandomSampler. Split them: DataLoader(dataset, batch_size=..., sampler=",
            ),
            ("wrong", "sampler must be for process 0 of 2, got one for process 0 of 3"),
            ("lengths", "must have the same number of batches in every process, got [5, 6] by rank"),
        ],
    )
    def test_wrong_loaders_raise(self, two_processes, name, message):
        """The same samples in all processes, another rank's, or different numbers of batches raise."""
        assert message in two_processes[0]["samplers"][name]


class TestPlainLoaders:
    """Loaders without a sampler of the user are split over the processes."""

    @pytest.mark.parametrize("kind", ["shuffled", "sequential"])
    def test_equal_those_with_a_sampler(self, plain_loaders, kind):
        """Samples and weights are those of get_sampler, and the processes share the samples out."""
        for result in plain_loaders:
            assert result[kind] == result[f"{kind} with a sampler"]
        for parts in zip(*(result[kind]["samples"].values() for result in plain_loaders), strict=True):
            assert sorted(chain(*parts)) == [*range(1, 15 if kind == "shuffled" else 13)]

    def test_the_order_depends_on_the_generator(self, plain_loaders):
        """Other seeds of the loader's generator give other orders, the same in all processes."""
        for result in plain_loaders:
            assert result["orders"][0] != result["orders"][1]
        for parts in zip(*(result["orders"] for result in plain_loaders), strict=True):
            assert sorted(chain(*(part["0"] for part in parts))) == [*range(1, 15)]

    def test_of_a_subset(self, plain_loaders):
        """Any map-style data set is split."""
        assert [result["subset"]["samples"]["0"] for result in plain_loaders] == [[1, 3], [2, 4]]

    def test_evaluation(self, plain_loaders):
        """Each sample is evaluated once, also by eval()."""
        for result in plain_loaders:
            assert result["metrics"] == {"of the training": 7.5, "of eval()": 7.5}

    @pytest.mark.parametrize("count", [14, 13, 3, 1])
    def test_prediction(self, plain_loaders, count):
        """Each row is returned in one process, with the output that one process computes, in the stride of ranks."""
        parts, sampled = zip(*(result["predictions"][str(count)] for result in plain_loaders), strict=True)

        assert parts == sampled
        assert [rows for _, rows in filter(None, parts)] == [[*range(rank, count, 2)] for rank in range(min(count, 2))]
        outputs = {row: output for part in filter(None, parts) for output, row in zip(*part, strict=True)}
        assert outputs == {row: row + 1.0 for row in range(count)}  # of Scale, whose weight is 1

    def test_schedules_of_the_unsplit_loader(self, plain_loaders):
        """A schedule made from the length of the loader has twice the steps of the training: a warning names both."""
        for result in plain_loaders:
            [warning], [each_epoch], *others = result["scheduled"].values()
            assert "has 14 steps, and a training of '2ep' makes 8 of them, as the loader is split over 2" in warning
            assert "give step_schedulers_every_batch=True" in each_epoch
            assert others == [[], []]

    def test_are_logged_once(self, plain_loaders):
        """One message for each loader, of process 0."""
        first, second = (result["logged"] for result in plain_loaders)

        assert [line.split(" has no sampler")[0] for line in first] == [
            "train_dataloader",
            "eval_dataloader ('eval')",
            "eval_dataloader ('eval')",
        ]
        assert (
            "split over the 2 processes, as by sampler=composer.distributed.get_sampler(dataset, shuffle=True)"
            in first[0]
        )
        assert not second

    def test_the_loader_of_the_user_stays(self, plain_loaders):
        """It has its own sampler, and a second call of fit() with it continues in the epoch."""
        for result in plain_loaders:
            assert result["again"]["own"] == "RandomSampler"
        assert sorted(chain(*(result["again"]["samples"]["0"] for result in plain_loaders))) == [*range(1, 15)]

    @pytest.mark.parametrize(
        ("sampler", "remedy"),
        [
            ("WeightedRandomSampler", "sampler=composer.distributed.DistributedWeightedSampler(weights, num_samples)"),
            ("SubsetRandomSampler", "with dataset=Subset(dataset, indices)"),
        ],
    )
    def test_samplers_of_the_user_raise(self, plain_loaders, sampler, remedy):
        """The error names what replaces the sampler."""
        for result in plain_loaders:
            assert f"the same samples, as its sampler is a {sampler}." in result["errors"][sampler]
            assert remedy in result["errors"][sampler]


class TestDistributedWeightedSampler:
    def test_processes_share_the_draws(self, plain_loaders):
        """Each epoch has 13 draws, of the samples with a weight, in another order; they resume exactly."""
        first, second = (result["weighted"] for result in plain_loaders)

        draws = {epoch: first["samples"][epoch] + second["samples"][epoch] for epoch in ("0", "1")}

        assert {len(drawn) for drawn in draws.values()} == {13}
        assert {*draws["0"], *draws["1"]} == {1, 2, 3}
        assert draws["0"] != draws["1"]
        assert first["resumed"] == second["resumed"] == first["weight"]

    @pytest.mark.parametrize(("count", "drop_last"), [(10, False), (10, True), (2, False)])
    def test_parts_are_those_of_one_order(self, count, drop_last):
        """Processes get every third draw of one process; the first ones are repeated, or the last ones dropped."""
        weights = torch.arange(1.0, 11.0)

        def draws(num_replicas, rank):
            options = {"num_replicas": num_replicas, "rank": rank, "drop_last": drop_last, "seed": 4}
            return [*cd.DistributedWeightedSampler(weights, count, **options)]

        alone, parts = draws(1, 0), [draws(3, rank) for rank in range(3)]

        end = count // 3 * 3 if drop_last else -(-count // 3) * 3
        assert [part for group in zip(*parts, strict=True) for part in group] == (alone * 3)[:end]

    def test_frequencies(self):
        """A sample is drawn as often as its weight states, and without replacement once."""
        drawn = [*cd.DistributedWeightedSampler([1.0, 3.0], 4000)]
        each = [*cd.DistributedWeightedSampler([1.0, 3.0, 2.0], replacement=False)]

        assert sum(drawn) / 4000 == pytest.approx(0.75, abs=0.03)
        assert sorted(each) == [0, 1, 2]
