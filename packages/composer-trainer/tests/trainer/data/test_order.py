"""The order and the randomness of the data depend only on the seed and the epoch."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from composer.core.saving.randomness import derive_seed
from composer.trainer.data.order import DataOrder, make_order
from fixtures.draws import Noisy, NoisyBatches, NoisyStream, noisy


class Values(Dataset):
    """Twelve numbers, or several at once."""

    def __len__(self):
        """Twelve."""
        return 12

    def __getitem__(self, index):
        """Take them."""
        return torch.arange(12.0)[index]


def collate_noisily(samples):
    """Add a sample of draws to the batch."""
    return torch.stack([*samples, noisy(-1)])


class Reversed(Sampler):
    """An unknown sampler that draws its start from Python's generator."""

    def __init__(self, length):
        """Of so many samples."""
        self.length = length

    def __iter__(self):
        """Begin anywhere."""
        begin = random.randrange(self.length)
        return iter([(begin - place) % self.length for place in range(self.length)])

    def __len__(self):
        """All."""
        return self.length


def batches(order, epoch, skip=0):
    """Return an epoch's batches as one tensor."""
    return torch.cat([batch if batch.ndim > 1 else batch.flatten() for batch in order.begin(epoch, skip)])


class TestIndependentOfWorkers:
    @pytest.mark.parametrize(
        "options",
        [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
        ids=["1", "2", "2 that live on"],
    )
    @pytest.mark.parametrize("dataset", [Noisy(), NoisyBatches(), Subset(Noisy(), range(8))])
    @pytest.mark.parametrize("collate", [None, collate_noisily])
    def test_equals_no_workers(self, dataset, options, collate):
        """Samples and batches have equal draws for any number of workers, in each epoch and from any batch on."""
        alone = make_order(DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate), seed=17)
        helped = make_order(DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate, **options), seed=17)

        pairs = [(batches(alone, epoch, skip), batches(helped, epoch, skip)) for epoch, skip in ((0, 0), (3, 1))]

        assert all(torch.equal(one, other) for one, other in pairs)
        assert not torch.equal(pairs[0][0][-4:], pairs[1][0][-4:])

    def test_draws_depend_on_the_position(self):
        """A batch's draws depend on its position in the epoch, not on its samples; other batches and epochs differ."""
        in_order = make_order(DataLoader(Noisy(), batch_size=4), seed=17)
        shuffled = make_order(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=17)

        drawn = [batches(order, epoch)[:, 1:] for order in (in_order, shuffled) for epoch in (1, 2)]

        assert torch.equal(drawn[0], drawn[2])
        assert torch.equal(drawn[1], drawn[3])
        assert len(set(torch.cat(drawn[:2]).flatten().tolist())) == 2 * 12 * 3

    @pytest.mark.parametrize("workers", [0, 1])
    def test_skipped_batches_do_not_shift_the_draws(self, workers):
        """The batches after a skip draw what they draw without it."""
        order = make_order(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers), seed=17)

        complete, rest = batches(order, 1), batches(order, 1, skip=2)

        assert torch.equal(complete[8:], rest)

    def test_processes_have_different_draws(self, monkeypatch):
        """Processes have different draws for their batches, and share the order."""
        first = make_order(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=17)
        one = batches(first, 0)
        monkeypatch.setenv("RANK", "1")

        other = batches(make_order(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=17), 0)

        assert torch.equal(one[:, 0], other[:, 0])
        assert not set(one[:, 1].tolist()) & set(other[:, 1].tolist())

    @pytest.mark.parametrize("make", [lambda: DataLoader(NoisyStream(), batch_size=2), NoisyStream])
    def test_processes_draw_apart_in_streams(self, monkeypatch, make):
        """Each process draws for itself in a stream, with or without torch's loader."""
        one = batches(make_order(make(), seed=17), 0).view(6, 4)
        monkeypatch.setenv("RANK", "1")

        other = batches(make_order(make(), seed=17), 0).view(6, 4)

        assert not set(one[:, 1].tolist()) & set(other[:, 1].tolist())

    def test_draws_of_streams_depend_on_the_position(self):
        """A stream's samples have equal draws in each process, and different ones in each epoch."""
        first, second = (make_order(DataLoader(NoisyStream(), batch_size=2), seed=17) for _ in range(2))
        torch.rand(3)

        epochs = [batches(first, epoch) for epoch in (0, 1)]
        batches(second, 0)

        assert torch.equal(epochs[1], batches(second, 1))
        assert torch.equal(epochs[1][2:], batches(second, 1, skip=1))
        assert len({*epochs[0][:, 1].tolist(), *epochs[1][:, 1].tolist()}) == 12


SAMPLERS = {
    "random": lambda data: {"sampler": RandomSampler(data)},
    "with replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=20)},
    "with a generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 12)},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(8))},
    "distributed": lambda data: {"sampler": DistributedSampler(data, num_replicas=2, rank=1)},
    "unknown": lambda data: {"sampler": Reversed(12)},
    "in batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 3, drop_last=True)},
    "unknown in batches": lambda data: {"batch_sampler": BatchSampler(Reversed(12), 5, drop_last=False)},
    "one by one": lambda data: {"shuffle": True, "batch_size": None},
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
class TestSamplers:
    def loader(self, make):
        """Return a loader with the sampler."""
        data = TensorDataset(torch.arange(12.0))
        return DataLoader(_First(data), **make(data))

    def test_order_depends_only_on_seed_and_epoch(self, make):
        """Earlier draws do not change an epoch's order; other epochs and seeds have others."""
        first, second = (make_order(self.loader(make), seed=17) for _ in range(2))
        torch.rand(5)
        random.random()
        other = make_order(self.loader(make), seed=18)

        once = batches(first, 1)

        assert torch.equal(once, batches(second, 1))
        assert not torch.equal(once, batches(first, 2))
        assert make is SAMPLERS["distributed"] or not torch.equal(once, batches(other, 1))

    def test_skipping_does_not_change_later_batches(self, make):
        """After a skip the same batches follow."""
        order = make_order(self.loader(make), seed=17)

        complete, rest = (list(order.begin(4, skip * order.place_distance)) for skip in (0, 2))

        assert len(rest) == len(complete) - 2
        assert all(torch.equal(one, other) for one, other in zip(complete[2:], rest, strict=True))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class _Shuffled(Sampler):
    """A sampler of a user, which draws from its own generator."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(torch.randperm(12, generator=self.generator).tolist())

    def __len__(self):
        return 12


class _Batched(BatchSampler):
    """A batch sampler of a user."""


OWN_GENERATORS = {
    "RandomSampler": lambda generator: {"sampler": RandomSampler(Values(), generator=generator)},
    "SubsetRandomSampler": lambda generator: {"sampler": SubsetRandomSampler(range(12), generator=generator)},
    "WeightedRandomSampler": lambda generator: {"sampler": WeightedRandomSampler([1.0] * 12, 12, generator=generator)},
    "in batches": lambda generator: {
        "batch_sampler": BatchSampler(RandomSampler(Values(), generator=generator), 4, True)
    },
    "unknown": lambda generator: {"sampler": _Shuffled(generator)},
    "unknown in batches": lambda generator: {
        "batch_sampler": _Batched(RandomSampler(Values(), generator=generator), 4, True)
    },
}


class TestSeedsOfSamplers:
    def order(self, **options):
        """Return the samples of an epoch."""
        return batches(make_order(DataLoader(Values(), batch_size=4, **options), seed=17), 1).tolist()

    def test_of_the_loader(self):
        """The seed is the one of the loader's generator, independent of its draws."""
        drawn = torch.Generator().manual_seed(3)
        torch.rand(5, generator=drawn)
        generators = [torch.Generator().manual_seed(3), drawn, torch.Generator().manual_seed(4)]

        one, same, other = (self.order(shuffle=True, generator=generator) for generator in generators)

        assert one == same
        assert one != other

    @pytest.mark.parametrize("make", OWN_GENERATORS.values(), ids=OWN_GENERATORS.keys())
    def test_of_the_generator_of_a_sampler(self, make):
        """The seed is that of the sampler's generator, which the order of an earlier epoch does not change."""
        orders = [make_order(DataLoader(Values(), **make(seeded(seed))), seed=17) for seed in (5, 5, 6)]
        batches(orders[0], 0)

        one, same, other = (batches(order, 1).tolist() for order in orders)

        assert one == same
        assert one != other

    def test_of_a_sampler_and_the_loader(self):
        """The generators of both count, also together."""
        seeds = [(5, 3), (5, 3), (6, 3), (5, 4)]
        options = [
            {"sampler": RandomSampler(Values(), generator=seeded(own)), "generator": seeded(of_loader)}
            for own, of_loader in seeds
        ]

        one, same, *others = (self.order(**option) for option in options)

        assert one == same
        assert all(one != other for other in others)

    def test_of_a_distributed_sampler(self):
        """The seed is the sampler's own."""
        samplers = [DistributedSampler(Values(), num_replicas=2, rank=0, seed=seed) for seed in (0, 0, 1)]

        one, same, other = (self.order(sampler=sampler) for sampler in samplers)

        assert one == same
        assert one != other

    def test_processes_share_one_order(self):
        """Processes divide one order among them, also if their loaders have generators of their own."""
        parts = [
            self.order(
                sampler=DistributedSampler(Values(), num_replicas=2, rank=rank),
                generator=torch.Generator().manual_seed(rank),
            )
            for rank in range(2)
        ]

        assert sorted(parts[0] + parts[1]) == list(range(12))


class _First(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index][0]


class TestEqualsTorchLoader:
    @pytest.mark.parametrize("make", [DataLoader, type("Loader", (DataLoader,), {})], ids=["torch's", "a subclass"])
    @pytest.mark.parametrize(
        "options",
        [
            {"batch_size": 5},
            {"batch_size": 5, "drop_last": True},
            {"batch_size": 5, "collate_fn": list},
            {"batch_size": None},
            {"batch_size": None, "sampler": BatchSampler(range(12), 5, drop_last=False)},
        ],
    )
    @pytest.mark.parametrize("data", [TensorDataset(torch.arange(12.0)), Values(), Subset(Values(), range(12))])
    def test_equals_the_plain_loader(self, make, options, data):
        """Results equal torch's loader, for datasets with and without draws."""
        loader = make(data, **options)

        value = list(make_order(loader, seed=17).begin(0))

        assert repr(value) == repr(list(loader))


class TestNoSideEffects:
    def test_global_generator_is_not_advanced(self):
        """Data loading changes neither dropout's draws nor the user's loader."""
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
        order = make_order(loader, seed=17)
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)

        drawn = [torch.rand(()) for _ in order.begin(0)]
        drawn.append(torch.rand(()))

        assert torch.equal(torch.stack(drawn), expected)
        assert type(loader.dataset) is Noisy
        assert loader.generator is None

    def test_dataset_attributes_are_accessible(self):
        """A worker_init_fn accesses the dataset through its wrapper."""
        data = Noisy()
        order = make_order(DataLoader(data, num_workers=1), seed=17)

        order.loader.dataset.extra = 5

        assert data.extra == order.loader.dataset.extra == 5
        assert len(order.loader.dataset) == 12

    def test_skipped_samples_are_not_loaded(self):
        """Starting within an epoch loads no earlier samples."""
        loaded = []

        class Counting(Noisy):
            def __getitem__(self, index):
                loaded.append(index)
                return super().__getitem__(index)

        order = make_order(DataLoader(Counting(), batch_size=4, shuffle=True), seed=17)

        list(order.begin(0, 2))

        assert len(loaded) == 4


@given(length=st.integers(1, 30), batch=st.integers(1, 7), drop=st.booleans(), skip=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_every_sample_is_loaded_once(length, batch, drop, skip):
    """Skipped and loaded samples together are all samples once, except dropped ones."""
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size=batch, shuffle=True, drop_last=drop)
    order = make_order(loader, seed=3)

    complete = [batch[0].tolist() for batch in order.begin(1)]
    rest = [batch[0].tolist() for batch in order.begin(1, skip)]

    expected = length - length % batch if drop else length
    assert len({sample for part in complete for sample in part}) == expected
    assert rest == complete[skip:]


class TestDistributedOrder:
    """The batches of all processes together, if a ``DistributedSampler`` splits the data."""

    @given(
        length=st.integers(1, 40),
        together=st.sampled_from([4, 8, 12]),
        world_size=st.sampled_from([1, 2, 4]),
        done=st.integers(0, 45),
        drops=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_equal_for_any_number_of_processes(self, length, together, world_size, done, drops):
        """They are the batches of one process, from any sample of the order on; no sample is repeated."""

        def all_batches(world_size):
            data, found = range(length), []
            for rank in range(world_size):
                sampler = DistributedSampler(data, world_size, rank, seed=5)
                size = together // world_size
                order = make_order(DataLoader(data, batch_size=size, sampler=sampler, drop_last=drops), seed=3)
                batches, left = [*order.begin(2, done)], order.end(done) - done
                assert len(batches) == max(0, -(-left // together))
                assert all(len(batch) == size for batch in batches[: max(0, left) // together])
                found.append([batch.tolist() for place, batch in enumerate(batches) if place * together + rank < left])
            return [sorted(itertools.chain(*parts)) for parts in itertools.zip_longest(*found, fillvalue=[])]

        order = [*itertools.chain(*make_one(length, 1).begin(2))]
        left = order[done:]
        left = left[: len(left) - len(left) % together] if drops else left
        expected = [sorted(left[place : place + together]) for place in range(0, len(left), together)]

        assert all_batches(world_size) == expected

    def test_equals_torch(self):
        """Each process has the samples that torch's sampler gives it, in its order, without repeats."""
        data = range(22)
        for rank in range(4):
            sampler = DistributedSampler(data, 4, rank, seed=5)
            order = make_order(DataLoader(data, batch_size=2, sampler=sampler), seed=3)
            found = [batch.tolist() for batch in order.begin(2)]

            torchs = copy.copy(sampler)
            torchs.seed, torchs.epoch = derive_seed(derive_seed(3, "order", 2), 5), 0
            expected = [*torchs]

            assert [*itertools.chain(*found)] == expected[: 6 if rank < 2 else 5]


def make_one(length, batch_size):
    """Return the order of one process, as numbers."""
    data = range(length)
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, 1, 0, seed=5), collate_fn=list)
    return make_order(loader, seed=3)


class TestOtherLoaders:
    def test_order_and_first_batch_have_different_draws(self):
        """An order drawn at the start of an epoch has other numbers than the first batch."""

        def draws():
            return torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002  (the global one)

        class Batches:
            def __iter__(self):
                order = draws()
                return ((order, draws()) for _ in range(2))

        for drawn_first, drawn in make_order(Batches(), seed=17).begin(0):
            assert not torch.equal(drawn_first[0], drawn[0])
            assert drawn_first[1] != drawn[1]
            assert drawn_first[2] != drawn[2]

    def test_stateful_loader_is_not_wrapped(self):
        """A loader with state_dict and load_state_dict saves its position, and its set_epoch is called."""

        class Stateful(list):
            epoch = None

            def set_epoch(self, epoch):
                self.epoch = epoch

            def state_dict(self):
                return {"place": 2}

            def load_state_dict(self, state):
                del self[: state["place"]]

        loader = Stateful([1, 2, 3])
        order = make_order(loader, seed=17)

        rest = list(order.begin(5, 2))

        assert (rest, loader.epoch) == ([1, 2, 3], 5)


def test_sampler_without_an_end_and_with_a_length():
    """It is treated as one without a length: its keys are not drawn in advance."""

    class Endless(Reversed):
        def __iter__(self):
            return itertools.cycle(range(self.length))

    loader = DataLoader(Values(), 5, sampler=Endless(12))
    order = make_order(loader, seed=0).begin(0)

    first = [batch.tolist() for batch in itertools.islice(order, 4)]

    assert first == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2], [3, 4, 5, 6, 7]]


def test_order_without_begin():
    """An order that does not define how an epoch begins raises an error with its name."""

    class Forgetful(DataOrder):
        pass

    with pytest.raises(NotImplementedError, match="Forgetful must define begin"):
        Forgetful([1], seed=0).begin(0)
