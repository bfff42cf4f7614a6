"""Samples are dealt out, and counted once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from composer import distributed as cd
from composer.core import DataSpec

NUMBERS = st.integers(1, 40)


def counted_by(rank, dataset, world_size, batch_size, microbatch_size, *, drop_last=False):
    """Return the samples that a process counts, going through its loader as an evaluation does."""
    sampler = cd.get_sampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, drop_last=drop_last)
    loader, spec = DataLoader(dataset, batch_size=batch_size, sampler=sampler), DataSpec([])
    num_real, seen, counted = cd.num_real_samples_in_loader(loader), 0, []
    for batch in loader:
        left = None if num_real is None else max(0, num_real - seen)
        for part, counts in cd.real_parts(spec.split_batch(batch, microbatch_size), left, spec):
            counted += part.tolist() if counts else []
        seen += len(batch)
    return counted


class TestCounting:
    @given(NUMBERS, st.integers(1, 9), NUMBERS, NUMBERS)
    def test_every_sample_is_counted_once(self, samples, world_size, batch_size, microbatch_size):
        """Over all processes, whatever the sizes."""
        counted = [
            sample
            for rank in range(world_size)
            for sample in counted_by(rank, range(samples), world_size, batch_size, microbatch_size)
        ]

        assert sorted(counted) == list(range(samples))

    @given(NUMBERS, st.integers(1, 9), NUMBERS)
    def test_batches_have_their_part_of_it(self, samples, world_size, batch_size):
        """The pure function agrees with torch's sampler: real are the samples whose place is in the dataset."""
        for rank in range(world_size):
            length = len(DistributedSampler(range(samples), num_replicas=world_size, rank=rank))
            for start in range(0, length, batch_size):
                stop = min(start + batch_size, length)
                expected = sum(rank + place * world_size < samples for place in range(start, stop))

                assert cd.num_real_samples(samples, world_size, rank, start, stop - start) == expected

    @given(NUMBERS, st.integers(1, 9), NUMBERS)
    def test_dropped_samples_stay_dropped(self, samples, world_size, batch_size):
        """With drop_last nothing is repeated, so everything that is dealt is counted."""
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

    @pytest.mark.parametrize(
        "arguments", [(-1, 2, 0), (5, 2, 2), (5, 2, -1), (5, 2, 0, -1), (5, 2, 0, 0, -2), (5, 0, 0)]
    )
    def test_impossible_numbers_are_refused(self, arguments):
        """Nothing is less than 0, and a rank is one of the world's."""
        with pytest.raises(ValueError, match="dataset_len, start and count must be at least 0"):
            cd.num_real_samples(*arguments)

    @pytest.mark.parametrize(
        "loader",
        [
            DataLoader(range(5)),
            DataLoader(range(5), sampler=DistributedSampler(range(5), 2, 1, drop_last=True)),
            DataLoader(range(5), batch_sampler=[[0], [1]]),
            [torch.ones(3)],
        ],
        ids=["plain", "dropping", "own batches", "a list"],
    )
    def test_without_repeats_all_count(self, loader):
        """None says that there is nothing to leave out."""
        assert cd.num_real_samples_in_loader(loader) is None

    def test_a_batch_sampler_is_looked_through(self):
        """A batch sampler of torch around a distributed one repeats what that repeats."""
        sampler = DistributedSampler(range(5), 2, 1, shuffle=False)

        assert cd.num_real_samples_in_loader(DataLoader(range(5), batch_sampler=BatchSampler(sampler, 2, False))) == 2

    def test_parts_keep_their_structure(self):
        """Batches of any structure are cut as microbatches are."""
        batch = {"ids": torch.arange(4), "names": ["a", "b", "c", "d"]}

        [(part, counts)] = cd.real_parts([batch], 3, DataSpec([]))

        assert counts
        assert part["ids"].tolist() == [0, 1, 2]
        assert part["names"] == ["a", "b", "c"]


class TestGetSampler:
    def test_it_is_that_of_this_process(self, monkeypatch):
        """By default, a sampler uses the world size and the rank of the process group."""
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "2")

        assert list(cd.get_sampler(range(7))) == [2, 5, 1]
        assert list(cd.get_sampler(range(7), drop_last=True)) == [2, 5]
        assert list(cd.get_sampler(range(4), num_replicas=1, rank=0)) == [0, 1, 2, 3]

    def test_epochs_have_different_orders(self):
        """Shuffled samples are in another order in each epoch, and in the same in every run."""
        loader = DataLoader(range(50), sampler=cd.get_sampler(range(50), shuffle=True), batch_size=None)
        orders = []
        for epoch in (0, 1, 0):
            cd.set_epoch(loader, epoch)
            orders.append([int(sample) for sample in loader])

        assert orders[0] == orders[2] != orders[1]
        assert sorted(orders[1]) == list(range(50))

    @pytest.mark.parametrize("loader", [[1, 2], DataLoader(range(3)), DataLoader(range(3), batch_sampler=[[0], [1]])])
    def test_samplers_without_epochs_are_left_alone(self, loader):
        """Samplers without set_epoch are accepted."""
        before = [str(batch) for batch in loader]

        cd.set_epoch(loader, 4)

        assert [str(batch) for batch in loader] == before

    def test_batch_samplers_are_told(self):
        """One that deals out whole batches may depend on the epoch, too."""

        class Batches(list):
            def set_epoch(self, epoch):
                self.epoch = epoch

        batches = Batches([[0], [1]])

        cd.set_epoch(DataLoader(range(3), batch_sampler=batches), 4)

        assert batches.epoch == 4

    def test_data_without_length_is_refused(self):
        """What is iterated over cannot be dealt out."""

        class Stream(IterableDataset):
            def __len__(self):
                return 3

            def __iter__(self):
                return iter(range(3))

        for dataset in (Stream(), iter([1])):
            with pytest.raises(TypeError, match=r"dataset must have a length .* got (Stream|list_iterator)"):
                cd.get_sampler(dataset)


class TestChecks:
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
    def test_loaders_that_cannot_be_right_are_refused(self, two_processes, name, message):
        """The same samples everywhere, another process's, or more batches here than there: each is an error."""
        assert message in two_processes[0]["samplers"][name]

    def test_a_sampler_of_ones_own_is_trusted(self, two_processes):
        """What cannot be known is not refused."""
        assert two_processes[0]["samplers"]["own"] == ""

    @pytest.mark.parametrize(
        "sampler", [RandomSampler(range(4)), SubsetRandomSampler(range(3)), WeightedRandomSampler([1.0, 2.0], 4)]
    )
    def test_wrapped_samplers_are_seen(self, monkeypatch, sampler):
        """A random sampler within torch's batch sampler is the same mistake."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        batches = BatchSampler(sampler, 2, drop_last=False)

        with pytest.raises(ValueError, match=type(sampler).__name__):
            cd.check_sampler(DataLoader(range(4), batch_sampler=batches))

    def test_alone_every_loader_will_do(self):
        """One process may take samples as it likes, and any number of batches."""
        cd.check_sampler(DataLoader(TensorDataset(torch.ones(3)), shuffle=True))
        cd.check_lengths(None)
        cd.check_lengths(3)

        assert cd.get_world_size() == 1
