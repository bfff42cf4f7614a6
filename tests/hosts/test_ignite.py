"""Algorithms in an engine of Ignite train as in our own Trainer, resume exactly, and raise where they cannot work."""

import contextlib
import copy
import doctest
import importlib
import inspect
import itertools
from unittest import mock

import pytest
import torch
from comparison import CASES, EPOCHS, SEED, STEPS, assert_same, our_weights, weights_of
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, EarlyStopping, ModelCheckpoint, ProgressBar
from ignite.handlers.param_scheduler import LRScheduler
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.metrics import Loss
from small_training import make_loader, make_net, run_in_two_processes, sgd, train_ours
from torch import nn
from torch.nn.functional import cross_entropy

from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    BlurPool,
    GradientClipping,
    LabelSmoothing,
    MixUp,
    SelectiveBackprop,
)
from composer.core import Algorithm, Event, Stage
from composer.integrations.ignite import attach_algorithms

SERVED = {
    name: case
    for name, case in CASES.items()
    if not name.startswith("NoOpModel")
    and case.precision == "fp32"  # Ignite's only mixed precision needs a GPU
    and not (name.startswith("SAM") and case.is_transformer)  # raises in a process function of the user
}


def host_weights(case):
    """Train a case in an engine, and return the weights."""
    model = case.make_model()
    optimizer = case.make_optimizer(model)

    def loss_fn(outputs, labels, reduction="mean"):
        return case.loss(outputs, {"labels": labels}, reduction)

    def loss_of_tuples(outputs, labels, reduction="mean"):
        return case.loss(outputs, (None, labels), reduction)

    loss = loss_fn if case.is_transformer else loss_of_tuples
    if case.is_transformer:
        trainer = Engine(lambda engine, batch: own_step(model, optimizer, algorithms, batch))
    else:
        trainer = create_supervised_trainer(model, optimizer, loss)
    algorithms = attach_algorithms(
        trainer, model, optimizer, loss, case.make_algorithms(), max_duration=f"{STEPS}ba", seed=SEED
    )
    with torch.random.fork_rng(devices=[]):
        trainer.run(case.make_data(), max_epochs=EPOCHS)
    return weights_of(algorithms.state, model)


def own_step(model, optimizer, algorithms, batch):
    """A process function of a user, for dictionaries."""
    model.train()
    optimizer.zero_grad()
    loss = algorithms.compute_loss(batch)
    loss.backward()
    optimizer.step()
    return loss.item()


class Run:
    """A trainer of Ignite with algorithms."""

    def __init__(self, algorithms, *, deterministic=False, loader=None, **options):
        self.model, self.loader = make_net(), loader or make_loader()
        self.optimizer = sgd(self.model)
        self.trainer = create_supervised_trainer(
            self.model, self.optimizer, cross_entropy, deterministic=deterministic, **options
        )
        self.algorithms = attach_algorithms(
            self.trainer, self.model, self.optimizer, cross_entropy, algorithms, seed=SEED
        )

    @property
    def clock(self):
        return self.algorithms.state.timestamp

    @property
    def to_save(self):
        return {
            "trainer": self.trainer,
            "model": self.model,
            "optimizer": self.optimizer,
            "algorithms": self.algorithms,
        }

    def train(self, epochs=2):
        """Train, and return the weights."""
        self.trainer.run(self.loader, max_epochs=epochs)
        return self.weights()

    def weights(self):
        return weights_of(self.algorithms.state, self.model)


class TestEquality:
    """The weights after 12 steps are those of our own Trainer, bit for bit."""

    @pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
    def test_weights_of_our_trainer(self, case):
        """Engines of create_supervised_trainer, and for dictionaries a process function, train as our Trainer."""
        assert_same(host_weights(case), our_weights(case))

    @pytest.mark.parametrize("steps", [2, 4])
    def test_accumulation(self, steps):
        """Batches of one step are what microbatches are in our Trainer."""

        def make():
            return [BlurPool(min_channels=8), MixUp(), LabelSmoothing(0.1), EMA("2ba")]

        expected, clock = train_ours(make(), batch_size=2 * steps, device_train_microbatch_size=2)

        run = Run(make(), gradient_accumulation_steps=steps)
        weights = run.train()

        assert run.clock.batch == clock.batch
        assert_same(weights, expected)

    def test_batches_that_are_computed_again(self):
        """With SAM, clipping sees the gradients of both passes, and the model runs twice in a step."""
        run = Run([SAM(), GradientClipping("norm", 0.1), MixUp()])
        calls = []
        run.model.register_forward_hook(lambda *_: calls.append(1))
        weights = run.train()
        expected, clock = train_ours([SAM(), GradientClipping("norm", 0.1), MixUp()])
        assert_same(weights, expected)
        assert len(calls) == 2 * clock.batch

    def test_without_an_effect(self):
        """With an algorithm that only observes, the weights and outputs are those of Ignite alone."""

        def train(algorithms):
            outputs, model = [], make_net()
            optimizer = sgd(model)
            trainer = create_supervised_trainer(model, optimizer, cross_entropy, gradient_accumulation_steps=3)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output))
            if algorithms:
                attach_algorithms(trainer, model, optimizer, cross_entropy, algorithms)
            trainer.run(make_loader(), max_epochs=2)
            return model.state_dict(), outputs

        plain, outputs = train([])
        observed, same_outputs = train([EMA("2ba")])
        assert_same(observed, plain)
        assert outputs == same_outputs

    def test_loss_as_module(self):
        """Algorithms that need the loss of each sample get it from a loss module with a reduction."""
        model, loss_fn = make_net(), nn.CrossEntropyLoss()
        optimizer = sgd(model)
        trainer = create_supervised_trainer(model, optimizer, loss_fn)
        algorithms = [SelectiveBackprop(start=0, end=1)]
        attached = attach_algorithms(trainer, model, optimizer, loss_fn, algorithms, seed=SEED)
        trainer.run(make_loader(), max_epochs=2)
        assert_same(weights_of(attached.state, model), Run([SelectiveBackprop(start=0, end=1)]).train())
        assert loss_fn.reduction == "mean"


class TestClock:
    """A batch of the clock is a step of the optimizer."""

    def test_accumulation_across_epochs(self):
        """As in Ignite, gradients accumulate from one epoch to the next: ten batches by four are two steps."""
        run = Run(EMA("2ba"), loader=make_loader(samples=10), gradient_accumulation_steps=4)
        run.train()
        assert (run.clock.batch, run.clock.sample, run.clock.epoch) == ("2ba", "16sp", "2ep")

    def test_events(self):
        """Each epoch begins and ends once, before the user's handlers at its end."""
        seen = []

        class Records(Algorithm):
            runs_at = dict.fromkeys((Event.EPOCH_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END), Stage.WEIGHTS)

            def apply(self, event, state, logger):
                seen.append(event)

        model, optimizer = make_net(), None
        optimizer = sgd(model)
        trainer = create_supervised_trainer(model, optimizer, cross_entropy)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append("user"))
        attach_algorithms(trainer, model, optimizer, cross_entropy, Records())
        trainer.run(make_loader(samples=4), max_epochs=2)
        epoch = [Event.EPOCH_START, Event.BATCH_END, Event.BATCH_END, Event.EPOCH_END, "user"]
        assert seen == [*epoch, *epoch, Event.FIT_END]

    @pytest.mark.skipif(
        "max_iters" not in inspect.signature(Engine.run).parameters, reason="Ignite 0.5.2 counts only epochs"
    )
    def test_number_of_iterations(self):
        """A training of some iterations has their number as duration."""
        run = Run(EMA("0.5dur"), gradient_accumulation_steps=2)
        run.trainer.run(run.loader, max_iters=12)
        assert (run.clock.batch, run.algorithms.state.max_duration) == ("6ba", "6ba")
        assert run.algorithms.state.dataloader_len == 4

    def test_several_losses_in_a_step(self):
        """A process function of the user that accumulates gradients itself runs the events of each loss."""
        seen = []

        class Records(Algorithm):
            runs_at = dict.fromkeys((Event.BEFORE_FORWARD, Event.AFTER_BACKWARD, Event.BATCH_END), Stage.WEIGHTS)

            def apply(self, event, state, logger):
                seen.append(event)

        model = make_net()
        optimizer = sgd(model)

        def process(engine, batch):
            for half in zip(*(item.chunk(2) for item in batch), strict=True):
                algorithms.compute_loss(half).backward()
            optimizer.step()

        trainer = Engine(process)
        algorithms = attach_algorithms(trainer, model, optimizer, cross_entropy, Records())
        trainer.run(make_loader(samples=2), max_epochs=1)
        assert seen == [Event.BEFORE_FORWARD, Event.AFTER_BACKWARD] * 2 + [Event.BATCH_END]
        assert algorithms.state.timestamp.sample == "2sp"

    @pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
    def test_step_that_the_scaler_skips(self):
        """A batch with infinite gradients counts, as in our Trainer."""
        run = Run(EMA("2ba"), amp_mode="amp", scaler=torch.amp.GradScaler("cpu"))
        run.loader = list(run.loader)
        run.loader[2][0].fill_(float("inf"))
        run.train(epochs=1)
        assert (run.clock.batch, run.clock.sample) == ("8ba", "16sp")

    def test_end_of_the_training(self):
        """At the end the averages of SWA are in the model, for handlers that were added later."""
        swa, saved = SWA("1ep", "2ep"), {}
        run = Run(swa)
        run.trainer.add_event_handler(Events.COMPLETED, lambda: saved.update(copy.deepcopy(run.model.state_dict())))
        run.train()
        assert_same(saved, run.model.state_dict())


class TestResume:
    """A run continues from Ignite's Checkpoint with the same bits."""

    @pytest.mark.parametrize(
        ("steps", "until", "deterministic"), [(1, 5, False), (1, 8, False), (2, 12, False), (1, 11, True)]
    )
    def test_resume(self, tmp_path, steps, until, deterministic):
        """With surgery, draws and averages, in and at the end of an epoch, as exactly as Ignite itself resumes."""

        def make():
            algorithms = [BlurPool(min_channels=8), MixUp(), EMA("2ba"), LabelSmoothing(0.1)]
            # Ignite itself resumes shuffled loaders exactly only with workers.
            options = {"deterministic": deterministic, "loader": list(make_loader())}
            return Run(algorithms, gradient_accumulation_steps=steps, **options)

        stopped = make()
        keep = Checkpoint(stopped.to_save, str(tmp_path), n_saved=None)
        stopped.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=until), keep)
        uninterrupted = stopped.train()

        resumed = make()
        (path,) = tmp_path.glob("*.pt")
        Checkpoint.load_objects(resumed.to_save, torch.load(path, weights_only=not deterministic))
        if not deterministic:  # Ignite starts such an epoch with the first batch, and leaves skipping to the user
            started = until % 8
            resumed.loader = itertools.cycle(resumed.loader[started:] + resumed.loader[:started])
        resumed.trainer.run(resumed.loader, max_epochs=2)
        assert resumed.clock.batch == 16 // steps
        assert_same(resumed.weights(), uninterrupted)

    def test_sam(self, tmp_path):
        """The state of the optimizer within SAM is saved and loaded."""
        run = Run(SAM(interval=2))
        run.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), Checkpoint(run.to_save, str(tmp_path)))
        uninterrupted = run.train()
        (path,) = tmp_path.glob("*.pt")
        resumed = Run(SAM(interval=2))
        Checkpoint.load_objects(resumed.to_save, torch.load(path, weights_only=True))
        assert_same(resumed.train(), uninterrupted)

    def test_return_to_a_checkpoint(self, tmp_path):
        """The same engine, stopped within a step, returns to a checkpoint at the start of the epoch."""
        seen = []

        class Records(Algorithm):
            runs_at = {Event.EPOCH_START: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                seen.append(state.timestamp.epoch)

        def make():
            algorithms = [BlurPool(min_channels=8), MixUp(), EMA("2ba"), Records()]
            return Run(algorithms, loader=list(make_loader()), gradient_accumulation_steps=2)

        uninterrupted = make().train()
        run = make()
        run.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), Checkpoint(run.to_save, str(tmp_path)))
        stop = run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=11), run.trainer.terminate)
        run.train()
        stop.remove()
        (path,) = tmp_path.glob("*.pt")
        Checkpoint.load_objects(run.to_save, torch.load(path, weights_only=True))
        assert_same(run.train(), uninterrupted)
        assert seen == ["0ep", "1ep", "0ep", "1ep", "1ep"]

    @pytest.mark.parametrize("missing", ["trainer", "algorithms"])
    def test_incomplete_checkpoint(self, missing):
        """An engine that continues without the state of its algorithms raises, and so does the reverse."""
        run = Run(EMA("2ba"))
        run.train(epochs=1)
        states = {name: one.state_dict() for name, one in run.to_save.items()}
        resumed = Run(EMA("2ba"))
        to_load = {name: one for name, one in resumed.to_save.items() if name != missing}
        Checkpoint.load_objects(to_load, states)
        with pytest.raises(RuntimeError, match="Save and load both in one Checkpoint"):
            resumed.train()


class TestEvaluation:
    """An evaluator runs with the averages, until its last handler has run."""

    def test_best_model(self, tmp_path):
        """What is saved as best is what was evaluated."""
        ema = EMA("2ba")
        run = Run(ema)
        evaluator = create_supervised_evaluator(run.model, {"loss": Loss(cross_entropy)})
        run.algorithms.attach_evaluator(evaluator)
        keep = ModelCheckpoint(
            str(tmp_path),
            score_function=lambda engine: -engine.state.metrics["loss"],
            global_step_transform=lambda *_: int(run.clock.epoch),
            require_empty=False,
        )
        evaluator.add_event_handler(Events.COMPLETED, keep, {"model": run.model})
        run.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(make_loader()))
        run.train(epochs=1)
        (path,) = tmp_path.glob("*.pt")
        saved = torch.load(path, weights_only=True)
        assert_same(saved, ema.get_ema_model(run.model).state_dict())
        assert not torch.equal(saved["layers.4.bias"], run.model.layers[4].bias)

    def test_error(self):
        """After an error in an evaluation the training weights are in the model."""
        run = Run(EMA("2ba"))
        before = run.train()

        def fail(engine, batch):
            raise ZeroDivisionError

        evaluator = Engine(fail)
        run.algorithms.attach_evaluator(evaluator)
        with contextlib.suppress(ZeroDivisionError):
            evaluator.run([1])
        assert_same(run.weights(), before)


class TestFeatures:
    """Handlers of Ignite still work."""

    def test_handlers(self, tmp_path):
        """The progress bar, TensorBoard, a schedule and early stopping run beside algorithms."""

        class Logs(Algorithm):
            runs_at = {Event.BATCH_END: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                logger.log_metrics({"seen": 1.0})

        run = Run([Logs(), MixUp(), SAM()])
        schedule = LRScheduler(torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5))
        run.trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
        bar = ProgressBar(disable=True)
        bar.attach(run.trainer, output_transform=lambda loss: {"loss": loss})
        board = TensorboardLogger(str(tmp_path))
        board.writer = mock.Mock()
        board.attach_output_handler(run.trainer, Events.ITERATION_COMPLETED, tag="train", metric_names="all")
        stop = EarlyStopping(patience=1, score_function=lambda engine: 0.0, trainer=run.trainer)
        run.trainer.add_event_handler(Events.EPOCH_COMPLETED, stop)
        run.train(epochs=9)
        assert run.trainer.state.epoch == 2
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**15)
        assert mock.call("train/seen", 1.0, 16) in board.writer.add_scalar.mock_calls

    def test_compiled_model(self):
        """A compiled model is served without surgery, and trains up to rounding as one that is not compiled."""
        eager = Run([MixUp(), EMA("2ba")])
        model = make_net()
        compiled, optimizer = torch.compile(model, backend="aot_eager"), sgd(model)
        trainer = create_supervised_trainer(compiled, optimizer, cross_entropy)
        algorithms = [MixUp(), EMA("2ba")]
        attached = attach_algorithms(trainer, compiled, optimizer, cross_entropy, algorithms, seed=SEED)
        trainer.run(make_loader(), max_epochs=2)
        torch.testing.assert_close(weights_of(attached.state, model), eager.train(), rtol=1e-4, atol=1e-5)

    def test_two_processes(self, tmp_path):
        """Both processes of DDP have the same weights, those of one process with batches of twice the size.

        It takes more than a second, as it starts two processes.
        """
        first, second = run_in_two_processes("distributed_ignite.py", tmp_path)
        assert first == second
        assert first["clock"] == ["8ba", "32sp"]
        alone = Run([SAM(), EMA("2ba")], loader=make_loader(batch_size=4)).train()
        expected = {
            name: pytest.approx(weight.flatten().tolist(), rel=1e-3, abs=1e-4) for name, weight in alone.items()
        }
        assert first["weights"] == expected

    def test_explain(self):
        """The plan is printed as in our Trainer."""
        assert "MixUp" in str(Run([MixUp()]).algorithms.explain())


class TestRefusals:
    """Bad use raises an error of one sentence, where possible before the training."""

    def test_own_process_function_without_the_algorithms(self):
        """A process function that computes the loss itself is detected at its first step."""
        model = make_net()
        optimizer = sgd(model)

        def process(engine, batch):
            cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()

        trainer = Engine(process)
        attach_algorithms(trainer, model, optimizer, cross_entropy, EMA())
        with pytest.raises(RuntimeError, match=r"without a loss by algorithms\.compute_loss"):
            trainer.run(make_loader(), max_epochs=1)

    @pytest.mark.parametrize("algorithm", [SAM(), EMA()])
    def test_closure_with_accumulation(self, algorithm):
        """A batch cannot be computed again if gradients are accumulated."""
        model = make_net()
        make = torch.optim.LBFGS if isinstance(algorithm, EMA) else sgd
        optimizer = make(model.parameters()) if isinstance(algorithm, EMA) else sgd(model)
        trainer = create_supervised_trainer(model, optimizer, cross_entropy, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="with gradient_accumulation_steps=2"):
            attach_algorithms(trainer, model, optimizer, cross_entropy, algorithm)

    @pytest.mark.parametrize("name", ["model", "optimizer", "loss_fn"])
    def test_other_objects(self, name):
        """The engine must have been created with the same objects."""
        model = make_net()
        given = {"model": model, "optimizer": sgd(model), "loss_fn": cross_entropy}
        trainer = create_supervised_trainer(**given)
        other = {"model": make_net(), "optimizer": sgd(model), "loss_fn": nn.CrossEntropyLoss()}
        with pytest.raises(ValueError, match=f"{name} must be the one that the engine was created with"):
            attach_algorithms(trainer, **{**given, name: other[name]}, algorithms=EMA())

    def test_surgery_in_a_compiled_model(self):
        """Layers of a compiled model cannot be replaced."""
        model = make_net()
        compiled, optimizer = torch.compile(model, backend="aot_eager"), sgd(model)
        trainer = create_supervised_trainer(compiled, optimizer, cross_entropy)
        with pytest.raises(ValueError, match="got OptimizedModule: BlurPool replaces layers"):
            attach_algorithms(trainer, compiled, optimizer, cross_entropy, BlurPool())

    def test_evaluator(self):
        """The engine that trains is no evaluator, and one is attached once."""
        run = Run(EMA())
        evaluator = Engine(lambda *_: None)
        run.algorithms.attach_evaluator(evaluator)
        for engine in (run.trainer, evaluator):
            with pytest.raises(ValueError, match="evaluator must be an engine that does not train"):
                run.algorithms.attach_evaluator(engine)


@pytest.mark.parametrize("module", ["ignite"])
def test_examples_run(module):
    """The examples of the docstrings have the stated output."""
    result = doctest.testmod(importlib.import_module(f"composer.integrations.{module}"), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted
