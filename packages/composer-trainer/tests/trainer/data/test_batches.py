"""Training batches: lengths that are wrong, one of several processes, and problems of loaders."""

import itertools
import math
import multiprocessing
import operator
import warnings

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

import composer.trainer.data.batches
from composer import functional as cf
from composer.core import Callback, DataSpec
from composer.distributed import get_sampler
from composer.models import ComposerClassifier
from composer.trainer.data.batches import Batches
from fixtures import record, small_run, weights
from fixtures.data import make_batches, vector_batches, vectors


@pytest.mark.usefixtures("one_of_two")
class TestRepeats:
    @pytest.mark.parametrize(("samples", "expected"), [(5, [[1, 3], [0]]), (7, [[1, 3], [5]]), (6, [[1, 3], [5]])])
    def test_repeats_are_excluded(self, samples, expected):
        """The last batch has only this process's samples, unless it has none."""
        batches = make_batches(DataLoader, samples)

        assert [batches.next().tolist() for _ in range(2)] == expected

    @pytest.mark.parametrize(("samples", "expected"), [(5, [True, False]), (7, [True, True])])
    def test_batch_of_repeats_has_weight_zero(self, samples, expected):
        """It is trained on with weight 0, as the other process has a batch too."""
        batches = make_batches(DataLoader, samples)
        counts = []

        for _ in range(2):
            batches.next()
            counts.append(batches.position.last_is_counted)

        assert counts == expected


class Pairs(Sampler):
    """A batch sampler of a user around another sampler."""

    def __init__(self, sampler):
        super().__init__()
        self.sampler, self.batch_size = sampler, 2

    def __len__(self):
        return (len(self.sampler) + 1) // 2

    def __iter__(self):
        keys = iter(self.sampler)
        while pair := list(itertools.islice(keys, 2)):
            yield pair


@pytest.mark.usefixtures("one_of_two")
class TestOwnBatchSampler:
    """Its batches are its own, so that what the sampler repeats is trained on."""

    def test_repeats_warn(self):
        """The warning names the batch sampler, which no rule for samplers covers."""
        loader = DataLoader(range(5), batch_sampler=Pairs(get_sampler(range(5))))

        with pytest.warns(UserWarning, match=r"1 samples of each epoch are trained on twice.*the Pairs chooses"):
            Batches(DataSpec(loader), -1, torch.device("cpu"))


def saved_place(place, samples=46):
    """Return the place of four processes with batches of three samples each, after some samples of all of them."""
    loader = DataLoader(range(samples), batch_size=3, sampler=get_sampler(range(samples), num_replicas=4, rank=3))
    batches = Batches(DataSpec(loader), -1, torch.device("cpu"))
    return attrs.evolve(batches.save(), place=place)


@pytest.mark.usefixtures("one_of_two")
class TestOtherNumbersOfProcesses:
    """The place of four processes, with three samples in a batch each, in the data of the second of two."""

    @pytest.mark.parametrize("batch_size", [6, 4, 12, 5])
    @pytest.mark.parametrize("place", [24, 48])
    def test_place(self, batch_size, place):
        """It is after the samples of all processes, whatever the batch size."""
        loader = DataLoader(range(46), batch_size=batch_size, sampler=get_sampler(range(46), shuffle=True))
        batches = Batches(DataSpec(loader), -1, torch.device("cpu"))

        batches.load(saved_place(place))

        assert batches.save().place == place
        assert batches.position.epoch_is_over == (place == 48)

    @pytest.mark.parametrize(("place", "expected"), [(24, 11 / 3), (46, 0), (0, 23 / 3)])
    def test_epoch_ends_after_its_last_sample(self, monkeypatch, place, expected):
        """The rest of the epoch has batches of the new size, and begins with the next sample."""
        data = range(46)
        loader = DataLoader(data, batch_size=3, sampler=get_sampler(data))
        monkeypatch.setattr(composer.trainer.data.batches, "all_gather_object", lambda one: [one, one])
        rest = Batches(DataSpec(loader), -1, torch.device("cpu"))
        rest.agree()
        rest.load(saved_place(place))

        found = []
        while not rest.position.epoch_is_over:
            found.append(rest.next().tolist())
            assert rest.position.last_is_counted
            assert rest.save().place == place + 6 * len(found)

        assert len(found) == math.ceil(expected)
        assert [*itertools.chain(*found)] == [*range(place + 1, 46, 2)]

    def test_subset(self):
        """A subset ends the epoch after as many samples as its batches have, whatever the number of processes."""
        loader = DataLoader(range(46), batch_size=3, sampler=get_sampler(range(46)))
        batches = Batches(DataSpec(loader), 5, torch.device("cpu"))

        batches.load(saved_place(24))

        assert batches.next().tolist() == [25, 27, 29]
        assert batches.position.epoch_is_over


@pytest.mark.usefixtures("one_of_two")
class TestDropLast:
    def test_less_than_a_batch_of_all_processes(self):
        """Processes that would have batches of repeats alone train on none; without any the data raises an error."""
        with pytest.raises(ValueError, match="smaller than one batch of all processes with drop_last=True"):
            make_batches(lambda *args, **options: DataLoader(*args, drop_last=True, **options), 3)


class Growing(Sampler):
    """Three samples, and one more in each further epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        """Of this epoch."""
        self.epoch = epoch

    def __len__(self):
        """Of the first epoch."""
        return 3

    def __iter__(self):
        """In order."""
        return iter(range(3 + self.epoch))


class TestLengthOfAnotherEpoch:
    """What an unknown sampler has drawn in one epoch does not apply to another."""

    @pytest.mark.filterwarnings("ignore:train_dataloader has a length of 3 batches")
    def test_two_saved_places(self):
        """Each place that is loaded has the end of its own epoch."""
        batches = Batches(DataSpec(DataLoader(range(9), sampler=Growing())), -1, torch.device("cpu"))
        saved, ends = [], []
        for epoch in range(2):
            batches.rewind(epoch)
            batches.next()
            saved.append(batches.save())

        for state in (saved[1], saved[0], saved[1]):
            batches.load(state)
            ends.append(batches.position.data_end)

        assert ends == [4, 3, 4]


class RoundedDown(Sampler):
    """A batch sampler that has a last batch of two samples, which its length does not count."""

    def __len__(self):
        return 10 // 4

    def __iter__(self):
        yield from torch.randperm(10).split(4)


class Estimated(Sampler):
    """A sampler of twelve samples that announces more or fewer."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(12).tolist())


class Split(IterableDataset):
    """Ten samples, shared by the workers, whose batches torch counts as if there were one."""

    def __len__(self):
        return 10

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([vectors(10)[index] for index in range(first, 10, step)])


class Ending(Dataset):
    """A data set whose eleventh sample raises StopIteration."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 10:
            raise StopIteration
        return vectors(24)[index]


class Announcing:
    """A loader of three batches whose length is another number; each epoch has other samples."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([(torch.rand(4, 4), torch.randint(3, (4,))) for _ in range(3)])


def test_batches_that_may_be_repeated_are_copied():
    """Where a process may need its last batch again, algorithms that change a batch in place do not change that one."""
    loaded = [{"x": torch.zeros(2)}, {"x": torch.ones(2)}]
    batches = Batches(DataSpec(filter(None, loaded)), -1, torch.device("cpu"))
    batches._may_end_apart = True  # as in several processes

    batches.next().clear()

    assert loaded[0].keys() == {"x"}


LENGTHS = {  # the loader, its announced and its actual number of batches
    "batch sampler that rounds down": (lambda: DataLoader(vectors(10), batch_sampler=RoundedDown()), 2, 3),
    "sampler with fewer": (lambda: DataLoader(vectors(12), 4, sampler=Estimated(40)), 10, 3),
    "stream in parts": (lambda: DataLoader(Split(), 4, num_workers=2), 3, 4),
    "StopIteration in a worker": (lambda: DataLoader(Ending(), 4, num_workers=1), 6, 2),
    "loader with more": (lambda: Announcing(2), 2, 3),
    "loader with fewer": (lambda: Announcing(8), 8, 3),
}


class Drawn:
    """An iterable without a length."""

    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(torch.rand(self.number, 4))


def test_subset_of_a_loader_without_a_length():
    """A subset that is larger than the data is named as the cause, and not the length that the loader lacks."""
    batches = Batches(DataSpec(Drawn(3)), 5, torch.device("cpu"))
    for _ in range(3):
        batches.next()

    with pytest.warns(UserWarning, match="^train_subset_num_batches is 5, and train_dataloader returned only 3"):
        batches.next()


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")  # of torch's own
@pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")
@pytest.mark.parametrize(("make", "announced", "actual"), LENGTHS.values(), ids=LENGTHS.keys())
class TestLengthIsAHint:
    def run(self, make, **options):
        """Return a trainer of two epochs, its batches and the ends of its epochs."""
        seen, ends = record("batch_end", lambda state: state.batch[0].tolist()), record("epoch_end", lambda _: 0)
        trainer = small_run(train_dataloader=make(), max_duration="2ep", callbacks=[seen, ends], **options)
        return trainer, seen.values, ends.values

    def test_trains_on_what_the_loader_returns(self, make, announced, actual):
        """Each epoch has all batches of the loader, and the first that differs from the length warns."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer, batches, ends = self.run(make)
            trainer.fit()

        assert (len(batches), len(ends)) == (2 * actual, 2)
        [message] = [str(one.message) for one in warned if str(one.message).startswith("train_dataloader")]
        assert message.startswith(f"train_dataloader has a length of {announced} batches and returned")

    @pytest.mark.filterwarnings("ignore:train_dataloader has a length:UserWarning")
    def test_resumes_exactly(self, make, announced, actual, tmp_path):
        """A run that is stopped after any batch of an epoch continues with the next one."""
        saving = {"save_folder": tmp_path, "save_filename": "{batch}"}
        saving["save_interval"] = lambda state, event: event == "batch_checkpoint"  # also the last announced one
        whole, batches, _ = self.run(make, **saving)
        whole.fit()

        for place in {1, announced, announced + 1, actual, actual + 1} & {*range(1, 2 * actual)}:
            resumed, rest, ends = self.run(make, load_path=str(tmp_path / f"{place}"))
            resumed.fit()

            assert batches[place:] == rest
            assert len(ends) == 2 - (place - 1) // actual
            assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")
def test_an_epoch_ends_where_its_loader_ends(tmp_path):
    """A training that ends with the last batch of a loader leaves the end of its epoch to the run that asks for it."""
    ends = record("epoch_end", lambda state: int(state.timestamp.batch))
    first = small_run(train_dataloader=Announcing(3), max_duration="2ep")
    first.fit(duration="3ba")
    path = first.save_checkpoint(str(tmp_path / "one"))

    small_run(train_dataloader=Announcing(3), max_duration="2ep", load_path=path, callbacks=ends).fit()

    assert int(first.state.timestamp.epoch) == 0
    assert ends.values == [3, 6]


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_end_with_the_trainer(persistent):
    """The trainer stops the workers of its loader when it is closed within an epoch."""
    before = multiprocessing.active_children()
    loader = DataLoader(vectors(40), 4, num_workers=1, persistent_workers=persistent)
    trainer = small_run(train_dataloader=loader, max_duration="1ep")
    trainer.fit(duration="1ba")
    during = multiprocessing.active_children()

    trainer.close()

    assert len(during) == len(before) + 1
    assert len(multiprocessing.active_children()) == len(before)


class ByEpoch(Dataset):
    """Twenty samples that depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(4, generator=torch.Generator().manual_seed(100 * self.epoch + index)), index % 3


class TestEpochInWorkers:
    """The copies of a data set in worker processes, of torch's loader."""

    @pytest.mark.parametrize("persistent", [True, False])
    @pytest.mark.parametrize("inside", [True, False])
    def test_set_epoch_reaches_them(self, persistent, inside):
        """Each epoch has the samples that it has without workers, also of a data set inside of others."""
        seen = [record("batch_end", lambda state: state.batch[0].tolist()) for _ in range(2)]
        for workers, one in enumerate(seen):
            data = ConcatDataset([Subset(ByEpoch(), range(8)), ByEpoch()]) if inside else ByEpoch()
            loader = DataLoader(data, 4, num_workers=workers, persistent_workers=persistent and workers > 0)
            small_run(train_dataloader=loader, max_duration="2ep", callbacks=one).fit()

        length = len(seen[0].values) // 2
        assert seen[0].values == seen[1].values
        assert all(map(operator.ne, seen[0].values[:length], seen[0].values[length:]))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_alternating_flips(tmp_path, workers):
    """Each image is mirrored in every second epoch, also after a resume within an epoch and with workers."""
    images = torch.arange(24.0).view(12, 1, 1, 2)
    seen = {}

    class Record(Callback):
        def after_dataloader(self, state, logger):
            pixels, _ = state.batch
            for first, second in pixels.flatten(1).tolist():
                seen.setdefault(int(min(first, second)) // 2, []).append(first > second)

    def train(**options):
        data = cf.AlternatingFlip([(image, 0) for image in images])
        model = ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), num_classes=2)
        loader = DataLoader(data, batch_size=4, shuffle=True, **workers)
        trainer = small_run(model=model, train_dataloader=loader, callbacks=Record(), max_duration="3ep", **options)
        trainer.fit(duration=None if "load_path" in options else "4ba")
        trainer.close()

    train(save_folder=str(tmp_path), save_interval="4ba")
    train(load_path=str(next(tmp_path.glob("*-ba4"))))

    assert sorted(seen) == list(range(12))
    assert all(turns in ([True, False, True], [False, True, False]) for turns in seen.values())
    assert len({turns[0] for turns in seen.values()}) == 2


class Counting(torch.nn.Module):
    """A collate function that counts its batches in a buffer, and adds their number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, samples):
        self.count += 1
        return torch.stack(samples) + self.count


[BATCH] = vector_batches(1)


class OwnLoader(DataLoader):
    """A custom iterable loader with its own order."""

    def __iter__(self):
        return super().__iter__()


@pytest.mark.usefixtures("one_of_two")
class TestRepeatsOfOtherLoaders:
    def test_repeats_that_cannot_be_excluded_warn(self):
        """The warning states the number of repeated samples and the remedy."""
        with pytest.warns(
            UserWarning, match=r"1 samples of each epoch are trained on twice.*OwnLoader.*drop_last=True"
        ):
            make_batches(OwnLoader, 5)

    @pytest.mark.parametrize(("samples", "options"), [(4, {}), (5, {"drop_last": True})])
    def test_no_repeats_do_not_warn(self, samples, options):
        """Evenly divisible and dropped samples are trained on once by any loader."""
        assert make_batches(OwnLoader, samples, **options).position.length == 1
