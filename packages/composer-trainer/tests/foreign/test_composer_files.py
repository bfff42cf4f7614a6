"""Checkpoint files of MosaicML Composer, written with the names and the structure that it documents."""

import collections
import datetime
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d

from composer import algorithms
from composer.checkpoint import CheckpointError, CheckpointMismatchError, load_checkpoint
from composer.core import Engine, State, TimeUnit
from composer.foreign import ForeignFile

BINOMIAL = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16


class Blurred(nn.Module):
    """A blur, then a layer: ``blur_filter`` has a filter for each channel, and the layer is ``conv``."""

    def __init__(self, layer, channels):
        super().__init__()
        self.register_buffer("blur_filter", BINOMIAL.expand(channels, 1, 3, 3).clone())
        self.conv = layer

    def forward(self, x):
        return self.conv(conv2d(x, self.blur_filter, padding=1, groups=len(self.blur_filter)))


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("filt2d", BINOMIAL[None, None].clone())

    def forward(self, x):
        channels = x.shape[1]
        return conv2d(max_pool2d(x, 2, 1), self.filt2d.expand(channels, 1, 3, 3), None, 2, 1, 1, channels)


class Excited(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv, self.se, size = conv, nn.Module(), conv.out_channels
        layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 4, False), nn.ReLU(), nn.Linear(4, size, False)
        self.se.pool_and_mlp = nn.Sequential(*layers, nn.Sigmoid())

    def forward(self, x):
        x = self.conv(x)
        return x * self.se.pool_and_mlp(x)[..., None, None]


class Factors(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.module0, self.module1 = first, second

    def forward(self, x):
        return self.module1(self.module0(x))


class Ghost(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.batchnorm = norm

    def forward(self, x):
        return self.batchnorm(x)


def conv():
    return nn.Conv2d(16, 16, 3, stride=2, padding=1)


def factors():
    return Factors(nn.Linear(16, 4, bias=False), nn.Linear(4, 16))


BLUR = "replace_convs=True,replace_maxpools=True,blur_first=True,min_channels=16"
FACTORIZE = (
    "factorize_convs=False,factorize_linears=True,min_channels=16,latent_channels=0.25,min_features=16,"
    "latent_features=4"
)
LAYERS = {
    "BlurPool": (BLUR, {"conv": lambda: Blurred(conv(), 16), "pool": Pool}),
    "SqueezeExcite": ("latent_channels=4,min_channels=16", {"conv": lambda: Excited(conv())}),
    "Factorize": (FACTORIZE, {"linear": factors}),
    "GhostBatchNorm": ("ghost_batch_size=4", {"norm": lambda: Ghost(nn.BatchNorm2d(16))}),
    "BlurPool and SqueezeExcite": ("", {"conv": lambda: Blurred(Excited(conv()), 16), "pool": Pool}),
    "SqueezeExcite and BlurPool": ("", {"conv": lambda: Excited(blurred_conv()), "pool": Pool}),
    "MixUp": ("", {}),
}
"""For each algorithm its settings, and the layers of Composer's model that it replaces."""


def blurred_conv():
    layer = Blurred(conv(), 16)
    layer.out_channels = 16
    return layer


def network(seed, replaced):
    """Return a model with layers that may be replaced."""
    torch.manual_seed(seed)
    plain = {
        "stem": lambda: nn.Conv2d(3, 16, 3),
        "norm": lambda: nn.BatchNorm2d(16),
        "conv": conv,
        "pool": lambda: nn.MaxPool2d(2),
        "mean": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "linear": lambda: nn.Linear(16, 16),
        "head": lambda: nn.Linear(16, 3),
    }
    layers = nn.Sequential(collections.OrderedDict((name, replaced.get(name, make)()) for name, make in plain.items()))
    model = nn.Module()
    model.module = layers
    model.forward = layers.forward
    return model


def written(path, names, *, model=None, change=None):
    """Write a file of Composer after two epochs of training with algorithms, and return the model in it."""
    chosen = names.split(" and ")
    if model is None:
        model = network(3, LAYERS[names][1])
    model.get_submodule("module.norm").train()(torch.randn(8, 16, 4, 4))
    parameters = dict(model.named_parameters())
    state = {
        "model": collections.OrderedDict(model.state_dict()),
        "optimizers": {
            "SGD": {
                "state": {name: {"momentum_buffer": torch.randn_like(one)} for name, one in parameters.items()},
                "param_groups": [{"lr": 0.025, "momentum": 0.9, "initial_lr": 0.1, "params": list(parameters)}],
            }
        },
        "schedulers": {"StepLR": {"last_epoch": 8, "gamma": 0.5, "_last_lr": [0.025], "base_lrs": [0.1]}},
        "algorithms": [(name, {"repr": f"{name}({LAYERS[name][0]})"}) for name in chosen if name != "MixUp"],
        "timestamp": {
            "Timestamp": {
                "iteration": 0,
                "epoch": 2,
                "batch": 8,
                "sample": 32,
                "token": 0,
                "epoch_in_iteration": 2,
                "batch_in_epoch": 0,
                "total_wct": datetime.timedelta(seconds=3),
            }
        },
        "callbacks": {},
        "scaler": {},
        "rank_zero_seed": 5,
        "run_name": "there",
        "dataset_state": {"train": None, "eval": {}},
        "metadata": {"torch_version": torch.__version__},
    }
    if change is not None:
        change(state)
    rng = [{"python": (3, (1, 2), None), "numpy": ("MT19937", np.arange(4, dtype=np.uint32), 0, 0, 0.5)}]
    torch.save({"state": state, "rng": rng}, path)
    return model.eval(), state


def run(names="", **options):
    """Return a run of the model with algorithms that have changed it."""
    chosen = [name for name in names.split(" and ") if name in LAYERS and name != "MixUp"]
    own = [getattr(algorithms, name)(**eval(f"dict({LAYERS[name][0]})")) for name in chosen]
    model = network(7, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model, optimizers=optimizer, algorithms=own, max_duration="4ep", rank_zero_seed=1, **options)
    Engine(state).run_event("init")
    return state


def loaded(path, state, **options):
    with pytest.warns(UserWarning, match="is a checkpoint of MosaicML Composer. The training continues") as caught:
        report = load_checkpoint(ForeignFile(path), state, **options)
    return report, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("names", LAYERS)
def test_outputs_equal_those_of_composer_s_layers(names, given, weights_only, tmp_path):
    """With the algorithms in the run, or constructed from the file, the model computes the same as the one saved."""
    theirs, _ = written(tmp_path / "ep2-ba8-rank0.pt", names)
    state = run(names if given else "")
    images = torch.randn(4, 3, 16, 16)

    if weights_only:
        load_checkpoint(ForeignFile(tmp_path / "ep2-ba8-rank0.pt"), state, weights_only=True)
    else:
        loaded(tmp_path / "ep2-ba8-rank0.pt", state)

    torch.testing.assert_close(state.model.eval()(images), theirs(images))
    assert {type(one).__name__ for one in state.algorithms} == {*names.split(" and ")} - {"MixUp"}


def test_optimizers_and_clock_are_restored(tmp_path):
    """The momentum of each parameter, the settings of its group and the clock are those of the file."""
    _, saved = written(tmp_path / "old.pt", "Factorize")
    state = run("Factorize")

    report, _ = loaded(tmp_path / "old.pt", state)

    (optimizer,) = state.optimizers
    momentum = saved["optimizers"]["SGD"]["state"]
    first = state.model.get_submodule("module.linear").first.weight
    assert torch.equal(
        optimizer.state[first]["momentum_buffer"], momentum["module.linear.module0.weight"]["momentum_buffer"]
    )
    assert len(optimizer.state) == len(momentum)
    assert optimizer.param_groups[0]["lr"] == 0.025
    clock = state.timestamp
    assert [clock.get(unit).value for unit in (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE)] == [2, 8, 32]
    assert clock.total_wct == datetime.timedelta(seconds=3)
    assert report.report.restored == ("timestamp", "model", "optimizers")
    assert "algorithms/Factorize" in report.ignored
    assert state.rank_zero_seed == 1


def test_a_trainer_continues(tmp_path):
    """A Trainer continues after the epochs of the file, with its learning rate, until max_duration."""
    from torch.utils.data import DataLoader, TensorDataset

    from composer import Trainer
    from composer.models import ComposerClassifier
    from composer.optim import CosineAnnealingScheduler

    written(tmp_path / "old.pt", "MixUp", model=network(3, {}))
    model = ComposerClassifier(network(7, {}).module, num_classes=3)
    data = DataLoader(TensorDataset(torch.randn(16, 3, 16, 16), torch.randint(3, (16,))), batch_size=4)

    with pytest.warns(UserWarning, match="is a checkpoint of MosaicML Composer"):
        trainer = Trainer(
            model=model,
            train_dataloader=data,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            schedulers=CosineAnnealingScheduler(),
            max_duration="3ep",
            load_path=tmp_path / "old.pt",
            device="cpu",
            progress_bar=False,
        )
    rates = []
    trainer.engine.on("before_train_batch", lambda state, _: rates.append(state.optimizers[0].param_groups[0]["lr"]))
    trainer.fit()

    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == (3, 12)
    assert rates == pytest.approx([0.05 * (1 + np.cos(np.pi * done / 12)) for done in range(8, 12)])


@pytest.mark.parametrize("active", [True, False])
def test_ema_continues_from_the_trained_weights(tmp_path, active):
    """Weights alone are EMA's averages, the model of a file or beside it; training continues from the others."""
    weights = {}

    def change(state):
        weights.update({name: torch.randn_like(value) for name, value in state["model"].items() if "head" in name})
        ema = {"ema_model": {"named_parameters_dict": weights, "named_buffers_dict": {}}, "ema_weights_active": active}
        state["algorithms"] = [("EMA", {"repr": "<composer.algorithms.ema.ema.EMA object at 0x7f>", **ema})]

    theirs, _ = written(tmp_path / "old.pt", "MixUp", change=change)
    averaged, trained = run(), run()

    load_checkpoint(ForeignFile(tmp_path / "old.pt"), averaged, weights_only=True)
    _, messages = loaded(tmp_path / "old.pt", trained)

    in_model, beside = (averaged, trained) if active else (trained, averaged)
    assert torch.equal(in_model.model.get_parameter("module.head.weight"), theirs.get_parameter("module.head.weight"))
    assert torch.equal(beside.model.get_parameter("module.head.weight"), weights["module.head.weight"])
    assert any("the state of EMA" in message for message in messages)


def _indices(state):
    state["optimizers"]["SGD"] = {"state": {0: {}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def _clock(state):
    state["timestamp"] = {"Timestamp": {"epoch": -1, "batch": "8"}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_indices, "the optimizers"),
        (_clock, "the clock"),
        (dict, "the order of the data of a DataLoader with shuffle=True"),
        (dict, "the generators of random numbers"),  # the state of Python's is too short
    ],
)
def test_what_is_not_restored_is_named(change, reason, tmp_path):
    """State that is not plain data by name is not loaded, and the warning names it."""
    written(tmp_path / "old.pt", "MixUp", change=change)

    _, messages = loaded(tmp_path / "old.pt", run())

    assert reason in messages[0]


def test_mismatches_change_nothing(tmp_path):
    """A file with other weights raises, and the run is as before."""
    written(tmp_path / "old.pt", "MixUp", model=network(3, {"head": lambda: nn.Linear(16, 5)}))
    state = run()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}

    for weights_only in (True, False):
        with pytest.raises(CheckpointMismatchError, match=r"model\.module\.head\.weight: must be a tensor of shape"):
            load_checkpoint(ForeignFile(tmp_path / "old.pt"), state, weights_only=weights_only)

    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert state.timestamp.batch == 0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch ran')",
        "BlurPool(min_channels=__import__('os').getpid())",
        "BlurPool(*[1])",
        "(" * 300,
    ],
)
def test_text_is_parsed_and_not_run(text, tmp_path, monkeypatch):
    """The text of an algorithm is not evaluated; if it has no plain settings, it is ignored."""
    monkeypatch.chdir(tmp_path)

    def change(state):
        state["algorithms"] = [("BlurPool", {"repr": text})]

    written(tmp_path / "old.pt", "MixUp", change=change)
    state = run()

    load_checkpoint(ForeignFile(tmp_path / "old.pt"), state, weights_only=True)

    assert state.algorithms == []
    assert not (tmp_path / "ran").exists()


def test_other_files_of_weights_raise(tmp_path):
    """A file with weights alone needs weights_only."""
    torch.save(network(3, {}).state_dict(), tmp_path / "weights.pt")

    with pytest.raises(CheckpointError, match="is a file of weights, not a checkpoint; set weights_only"):
        load_checkpoint(ForeignFile(tmp_path / "weights.pt"), run())


REST = [
    (0.567166, [4, 21, 14, 11]),
    (0.763446, [16, 1, 5, 15]),
    (0.694854, [22, 3, 10, 0]),
    (0.738508, [12, 9, 19, 8]),
    (0.717801, [0, 19, 7, 12]),
    (0.684335, [22, 11, 6, 4]),
    (0.588125, [16, 15, 3, 9]),
    (0.720881, [23, 10, 1, 17]),
    (0.568948, [13, 20, 5, 14]),
    (0.393625, [18, 21, 8, 2]),
]
"""The loss and the samples of each batch from the ninth on; see :func:`continue_run`."""


def continue_run(tmp_path, load_path, **options):
    """Continue the run of the file from MosaicML Composer 0.32.1, and return the loss and the samples of each batch.

    This program wrote the file there after the eighth batch, the second of the second epoch, with torch 2.7 and a
    constant schedule (its description of the machine was removed), and ``REST`` when it continued from it. Both were
    equal to the same batches of a run without a stop.
    """
    from torch.utils.data import DataLoader, TensorDataset

    from composer import Trainer
    from composer.distributed import get_sampler
    from composer.models import ComposerClassifier

    model = ComposerClassifier(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2)), num_classes=2)
    data = TensorDataset(torch.arange(48.0).reshape(24, 2) / 48, torch.arange(24) % 3 % 2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=get_sampler(data, shuffle=True)),
        optimizers=torch.optim.Adam(model.parameters(), lr=0.05),
        max_duration="3ep",
        load_path=load_path,
        save_folder=tmp_path,
        device="cpu",
        progress_bar=False,
        seed=3,
        **options,
    )
    batches = []
    trainer.engine.on(
        "batch_end",
        lambda state, _: batches.append((state.loss.item(), (state.batch[0][:, 0] * 24).round().int().tolist())),
    )
    trainer.fit()
    assert trainer.state.timestamp.batch == 18
    return batches


def test_the_epoch_continues_with_the_losses_of_composer(tmp_path):
    """All further batches are those of Composer, and the losses until the end of the epoch, also with dropout."""
    with pytest.warns(UserWarning, match="is a checkpoint of MosaicML Composer") as caught:
        batches = continue_run(tmp_path, Path(__file__).parent / "composer_0_32_1_ba8.pt")

    assert [samples for _, samples in batches] == [samples for _, samples in REST]
    assert [loss for loss, _ in batches[:4]] == pytest.approx([loss for loss, _ in REST[:4]], abs=1e-6)
    assert "generators" not in str(caught[0].message)


def test_the_order_of_composer_is_kept_in_own_checkpoints(tmp_path):
    """A run that continues from a file of Composer, and is stopped between two epochs, keeps the order of its data."""
    with pytest.warns(UserWarning, match="is a checkpoint of MosaicML Composer"):
        continue_run(tmp_path, Path(__file__).parent / "composer_0_32_1_ba8.pt", save_interval="1ep")

    batches = continue_run(tmp_path, tmp_path / "ep2-ba12", save_overwrite=True)

    assert [samples for _, samples in batches] == [samples for _, samples in REST[4:]]


def test_a_loader_that_saves_its_position_continues_there(tmp_path):
    """The state of a StreamingDataset is given to its loader."""
    from torch.utils.data import DataLoader

    from composer import Trainer
    from composer.models import ComposerClassifier

    class Loader(DataLoader):
        loaded = None

        def __iter__(self):
            batches, started = super().__iter__(), self.loaded
            yield from itertools.islice(batches, started["sample_in_epoch"] // 4, None)

        def state_dict(self):
            return self.loaded

        def load_state_dict(self, state):
            self.loaded = state

    def change(state):
        state["timestamp"]["Timestamp"] |= {"batch": 9, "batch_in_epoch": 1, "sample": 36, "sample_in_epoch": 4}
        state["dataset_state"]["train"] = {"epoch": 2, "sample_in_epoch": 4}

    written(tmp_path / "old.pt", "MixUp", model=network(3, {}), change=change)
    model = ComposerClassifier(network(7, {}).module, num_classes=3)
    loader = Loader([(torch.zeros(3, 16, 16), 0)] * 16, batch_size=4)
    with pytest.warns(UserWarning, match="is a checkpoint of MosaicML Composer"):
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            max_duration="3ep",
            load_path=tmp_path / "old.pt",
            device="cpu",
            progress_bar=False,
        )

    trainer.fit(train_dataloader=loader)

    assert loader.loaded == {"epoch": 2, "sample_in_epoch": 4}
    assert trainer.state.timestamp.epoch == 3
