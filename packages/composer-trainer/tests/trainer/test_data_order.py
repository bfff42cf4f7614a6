"""The order and the randomness of the data depend only on the seed and the epoch."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from composer.trainer.data_order import make_order


def noisy(index):
    """Return the index and a draw from each global generator."""
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002  (the global one)
    return torch.tensor([index, *drawn], dtype=torch.float64)


class Noisy(Dataset):
    """Samples that draw from all three global generators: their index, then the draws."""

    def __len__(self):
        """Twelve samples."""
        return 12

    def __getitem__(self, index):
        """Draw."""
        return noisy(index)


class NoisyBatches(Noisy):
    """The same, loaded a batch at once."""

    def __getitems__(self, indices):
        """Draw for each."""
        return [self[index] for index in indices]


class Echo(Noisy):
    """Loads a batch in one call and returns the requested indices."""

    def __getitems__(self, indices):
        """Do not load anything."""
        return ["loaded", indices]


class Values(Dataset):
    """Twelve numbers, or several of them at once."""

    def __len__(self):
        """Twelve."""
        return 12

    def __getitem__(self, index):
        """Take them."""
        return torch.arange(12.0)[index]


def collate_noisily(samples):
    """Add a sample of draws to the batch."""
    return torch.stack([*samples, noisy(-1)])


class NoisyStream(IterableDataset):
    """A stream of six draws."""

    def __iter__(self):
        """Draw."""
        for index in range(6):
            yield noisy(index)


class Reversed(Sampler):
    """A sampler that nobody knows: draws from Python's generator where to begin."""

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


class TestSameWhateverTheWorkers:
    @pytest.mark.parametrize(
        "options",
        [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
        ids=["1", "2", "2 that live on"],
    )
    @pytest.mark.parametrize("dataset", [Noisy(), NoisyBatches(), Subset(Noisy(), range(8))])
    @pytest.mark.parametrize("collate", [None, collate_noisily])
    def test_equals_no_workers(self, dataset, options, collate):
        """Samples and batches draw the same with any number of workers, in each epoch and from any batch on."""
        alone = make_order(DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate), seed=17)
        helped = make_order(DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate, **options), seed=17)

        pairs = [(batches(alone, epoch, skip), batches(helped, epoch, skip)) for epoch, skip in ((0, 0), (3, 1))]

        assert all(torch.equal(one, other) for one, other in pairs)
        assert not torch.equal(pairs[0][0][-4:], pairs[1][0][-4:])

    def test_a_batch_draws_by_its_place(self):
        """Whatever its samples are, a batch draws by its place in the epoch; other batches and epochs draw apart."""
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

        whole, rest = batches(order, 1), batches(order, 1, skip=2)

        assert torch.equal(whole[8:], rest)

    def test_processes_draw_apart(self, monkeypatch):
        """Processes draw for their batches each in its own way, and share the order."""
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

    def test_streams_draw_by_their_place(self):
        """A stream's samples draw the same in each process, other things in each epoch, and each of their own."""
        first, second = (make_order(DataLoader(NoisyStream(), batch_size=2), seed=17) for _ in range(2))
        torch.rand(3)

        epochs = [batches(first, epoch) for epoch in (0, 1)]
        batches(second, 0)

        assert torch.equal(epochs[1], batches(second, 1))
        assert torch.equal(epochs[1][2:], batches(second, 1, skip=1))
        assert len({*epochs[0][:, 1].tolist(), *epochs[1][:, 1].tolist()}) == 12

    def test_persistent_workers_of_a_stream_begin_again(self):
        """An epoch that is begun a second time draws the same in workers that have outlived it."""
        order = make_order(DataLoader(NoisyStream(), batch_size=3, num_workers=1, persistent_workers=True), seed=17)

        first, _, again = (batches(order, epoch) for epoch in (0, 1, 0))

        assert torch.equal(first, again)

    def test_workers_of_streams_draw_apart(self):
        """Two workers that go through copies of a stream do not draw the same."""
        order = make_order(DataLoader(NoisyStream(), batch_size=3, num_workers=2, persistent_workers=True), seed=17)

        epochs = torch.cat([batches(order, epoch) for epoch in (0, 1)])

        assert epochs.shape == (24, 4)
        assert len(set(epochs[:, 1].tolist())) == 24


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

    def test_the_order_hangs_on_seed_and_epoch(self, make):
        """Whatever was drawn before, an epoch's order is the same; the next one's and another seed's are others."""
        first, second = (make_order(self.loader(make), seed=17) for _ in range(2))
        torch.rand(5)
        random.random()
        other = make_order(self.loader(make), seed=18)

        once = batches(first, 1)

        assert torch.equal(once, batches(second, 1))
        assert not torch.equal(once, batches(first, 2))
        assert make is SAMPLERS["distributed"] or not torch.equal(once, batches(other, 1))

    def test_skipping_leaves_the_rest_as_it_is(self, make):
        """After a skip come exactly the batches that come without."""
        order = make_order(self.loader(make), seed=17)

        whole, rest = (list(order.begin(4, skip)) for skip in (0, 2))

        assert len(rest) == len(whole) - 2
        assert all(torch.equal(one, other) for one, other in zip(whole[2:], rest, strict=True))


class TestSeedsOfSamplers:
    def order(self, **options):
        """Return the samples of an epoch."""
        return batches(make_order(DataLoader(Values(), batch_size=4, **options), seed=17), 1).tolist()

    def test_of_the_loader(self):
        """The seed of the loader's own generator counts, and not what was drawn from it."""
        drawn = torch.Generator().manual_seed(3)
        torch.rand(5, generator=drawn)
        generators = [torch.Generator().manual_seed(3), drawn, torch.Generator().manual_seed(4)]

        one, same, other = (self.order(shuffle=True, generator=generator) for generator in generators)

        assert one == same
        assert one != other

    def test_of_a_distributed_sampler(self):
        """The sampler's own seed counts."""
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


class TestSeedsOnceForEachBatch:
    """To seed takes longer than to load many a sample."""

    @pytest.fixture
    def seeded(self, monkeypatch):
        """Return a list that grows with each seeding of Python's generator."""
        calls, seed = [], random.seed
        monkeypatch.setattr(random, "seed", lambda key: (calls.append(key), seed(key)))
        return calls

    @pytest.mark.parametrize("data", [Noisy(), NoisyBatches(), Subset(Noisy(), range(12))])
    @pytest.mark.parametrize("make", [DataLoader, type("Loader", (DataLoader,), {})], ids=["torch's", "a subclass"])
    def test_a_dataset(self, seeded, data, make):
        """Three batches of four samples take three seedings."""
        order = make_order(make(data, batch_size=4, shuffle=True), seed=17)

        list(order.begin(0))

        assert len(set(seeded)) == len(seeded) == 3

    def test_a_stream(self, seeded):
        """Six samples in batches of four take a seeding for the iterator, and one for each batch."""
        order = make_order(DataLoader(NoisyStream(), batch_size=4), seed=17)

        list(order.begin(0))

        assert len(set(seeded)) == len(seeded) == 3

    def test_samples_without_batches(self, seeded):
        """A loader that does not batch loads each by a seed of its own."""
        order = make_order(DataLoader(Noisy(), batch_size=None), seed=17)

        list(order.begin(0))

        assert len(set(seeded)) == 12


class TestAsTorchLoads:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_batch_is_loaded_at_once(self, workers):
        """A dataset with ``__getitems__`` gets a batch's indices as the sampler has put them together."""
        sampler = [(3, 1), (2,)]
        order = make_order(DataLoader(Echo(), batch_sampler=sampler, collate_fn=list, num_workers=workers), seed=17)

        assert list(order.begin(0)) == [["loaded", (3, 1)], ["loaded", (2,)]]

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
        """What comes is what torch's loader gives, of datasets that draw nothing and of others."""
        loader = make(data, **options)

        given = list(make_order(loader, seed=17).begin(0))

        assert repr(given) == repr(list(loader))


class TestLeavesOthersAlone:
    def test_layers_draw_the_same(self):
        """Torch's global generator, from which dropout draws, does not notice the data; nor does the user's loader."""
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

    def test_plain_data_is_not_wrapped(self):
        """Tensors draw nothing, so their samples cost nothing more; a function that collates them might."""
        data = ConcatDataset([TensorDataset(torch.arange(4.0)), Subset(TensorDataset(torch.arange(4.0)), [1, 2])])

        plain = make_order(DataLoader(data, num_workers=1), seed=17)
        collated = make_order(DataLoader(data, num_workers=1, collate_fn=list), seed=17)

        assert plain.loader.dataset is data
        assert collated.loader.dataset is not data

    def test_dataset_of_this_process_is_not_wrapped(self):
        """Without workers, the dataset that a collate_fn or a transform may refer to is the user's own."""
        data = Noisy()

        assert make_order(DataLoader(data), seed=17).loader.dataset is data

    def test_dataset_that_raises_stop_iteration_does_not_end_the_epoch(self):
        """A sample that raises StopIteration is an error; otherwise the epoch would end early without a word."""

        class Ending(Noisy):
            def __getitem__(self, index):
                raise StopIteration

        with pytest.raises(RuntimeError, match="StopIteration"):
            next(make_order(DataLoader(Ending()), seed=17).begin(epoch=0))

    def test_attributes_of_the_dataset_are_reached(self):
        """The function that initializes a worker accesses the dataset through its wrapper."""
        data = Noisy()
        order = make_order(DataLoader(data, num_workers=1), seed=17)

        order.loader.dataset.extra = 5

        assert data.extra == order.loader.dataset.extra == 5
        assert len(order.loader.dataset) == 12

    def test_skipped_samples_are_not_loaded(self):
        """To begin in the middle of an epoch, nothing before it is loaded."""
        loaded = []

        class Counting(Noisy):
            def __getitem__(self, index):
                loaded.append(index)
                return super().__getitem__(index)

        order = make_order(DataLoader(Counting(), batch_size=4, shuffle=True), seed=17)

        list(order.begin(0, skip=2))

        assert len(loaded) == 4


class TestOtherLoaders:
    def test_a_generator_function_draws_by_the_batch(self):
        """What can only be iterated over draws the same again, from any batch on."""

        class Batches:
            def __iter__(self):
                for _ in range(4):
                    yield torch.rand(2)

        order = make_order(Batches(), seed=17)
        torch.manual_seed(3)

        whole, rest = list(order.begin(1)), list(order.begin(1, skip=2))

        assert not order.skips
        assert torch.equal(torch.stack(whole[2:]), torch.stack(rest))
        assert not torch.equal(whole[0], next(order.begin(2)))

    def test_what_is_drawn_first_is_not_drawn_again(self):
        """An order that is drawn when an epoch begins has other numbers than the first batch."""

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

    def test_a_loader_that_knows_its_place_is_left_alone(self):
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

        rest = list(order.begin(5, skip=2))

        assert (rest, loader.epoch, order.state_dict()) == ([1, 2, 3], 5, {"place": 2})

    def test_a_fingerprint_tells_unknown_orders_apart(self):
        """Only where an unknown sampler chose the order there is a digest of it, one for each order."""
        known = make_order(DataLoader(Noisy(), shuffle=True), seed=17)
        unknown = make_order(DataLoader(Noisy(), sampler=Reversed(12)), seed=17)
        known.begin(0)

        digests = set()
        for epoch in range(3):
            unknown.begin(epoch)
            digests.add(unknown.fingerprint(1))

        assert known.fingerprint(1) is None
        assert len(digests) > 1
        assert None not in digests


class TestFingerprint:
    @pytest.mark.parametrize("batched", [True, False])
    @pytest.mark.parametrize("has_set_epoch", [True, False])
    def test_of_what_may_not_end(self, has_set_epoch, batched):
        """Of a sampler without a length, or one that takes the epoch, it is that of the batches given so far."""
        own = Endless()
        if has_set_epoch:
            own.set_epoch = lambda epoch: None
        options = {"sampler": own, "batch_size": 2} if batched else {"batch_sampler": BatchSampler(own, 2, False)}
        order = make_order(DataLoader(TensorDataset(torch.arange(12)), **options), seed=17)
        iterator = order.begin(0)

        digests = []
        for count in range(1, 4):
            next(iterator)
            digests.append(order.fingerprint(count))
            own.begin = 0

        assert len(set(digests)) == 3
        assert [order.choose_again(0, count) for count in (1, 2, 3)] == digests
        order.begin(0, skip=2)
        assert order.fingerprint(2) == digests[1]
        own.begin = 1
        assert order.choose_again(0, 2) != digests[1]

    def test_of_keys_that_are_no_numbers(self):
        """Keys of other kinds have digests, too."""
        keys = [torch.tensor(1), torch.tensor(2)]
        order = make_order(DataLoader(_ByTensor(), batch_sampler=_Unending(keys)), seed=17)
        iterator = order.begin(0)
        next(iterator)

        assert order.fingerprint(1) == order.choose_again(0, 1) != order.choose_again(0, 2)


class Endless(Sampler):
    """A sampler that never ends."""

    begin = 0

    def __iter__(self):
        return ((self.begin + place) % 12 for place in itertools.count())


class _Unending:
    def __init__(self, keys):
        self.keys = keys

    def __iter__(self):
        return ([key] for key in itertools.cycle(self.keys))


class _ByTensor(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, key):
        return key


@given(length=st.integers(1, 30), batch=st.integers(1, 7), drop=st.booleans(), skip=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_every_sample_once(length, batch, drop, skip):
    """What is skipped and what is given are together every sample once, but for those that are dropped."""
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size=batch, shuffle=True, drop_last=drop)
    order = make_order(loader, seed=3)

    whole = [batch[0].tolist() for batch in order.begin(1)]
    rest = [batch[0].tolist() for batch in order.begin(1, skip)]

    expected = length - length % batch if drop else length
    assert len({sample for part in whole for sample in part}) == expected
    assert rest == whole[skip:]
