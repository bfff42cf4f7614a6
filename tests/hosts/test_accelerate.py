"""Algorithms in a loop with Accelerate train as in our own Trainer, resume exactly, and raise if unsupported."""

import contextlib
import doctest
import importlib
import itertools

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from comparison import CASES, EPOCHS, SEED, assert_same, our_weights, weights_of
from small_training import image_loss, make_loader, make_net, run_in_two_processes, sgd, train_ours
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, MixtralConfig, MixtralForCausalLM

from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    BlurPool,
    GradientClipping,
    LabelSmoothing,
    MixUp,
    SkipSpikes,
)
from composer.core import Algorithm, Event, Stage, StateMismatchError
from composer.integrations.accelerate import accelerate_algorithms

SERVED = {name: case for name, case in CASES.items() if not name.startswith("NoOpModel")}


@pytest.fixture(autouse=True)
def _new_state():
    """Accelerate keeps settings of the process, such as the precision; each test starts without them."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """A model, an optimizer and a loader, prepared with algorithms, and the loop of a user."""

    def __init__(self, algorithms, *, accelerator=None, loader=None, epochs=2, loss=image_loss, lr_steps=3, **options):
        self.accelerator = accelerator or Accelerator(cpu=True)
        self.bare = make_net()
        raw, loader = sgd(self.bare), loader or make_loader()
        self.scheduler = torch.optim.lr_scheduler.StepLR(raw, lr_steps, 0.5)
        self.algorithms = accelerate_algorithms(
            self.accelerator, self.bare, raw, loader, algorithms, loss=loss, max_duration=f"{epochs}ep", **options
        )
        prepared = self.accelerator.prepare(self.bare, raw, loader, self.scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.epochs = epochs

    @property
    def clock(self):
        return self.algorithms.state.timestamp

    def train(self, until=None):
        """Train as a user does, from the clock on, and return the weights."""
        for _ in range(int(self.clock.epoch), self.epochs):
            skipped = int(self.clock.batch_in_epoch) * self.accelerator.gradient_accumulation_steps
            loader = self.accelerator.skip_first_batches(self.loader, skipped) if skipped else self.loader
            loader.set_epoch(int(self.clock.epoch))
            for batch in loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.algorithms.compute_loss(batch)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if until == self.clock.batch:
                    return self.weights()
        return self.weights()

    def weights(self):
        return weights_of(self.algorithms.state, self.bare)


def host_weights(case, **options):
    """Train a case in a loop with Accelerate, and return the weights."""
    mixed_precision = {"fp32": "no", "amp_bf16": "bf16"}[case.precision]
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    bare = case.make_model()
    optimizer, loader = case.make_optimizer(bare), case.make_data()
    options = {"loss": case.loss, "forward": case.forward, **options}
    algorithms = accelerate_algorithms(
        accelerator, bare, optimizer, loader, case.make_algorithms(), max_duration=f"{EPOCHS}ep", seed=SEED, **options
    )
    model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    with torch.random.fork_rng(devices=[]):
        for batch in itertools.chain.from_iterable(itertools.repeat(loader, EPOCHS)):
            with accelerator.accumulate(model):
                accelerator.backward(algorithms.compute_loss(batch))
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(algorithms.state, bare)


class TestEquality:
    """The weights after 12 steps are those of our own Trainer, bit for bit."""

    @pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
    def test_weights_of_our_trainer(self, case):
        """A model with a loss function has the weights of our Trainer."""
        assert_same(host_weights(case), our_weights(case))

    @pytest.mark.parametrize(
        "name",
        ["EMA-bert", "SAM-gpt2", "MixUp-vit", "MixUp of losses-vit", "LabelSmoothing-gpt2", "SelectiveBackprop-vit"],
    )
    def test_loss_of_the_model(self, name):
        """A model of Transformers computes the loss itself from the labels in the batch."""
        weights = host_weights(CASES[name], loss=None, forward=None)
        assert_same(weights, our_weights(CASES[name], own_loss=True))

    def test_further_parts_of_the_loss(self):
        """The loss of the balance of experts stays in the loss for smoothed labels."""
        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0,
        )  # fmt: skip
        model, accelerator, loader = MixtralForCausalLM(config), Accelerator(cpu=True), CASES["EMA-gpt2"].make_data()
        algorithms = accelerate_algorithms(
            accelerator, model, optimizer := sgd(model), loader, LabelSmoothing(0.1), max_duration="1ep"
        )
        _, _, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            loss, out = algorithms.compute_loss(batch), algorithms.state.outputs
            rows, targets = out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            assert loss.item() == pytest.approx(
                (cross_entropy(rows, targets, label_smoothing=0.1) + out.aux_loss).item()
            )

    @pytest.mark.parametrize("steps", [2, 4])
    def test_accumulation(self, steps):
        """Batches of one step are what microbatches are in our Trainer."""

        def make():
            return [BlurPool(min_channels=8), MixUp(), LabelSmoothing(0.1), EMA("2ba")]

        expected, clock = train_ours(make(), batch_size=2 * steps, device_train_microbatch_size=2)

        run = Run(make(), accelerator=Accelerator(cpu=True, gradient_accumulation_steps=steps), seed=SEED, lr_steps=99)
        weights = run.train()

        assert run.clock.batch == clock.batch
        assert_same(weights, expected)

    def test_batches_that_are_computed_again(self):
        """With SAM, clipping sees the gradients of both passes, and the model and its events run twice in a step."""
        calls, events = [], []

        class Records(Algorithm):
            runs_at = {Event.AFTER_BACKWARD: Stage.GRADIENT}

            def apply(self, event, state, logger):
                events.append(event)

        run = Run([SAM(), GradientClipping("norm", 0.1), MixUp(), Records()], seed=SEED, lr_steps=99)
        run.bare.register_forward_hook(lambda *_: calls.append(1))
        weights = run.train()
        expected, clock = train_ours([SAM(), GradientClipping("norm", 0.1), MixUp()])
        assert_same(weights, expected)
        assert len(calls) == len(events) == 2 * clock.batch


class TestClock:
    """A batch of the clock is a step of the optimizer, and the end of the loader the end of an epoch."""

    def test_incomplete_accumulation(self):
        """The last batches of an epoch step alone: seven batches by two are four steps."""
        seen = []

        class Records(Algorithm):
            runs_at = dict.fromkeys((Event.EPOCH_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END), Stage.WEIGHTS)

            def apply(self, event, state, logger):
                seen.append(event)

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        run = Run(Records(), accelerator=accelerator, loader=make_loader(samples=14))
        run.train()
        assert (run.clock.batch, run.clock.sample, run.clock.epoch) == ("8ba", "28sp", "2ep")
        assert run.algorithms.state.dataloader_len == 4
        epoch = [Event.EPOCH_START, *[Event.BATCH_END] * 4, Event.EPOCH_END]
        assert seen == [*epoch, *epoch, Event.FIT_END]

    def test_epoch_that_ends_within_a_step(self):
        """The backward pass of the last batch ends before the epoch."""
        seen = []

        class Records(Algorithm):
            runs_at = dict.fromkeys((Event.AFTER_BACKWARD, Event.EPOCH_END), Stage.WEIGHTS)

            def apply(self, event, state, logger):
                seen.append(event)

        run = Run(Records(), accelerator=Accelerator(cpu=True, gradient_accumulation_steps=2))
        batch = next(iter(run.loader))
        run.accelerator.backward(run.algorithms.compute_loss(batch))
        run.algorithms.end_epoch()
        assert seen == [Event.AFTER_BACKWARD, Event.EPOCH_END]

    def test_end_of_the_training(self):
        """At max_duration the averages of SWA are in the model, and the next batch raises."""
        swa = SWA("1ep", "2ep")
        run = Run(swa)
        averaged = run.train()
        with run.algorithms.evaluation():
            evaluated = run.model.state_dict()
            assert_same(evaluated, {name: averaged[name] for name in evaluated})
        with pytest.raises(RuntimeError, match="The training ended after max_duration='2ep'"):
            run.algorithms.compute_loss(next(iter(run.loader)))

    def test_learning_rates(self):
        """Schedulers of the user step with the optimizer, also when SAM wraps it."""
        run = Run(SAM())
        run.train()
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)


class TestResume:
    """A run continues from `accelerator.save_state` with the same bits."""

    @pytest.mark.parametrize(("steps", "until"), [(1, 5), (1, 8), (1, 11), (2, 3), (2, 6)])
    def test_resume(self, tmp_path, steps, until):
        """With surgery, draws and averages, in and at the end of an epoch, with and without accumulation."""

        def make():
            config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, dataloader_config=config)
            algorithms = [BlurPool(min_channels=8), MixUp(), EMA("2ba"), LabelSmoothing(0.1)]
            return Run(algorithms, accelerator=accelerator, loader=make_loader(shuffle=True))

        uninterrupted = make().train()
        stopped = make()
        stopped.train(until=until)
        stopped.accelerator.save_state(tmp_path)

        resumed = make()
        resumed.accelerator.load_state(tmp_path)
        assert resumed.clock.batch == until
        assert_same(resumed.train(), uninterrupted)

    def test_sam(self, tmp_path):
        """The state of the optimizer within SAM is saved and loaded, with the number of its steps."""
        uninterrupted = Run(SAM(interval=2)).train()
        stopped = Run(SAM(interval=2))
        stopped.train(until=5)
        stopped.accelerator.save_state(tmp_path)
        resumed = Run(SAM(interval=2))
        resumed.accelerator.load_state(tmp_path)
        assert_same(resumed.train(), uninterrupted)

    @pytest.mark.parametrize("steps", [1, 2])
    def test_return_to_a_checkpoint(self, tmp_path, steps):
        """The same objects return to a checkpoint from the end of the training, and from within a step."""

        def make():
            algorithms = [BlurPool(min_channels=8), MixUp(), EMA("2ba"), *([SAM()] if steps == 1 else [])]
            return Run(algorithms, accelerator=Accelerator(cpu=True, gradient_accumulation_steps=steps))

        uninterrupted = make().train()
        run = make()
        run.train(until=3)
        run.accelerator.save_state(tmp_path)
        run.train()
        run.accelerator.load_state(tmp_path)
        run.accelerator.backward(run.algorithms.compute_loss(next(iter(run.loader))))
        run.accelerator.load_state(tmp_path)
        run.optimizer.zero_grad()
        assert_same(run.train(), uninterrupted)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_other_registered_objects(self, tmp_path, is_first):
        """Objects of the user are saved beside the algorithms, in the order of their registration."""

        class Counter:
            def __init__(self):
                self.count = 0

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]

        def make(is_first=is_first):
            accelerator, counter = Accelerator(cpu=True), Counter()
            if is_first:
                accelerator.register_for_checkpointing(counter)
            run = Run(EMA("2ba"), accelerator=accelerator)
            if not is_first:
                accelerator.register_for_checkpointing(counter)
            return run, counter

        run, counter = make()
        run.train(until=5)
        counter.count = 3
        run.accelerator.save_state(tmp_path)
        resumed, counter = make()
        resumed.accelerator.load_state(tmp_path)
        assert (resumed.clock.batch, counter.count) == ("5ba", 3)
        other_order, _ = make(not is_first)
        with pytest.raises((StateMismatchError, KeyError)):
            other_order.accelerator.load_state(tmp_path)

    def test_state_is_data(self, tmp_path):
        """The file of the algorithms can be read without running code."""
        run = Run([BlurPool(min_channels=8), EMA("2ba")])
        run.train(until=2)
        run.accelerator.save_state(tmp_path)
        state = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
        assert "timestamp" in state


class TestEvaluation:
    """The averages are in the model for the time of an evaluation."""

    @pytest.mark.parametrize("fails", [False, True])
    def test_averages(self, fails):
        """The training weights return, also after an error."""
        ema = EMA("2ba")
        run = Run(ema)
        before = run.train()
        averages = ema.get_ema_model(run.bare).state_dict()
        with contextlib.suppress(ZeroDivisionError), run.algorithms.evaluation():
            assert_same(run.model.state_dict(), averages)
            _ = 1 / (not fails)
        assert_same(run.weights(), before)


class TestFeatures:
    """What Accelerate does around a step still works."""

    def test_compiled_model(self):
        """A model that Accelerate compiles has the weights of one that is not compiled, up to rounding."""
        algorithms = [BlurPool(min_channels=8), MixUp(), EMA("2ba")]
        compiled = Run(algorithms, accelerator=Accelerator(cpu=True, dynamo_backend="aot_eager"))
        assert hasattr(compiled.model, "_orig_mod")
        eager = Run([BlurPool(min_channels=8), MixUp(), EMA("2ba")])
        torch.testing.assert_close(compiled.train(), eager.train(), rtol=1e-4, atol=1e-5)

    def test_trackers(self):
        """What algorithms log reaches the trackers, with the number of the step."""

        class Tracker(GeneralTracker):
            name, requires_logging_directory, tracker = "list", False, None
            logged = []

            @on_main_process
            def log(self, values, step=None, **options):
                self.logged.append((values, step))

        class Logs(Algorithm):
            runs_at = {Event.BATCH_END: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                logger.log_metrics({"seen": 1.0})

        accelerator = Accelerator(cpu=True, log_with=Tracker())
        accelerator.init_trackers("project")
        Run(Logs(), accelerator=accelerator, epochs=1).train(until=2)
        assert Tracker.logged == [({"seen": 1.0}, 1), ({"seen": 1.0}, 2)]

    def test_explain(self):
        """The plan is printed as in our Trainer."""
        assert "MixUp" in str(Run([MixUp()]).algorithms.explain())

    def test_two_processes(self, tmp_path):
        """Both processes of DDP have the same weights, those of one process with batches of twice the size.

        It takes more than a second, as it starts two processes.
        """
        first, second = run_in_two_processes("distributed_accelerate.py", tmp_path)
        assert first == second
        assert first["clock"] == ["8ba", "32sp", "2ep"]
        alone = Run([BlurPool(min_channels=8), SAM(), EMA("2ba")], loader=make_loader(batch_size=4), lr_steps=99)
        weights = {name: weight.flatten().tolist() for name, weight in alone.train().items()}
        assert first["weights"] == {name: pytest.approx(values, rel=1e-3, abs=1e-4) for name, values in weights.items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
@pytest.mark.parametrize("adapts", [False, True])
def test_labels_change_beside_adapters(adapts):
    """The own loss of a model of Transformers with adapters of PEFT is computed for other labels, too."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=16, **sizes))
    if adapts:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    batch = {"input_ids": torch.randint(16, (4, 6)), "labels": torch.tensor([0, 1, 0, 1])}
    accelerator, optimizer, loader = Accelerator(cpu=True), sgd(model), DataLoader([batch], batch_size=None)
    algorithms = accelerate_algorithms(
        accelerator, model, optimizer, loader, LabelSmoothing(0.2, target_key="labels"), max_duration="1ep"
    )
    *_, prepared = accelerator.prepare(model, optimizer, loader)

    loss = next(algorithms.compute_loss(one) for one in prepared)

    logits = model(**batch).logits
    torch.testing.assert_close(loss, cross_entropy(logits, batch["labels"], label_smoothing=0.2))


class TestRefusals:
    """Bad use raises an error of one sentence, where possible before the training."""

    def attach(self, algorithms=None, model=None, optimizer=None, accelerator=None, loss=image_loss):
        model = make_net() if model is None else model
        return accelerate_algorithms(
            accelerator or Accelerator(cpu=True),
            model,
            optimizer or sgd(model),
            make_loader(),
            algorithms or EMA(),
            loss=loss,
            max_duration="1ep",
        )

    def test_sam_with_accumulation(self):
        """SAM computes a batch again, which accumulated gradients do not allow."""
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="SAM cannot run in Accelerate with gradient_accumulation_steps=2"):
            self.attach(SAM(), accelerator=accelerator)

    def test_sam_with_accumulation_in_the_loop(self):
        """Without `accumulate`, several batches for one step of SAM are detected in the first step."""
        run = Run(SAM())
        first, second, *_ = run.loader
        for _ in run.loader:
            run.accelerator.backward(run.algorithms.compute_loss(first))
            run.accelerator.backward(run.algorithms.compute_loss(second))
            with pytest.raises(RuntimeError, match="there were 2 batches before"):
                run.optimizer.step()
            return

    @pytest.mark.parametrize("algorithm", [MixUp(), MixUp(interpolate_loss=True), LabelSmoothing(0.1)])
    def test_labels_after_a_loss_of_the_model(self, algorithm):
        """If the model computes the loss, labels cannot change after the forward pass."""
        with pytest.raises(ValueError, match=r"cannot run in Accelerate without loss=: it writes 'batch\.target' at"):
            self.attach(algorithm, loss=None)

    def test_prepared_model(self):
        """Surgery has to come before the preparation."""
        accelerator, model = Accelerator(cpu=True), make_net()
        with pytest.raises(ValueError, match="model must not be prepared"):
            self.attach(model=accelerator.prepare(model), accelerator=accelerator)

    def test_compiled_model(self):
        """Surgery has to come before the compilation."""
        with pytest.raises(ValueError, match="model must not be prepared, compiled or wrapped yet, got Opt"):
            self.attach(model=torch.compile(make_net()))

    @pytest.mark.parametrize("algorithm", [GradientClipping("norm", 1.0), SkipSpikes()])
    def test_clipping_before_an_algorithm(self, algorithm):
        """Accelerate's clipping is an error if an algorithm clips or measures the gradients after it."""
        run = Run(algorithm)
        expected = f"{type(algorithm).__name__} must get the gradients before they are clipped"
        for clip in (run.accelerator.clip_grad_norm_, run.accelerator.clip_grad_value_):
            with pytest.raises(RuntimeError, match=expected):
                clip(run.model.parameters(), 1.0)

    def test_not_prepared(self):
        """The error names what accelerator.prepare did not get."""
        accelerator, model = Accelerator(cpu=True), make_net()
        algorithms = accelerate_algorithms(
            accelerator, model, sgd(model), make_loader(), EMA(), loss=image_loss, max_duration="1ep"
        )
        accelerator.prepare(model)
        with pytest.raises(RuntimeError, match="Pass the same loader and optimizer to accelerator"):
            algorithms.compute_loss(None)

    def test_batches_of_another_loader(self):
        """Batches must come from a prepared loader."""
        run = Run(EMA())
        with pytest.raises(RuntimeError, match="in a loop over the loader that accelerator"):
            run.algorithms.compute_loss(next(iter(make_loader())))

    def test_step_without_the_algorithms(self):
        """A loop that computes the loss itself is detected at the first step."""
        run = Run(EMA())
        for images, labels in run.loader:
            run.accelerator.backward(cross_entropy(run.model(images), labels))
            with pytest.raises(RuntimeError, match=r"without a loss by algorithms\.compute_loss"):
                run.optimizer.step()
            return

    def test_outputs_without_loss(self):
        """A model without a loss needs a function, and the error names the batch."""
        run = Run(EMA("2ba"), loss=None)
        for batch in run.loader:
            with pytest.raises(ValueError, match=r"The model must return its loss, .* got Tensor"):
                run.algorithms.compute_loss(batch)
            return


@pytest.mark.parametrize("module", ["accelerate", "_host"])
def test_examples_run(module):
    """The examples of the docstrings have the stated output."""
    result = doctest.testmod(importlib.import_module(f"composer.integrations.{module}"), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted
