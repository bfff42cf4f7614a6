"""The order of a loader that saves its own state."""

import collections
import itertools
import sys

import attrs
import pytest
import torch
from torch.utils.data import DataLoader

import composer.trainer.data.stateful_order
from composer.checkpoint.contents import SavedObjects, SavedPlace
from composer.core import DataSpec
from composer.core.saving.codec import NotSerializableError
from composer.trainer.data.batches import Batches
from composer.trainer.data.order import make_order
from fixtures import record, small_run
from fixtures.data import vectors


class Saving:
    """A loader of three batches that saves its place, and announces another length."""

    def __init__(self, length):
        self.length, self.place, self.epoch = length, 0, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        while self.place < 3:
            self.place += 1
            yield torch.rand(4, 4) + self.place, torch.randint(3, (4,))
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch = state["place"], state["epoch"]


class Drawing:
    """A loader of five batches that draw, which saves its place."""

    place = 0

    def __len__(self):
        return 5

    def batches(self, order):
        while self.place < 5:
            self.place += 1
            yield torch.rand(4, 4) + order[self.place - 1], torch.randint(3, (4,))
        self.place = 0

    def __iter__(self):
        return self.batches(torch.randperm(5))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class DrawingLate(Drawing):
    """The same, whose order is drawn with its first batch."""

    def __iter__(self):
        yield from self.batches(torch.randperm(5))


class RestoringLate(Drawing):
    """The same, which begins again in each epoch, and at a loaded place only once."""

    start = 0

    def __iter__(self):
        noise, self.place, self.start = torch.rand(5), self.start, 0
        yield from self.batches(torch.zeros_like(noise))

    def load_state_dict(self, state):
        self.place = self.start = state["place"]


class Finishing(Drawing):
    """The same, which begins again after each iteration, wherever it has stopped."""

    def __iter__(self):
        try:
            yield from self.batches(torch.randperm(5))
        finally:
            self.place = 0


class CountingEpochs(Drawing):
    """The same, which counts its epochs at their ends, and ends first if its place is loaded there."""

    def __init__(self):
        self.epoch, self.is_loaded = 0, False

    def __iter__(self):
        self.place, self.is_loaded = self.place if self.is_loaded else 0, False
        while self.place < 5:
            self.place += 1
            yield torch.full((4, 4), float(self.epoch + self.place)), torch.randint(3, (4,))
        self.epoch += 1

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch, self.is_loaded = state["place"], state["epoch"], True


class CountingOutside(CountingEpochs):
    """The same, whose iterator is no generator."""

    def __iter__(self):
        return map(tuple, super().__iter__())


class SavingEpoch(Drawing):
    """The same, whose order depends on the epoch that it is given, which its state contains."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return self.batches(torch.randperm(5, generator=torch.Generator().manual_seed(self.epoch)))

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch = state["place"], state["epoch"]


class SavingEpochOutside(SavingEpoch):
    """The same, whose iterator is no generator."""

    def __iter__(self):
        return map(tuple, super().__iter__())


class AnnouncingMany(CountingOutside):
    """The same, which announces more batches than it has."""

    def __len__(self):
        return 7


class AnnouncingNone(CountingOutside):
    """The same, without a length."""

    __len__ = None


class OwnGenerator(Drawing):
    """The same, with a generator that its state does not contain."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        return self.batches(torch.randperm(5, generator=self.generator))


class OwnGeneratorLate(OwnGenerator):
    """The same, whose order is drawn with its first batch."""

    def __iter__(self):
        yield from self.batches(torch.randperm(5, generator=self.generator))


class NoisyLate(OwnGeneratorLate):
    """The same, which also draws with each batch."""

    def __iter__(self):
        for inputs, targets in super().__iter__():
            yield inputs + torch.rand((), generator=self.generator), targets


class SavedGenerator(OwnGenerator):
    """The same, whose state contains its generator, and which draws with each batch."""

    def __iter__(self):
        return self.batches(torch.arange(5))

    def batches(self, order):
        for inputs, targets in super().batches(order):
            yield inputs + torch.rand((), generator=self.generator), targets

    def state_dict(self):
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.generator.set_state(state["generator"])


class DrawingEach(OwnGenerator):
    """The same, which draws with each batch, and whose iterator is no generator."""

    def __iter__(self):
        return map(self.noisy, self.batches(torch.zeros(5)))

    def noisy(self, batch):
        inputs, targets = batch
        return inputs + torch.rand((), generator=self.generator), targets


class AnnouncingFew(Drawing):
    """The same, which counts its epochs at their starts, announces 3 batches, and has 8."""

    def __init__(self):
        self.epoch, self.is_loaded = 0, False

    def __len__(self):
        return 3

    def __iter__(self):
        if not self.is_loaded:
            self.place, self.epoch = 0, self.epoch + 1
        self.is_loaded = False
        return map(self.batch, iter(lambda: self.place < 8, False))

    def batch(self, _):
        self.place += 1
        return torch.full((4, 4), float(100 * self.epoch + self.place)), torch.randint(3, (4,))

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch, self.is_loaded = state["place"], state["epoch"], True


class Shuffling(Drawing):
    """The same, whose state depends on its draws."""

    def __init__(self):
        self.left = []

    def __iter__(self):
        self.left = self.left or list(range(5))
        while self.left:
            sample = self.left.pop(int(torch.randint(len(self.left), ())))
            yield torch.rand(4, 4) + sample, torch.randint(3, (4,))

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = list(state["left"])


class ShufflingLate(Shuffling):
    """The same, which also draws with its first batch, before that is chosen."""

    def __iter__(self):
        torch.rand(5)
        yield from super().__iter__()


class ShufflingNoisy(Shuffling):
    """The same, which adds noise from a generator that its state does not contain."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        for inputs, targets in super().__iter__():
            yield inputs + torch.rand((), generator=self.generator), targets


class TestStateOfALoader:
    def fit(self, make, subset, **options):
        seen = record("batch_end", lambda state: [one.tolist() for one in state.batch])
        options = {"max_duration": "3ep", **options}
        small_run(train_dataloader=make(), train_subset_num_batches=subset, callbacks=seen, **options).fit()
        return seen.values

    @pytest.mark.filterwarnings("ignore:train_dataloader has a length:UserWarning")
    @pytest.mark.parametrize(
        ("make", "subset"),
        [
            *itertools.product([Drawing, DrawingLate, RestoringLate, Finishing, Shuffling, ShufflingNoisy], [-1, 3, 1]),
            *itertools.product([CountingEpochs, OwnGenerator, OwnGeneratorLate, NoisyLate, SavedGenerator], [-1, 3, 1]),
            *itertools.product([DrawingEach, CountingOutside, SavingEpoch, SavingEpochOutside], [-1, 3, 1]),
            *itertools.product([AnnouncingFew], [-1, 3, 5, 6]),
        ],
    )
    def test_resumes_exactly(self, make, subset, tmp_path, monkeypatch):
        """A run resumes after any batch, wherever the loader begins, and whatever a draw or a state decides."""
        monkeypatch.setattr(composer.trainer.data.stateful_order, "_COPY_EVERY", 3)
        saving = {"save_folder": tmp_path, "save_interval": "1ba", "save_filename": "{batch}-{epoch}"}
        batches = self.fit(make, subset, **saving)

        for path in sorted(tmp_path.glob("[1-9]*-*")):
            place = int(path.name.partition("-")[0])
            if place < len(batches):
                assert (path.name, self.fit(make, subset, load_path=path)) == (path.name, batches[place:])

    @pytest.mark.parametrize("make", [Drawing, DrawingLate, OwnGenerator, OwnGeneratorLate, SavedGenerator, Shuffling])
    def test_end_of_the_data_at_that_of_a_subset(self, make, tmp_path):
        """A loader that has no batch after the last one of a subset begins again, also in a resumed run."""
        options = {"max_duration": "8ep"}
        saving = {"save_folder": tmp_path, "save_interval": "1ba", "save_filename": "{batch}-{epoch}"}
        batches = self.fit(make, 1, **saving, **options)

        resumed = {path.name: self.fit(make, 1, load_path=path, **options) for path in tmp_path.glob("[1-7]-*")}

        assert len(batches) == 8
        assert resumed == {name: batches[int(name[0]) :] for name in resumed}

    @pytest.mark.filterwarnings("ignore:The run resumes from .* with other settings")
    @pytest.mark.parametrize("make", [Drawing, DrawingLate, RestoringLate, DrawingEach, Shuffling])
    @pytest.mark.parametrize("subset", [1, 2])
    def test_longer_subset(self, make, subset, tmp_path):
        """A run that was saved at the end of a subset continues with the next batch of a longer one."""
        saving = {"save_folder": tmp_path, "save_interval": "1ba", "save_filename": "{batch}-{epoch}"}
        batches, _ = self.fit(make, 5, max_duration="1ep"), self.fit(make, subset, max_duration="2ep", **saving)

        assert self.fit(make, 5, max_duration="1ep", load_path=tmp_path / f"{subset}-0") == batches[subset:]

    @pytest.mark.parametrize("make", [CountingEpochs, DrawingLate, OwnGeneratorLate])
    def test_after_another_epoch_of_the_same_number(self, make, tmp_path):
        """A run that began a second time with epoch 0 resumes in it."""
        seen = record("batch_end", lambda state: [one.tolist() for one in state.batch])
        trainer = small_run(train_dataloader=make(), max_duration="1ep", callbacks=seen)
        trainer.fit()
        trainer.fit(duration="1ba", reset_time=True)
        path = trainer.save_checkpoint(tmp_path / "checkpoint")
        trainer.fit(duration="4ba")

        assert self.fit(make, -1, max_duration="5ba", load_path=path) == seen.values[6:]

    @pytest.mark.filterwarnings("ignore:train_dataloader has a length:UserWarning")
    @pytest.mark.parametrize("subset", [-1, 2, 3, 4])
    def test_requests_that_lead_elsewhere(self, subset, tmp_path):
        """Between two epochs, the saved state is loaded if the repeated requests do not lead to it."""
        saving = {"save_folder": tmp_path, "save_interval": "1ep", "save_filename": "{batch}-{epoch}"}
        batches = self.fit(ShufflingLate, subset, **saving)

        for path in tmp_path.glob("[1-9]*-[12]"):
            place = int(path.name.partition("-")[0])
            assert self.fit(ShufflingLate, subset, load_path=path) == batches[place:]

    def test_resumes_twice_without_a_copy(self, tmp_path):
        """The draws of a run that was resumed without an earlier state are repeated by one that resumes from it."""
        first, second = (Batches(DataSpec(DrawingLate()), -1, torch.device("cpu"), seed=3) for _ in range(2))
        for _ in range(2):
            first.next()
        second.load(attrs.evolve(first.save(), objects=SavedObjects()))
        second.next()
        third = Batches(DataSpec(DrawingLate()), -1, torch.device("cpu"), seed=3)

        third.load(second.save())

        for _ in range(2):
            assert torch.equal(third.next()[0], second.next()[0])

    def test_state_with_other_mappings(self, tmp_path):
        """They are saved as dictionaries, and an object is named by its place in the state."""

        class WithMapping(Drawing):
            more = ()

            def state_dict(self):
                return collections.OrderedDict(place=self.place, counts=collections.Counter("aa"), more=self.more)

        loader = WithMapping()
        batches = self.fit(WithMapping, -1, max_duration="1ep", save_folder=tmp_path, save_interval="2ba")

        assert self.fit(WithMapping, -1, max_duration="1ep", load_path=tmp_path / "ep0-ba2") == batches[2:]
        loader.more = {print}
        with pytest.raises(NotSerializableError, match=r"^train_dataloader\.more\[0\]: function builtins.print"):
            make_order(loader, seed=17).save(in_epoch=False)

    def test_announced_end_of_own_batches(self):
        """An end of the data is repeated in each of several processes, also if other loaders are longer."""
        ended, resumed = (make_order(CountingOutside(), seed=17) for _ in range(2))
        batches = [*ended.begin(0)]
        loader, states = ended.save(in_epoch=True)

        resumed.load(SavedPlace(epoch=0, place=6, loader=loader, objects=SavedObjects(states), has_ended=True))
        resumed.begin(1)

        assert len(batches) == 5
        assert resumed.loader.epoch == ended.loader.epoch == 1

    @pytest.mark.filterwarnings("ignore:train_dataloader has a length:UserWarning")
    @pytest.mark.parametrize("make", [AnnouncingMany, AnnouncingNone])
    def test_a_loader_that_counts_an_epoch_twice_warns(self, make, tmp_path):
        """Where no state was copied before the end, a loader that ends again and counts again is reported."""
        saving = {"save_folder": tmp_path, "save_interval": "1ep", "save_filename": "{batch}-{epoch}"}
        batches = self.fit(make, -1, max_duration="2ep", **saving)

        with pytest.warns(UserWarning, match="so it may count this epoch twice. Let its __len__ return the number"):
            resumed = self.fit(make, -1, max_duration="2ep", load_path=tmp_path / "5-1")

        assert resumed != batches[5:]  # if they are equal, the warning is not needed

    @pytest.mark.filterwarnings("ignore:train_dataloader saved its own state before the run stopped")
    def test_another_loader_warns(self, tmp_path):
        """A loader of another class than the one whose place within an epoch was saved is a changed setting."""
        saving = {"save_folder": tmp_path, "save_interval": "1ba", "save_filename": "{batch}-{epoch}"}
        self.fit(lambda: Saving(3), -1, max_duration="1ep", **saving)
        loader = DataLoader(vectors(12), batch_size=4)

        with pytest.warns(UserWarning, match=r"train_dataloader\.class: Saving was saved, DataLoader is set"):
            self.fit(lambda: loader, -1, load_path=tmp_path / "2-0")

    @pytest.mark.parametrize("place", [2, 3])
    def test_end_of_own_batches_is_kept(self, place):
        """A process that only stays in step with others is still known to have ended when it saves again."""
        own = Batches(DataSpec(Saving(3)), -1, torch.device("cpu"))
        own.next()
        saved = attrs.evolve(own.save(), place=place, has_ended=True, is_over=place == 3)
        resumed = Batches(DataSpec(Saving(3)), -1, torch.device("cpu"))

        resumed.load(saved)

        assert resumed.save() == saved
        assert resumed.position.epoch_is_over == (place == 3)

    @pytest.mark.parametrize("make", [OwnGenerator, OwnGeneratorLate])
    def test_generator_after_own_batches(self, make):
        """A process that only stays in step with others begins the next epoch with the order that it would have had."""
        own, resumed = (Batches(DataSpec(make()), -1, torch.device("cpu"), seed=3) for _ in range(2))
        for _ in range(5):
            own.next()
        loader, states = own._order.save(in_epoch=True)
        resumed.load(attrs.evolve(own.save(), place=6, has_ended=True, loader=loader, objects=SavedObjects(states)))

        rest = []
        for batches in (own, resumed):
            batches.rewind()
            rest.append(torch.stack([batches.next()[0] for _ in range(5)]))

        assert torch.equal(*rest)

    def test_state_of_an_earlier_release(self):
        """A saved place without the state before the last batch continues from the state."""
        batches = Batches(DataSpec(Saving(3)), -1, torch.device("cpu"))
        batches.next()
        expected, saved = batches.save(), attrs.evolve(batches.save(), objects=SavedObjects())
        other = Batches(DataSpec(Saving(3)), -1, torch.device("cpu"))

        other.load(saved)

        assert torch.equal(other.next()[0], batches.next()[0])
        assert expected.objects.states["earlier"]["state"] == {"place": 0, "epoch": 0}

    def test_state_is_copied_rarely(self):
        """Of a loader whose ``__iter__`` is a generator function, each eighth batch is preceded by a copy."""

        class Long(Saving):
            reads = 0

            def __iter__(self):
                yield from ((torch.rand(4, 4), torch.arange(4) % 3) for _ in range(40))

            def state_dict(self):
                self.reads += 1
                return super().state_dict()

        batches = Batches(DataSpec(loader := Long(100)), -1, torch.device("cpu"))
        for _ in range(40):
            batches.next()

        assert loader.reads == 6  # at the start, and before the batches 1, 9, 17, 25 and 33


class Shuffled:
    """A loader whose state, which it changes in place, has a list of all samples that are left, and their sum."""

    def __init__(self):
        self.state = {"left": list(range(10_000)), "sums": [[0]]}

    def __iter__(self):
        while self.state["left"]:
            sample = self.state["left"].pop()
            self.state["sums"][0][0] += sample
            yield sample

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class TestCopiesOfAState:
    """The state of a loader whose ``__iter__`` is a generator function is copied before some of its batches."""

    def test_are_independent(self):
        """A copy keeps its values when the loader goes on."""
        order = make_order(Shuffled(), seed=17)
        batches = order.begin(0)
        next(batches)
        next(batches)  # the first one after the start that is preceded by a copy

        state, states = order.save(in_epoch=True)
        next(batches)

        assert (state["left"][-1], state["sums"]) == (9_997, [[9_999 + 9_998]])
        assert (states["earlier"]["state"]["left"][-1], states["earlier"]["state"]["sums"]) == (9_998, [[9_999]])

    def test_are_cheap(self):
        """The numbers of a long list are copied without a call for each."""
        batches = make_order(Shuffled(), seed=17).begin(0)
        next(batches)
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
        try:
            next(batches)
        finally:
            sys.setprofile(None)

        assert len(calls) < 1000
