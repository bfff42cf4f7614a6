"""Algorithms in Lightning train as in our Trainer, resume as Lightning does, and raise for what it does not serve."""

import copy
import csv
import itertools
import logging
import warnings
from pathlib import Path

import pytest
import torch
from comparison import (
    CASES,
    SEED,
    weights_of,
)
from comparison import (
    assert_same as assert_same_weights,
)
from comparison import (
    our_weights as weights_of_our_trainer,
)
from small_training import make_loader as small_loader
from small_training import run_in_two_processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import (
    EMA,
    SAM,
    BlurPool,
    CutOut,
    GradientClipping,
    LabelSmoothing,
    LowPrecisionLayerNorm,
    MixUp,
    RandAugment,
    SelectiveBackprop,
    SqueezeExcite,
)
from composer.core import Algorithm, Event, Stage
from composer.core.saving.codec import equal
from composer.models import ComposerModel

lightning = pytest.importorskip("lightning")

from distributed_lightning import train as train_alone  # noqa: E402

from composer.integrations.lightning import ComposerCallback, FabricAlgorithms  # noqa: E402

# Lightning's hints about workers, logging intervals and its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def make_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(72, 5)
        )


def make_data(batches=4):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6 * batches, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(5, (6 * batches,), generator=generator))


def make_loader(batches=4):
    return DataLoader(make_data(batches), batch_size=6)


class Classifier(lightning.LightningModule):
    """A module as users write it: forward pass and loss in one function."""

    def __init__(self):
        super().__init__()
        self.network = make_network()
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.seen.append(self.network[5].bias.detach().clone())
        self.log("val_loss", cross_entropy(self.network(images), labels))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.seen.append(self.network[5].bias.detach().clone())
        return self.network(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_trainer(*callbacks, **settings):
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 3,
    }
    return lightning.Trainer(callbacks=list(callbacks), **{**quiet, **settings})


def fit(algorithms, module=None, batches=4, **settings):
    """Train with Lightning, and return the module and the callback."""
    module, callback = Classifier() if module is None else module, ComposerCallback(algorithms, seed=SEED)
    make_trainer(callback, **settings).fit(module, make_loader(batches))
    return module, callback


class Ours(ComposerModel):
    """The same network for our Trainer."""

    def __init__(self):
        super().__init__()
        self.network = make_network()

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch, reduction="mean"):
        return cross_entropy(outputs, batch[1], reduction=reduction)


def our_weights(algorithms, batches=4, **settings):
    model = Ours()
    Trainer(
        model=model,
        train_dataloader=make_loader(batches),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=algorithms,
        max_duration="3ep",
        seed=SEED,
        progress_bar=False,
        **settings,
    ).fit()
    return model.network.state_dict()


def assert_same(module, expected):
    torch.testing.assert_close(dict(module.network.state_dict()), dict(expected), rtol=0, atol=0)


SETS = {
    "none": list,
    "mixup": lambda: [MixUp()],
    "mixup of losses": lambda: [MixUp(interpolate_loss=True)],
    "sam": lambda: [SAM(rho=0.1)],
    "five": lambda: [BlurPool(), MixUp(), LabelSmoothing(0.1), SAM(), EMA("2ba"), GradientClipping("norm", 0.1)],
}


class OfCase(lightning.LightningModule):
    """The model of a case of the comparison, as users write it."""

    def __init__(self, case):
        super().__init__()
        self.case, self.network = case, case.make_model()

    def training_step(self, batch, batch_idx):
        return self.case.loss(self.case.forward(self.network, batch), batch)

    def configure_optimizers(self):
        return self.case.make_optimizer(self)


SERVED = {
    name: case
    for name, case in CASES.items()
    if not name.startswith("SelectiveBackprop")  # raises, see TestRefusals
}


class TestEquality:
    """The weights are those of our Trainer, bit for bit."""

    @pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
    def test_weights_of_each_algorithm(self, case):
        """Each algorithm that Lightning serves has the same result, on a network for images or text."""
        module, callback = OfCase(case), ComposerCallback(case.make_algorithms(), seed=SEED)
        precision = {"fp32": "32-true", "amp_bf16": "bf16-mixed"}[case.precision]
        with torch.random.fork_rng(devices=[]):
            make_trainer(callback, precision=precision).fit(module, case.make_data())

        assert_same_weights(weights_of(callback.adapter.state, module.network), weights_of_our_trainer(case))

    def test_second_trainer(self):
        """Another Trainer with the same callback trains from the beginning of the clock."""
        module, callback = fit([])

        make_trainer(callback, max_epochs=2).fit(module, make_loader())

        assert callback.adapter.state.timestamp.batch == 8

    @pytest.mark.parametrize("accumulate", [2, 4])
    def test_accumulation(self, accumulate):
        """A step of several batches is one batch of the clock; the last incomplete one of an epoch steps, too."""
        _, callback = fit([CutOut(length=0.5), EMA("2ba")], batches=5, accumulate_grad_batches=accumulate)

        clock = callback.adapter.state.timestamp
        assert (clock.batch, clock.sample, clock.epoch) == (f"{3 * -(-5 // accumulate)}ba", "90sp", "3ep")


class StopAt(lightning.Callback):
    """Saves a checkpoint after a batch, and ends the training there."""

    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class Resumable(DataLoader):
    """A loader that continues at its position, which Lightning needs for a resume within an epoch."""

    position = 0

    def __iter__(self):
        start, self.position = self.position, 0
        for place, batch in enumerate(super().__iter__()):
            if place >= start:
                self.position = place + 1
                yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class TestResume:
    """A resumed run has the weights of one without interruption, as with Lightning alone."""

    @pytest.mark.parametrize(
        "make",
        [
            list,
            lambda: [BlurPool(), MixUp(), EMA("2ba"), LabelSmoothing(0.1)],
            lambda: [SqueezeExcite(2, 3), SAM(rho=0.1)],
        ],
        ids=["alone", "four", "surgery and sam"],
    )
    @pytest.mark.parametrize("stop", [2, 4, 6], ids=["in the first epoch", "between epochs", "in the second epoch"])
    def test_stopped_run(self, make, stop, tmp_path):
        """Weights, averages and the clock are equal bit for bit."""

        def run(stop=None, ckpt_path=None):
            callback = ComposerCallback(make(), seed=SEED)
            callbacks = [callback] if make is not list else []
            module = Classifier()
            trainer = make_trainer(*callbacks, *([StopAt(stop, tmp_path / "last.ckpt")] if stop else []))
            trainer.fit(module, Resumable(make_data(), batch_size=6), ckpt_path=ckpt_path)
            return module, callback

        uninterrupted, expected = run()
        run(stop=stop)
        resumed, callback = run(ckpt_path=tmp_path / "last.ckpt")

        assert_same(resumed, uninterrupted.network.state_dict())
        assert callback.adapter.state.timestamp == expected.adapter.state.timestamp
        assert equal(callback.state_dict()["algorithms"], expected.state_dict()["algorithms"])

    def test_checkpoint_without_callback(self, tmp_path):
        """The checkpoint of a training without algorithms raises before weights are loaded."""
        make_trainer(StopAt(2, tmp_path / "last.ckpt")).fit(Classifier(), make_loader())
        module = Classifier()
        module.network[5].bias.data.zero_()
        with pytest.raises(ValueError, match="must be a checkpoint of a training with ComposerCallback, but it has no"):
            make_trainer(ComposerCallback(EMA())).fit(module, make_loader(), ckpt_path=tmp_path / "last.ckpt")
        assert not module.network[5].bias.any()

    def test_resume_without_callback(self, tmp_path):
        """Lightning itself warns about a training that continues without the algorithms."""
        callback = ComposerCallback(EMA("2ba"))
        make_trainer(callback, StopAt(2, tmp_path / "last.ckpt")).fit(Classifier(), make_loader())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer().fit(Classifier(), make_loader(), ckpt_path=tmp_path / "last.ckpt")
        assert any("need to be provided" in (text := str(one.message)) and "Composer" in text for one in caught)


class TestEvaluation:
    """Validations, tests, predictions and checkpoints use the averages."""

    @pytest.mark.parametrize("inference_mode", [True, False])
    @pytest.mark.parametrize("run", ["validate", "test", "predict"])
    def test_averages(self, run, inference_mode):
        """The evaluated weights are the averages, and the training weights return, to be trained further."""
        ema = EMA("2ba")
        module, callback = Classifier(), ComposerCallback(ema, seed=SEED)
        trainer = make_trainer(callback, inference_mode=inference_mode)
        trainer.fit(module, make_loader())
        before = copy.deepcopy(module.network.state_dict())
        averages = ema.get_ema_model(module).network[5].bias

        getattr(trainer, run)(module, make_loader(1), **({} if run == "predict" else {"verbose": False}))

        assert torch.equal(module.seen[-1], averages)
        assert not torch.equal(module.seen[-1], before["5.bias"])
        assert_same(module, before)
        assert not module.network[5].bias.is_inference()

    def test_best_checkpoint(self, tmp_path):
        """The saved state_dict is what was evaluated, and a test of it evaluates the same again."""
        from lightning.pytorch.callbacks import ModelCheckpoint

        best = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", save_top_k=1)
        module, callback = Classifier(), ComposerCallback([BlurPool(), EMA("2ba")], seed=SEED)
        trainer = make_trainer(callback, best, enable_checkpointing=True)
        trainer.fit(module, make_loader(), make_loader(1))
        evaluated, (tested,) = module.seen[:], trainer.test(module, make_loader(1), ckpt_path="best", verbose=False)

        saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
        assert any(torch.equal(saved["network.5.bias"], bias) for bias in evaluated)
        assert torch.equal(module.seen[-1], saved["network.5.bias"])
        assert tested["val_loss"] == pytest.approx(best.best_model_score.item(), abs=0)

    def test_error_in_a_validation(self):
        """The training weights and the module's own methods are restored."""

        class Failing(Classifier):
            def validation_step(self, batch, batch_idx):
                self.seen.append(self.network[5].bias.detach().clone())
                if not self.trainer.sanity_checking:
                    raise ZeroDivisionError

        module, ema = Failing(), EMA("2ba")
        callback = ComposerCallback(ema, seed=SEED)
        with pytest.raises(ZeroDivisionError):
            make_trainer(callback).fit(module, make_loader(), make_loader(1))

        expected = ema.get_training_model(module).network[5].bias
        assert torch.equal(module.network[5].bias, expected)
        assert not torch.equal(module.seen[-1], expected)
        assert not {"training_step", "configure_model", "on_save_checkpoint", "on_load_checkpoint"} & {*vars(module)}


class TestModule:
    """The outputs are those of the module that the loss is computed from."""

    def variant(self, step, **children):
        class Variant(Classifier):
            training_step = step

            def forward(self, images):
                return self.network(images)

        module = Variant()
        for name, child in children.items():
            setattr(module, name, child)
        return module

    def test_the_lightning_module(self):
        """A training_step that calls self(...) is split there, also if it returns a dictionary."""

        def step(self, batch, batch_idx):
            loss = cross_entropy(self(batch[0]), batch[1])
            return {"loss": loss, "more": 1}

        module, _ = fit([MixUp(), LabelSmoothing(0.1)], self.variant(step))

        assert_same(module, our_weights([MixUp(), LabelSmoothing(0.1)]))

    def test_two_modules(self):
        """Two modules one after the other need a forward function."""

        def step(self, batch):
            return cross_entropy(self.head(self.network(batch[0])), batch[1])

        with pytest.raises(ValueError, match="calls 'network' and 'head', so it is not clear"):
            fit(MixUp(), self.variant(step, head=nn.Linear(5, 5)))

    @pytest.mark.parametrize("chosen", ["network", "network.5"])
    def test_given_module(self, chosen):
        """The module can be named, also one within another."""

        def step(self, batch):
            outputs = self.network(batch[0])
            return cross_entropy(outputs, batch[1]) + 0 * self.head(outputs).sum()

        module = self.variant(step, head=nn.Linear(5, 5))
        make_trainer(ComposerCallback(LabelSmoothing(0.1), module=chosen)).fit(module, make_loader())

        assert module.trainer.global_step == 12

    def test_skipped_step(self):
        """A training_step that returns None is skipped, and counted as Lightning counts it."""

        def step(self, batch, batch_idx):
            loss = cross_entropy(self(batch[0]), batch[1])
            return None if batch_idx == 1 else loss

        module, callback = fit([LabelSmoothing(0.1), EMA("2ba")], self.variant(step))

        assert callback.adapter.state.timestamp.batch == module.trainer.global_step == 12

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_skipped_steps_with_gradient_clipping(self, accumulate):
        """A step without a loss clips nothing, and the others clip as Lightning does."""

        def step(self, batch, batch_idx):
            return None if batch_idx < 2 else cross_entropy(self(batch[0]), batch[1])

        module, _ = fit(GradientClipping("norm", 0.05), self.variant(step), accumulate_grad_batches=accumulate)
        expected = self.variant(step)
        make_trainer(gradient_clip_val=0.05, accumulate_grad_batches=accumulate).fit(expected, make_loader())

        torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=1e-7)


class TestRefusals:
    """What cannot work raises an error of one sentence before training."""

    @pytest.mark.parametrize(
        ("algorithms", "settings", "sentence"),
        [
            (GradientClipping("norm", 1.0), {"gradient_clip_val": 1.0}, "Gradients would be clipped twice"),
            (SAM(), {"accumulate_grad_batches": 2}, "SAMOptimizer computes the loss of a step twice"),
            (EMA(), {"strategy": "ddp_spawn", "devices": 2}, "cannot be sent to another process"),
        ],
    )
    def test_settings_of_the_trainer(self, algorithms, settings, sentence):
        """Settings that contradict an algorithm are named."""
        with pytest.raises((ValueError, TypeError), match=sentence):
            fit(algorithms, **settings)

    @pytest.mark.parametrize("run", ["validate", "test", "predict"])
    def test_other_module(self, run):
        """The error for a module that was loaded from a checkpoint has the call that evaluates the checkpoint."""
        trainer = make_trainer(ComposerCallback(EMA("2ba"), seed=SEED), max_epochs=1)
        trainer.fit(Classifier(), make_loader())
        with pytest.raises(ValueError, match=r"another model.* trainer\.test\(module, ckpt_path=...\)"):
            getattr(trainer, run)(Classifier(), make_loader())

    def test_compiled_module(self):
        """A compiled LightningModule raises with the remedy."""
        with pytest.raises(ValueError, match=r"Compile a module inside it"):
            fit(EMA(), torch.compile(Classifier(), backend="eager"))

    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (lambda: SelectiveBackprop(start=0, end=1), "SelectiveBackprop cannot run in Lightning: it reads 'losses'"),
            (lambda: RandAugment(batch=False), "RandAugment cannot run in Lightning: it reads 'evaluators'"),
        ],
    )
    def test_what_is_not_served(self, make, sentence):
        """An algorithm that needs more than Lightning has raises at construction."""
        with pytest.raises(ValueError, match=sentence):
            ComposerCallback(make())

    def test_manual_optimization(self):
        """Only algorithms without events of a batch work with manual optimization."""

        class Manual(Classifier):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch, batch_idx):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        with pytest.raises(ValueError, match="MixUp cannot run in Lightning with automatic_optimization=False"):
            fit(MixUp(), Manual())
        module, callback = fit([BlurPool(), EMA("2ba")], Manual())
        assert_same(module, our_weights([BlurPool(), EMA("2ba")]))
        assert callback.adapter.state.timestamp.batch == 12

    @pytest.mark.parametrize(("limit", "duration"), [({"max_epochs": 2}, "2ep"), ({"max_steps": 16}, None)])
    def test_several_optimizers(self, limit, duration):
        """A batch in which two optimizers step is one batch of the clock, as in a generative adversarial network."""

        class Adversarial(Classifier):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def configure_optimizers(self):
                return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.network[0], self.network[5])]

            def training_step(self, batch, batch_idx):
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                    self.manual_backward(super().training_step(batch, batch_idx))
                    optimizer.step()

        _, callback = fit(EMA("2ba"), Adversarial(), **{"max_epochs": -1, **limit})
        state = callback.adapter.state
        assert (state.timestamp.batch, state.max_duration) == (8, duration)


class Logs(Algorithm):
    """Logs the number of the step."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}
    reads = frozenset({"timestamp"})

    def apply(self, event, state, logger):
        logger.log_metrics({"logged_by_algorithm": float(state.timestamp.batch)})


class TestFeatures:
    """What Lightning has works with the algorithms on."""

    def test_two_processes(self, tmp_path):
        """Both processes of DDP have the same weights, those of one process with batches of twice the size.

        It takes more than a second, as it starts two processes.
        """
        first, second = run_in_two_processes("distributed_lightning.py", tmp_path)
        assert first == second
        assert first["clock"] == ["8ba", "32sp"]
        alone = train_alone(small_loader(batch_size=4))
        assert alone["clock"] == first["clock"]
        assert first["weights"] == {
            name: pytest.approx(weight, rel=1e-3, abs=1e-4) for name, weight in alone["weights"].items()
        }

    def test_metrics_of_algorithms(self, tmp_path):
        """What algorithms log is in the files of the loggers, beside what the module logs."""
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

        loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tensorboard")]
        module, callback = Classifier(), ComposerCallback([Logs(), EMA("2ba")])
        make_trainer(callback, logger=loggers).fit(module, make_loader(), make_loader(1))

        with next(tmp_path.glob("csv/*/metrics.csv")).open() as file:
            rows = list(csv.DictReader(file))
        assert [row["logged_by_algorithm"] for row in rows if row["logged_by_algorithm"]] == [
            f"{float(step)}" for step in range(1, 13)
        ]
        assert sum(bool(row["val_loss"]) for row in rows) == 3
        assert list(tmp_path.glob("tensorboard/*/events*"))

    @pytest.mark.parametrize("interval", ["step", "epoch"])
    def test_schedulers_bars_profilers_and_stops(self, interval, tmp_path):
        """Without algorithms a callback changes nothing: the same weights, learning rates, stop and best checkpoint."""
        from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
        from lightning.pytorch.loggers import CSVLogger
        from lightning.pytorch.profilers import SimpleProfiler

        class Scheduled(Classifier):
            def configure_optimizers(self):
                optimizer = super().configure_optimizers()
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

        def run(name, *callbacks):
            rates = LearningRateMonitor("step")
            module, trainer = (
                Scheduled(),
                make_trainer(
                    *callbacks,
                    EarlyStopping("val_loss", patience=1, min_delta=10.0),
                    best := ModelCheckpoint(tmp_path / name, monitor="val_loss"),
                    rates,
                    logger=CSVLogger(tmp_path, name=f"logs_{name}"),
                    log_every_n_steps=1,
                    max_epochs=6,
                    enable_checkpointing=True,
                    enable_progress_bar=True,
                    enable_model_summary=True,
                    profiler=SimpleProfiler(),
                ),
            )
            trainer.fit(module, make_loader(), make_loader(1))
            (file,) = tmp_path.glob(f"logs_{name}/*/metrics.csv")
            hooks.update(trainer.profiler.recorded_durations)
            return module, trainer.global_step, Path(best.best_model_path).name, file.read_text()

        hooks = set()
        alone, with_callback = run("alone"), run("callback", ComposerCallback([]))

        assert with_callback[1:] == alone[1:]
        assert alone[1] == 8
        assert_same(with_callback[0], alone[0].network.state_dict())
        assert "[Callback]ComposerCallback.on_train_batch_end" in hooks

    def test_command_line(self):
        """LightningCLI constructs the callback and its algorithms from a file in YAML, with their defaults."""
        pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
        from lightning.pytorch.cli import LightningCLI

        names = [{"class_path": f"composer.algorithms.{name}"} for name in ("EMA", "LowPrecisionLayerNorm")]
        callback = {"class_path": f"{ComposerCallback.__module__}.ComposerCallback", "init_args": {"algorithms": names}}
        settings = {"accelerator": "cpu", "logger": False, "callbacks": [callback]}
        cli = LightningCLI(Classifier, args={"trainer": settings}, run=False, save_config_callback=None)
        algorithms = cli.trainer.callbacks[0].state.algorithms
        assert [repr(one) for one in algorithms] == [repr(EMA()), repr(LowPrecisionLayerNorm())]

    def test_compiled_child(self):
        """A network that is compiled inside the LightningModule can be changed before its first call."""
        module = Classifier()
        module.network = torch.compile(module.network, backend="aot_eager")
        fit([BlurPool(), MixUp(), EMA("2ba")], module)

        expected = our_weights([BlurPool(), MixUp(), EMA("2ba")])
        torch.testing.assert_close(list(module.network.state_dict().values()), list(expected.values()))


class TestFabric:
    """A loop with Fabric trains as our Trainer does."""

    def train(self, algorithms, *, until=12, load=None, save=None):
        fabric = lightning.Fabric(accelerator="cpu")
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        algorithms = FabricAlgorithms(
            fabric, network, optimizer, algorithms, lambda outputs, batch: cross_entropy(outputs, batch[1]), seed=SEED
        )
        saved = {"model": network, "optimizer": optimizer, "algorithms": algorithms}
        if load:
            fabric.load(load, saved)
        loader = fabric.setup_dataloaders(make_loader())
        algorithms.begin_fit(max_duration="3ep", train_dataloader=loader)
        for _ in range(int(algorithms.state.timestamp.epoch), 3):
            algorithms.begin_epoch()
            for batch in itertools.islice(loader, int(algorithms.state.timestamp.batch_in_epoch), None):
                algorithms.step(batch)
                if algorithms.state.timestamp.batch == until:
                    if save:
                        fabric.save(save, saved)
                    return network.state_dict(), algorithms
            algorithms.end_epoch()
        return None

    @pytest.mark.parametrize("make", SETS.values(), ids=SETS)
    def test_weights_of_our_trainer(self, make):
        """Twelve steps have the same result."""
        weights, _ = self.train(make())

        torch.testing.assert_close(weights, our_weights(make()), rtol=0, atol=0)

    def test_resume(self, tmp_path):
        """A run that was saved by Fabric after five steps continues with the same bits."""
        make = SETS["five"]
        expected, _ = self.train(make())
        self.train(make(), until=5, save=tmp_path / "saved.ckpt")
        resumed, algorithms = self.train(make(), load=tmp_path / "saved.ckpt")

        torch.testing.assert_close(resumed, expected, rtol=0, atol=0)
        assert "MixUp" in str(algorithms.explain())

    def test_several_optimizers(self):
        """The error names what is expected."""
        network = make_network()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (network[0], network[5])]
        with pytest.raises(TypeError, match=r"optimizer must be one torch.optim.Optimizer, got list"):
            FabricAlgorithms(lightning.Fabric(accelerator="cpu"), network, optimizers, MixUp(), cross_entropy)

    def test_second_training(self):
        """Another training begins at the start of the clock, and steps once with each optimizer that was set up."""
        _, algorithms = self.train([SAM(), EMA("2ba")])
        model, optimizer = algorithms.model, algorithms.optimizer
        algorithms.end_fit()
        algorithms.begin_fit(max_duration="1ep", train_dataloader=make_loader())
        algorithms.begin_epoch()
        for batch in make_loader():
            algorithms.step(batch)
        algorithms.end_epoch()

        assert (algorithms.model, algorithms.optimizer) == (model, optimizer)
        assert (algorithms.state.timestamp.batch, algorithms.state.timestamp.epoch) == (4, 1)
        assert algorithms.state.optimizers[0].param_groups[0]["sam_steps"] == 16
        assert algorithms.state.algorithms[0].acted == 4

    def test_evaluation(self):
        """An evaluation uses the averages."""
        ema = EMA("2ba")
        _, algorithms = self.train(ema)
        network = algorithms.state.model
        with algorithms.evaluation():
            assert torch.equal(network[5].bias, ema.get_ema_model(network)[5].bias)
