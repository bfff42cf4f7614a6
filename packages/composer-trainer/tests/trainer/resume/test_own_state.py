"""State in attributes of user objects is restored on resume, or a warning names it."""

import collections
import functools
import itertools
import random
import time

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from composer.core import Algorithm, Callback, Event, Time
from composer.models import ComposerClassifier
from composer.trainer import Trainer
from composer.trainer.resume.own_state import OwnState

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :3].argmax(dim=1)
STEPS = 9


def noisy(sample, noise):
    """Return a sample that depends on a draw or a counter."""
    return sample[0] + 0.1 * noise, sample[1]


class Samples(Dataset):
    """Twelve samples, each changed by a draw or counter of a subclass."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return noisy((INPUTS[index], TARGETS[index]), self.noise())

    def noise(self):
        return 0.0


class TorchDataset(Samples):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def noise(self):
        return torch.rand((), generator=self.generator)


class PythonDataset(Samples):
    def __init__(self):
        self.transforms = [random.Random(3)]

    def noise(self):
        return self.transforms[0].random()


class NumpyDataset(Samples):
    def __init__(self, make=lambda: np.random.default_rng(3)):
        self.rng = make()

    def noise(self):
        return float(self.rng.random() if hasattr(self.rng, "random") else self.rng.rand())


class CountingDataset(Samples):
    def __init__(self):
        self.calls, self.seen = 0, collections.Counter()

    def noise(self):
        self.calls += 1
        self.seen[self.calls % 3] += 1
        return self.seen[0] / 10


class StatefulDataset(Samples):
    def __init__(self):
        self.hidden = object()
        self.place = {"a": 0}

    def noise(self):
        self.place["a"] += 1
        self.hidden = object()
        return self.place["a"] / 10

    def state_dict(self):
        return {"place": self.place["a"], "name": "a text"}

    def load_state_dict(self, state):
        self.place["a"] = state["place"]


class Transformed(Samples):
    """A dataset with a nested transform that counts."""

    def __init__(self):
        self.transform = functools.partial(_Step(_Step()), 1.0)

    def noise(self):
        return self.transform()


class _Step:
    def __init__(self, inner=None):
        self.inner, self.times = inner, 0

    def __call__(self, value):
        self.times += 1
        return value + self.times / 10 + (self.inner(value) if self.inner else 0)


class Collate:
    def __init__(self):
        self.generator, self.last = torch.Generator().manual_seed(5), torch.zeros(())

    def __call__(self, samples):
        inputs, targets = default_collate(samples)
        self.last = 0.5 * self.last + inputs.mean() + torch.rand((), generator=self.generator)
        return inputs + 0.1 * self.last, targets


def closure():
    """Return a function with state in its closure."""
    generator, times = random.Random(3), 0

    def collate(samples):
        nonlocal times
        times += 1
        inputs, targets = default_collate(samples)
        return inputs + 0.01 * times + 0.1 * generator.random(), targets

    return collate


class OwnSampler(Sampler):
    def __init__(self, source=None):
        self.generator = random.Random(3)
        self.times = 0

    def __iter__(self):
        self.times += 1
        order = list(range(12))
        self.generator.shuffle(order)
        yield from order[self.times % 2 :] + order[: self.times % 2]

    def __len__(self):
        return 12


class EpochSampler(OwnSampler):
    """A sampler with set_epoch that draws from its own generator."""

    def set_epoch(self, epoch):
        self.epoch = epoch


class EndlessSampler(OwnSampler):
    def __iter__(self):
        while True:
            yield from super().__iter__()

    def __len__(self):
        raise NotImplementedError


class Stream(IterableDataset):
    """A stream that continues from its position in the last epoch."""

    def __init__(self):
        self.place, self.generator = 0, torch.Generator().manual_seed(3)

    def __iter__(self):
        for _ in range(12):
            self.place += 5
            yield noisy((INPUTS[self.place % 12], TARGETS[self.place % 12]), torch.rand((), generator=self.generator))


class Loader:
    """A custom loader with a position."""

    def __init__(self):
        self.place = 0

    def __len__(self):
        return 3

    def __iter__(self):
        for _ in range(3):
            self.place = (self.place + 5) % 12
            yield INPUTS[self.place :][:4] + self.place, TARGETS[self.place :][:4]


class CountingNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 3), 0

    def forward(self, inputs):
        self.steps += self.training
        return self.layer(inputs) * (1 + self.steps / 10)


class DrawingNetwork(CountingNetwork):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs):
        return self.layer(inputs + 0.1 * torch.rand(inputs.shape, generator=self.generator))


class BufferNetwork(CountingNetwork):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4), persistent=False)

    def forward(self, inputs):
        self.average.mul_(0.5).add_(inputs.detach().mean(0))
        return self.layer(inputs - self.average)


class RememberingNetwork(CountingNetwork):
    """A network with a plain tensor attribute that is None until the first step, and one with a graph."""

    def __init__(self):
        super().__init__()
        self.memory = self.features = None

    def forward(self, inputs):
        self.features = self.layer(inputs)
        self.memory = inputs.detach().mean(0) + (0.0 if self.memory is None else 0.5 * self.memory)
        return self.features + self.layer(self.memory)


class WarmUp(Callback):
    """Scales the learning rate by counts in plain attributes."""

    def __init__(self):
        self.count, self.values, self.best, self.since = 0, [], None, None

    def batch_end(self, state, logger):
        self.count += 1
        self.values.append(float(state.total_loss))
        self.best = min(self.values)
        self.since = state.timestamp.batch
        for group in state.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + self.count) + 0.01 * self.best


class Unfreeze(Callback):
    """Freezes a parameter after two batches."""

    def batch_end(self, state, logger):
        if state.timestamp.batch == 2:
            next(state.model.parameters()).requires_grad_(False)


@attrs.define(eq=False)
class Scale(Algorithm):
    """An algorithm with a plain attribute in slots."""

    _times: int = attrs.field(default=0, init=False)

    def match(self, event, state):
        return event is Event.AFTER_LOSS

    def apply(self, event, state, logger):
        self._times += 1
        state.loss = state.loss * (1 + self._times / 10)


class Loss:
    def __init__(self):
        self.times, self.weight = 0, np.ones(3)

    def __call__(self, outputs, target):
        self.times += 1
        self.weight *= 1.1
        return nn.functional.cross_entropy(outputs, target) * (1 + self.times / 10) * float(self.weight.mean())


class Optimizer(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.times = 0

    def step(self, closure=None):
        self.times += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + self.times)
        return super().step(closure)


def loader(dataset, **options):
    return {"train_dataloader": DataLoader(dataset, batch_size=4, **{"shuffle": True, **options})}


def sampled(sampler, **options):
    data = TensorDataset(INPUTS, TARGETS)
    return {"train_dataloader": DataLoader(data, batch_size=4, sampler=sampler, **options)}


EXACT = {
    "a dataset's torch.Generator": lambda: loader(TorchDataset()),
    "a dataset's random.Random in a list": lambda: loader(PythonDataset()),
    "a dataset's numpy Generator": lambda: loader(NumpyDataset()),
    "a dataset's numpy Philox": lambda: loader(NumpyDataset(lambda: np.random.Generator(np.random.Philox(3)))),
    "a dataset's numpy RandomState": lambda: loader(NumpyDataset(lambda: np.random.RandomState(3))),
    "a dataset's counters": lambda: loader(CountingDataset()),
    "a dataset's state_dict": lambda: loader(StatefulDataset()),
    "a transform in a transform": lambda: loader(Transformed()),
    "a collate_fn's attributes": lambda: loader(TensorDataset(INPUTS, TARGETS), collate_fn=Collate()),
    "a collate_fn's closure": lambda: loader(TensorDataset(INPUTS, TARGETS), collate_fn=closure()),
    "a sampler's own": lambda: sampled(OwnSampler()),
    "a sampler's own, with workers": lambda: sampled(OwnSampler(), num_workers=1),
    "a sampler's own, with set_epoch": lambda: sampled(EpochSampler()),
    "a sampler's own, without a length": lambda: sampled(EndlessSampler()) | {"train_subset_num_batches": 3},
    "a stream's place": lambda: loader(Stream(), shuffle=None),
    "a loader's place": lambda: {"train_dataloader": Loader()},
    "a model's counter": lambda: {"network": CountingNetwork},
    "a model's torch.Generator": lambda: {"network": DrawingNetwork},
    "a model's non-persistent buffer": lambda: {"network": BufferNetwork},
    "a model's tensor": lambda: {"network": RememberingNetwork},
    "a callback's attributes": lambda: {"callbacks": [WarmUp()]},
    "a callback that freezes a parameter": lambda: {"callbacks": [Unfreeze()]},
    "an algorithm's attributes": lambda: {"algorithms": [Scale()]},
    "a loss's attributes": lambda: {"loss": Loss()},
    "an optimizer's attributes": lambda: {"optimizer": Optimizer},
}


STOPS = ["ep0-ba3", "ep1-ba3", "ep1-ba5"]


def saves(state, event):
    """Return whether to save: after an epoch's last batch, at its end, and within one."""
    batch = int(state.timestamp.batch)
    return batch == 3 or (batch == 5 and event is Event.BATCH_CHECKPOINT)


def train(folder, options, load_path=None):
    """Train three epochs of three batches; return all weights and the trainer."""
    torch.manual_seed(0)
    network = options.pop("network", lambda: nn.Linear(4, 3))()
    loss = {"loss_fn": options.pop("loss")} if "loss" in options else {}
    model = ComposerClassifier(network, num_classes=3, train_metrics=[], **loss)
    optimizer = options.pop("optimizer", functools.partial(torch.optim.SGD, lr=0.05))(model.parameters())
    settings = loader(TensorDataset(INPUTS, TARGETS)) | options
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        max_duration="3ep",
        seed=7,
        device="cpu",
        progress_bar=False,
        run_name="run",
        load_path=load_path,
        **{"save_folder": str(folder), "save_interval": saves, **settings},
    )
    with trainer:
        trainer.fit()
    return torch.cat([one.detach().flatten() for one in model.parameters()]), trainer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that returns an uninterrupted run's weights and checkpoint folder."""

    @functools.cache
    def run(case):
        folder = tmp_path_factory.mktemp("uninterrupted")
        return train(folder, EXACT[case]())[0], folder

    return run


@pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("case", EXACT)
def test_resume_is_exact(uninterrupted, tmp_path, case, stop):
    """A run that stops at or within an epoch resumes with identical weights and no warning."""
    expected, folder = uninterrupted(case)

    weights, trainer = train(tmp_path, EXACT[case](), str(folder / stop))

    assert int(trainer.state.timestamp.batch) == STEPS
    assert torch.equal(weights, expected)


def test_second_resume(uninterrupted, tmp_path):
    """A run that is resumed twice restores the first state where the second did not change it."""
    case = "a dataset's counters"
    expected, folder = uninterrupted(case)
    train(tmp_path / "again", EXACT[case](), str(folder / "ep1-ba3"))

    weights, _ = train(tmp_path / "third", EXACT[case](), str(tmp_path / "again" / "ep1-ba5"))

    assert torch.equal(weights, expected)


def test_ignored_components_are_not_restored(uninterrupted, tmp_path):
    """Attributes of a component with ignored state are not restored."""
    _, folder = uninterrupted("a callback's attributes")
    callback = WarmUp()

    options = {"callbacks": [callback], "load_ignore_keys": "callbacks/WarmUp"}
    train(tmp_path, options, str(folder / "ep1-ba5"))

    assert callback.count == STEPS - 5


def test_checkpoints_of_earlier_releases(uninterrupted, make_trainer):
    """A checkpoint without this part is loaded."""
    trainer = make_trainer(max_duration="1ep")
    saved = trainer._progress.to_data()
    del saved["own_state"]

    assert trainer._progress.check(saved) == []
    trainer._progress.load(saved)
    trainer.fit()


class Noting(Callback):
    """A callback that sets an attribute to a given value, from the first batch on."""

    def __init__(self, before, after):
        self.held, self.count, self.after = before, 0, after

    def batch_end(self, state, logger):
        self.held = self.after()
        self.count += 1


class Making(Callback):
    def batch_end(self, state, logger):
        self.made = 3


class Opening(Callback):
    """A callback that opens a file at first use."""

    def __init__(self, path):
        self.path, self.file = path, None

    def batch_end(self, state, logger):
        if self.file is None:
            self.file = self.path.open("w")

    def close(self, state, logger):
        if self.file is not None:
            self.file.close()


class Helper:
    """A user object."""


REPORTED = {
    "text": (
        lambda: Noting("a", lambda: "b"),
        "callbacks.Noting.held holds text; callbacks.Noting.count is not restored",
    ),
    "text in a list": (lambda: Noting([], lambda: ["b"]), r"callbacks.Noting.held holds text"),
    "text as a new key": (lambda: Noting({}, lambda: {"b": 1}), r"callbacks.Noting.held has text as new keys"),
    "an object in a list": (lambda: Noting([], lambda: [object()]), r"held holds an object of class object"),
    "another object": (lambda: Noting(Helper(), Helper), "held is another object than when training began"),
    "a new object": (lambda: Noting(None, Helper), "held is an object that is made in training"),
    "a new generator": (lambda: Noting(None, lambda: random.Random(3)), "held is a generator that is made in training"),
    "another kind": (lambda: Noting([], lambda: 3), "held was a list and is a number"),
    "an iterator": (lambda: Noting(itertools.count(), itertools.count), "held is an iterator, whose place cannot"),
    "the system's generator": (lambda: Noting(random.SystemRandom(), random.SystemRandom), "draws from the operating"),
    "too large": (lambda: Noting(None, lambda: torch.zeros(300_000)), "held is larger than 1 MiB"),
    "a new attribute": (Making, "callbacks.Making.made is set for the first time in training"),
}


class TestReported:
    @pytest.mark.parametrize(("make", "reason"), REPORTED.values(), ids=REPORTED.keys())
    def test_changed_attributes_are_named(self, tmp_path, make, reason):
        """A changed attribute that cannot be saved is reported with the reason, once per run."""
        with pytest.warns(UserWarning, match=reason) as caught:
            train(tmp_path, {"callbacks": [make()]})

        assert len(caught) == 1

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_copies_in_workers(self, tmp_path):
        """A dataset generator with copies in workers cannot be saved."""
        with pytest.warns(UserWarning, match=r"dataset.generator is copied into each worker process") as caught:
            train(tmp_path, loader(TorchDataset(), num_workers=1))

        assert [one.category for one in caught].count(UserWarning) == 1  # Python 3.12 also warns of forks

    def test_weights_only_does_not_warn(self, tmp_path):
        """Nothing is reported if only weights are saved."""
        _, trainer = train(tmp_path, {"callbacks": [Making()], "save_weights_only": True})

        assert trainer.saved_checkpoints

    def test_open_files_do_not_warn(self, tmp_path):
        """A file opened during training is not state."""
        train(tmp_path / "run", {"callbacks": [Opening(tmp_path / "text")]})

        assert (tmp_path / "text").exists()

    def test_attributes_beside_an_opened_file_are_not_saved(self, tmp_path):
        """Other attributes of an object that has opened a file are not restored, as they may describe the file."""
        one, own = Opening(tmp_path / "text"), OwnState()
        one.num_lines = 0
        own.watch({"one": one})
        with one.path.open("w") as one.file:
            one.num_lines = 3

            saved = own.to_data()

        assert saved == {}
        with pytest.warns(UserWarning, match=r"one\.num_lines is not restored without one\.file\."):
            own.report()

    def test_roots_keep_their_names(self):
        """An object that an earlier root refers to is saved under its own name."""
        first, second, own = Helper(), Helper(), OwnState()
        first.other, second.count = second, 0
        own.watch({"first": first, "second": second})

        second.count = 3

        assert own.to_data()["attributes"].keys() == {"second"}

    def test_graphs_do_not_warn(self, tmp_path):
        """Outputs with their graph belong to a step."""

        class Keeping(Callback):
            def __init__(self):
                self.outputs = None

            def after_forward(self, state, logger):
                self.outputs = state.outputs

        keeping = Keeping()
        train(tmp_path, {"callbacks": [keeping]})

        assert keeping.outputs.requires_grad


class TestLoad:
    """A checkpoint only determines the values of existing attributes of the same type."""

    def watched(self, one):
        own = OwnState()
        own.watch({"one": one})
        return own

    def attributes(self, **values):
        return {"attributes": {"one": {name: {"value": value, "on_device": False} for name, value in values.items()}}}

    @pytest.mark.parametrize("value", ["b", ["b"], {"b": 1}, {1: "b"}, ("b",), [{"b": 1}], 3 + 1j])
    @pytest.mark.parametrize("before", [None, 3, "a", [1], {"a": 1}, (1,), {1}, torch.zeros(1), Helper()])
    def test_strings_are_not_restored(self, before, value):
        """Strings are restored neither as attributes nor as keys."""
        one = Noting(before, Helper)
        own = self.watched(one)
        text = repr(before)

        problems = own.load(self.attributes(held=value))

        assert len(problems) == 1
        assert problems[0].startswith("one.held ")
        assert one.held is before
        assert repr(one.held) == text

    @pytest.mark.parametrize("name", ["batch_end", "missing", "__class__", "after"])
    def test_only_existing_data_is_restored(self, name):
        """Methods, functions and missing attributes do not change."""
        one = Noting(0, Helper)
        own = self.watched(one)
        before = dict(vars(one))

        (problem,) = own.load(self.attributes(**{name: 3}))

        assert problem.startswith(f"one.{name} is ")
        assert vars(one) == before

    def test_missing_objects_warn(self):
        """State of an object that does not exist is reported."""
        one = Noting(0, Helper)
        saved = {
            "attributes": {"other": {"held": {"value": 1, "on_device": False}}},
            "generators": {"one.held": {"torch": torch.zeros(1)}},
            "states": {"one": {"held": 3}},
            "trained": {"weight": False},
        }

        problems = self.watched(one).load(saved)

        assert problems == [
            "other.held is not there",
            "one.held is not there",
            "one is not there",
            "model.weight is not there",
        ]

    @pytest.mark.parametrize(
        "make",
        [
            torch.Generator,
            lambda: random.Random(3),
            lambda: np.random.default_rng(3),
            lambda: np.random.RandomState(3),
            lambda: np.random.SFC64(3),
        ],
    )
    def test_generators_reject_other_states(self, make):
        """A generator only accepts its own kind of state, and does not change otherwise."""
        others = [random.Random(5), np.random.default_rng(5), torch.Generator()]
        one = Noting(make(), Helper)
        own, states = self.watched(one), {"one.held": {}}
        for other in others:
            if type(other) is not type(one.held):
                source = self.watched(Noting(other, Helper))
                torch.rand(1, generator=other) if isinstance(other, torch.Generator) else other.random()
                states = source.to_data()["generators"]
            problems = own.load({"generators": states})
            assert "something else was saved" in problems[0]

        assert own.to_data() == {}

    def test_invalid_generator_state(self):
        """An invalid state is rejected by the generator and reported."""
        generator = random.Random(3)
        own = self.watched(Noting(generator, Helper))
        generator.random()
        saved = own.to_data()
        saved["generators"]["one.held"]["words"][-1] = -5

        (problem,) = own.load(saved)

        assert problem.startswith("one.held was saved with a state that Random refuses")

    def test_in_place(self):
        """Containers and tensors stay the same objects, so that other references see the change."""
        numbers, counts, values = collections.deque([1], maxlen=2), collections.defaultdict(int), torch.zeros(2)
        one = Helper()
        one.numbers, one.counts, one.values, one.time = numbers, counts, values, Time(0, "ba")
        own = self.watched(one)
        numbers.append(2)
        counts[3] += 1
        values += 1
        one.time = Time(5, "ba")
        saved = own.to_data()
        numbers.clear()
        counts.clear()
        values.zero_()
        one.time = Time(0, "ba")

        assert own.load(saved) == []

        assert (one.numbers, one.counts, one.values) == (numbers, counts, values)
        assert (numbers, counts, values.tolist()) == (collections.deque([1, 2], maxlen=2), {3: 1}, [1.0, 1.0])
        assert counts[5] == 0
        assert one.time == Time(5, "ba")


def test_modules_outside_the_model(tmp_path):
    """A callback's own module is restored."""

    class Averaging(Callback):
        def __init__(self):
            torch.manual_seed(1)
            self.average = nn.Linear(4, 3)

        def batch_end(self, state, logger):
            with torch.no_grad():
                for own, other in zip(self.average.parameters(), state.model.parameters(), strict=True):
                    own.lerp_(other, 0.5)

    first, second = Averaging(), Averaging()
    train(tmp_path / "whole", {"callbacks": [first]})

    train(tmp_path / "again", {"callbacks": [second]}, str(tmp_path / "whole" / "ep1-ba5"))

    assert torch.equal(first.average.weight, second.average.weight)


def test_shared_module(tmp_path):
    """A callback's reference to a part of the model is not saved again."""
    network = nn.Linear(4, 3)

    _, trainer = train(tmp_path, {"network": lambda: network, "callbacks": [Noting(network, lambda: network)]})

    assert list(trainer._progress._own.to_data()["attributes"]) == ["callbacks.Noting"]


def watched(**values):
    """Return an object with attributes, and its observer, next to a model that owns some of them."""
    model, one, own = values.pop("model", nn.Linear(1, 1)), Helper(), OwnState()
    vars(one).update(values)
    own.watch({"model": model, "one": one})
    return one, own


class TestReferences:
    """Tensors of modules are saved with them; other components only refer to them."""

    @pytest.mark.parametrize("size", [2, 600])
    @pytest.mark.parametrize("collect", [list, lambda parameters: dict.fromkeys(parameters, 0.0)])
    def test_weights_in_containers(self, size, collect):
        """A container of the model's weights is not state, and does not prevent other attributes from being saved."""
        model = nn.Linear(size, size)
        one, own = watched(model=model, weights=collect(model.parameters()), weight=model.weight, times=0)
        with torch.no_grad():
            model.weight += 1
        one.times = 3

        saved = own.to_data()

        assert saved == {"attributes": {"one": {"times": {"value": 3, "on_device": False}}}}

    def test_weights_in_a_changed_list(self):
        """A list to which weights are added is reported: restored, it would contain untrained copies."""
        model = nn.Linear(2, 2)
        one, own = watched(model=model, weights=[])
        one.weights.append(model.weight)

        assert own.to_data() == {}
        with pytest.warns(UserWarning, match=r"one\.weights holds a tensor of a module"):
            own.report()

    def test_tensors_as_keys(self):
        """A dictionary with tensor keys is reported: equal tensors are different keys."""
        one, own = watched(slow={torch.zeros(2): 0.0})
        one.slow[next(iter(one.slow))] = 1.0

        assert own.to_data() == {}
        with pytest.warns(UserWarning, match=r"one\.slow has tensors as keys"):
            own.report()


class Failing:
    """An object whose methods raise."""

    def __init__(self, fails_to_save=False):
        self.fails_to_save, self.times = fails_to_save, 0

    def state_dict(self):
        if self.fails_to_save:
            raise RuntimeError("not consolidated")
        return {"times": self.times}

    def load_state_dict(self, state):
        raise KeyError("other")


class TestObjectsThatFail:
    """Errors of methods that are only called for saving do not end a run."""

    def test_failing_state_dict(self):
        """An object whose state_dict() fails is reported."""
        _, own = watched(held=Failing(fails_to_save=True))

        assert own.to_data() == {}
        with pytest.warns(UserWarning, match=r"one\.held has a state_dict\(\) that fails: RuntimeError: not consol"):
            own.report()

    def test_large_state_in_several_processes(self, monkeypatch):
        """A large state is reported if every process would send its own to all others."""
        one, own = watched(held=torch.optim.SGD([nn.Parameter(torch.zeros(300_000))], lr=0.1, momentum=0.9))
        one.held.param_groups[0]["params"][0].grad = torch.ones(300_000)
        one.held.step()

        alone = own.to_data()
        monkeypatch.setenv("WORLD_SIZE", "2")

        assert (list(alone["states"]), own.to_data()) == (["one.held"], {})
        with pytest.warns(UserWarning, match=r"one\.held has a state_dict\(\) of more than 1 MiB"):
            own.report()

    def test_failing_load_state_dict(self):
        """An object that rejects its state is reported."""
        one, own = watched(held=Failing())
        one.held.times = 3

        (problem,) = own.load(own.to_data())

        assert problem == "one.held refuses what was saved: KeyError: 'other'"


def holding_itself(kind):
    """Return a self-referencing container."""
    one = {} if kind is dict else []
    one.update(itself=one) if kind is dict else one.append(one)
    return one


class TestNested:
    @pytest.mark.parametrize("kind", [list, dict])
    def test_self_referencing_container(self, kind):
        """A self-referencing container is observed, and reported once it has changed."""
        one, own = watched(held=holding_itself(kind))
        before = own.to_data()
        one.held.update({5: 1}) if kind is dict else one.held.append(1)

        assert (before, own.to_data()) == ({}, {})
        with pytest.warns(UserWarning, match=r"one\.held is nested more than 32 deep, or holds itself"):
            own.report()

    def test_deep_nesting(self):
        """A value nested too deeply for a file is reported."""
        one, own = watched(held=[])
        for _ in range(60):
            one.held = [one.held]

        assert own.to_data() == {}

    def test_large_list(self):
        """A large nested list that has grown is saved, without comparing its items."""
        one, own = watched(held=[[place] for place in range(20_000)])
        one.held.append([1])

        assert len(own.to_data()["attributes"]["one"]["held"]["value"]) == 20_001

    def test_search_is_bounded(self):
        """The search for generators in millions of nested numbers stops after the first ones."""
        nested = [[[[0] * 50] * 100] * 100] * 100
        began = time.perf_counter()

        watched(held=nested)

        assert time.perf_counter() - began < 1


def test_expanded_tensors():
    """An expanded tensor is replaced by the saved one."""
    one, own = watched(held=torch.zeros(1).expand(3))
    one.held = torch.ones(1).expand(3)
    saved = own.to_data()
    one.held = torch.zeros(1).expand(3)

    assert own.load(saved) == []
    assert one.held.tolist() == [1.0, 1.0, 1.0]


class Defaults:
    """A class with default values for missing attributes."""

    count, names, runs = 0, [1], {"a": 1}


@pytest.mark.parametrize(("name", "value"), [("names", [5]), ("runs", {"a": 5})])
def test_class_attributes_are_unchanged(name, value):
    """A checkpoint does not change a container that all objects of a class share."""
    own = OwnState()
    own.watch({"one": Defaults()})
    before = repr(getattr(Defaults, name))

    problems = own.load({"attributes": {"one": {name: {"value": value, "on_device": False}}}})

    assert problems == [f"one.{name} is not there"]
    assert repr(getattr(Defaults, name)) == before


def test_library_attributes_are_unchanged():
    """A checkpoint does not set attributes that a library class declares, such as a module's."""
    network, own = CountingNetwork(), OwnState()
    own.watch({"model": network})

    problems = own.load({"attributes": {"model": {"_compiled_call_impl": {"value": 3, "on_device": False}}}})

    assert problems == ["model._compiled_call_impl is not there"]
    assert network._compiled_call_impl is None
