"""What has state_dict() is saved by it, generators are saved, and one warning names other attributes that changed."""

import functools
import os
import random

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from composer.core import Algorithm, Callback, DataSpec, Event, saved
from composer.models import ComposerClassifier
from composer.trainer import Trainer
from composer.trainer.resume.given_objects import Changes

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :3].argmax(dim=1)
STEPS = 9
STOPS = ["ep0-ba3", "ep1-ba3", "ep1-ba5"]
WARNING = "A run that is resumed from this checkpoint may differ"


def noisy(index, noise):
    """Return a sample that depends on a draw or a counter."""
    return INPUTS[index] + 0.1 * noise, TARGETS[index]


class Drawing(Dataset):
    """Twelve samples that draw from a generator of their own."""

    def __init__(self, make=lambda: torch.Generator().manual_seed(3)):
        self.generator = make()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        is_torchs = isinstance(self.generator, torch.Generator)
        return noisy(index, torch.rand((), generator=self.generator) if is_torchs else float(self.generator.random()))


class Counting(Dataset):
    """Twelve samples that depend on a count that is saved."""

    def __init__(self):
        self.count = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.count += 1
        return noisy(index, self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Forgetting(Counting):
    """The same without the methods."""

    state_dict = load_state_dict = None


class Collate:
    def __init__(self):
        self.generator, self.hidden = torch.Generator().manual_seed(5), 0.0

    def __call__(self, samples):
        inputs, targets = default_collate(samples)
        self.hidden = 0.5 * self.hidden + float(torch.rand((), generator=self.generator))
        return inputs + 0.1 * self.hidden, targets

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"]


class OwnSampler(Sampler):
    """A sampler with a generator, and a count that is saved."""

    def __init__(self):
        self.generator, self.times = random.Random(3), 0

    def __iter__(self):
        self.times += 1
        order = list(range(12))
        self.generator.shuffle(order)
        yield from order[self.times % 2 :] + order[: self.times % 2]

    def __len__(self):
        return 12

    def state_dict(self):
        return {"times": self.times}

    def load_state_dict(self, state):
        self.times = state["times"]


class Stream(IterableDataset):
    """A stream that continues from its place in the last epoch, and draws."""

    def __init__(self):
        self.place, self.generator = 0, torch.Generator().manual_seed(3)

    def __iter__(self):
        for _ in range(12):
            self.place += 5
            yield noisy(self.place % 12, torch.rand((), generator=self.generator))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Loader:
    """A custom loader with a generator."""

    def __init__(self):
        self.generator = random.Random(3)

    def __len__(self):
        return 3

    def __iter__(self):
        for _ in range(3):
            place = self.generator.randrange(8)
            yield INPUTS[place:][:4] + place, TARGETS[place:][:4]


class Network(nn.Module):
    """A network whose inner module draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.noise = nn.Linear(4, 3), Noise()

    def forward(self, inputs):
        return self.layer(self.noise(inputs))


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs):
        return inputs + 0.1 * torch.rand(inputs.shape, generator=self.generator)


class WarmUp(Callback):
    """Scales the learning rate by a count that is saved, and a draw."""

    def __init__(self):
        self.count, self.generator = 0, np.random.default_rng(3)

    def batch_end(self, state, logger):
        self.count += 1
        for group in state.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + self.count) + 0.01 * self.generator.random()

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@attrs.define(eq=False)
class Scale(Algorithm):
    """An attrs class with a generator, and a field that is saved."""

    times: int = saved(default=0)
    generator: random.Random = attrs.field(factory=lambda: random.Random(3), init=False)

    def match(self, event, state):
        return event is Event.AFTER_LOSS

    def apply(self, event, state, logger):
        self.times += 1
        state.loss = state.loss * (1 + self.times / 10 + self.generator.random())


class Loss:
    """A loss that is not a module."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, outputs, target):
        return nn.functional.cross_entropy(outputs, target) * torch.rand((), generator=self.generator)


def loader(dataset, **options):
    return {"train_dataloader": DataLoader(dataset, batch_size=4, **{"shuffle": True, **options})}


def sampled(sampler, **options):
    data = TensorDataset(INPUTS, TARGETS)
    return {"train_dataloader": DataLoader(data, batch_size=4, sampler=sampler, **options)}


class Jitter:
    def __init__(self):
        self.generator = random.Random(3)

    def __call__(self, batch):
        return batch[0] + self.generator.random(), batch[1]


class Late:
    """Creates its generator when it is first used."""

    created = None

    @property
    def generator(self):
        self.created = self.created or self.make()
        return self.created

    @generator.setter
    def generator(self, generator):
        self.make = lambda: generator


class LateDrawing(Late, Drawing):
    pass


class LateSampler(Late, OwnSampler):
    pass


class LateCollate(Late):
    """Draws from a generator that is created with the first batch."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self, samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs + 0.1 * self.generator.random(), targets


class Transformed(Dataset):
    """Samples with transforms in a list; each is a function that is bound to an object with a generator."""

    def __init__(self, *transforms):
        self.transforms = [*transforms]

    def __len__(self):
        return 12

    def __getitem__(self, index):
        inputs, target = INPUTS[index], TARGETS[index]
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs, target


class Shift:
    def __init__(self):
        self.by = {"shift": random.Random(3)}

    def shift(self, inputs):
        return inputs + self.by["shift"].random()


def closure():
    generator = np.random.default_rng(3)
    return lambda inputs: inputs + generator.random()


def stateful(dataset, **options):
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="it is an optional loader")
    return {"train_dataloader": module.StatefulDataLoader(dataset, batch_size=4, shuffle=True, **options)}


EXACT = {
    "a StatefulDataLoader's dataset": lambda: stateful(Drawing()),
    "a dataset's torch.Generator": lambda: loader(Drawing()),
    "a dataset's random.Random": lambda: loader(Drawing(lambda: random.Random(3))),
    "a dataset's numpy Generator": lambda: loader(Drawing(lambda: np.random.default_rng(3))),
    "a dataset's state_dict": lambda: loader(Counting()),
    "a collate_fn's": lambda: loader(TensorDataset(INPUTS, TARGETS), collate_fn=Collate()),
    "a transform's generator": lambda: {
        "train_dataloader": DataSpec(
            loader(TensorDataset(INPUTS, TARGETS))["train_dataloader"], batch_transforms=Jitter()
        )
    },
    "a sampler's": lambda: sampled(OwnSampler()),
    "a sampler's, with workers": lambda: sampled(OwnSampler(), num_workers=1),
    "a stream's": lambda: loader(Stream(), shuffle=None),
    "a loader's generator": lambda: {"train_dataloader": Loader()},
    "an inner module's generator": lambda: {"network": Network},
    "a callback's": lambda: {"callbacks": [WarmUp()]},
    "an algorithm's": lambda: {"algorithms": [Scale()]},
    "a loss's generator": lambda: {"loss": Loss()},
    "a transform's in a data set": lambda: loader(Transformed(Shift().shift)),
    "a closure's": lambda: loader(Transformed(closure())),
    "an inner data set's state_dict": lambda: loader(Subset(Counting(), range(12))),
    "an inner sampler's": lambda: {
        "train_dataloader": DataLoader(
            TensorDataset(INPUTS, TARGETS), batch_sampler=BatchSampler(OwnSampler(), 4, drop_last=False)
        )
    },
}
LATE = {
    "a dataset's": lambda: loader(LateDrawing()),
    "a sampler's": lambda: sampled(LateSampler()),
    "a sampler's, with workers": lambda: sampled(LateSampler(), num_workers=1),
    "a collate_fn's": lambda: loader(TensorDataset(INPUTS, TARGETS), collate_fn=LateCollate()),
}
ALIVE = {"num_workers": 2, "persistent_workers": True}
EXACT |= {
    f"generators in workers {[*options.values()]}": lambda options=options: loader(
        Drawing(np.random.default_rng), collate_fn=LateCollate(), **options
    )
    for options in ({"num_workers": 1}, {"num_workers": 2}, ALIVE)
}
EXACT |= {f"{name} generator, created when it is first used": make for name, make in LATE.items()}


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
    settings = loader(TensorDataset(INPUTS, TARGETS)) | options
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05),
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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's own
@pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")
@pytest.mark.parametrize(
    ("case", "stop"),
    [
        (case, stop)
        for place, case in enumerate(EXACT)
        for number, stop in enumerate(STOPS)
        if number == 2 or place % 4 == number or os.environ.get("RESUME_MATRIX") == "all"
    ],
)
def test_resume_is_exact(uninterrupted, tmp_path, case, stop):
    """A run that stops at the end of an epoch or within one resumes with equal weights, without a warning."""
    expected, folder = uninterrupted(case)

    weights, trainer = train(tmp_path, EXACT[case](), str(folder / stop))

    assert int(trainer.state.timestamp.batch) == STEPS
    assert torch.equal(weights, expected)


def test_evaluated_data_are_exact(tmp_path):
    """The generator of data to evaluate on that is created with the first sample continues."""

    def evaluated(load_path=None):
        options = {"eval_dataloader": DataLoader(LateDrawing(), batch_size=4), "save_interval": "1ep"}
        _, trainer = train(tmp_path / str(load_path is None), options, load_path)
        return trainer.state.eval_metric_values["CrossEntropy"]

    expected = evaluated()

    assert torch.equal(evaluated(str(tmp_path / "True" / "ep1-ba3")), expected)


def test_second_resume(uninterrupted, tmp_path):
    """A run that is resumed twice is exact."""
    case = "a dataset's state_dict"
    expected, folder = uninterrupted(case)
    train(tmp_path / "again", EXACT[case](), str(folder / "ep1-ba3"))

    weights, _ = train(tmp_path / "third", EXACT[case](), str(tmp_path / "again" / "ep1-ba5"))

    assert torch.equal(weights, expected)


def test_ignored_components_are_not_restored(uninterrupted, tmp_path):
    """Neither the state nor the generators of an ignored component are restored."""
    _, folder = uninterrupted("a callback's")
    callback, expected = WarmUp(), np.random.default_rng(3)

    train(tmp_path, {"callbacks": [callback], "load_ignore_keys": "callbacks/WarmUp"}, str(folder / "ep1-ba5"))

    assert callback.count == STEPS - 5
    expected.random(STEPS - 5)
    assert callback.generator.random() == expected.random()


class Collecting(Callback):
    """A callback that collects losses, and does not define what is saved."""

    def __init__(self):
        self.losses, self.count, self.text = {}, 0, ""

    def batch_end(self, state, logger):
        batch = int(state.timestamp.batch)
        self.losses[batch] = float(state.total_loss)
        self.count, self.text = batch, str(batch)


class TestWhatIsNotSaved:
    def test_collected_losses(self, tmp_path):
        """A resumed run does not fill a dictionary with the first run's losses."""
        with pytest.warns(UserWarning, match=WARNING):
            train(tmp_path / "first", {"callbacks": [Collecting()]})
        again = Collecting()

        train(tmp_path / "second", {"callbacks": [again]}, str(tmp_path / "first" / "ep1-ba5"))

        assert list(again.losses) == [6, 7, 8, 9]

    def test_one_warning(self, tmp_path):
        """One warning, at the first save, names all attributes and the remedy."""
        options = {"callbacks": [Collecting()]} | loader(Forgetting())
        with pytest.warns(UserWarning, match=WARNING) as caught:
            train(tmp_path, options)

        (message,) = [str(one.message) for one in caught]
        assert "callbacks.Collecting.count, train_dataloader.dataset.count: changed since training began" in message
        assert "def state_dict(self):" in message

    def test_weights_only_does_not_warn(self, tmp_path):
        """Nothing is reported if only weights are saved."""
        _, trainer = train(tmp_path, {"callbacks": [Collecting()], "save_weights_only": True})

        assert trainer.saved_checkpoints


class Object:
    """An object of a user."""

    def __init__(self, **values):
        vars(self).update(values)


def changed(before, change, kind=Object):
    """Return whether a change of an attribute is noticed."""
    one = kind(held=before)
    changes = Changes({"one": one})
    change(one)
    return changes.names() == ["one.held"]


def set_to(value):
    return lambda one: setattr(one, "held", value)


class TestChanges:
    """Attributes that are numbers, tensors or arrays are compared."""

    @pytest.mark.parametrize(
        ("before", "change"),
        [
            (0, set_to(1)),
            (0, set_to(0.0)),
            (False, set_to(True)),
            (None, set_to(1)),
            (1, set_to(None)),
            (np.float32(1), set_to(np.float32(2))),
            (torch.zeros(2), lambda one: one.held.add_(1)),
            (torch.zeros(2), set_to(torch.ones(2))),
            (np.zeros(2), lambda one: one.held.fill(1)),
            (np.zeros(1 << 18), set_to(np.ones(1 << 18))),
        ],
    )
    def test_noticed(self, before, change):
        """New values, and changes in place, are noticed."""
        assert changed(before, change)

    def test_own_modules(self):
        """Of modules, plain attributes and buffers that are not persistent are compared, and no weights."""

        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.steps = nn.Linear(2, 2), 0
                self.register_buffer("average", torch.zeros(2), persistent=False)
                self.register_buffer("total", torch.zeros(2))
                self.first = (self.layer.weight,)

        model, other = nn.Sequential(Own()), Object(weight=None)
        other.weight = model[0].layer.weight
        changes = Changes({"model": model, "other": other})
        model.eval()
        model[0].steps += 1
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)

        assert changes.names() == ["model.0.steps", "model.0.average"]

    def test_numbers_of_packages(self):
        """Numbers of modules of packages are noticed, also if None replaces them, and so are replaced modules."""
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.3), nn.Tanh(), nn.LazyLinear(2))
        changes = Changes({"model": model})
        model[0].momentum, model[1].p, model[2] = None, 0.1, nn.Sigmoid()
        model(torch.zeros(2, 2))

        assert changes.names() == ["model.0.momentum", "model.1.p", "model.2"]
