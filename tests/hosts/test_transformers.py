"""Transformers' Trainer with algorithms trains as our own Trainer does, and keeps its own features."""

from __future__ import annotations

import contextlib
import copy
import doctest
import gc
import json
from pathlib import Path

import pytest
import torch
from comparison import CASES, EPOCHS, SEED, STEPS, Case, assert_same, each_case, our_weights, weights_of
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from composer.algorithms import (
    EMA,
    SAM,
    Alibi,
    BlurPool,
    ChunkedCrossEntropy,
    GradientClipping,
    LabelSmoothing,
    MixUp,
    NoOpModel,
    SeqLengthWarmup,
    SkipSpikes,
)
from composer.core import Algorithm, Event, Stage
from composer.core.evaluator import evaluation_weights
from composer.integrations import transformers
from composer.integrations.transformers import STATE_FILE, ComposerTrainer, composer_trainer
from fixtures.processes import run_processes

pytestmark = [
    # Of Accelerate and Transformers on a machine without GPU, and of torch's compiler.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _fast_garbage_collection():
    """Exclude imported modules from the collections that Accelerate runs in each training, half a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _new_precision(monkeypatch):
    """Transformers 4 keeps the precision of a training in the environment, for all later ones of the process."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


class Ordered(Trainer):
    """A user's own subclass: the samples come in the order of the dataset."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


class OrderedToSequences(Seq2SeqTrainer):
    """The same for encoder-decoders."""

    _get_train_sampler = Ordered._get_train_sampler


def settings(folder, **changes):
    """Return the arguments of a run that equals the one of our Trainer."""
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": EPOCHS,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "seed": SEED,
    }
    return chosen | changes


def make_trainer(case, folder, algorithms=None, *, trainer=Ordered, arguments=TrainingArguments, model=None, **changes):
    """Return a Trainer for a case, with its algorithms or others; ``changes`` are arguments of the training."""
    own = {name: changes.pop(name) for name in ("eval_dataset", "callbacks", "compute_loss_func") if name in changes}
    model = case.make_model() if model is None else model
    changes = {"remove_unused_columns": not case.reference} | changes
    with_algorithms = {} if algorithms == "none" else {"algorithms": algorithms or case.make_algorithms()}
    return (trainer if algorithms == "none" else composer_trainer(trainer))(
        model=model,
        args=arguments(**settings(folder, bf16=case.precision == "amp_bf16", **changes)),
        train_dataset=case.samples(dicts=True),
        optimizers=(case.make_optimizer(model), None),
        **own,
        **with_algorithms,
    )


def final_weights(trainer):
    return weights_of(trainer.algorithm_adapter.state, trainer.model)


def ragged(case):
    """Return samples of different lengths in which labels are ignored."""
    samples = copy.deepcopy(case.samples())
    for place, sample in enumerate(samples):
        sample["labels"][5 + place % 11 :] = -100
    return samples


class TestEquality:
    """The weights are those of our own Trainer, bit for bit."""

    @each_case
    def test_weights_after_12_steps(self, case, tmp_path):
        """Each algorithm trains as in our Trainer; NoOpModel, which replaces the model, raises."""
        if isinstance(case.algorithm(), NoOpModel):
            with pytest.raises(ValueError, match=r"NoOpModel cannot run in Transformers' Trainer"):
                make_trainer(case, tmp_path)
            return
        trainer = make_trainer(case, tmp_path)
        if case.architecture == "gpt2":
            # Otherwise the sum of the losses is divided by the number of labels, which rounds differently from a mean.
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
        assert trainer.state.global_step == trainer.algorithm_adapter.state.timestamp.batch == STEPS
        assert_same(final_weights(trainer), our_weights(case, own_loss=case.is_transformer))

    @pytest.mark.parametrize("accumulate", [1, 2, 4])
    @pytest.mark.parametrize("architecture", ["bert", "gpt2"])
    def test_loss_of_unchanged_labels(self, architecture, accumulate, tmp_path):
        """With unchanged labels the loss and the weights are those of Transformers alone, also with ignored labels."""
        case = Case(lambda: EMA("2ba"), architecture)
        weights, losses = [], []
        for algorithms in ("none", None):
            trainer = make_trainer(
                case, tmp_path, algorithms, per_device_train_batch_size=2, gradient_accumulation_steps=accumulate,
                max_grad_norm=1.0,
            )  # fmt: skip
            trainer.train_dataset = ragged(case) if architecture == "gpt2" else trainer.train_dataset
            losses.append(trainer.train().training_loss)
            weights.append(trainer.model.state_dict())
        assert losses[0] == losses[1]
        assert_same(weights[1], weights[0])
        assert trainer.algorithm_adapter.state.timestamp.batch == trainer.state.global_step

    @pytest.mark.parametrize("name", ["LabelSmoothing-gpt2", "Distillation-gpt2", "TokenSelection-gpt2"])
    def test_accumulation_of_changed_losses(self, tmp_path, name):
        """Smoothed labels, a teacher and selected tokens give the loss of a step as if its batches were one."""
        case = CASES[name]
        weights = []
        for size, accumulate in ((8, 1), (2, 4)):
            trainer = make_trainer(
                case, tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulate, max_steps=2
            )
            trainer.train_dataset = ragged(case)
            trainer.train()
            weights.append(trainer.model.state_dict())
        torch.testing.assert_close(weights[0], weights[1])

    def test_accumulation_of_shortened_sequences(self, tmp_path):
        """If an algorithm removes labels before the forward pass, the loss is the mean of the remaining ones."""
        case = Case(lambda: SeqLengthWarmup(0.9, 4, 4, 4), "gpt2")
        losses = []
        for size, accumulate in ((8, 1), (2, 4)):
            trainer = make_trainer(
                case, tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulate, max_steps=1
            )
            losses.append(trainer.train().training_loss)
        tokens = torch.stack([sample["input_ids"] for sample in case.samples()])[:8, :4]
        expected = case.make_model()(input_ids=tokens, labels=tokens).loss.item()
        assert losses == pytest.approx([expected, expected])

    def test_clipping_by_transformers_in_a_step_of_sam(self, tmp_path):
        """The gradients at both points are clipped, as our GradientClipping does."""
        case = Case(lambda: SAM(0.1), "bert")
        trainer = make_trainer(case, tmp_path, max_grad_norm=0.1)
        trainer.train()
        both = Case(lambda: SAM(0.1), "bert")
        ours = make_trainer(both, tmp_path, [SAM(0.1), GradientClipping("norm", 0.1)])
        ours.train()
        torch.testing.assert_close(trainer.model.state_dict(), ours.model.state_dict(), rtol=1e-4, atol=1e-5)


class TestLoss:
    """Losses of the user are computed for the changed labels."""

    def test_compute_loss_func(self, tmp_path):
        """The user's function is called with blended labels, and its loss is the one that is trained."""
        seen = []

        def compute_loss(outputs, labels, num_items_in_batch=None):
            seen.append(labels)
            return cross_entropy(outputs["logits"], labels)

        case = CASES["MixUp-vit"]
        trainer = make_trainer(case, tmp_path, compute_loss_func=compute_loss)
        trainer.train()
        assert any(labels.is_floating_point() for labels in seen)
        torch.testing.assert_close(final_weights(trainer), our_weights(case), rtol=1e-4, atol=1e-5)

    def test_compute_loss_of_a_subclass(self, tmp_path):
        """A subclass that computes its loss from labels and logits gets the smoothed labels."""

        class Doubled(Ordered):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                loss = 2 * cross_entropy(outputs.logits, labels)
                return (loss, outputs) if return_outputs else loss

        case = CASES["LabelSmoothing-vit"]
        trainer = make_trainer(case, tmp_path, trainer=Doubled, max_steps=1)
        loss = trainer.train().training_loss
        batch = next(iter(case.make_data(dicts=True)))
        logits = case.make_model()(pixel_values=batch["pixel_values"]).logits
        assert loss == pytest.approx(2 * cross_entropy(logits, batch["labels"], label_smoothing=0.1).item())

    def test_language_models_smooth_ids(self, tmp_path):
        """The labels stay ids in the loss of a language model, whose probabilities would have the size of the logits.

        A user's own loss gets the probabilities.
        """

        class Own(Ordered):
            def compute_loss(self, *args, **kwargs):
                return super().compute_loss(*args, **kwargs)

        case, losses = CASES["LabelSmoothing-gpt2"], {}
        for kind, is_dense in ((Ordered, False), (Own, True)):
            trainer, seen = make_trainer(case, tmp_path, trainer=kind, max_steps=2), []
            engine = trainer.algorithm_adapter.engine
            engine.on("before_loss", lambda state, _, seen=seen: seen.append(state.batch["labels"].is_floating_point()))
            losses[is_dense] = trainer.train().training_loss
            assert seen == [is_dense] * 2

        assert losses[True] == pytest.approx(losses[False], rel=1e-6)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_further_parts_of_the_loss(self, accumulate, tmp_path):
        """The loss of the balance of experts, which the model adds to its own, is part of that for smoothed labels."""
        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0,
        )  # fmt: skip
        torch.manual_seed(0)
        model, case = MixtralForCausalLM(config), Case(EMA, "gpt2")
        trainer = make_trainer(
            case, tmp_path, [LabelSmoothing(0.1)], model=copy.deepcopy(model), max_steps=1,
            per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        loss = trainer.train().training_loss
        tokens = torch.stack([sample["input_ids"] for sample in case.samples()]).split(4)[:accumulate]
        expected = 0.0
        for part in tokens:
            out = model(input_ids=part, labels=part)
            rows, targets = out.logits[:, :-1].flatten(0, 1), part[:, 1:].flatten()
            expected += cross_entropy(rows, targets, label_smoothing=0.1).item() / accumulate + out.aux_loss.item()
        assert loss == pytest.approx(expected)

    def test_own_loss_of_a_model(self, tmp_path):
        """The loss of a model that computes another one is changed by what smoothing changes in the cross entropy."""

        class Doubled(BertForSequenceClassification):
            def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
                outputs = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
                outputs.loss = None if labels is None else 2 * outputs.loss
                return outputs

        case = CASES["LabelSmoothing-bert"]
        model = Doubled(case.make_model().config)
        trainer = make_trainer(case, tmp_path, model=copy.deepcopy(model), max_steps=1)
        loss = trainer.train().training_loss
        batch = next(iter(case.make_data()))
        out = model.train()(**batch)
        smoothed = cross_entropy(out.logits, batch["labels"], label_smoothing=0.1)
        assert loss == pytest.approx((out.loss + smoothed - out.loss / 2).item())

    def test_outputs_without_logits(self, tmp_path):
        """The error explains what an algorithm that changes labels needs."""

        class Scores(torch.nn.Linear):
            def forward(self, pixel_values, labels=None):
                scores = super().forward(pixel_values.flatten(1))
                return {"loss": cross_entropy(scores, labels), "scores": scores}

        class Flips(Algorithm):
            runs_at = {Event.BEFORE_LOSS: Stage.LABEL}
            reads = writes = frozenset({"batch.target"})

            def apply(self, event, state, logger):
                state.batch_set_item(1, state.batch_get_item(1).flip(0))

        trainer = make_trainer(Case(EMA), tmp_path, [Flips()], model=Scores(3 * 16 * 16, 3))
        with pytest.raises(TypeError, match=r"Algorithms that change labels need 'labels'.*with \['loss', 'scores'\]"):
            trainer.train()


STEP = {"save_strategy": "steps", "save_steps": 1}


class TestResume:
    """Resuming by Transformers continues bit for bit."""

    @pytest.mark.parametrize("done", [5, 8])
    @pytest.mark.parametrize("kind", ["resnet", "bert"])
    def test_in_and_at_the_end_of_an_epoch(self, kind, done, tmp_path):
        """Surgery, blended labels, averages, dropout and the schedule of the learning rate continue exactly."""
        algorithms = {
            "resnet": lambda: [BlurPool(min_channels=8), MixUp(), EMA("2ba"), LabelSmoothing(0.1)],
            "bert": lambda: [EMA("1ep"), LabelSmoothing(0.1)],
        }[kind]
        case = Case(EMA, "resnet with dropout" if kind == "resnet" else "bert")
        run = {**STEP, "lr_scheduler_type": "linear", "warmup_steps": 3}
        uninterrupted = make_trainer(case, tmp_path, algorithms(), **run)
        uninterrupted.train()
        resumed = make_trainer(case, tmp_path, algorithms(), **run)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"))
        assert_same(final_weights(resumed), final_weights(uninterrupted))
        assert resumed.algorithm_adapter.state.timestamp == uninterrupted.algorithm_adapter.state.timestamp

    def test_checkpoint_without_state(self, tmp_path):
        """The checkpoint of a training without algorithms raises before anything is loaded."""
        case = Case(lambda: EMA("2ba"), "bert")
        make_trainer(case, tmp_path, "none", max_steps=1, **STEP).train()
        with pytest.raises(ValueError, match=f"checkpoint-1 has no {STATE_FILE}"):
            make_trainer(case, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class Watch(TrainerCallback):
    """Records the model's weights in each evaluation."""

    def __init__(self):
        self.weights = []

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.weights.append(copy.deepcopy(model.state_dict()))


class TestAverages:
    """Evaluation, prediction and saved models have the averaged weights."""

    def test_best_model_and_saved_model(self, tmp_path):
        """The best model has the weights that were evaluated, is what is saved, and is evaluated at the end."""
        case, watch = CASES["EMA-bert"], Watch()
        trainer = make_trainer(
            case, tmp_path, eval_dataset=case.samples(), callbacks=[watch], load_best_model_at_end=True,
            eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4, metric_for_best_model="loss",
            per_device_eval_batch_size=16, greater_is_better=True,
        )  # fmt: skip
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        best = max(range(3), key=losses.__getitem__)
        assert_same(trainer.model.state_dict(), watch.weights[best])
        assert trainer.evaluate()["eval_loss"] == losses[best]
        trainer.save_model(str(tmp_path / "final"))
        saved = type(trainer.model).from_pretrained(tmp_path / "final")
        assert_same(saved.state_dict(), watch.weights[best])

    def test_after_training_and_prediction(self, tmp_path):
        """Without a best model evaluate, predict and save_model use the last averages; training weights return."""
        case, watch = CASES["EMA-bert"], Watch()
        trainer = make_trainer(case, tmp_path, callbacks=[watch], per_device_eval_batch_size=16)
        trainer.train()
        training_weights = copy.deepcopy(trainer.model.state_dict())
        with evaluation_weights(trainer.algorithm_adapter.state):
            averages = copy.deepcopy(trainer.model.state_dict())
        trainer.evaluate(case.samples())
        trainer.predict(case.samples())
        trainer.save_model(str(tmp_path / "final"))
        assert_same(watch.weights[0], averages)
        assert_same(watch.weights[1], averages)
        assert_same(type(trainer.model).from_pretrained(tmp_path / "final").state_dict(), averages)
        assert_same(trainer.model.state_dict(), training_weights)


class TestFeatures:
    """The features of Transformers work as without algorithms."""

    def test_early_stopping_and_logs(self, tmp_path):
        """A training that does not improve stops early; values of algorithms are logged with the loss."""
        pytest.importorskip("tensorboard")
        case = CASES["SeqLengthWarmup-gpt2"]
        trainer = make_trainer(
            case, tmp_path, eval_dataset=case.samples(), callbacks=[EarlyStoppingCallback(1)], eval_strategy="steps",
            eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True, greater_is_better=True,
            metric_for_best_model="loss", logging_strategy="steps", logging_steps=1, report_to=["tensorboard"],
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == 4
        lengths = [entry["seq_length_warmup/curr_seq_len"] for entry in trainer.state.log_history if "loss" in entry]
        assert lengths == [4, 4, 4, 8]
        assert list(tmp_path.rglob("events.out.tfevents*"))

    def test_sequence_to_sequence(self, tmp_path):
        """Seq2SeqTrainer trains with smoothed labels and evaluates by generating."""
        config = T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
            dropout_rate=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config)
        case = Case(lambda: LabelSmoothing(0.1), "gpt2")
        tokens = torch.stack([sample["input_ids"] for sample in case.samples()[:4]])
        logits = copy.deepcopy(model)(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).logits
        trainer = make_trainer(
            case, tmp_path, trainer=OrderedToSequences, arguments=Seq2SeqTrainingArguments, model=model, max_steps=1,
            predict_with_generate=True, generation_max_length=5,
        )  # fmt: skip
        loss = trainer.train().training_loss
        expected = cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1).item()
        assert loss == pytest.approx(expected)
        assert len(trainer.predict(case.samples()[:4]).predictions) == 4

    def test_torch_compile(self, tmp_path):
        """A model that Transformers compiles is compiled after surgery, and labels are changed as without."""
        case = Case(EMA, "bert")
        weights = []
        for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
            trainer = make_trainer(case, tmp_path, [LabelSmoothing(0.1), EMA("2ba")], max_steps=3, **compiled)
            trainer.train()
            weights.append(final_weights(trainer))
        torch.testing.assert_close(weights[0], weights[1])

    def test_bf16(self, tmp_path):
        """Under autocast blended labels are trained in bfloat16, and the weights stay in float32."""
        case = Case(MixUp, "vit", precision="amp_bf16")
        trainer = make_trainer(case, tmp_path)
        trainer.train()
        assert_same(final_weights(trainer), our_weights(case, own_loss=True))

    def test_two_processes(self, tmp_path):
        """Two processes train as one with batches of twice the size, and count the samples of both."""
        script = tmp_path / "train.py"
        script.write_text(TWO_PROCESSES.format(folder=str(Path(__file__).parent)))
        run_processes(script, 2, tmp_path)
        algorithms = [LabelSmoothing(0.1), EMA("2ba")]
        one = make_trainer(Case(EMA, "bert"), tmp_path, algorithms, max_steps=2, per_device_train_batch_size=8)
        one.train()
        first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
        assert_same(first, second)
        torch.testing.assert_close(first, final_weights(one), rtol=1e-4, atol=1e-5)


TWO_PROCESSES = """
import os, sys
sys.path.insert(0, {folder!r})
from pathlib import Path
import torch
from test_transformers import Case, EMA, LabelSmoothing, final_weights, make_trainer

folder = Path(sys.argv[1])
trainer = make_trainer(Case(EMA, "bert"), folder, [LabelSmoothing(0.1), EMA("2ba")], max_steps=2)
trainer.train()
state = trainer.algorithm_adapter.state
assert state.timestamp.sample == 16, state.timestamp
torch.save(final_weights(trainer), folder / f"{{state.rank}}.pt")
os._exit(0)  # without the shutdown of the interpreter: see write_and_exit
"""
"""The program of each process."""


class TestRefusals:
    """What cannot work raises at construction, in a sentence with the remedy."""

    @pytest.mark.parametrize(
        ("algorithm", "changes", "sentence"),
        [
            (GradientClipping("norm", 1.0), {"max_grad_norm": 1.0}, "max_grad_norm must be 0 with GradientClipping"),
            (SkipSpikes(), {"max_grad_norm": 1.0}, "with SkipSpikes, which must get the gradients before"),
            (SAM(), {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps must be 1 with SAM, got 2"),
            (LabelSmoothing(0.1), {"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0 with algorithms"),
            (EMA(), {"auto_find_batch_size": True}, "do not work with auto_find_batch_size=True"),
        ],
    )
    def test_arguments(self, algorithm, changes, sentence, tmp_path):
        """Arguments of the training that contradict an algorithm."""
        with pytest.raises(ValueError, match=sentence):
            make_trainer(Case(EMA, "bert"), tmp_path, [algorithm], **changes)

    @pytest.mark.parametrize(
        ("wrap", "sentence"),
        [
            (lambda model: torch.compile(model, backend="eager"), "do not work with a compiled model"),
            (torch.nn.DataParallel, "do not work with a wrapped model"),
        ],
    )
    def test_models(self, wrap, sentence, tmp_path):
        """Models that are compiled or wrapped already."""
        case = Case(EMA, "bert")
        with pytest.raises(ValueError, match=sentence):
            ComposerTrainer(
                model=wrap(case.make_model()), args=TrainingArguments(**settings(tmp_path)), algorithms=EMA()
            )

    def test_own_loss_of_a_subclass_of_ours(self, tmp_path):
        """A subclass of ComposerTrainer whose loss does not call ours would train without the algorithms."""

        class Weighted(ComposerTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs).loss

        case = CASES["LabelSmoothing-vit"]
        data = [{key: value[0] for key, value in next(iter(case.make_data(dicts=True))).items()}] * 4
        trainer = Weighted(
            model=case.make_model(),
            args=TrainingArguments(**settings(tmp_path, max_steps=1)),
            train_dataset=data,
            algorithms=LabelSmoothing(),
        )

        with pytest.raises(TypeError, match=r"Weighted\.compute_loss did not call .* Derive Weighted from"):
            trainer.train()

    def test_gradient_checkpointing(self, tmp_path):
        """Transformers' own gradient checkpointing beside ours, at the start of the training."""
        trainer = make_trainer(CASES["ActivationCheckpointing-bert"], tmp_path, gradient_checkpointing=True)

        with pytest.raises(
            ValueError, match=r"must not use other gradient checkpointing.*gradient_checkpointing=False"
        ):
            trainer.train()

    def test_algorithm_that_needs_another_event(self, tmp_path):
        """An algorithm at an event that Transformers has no place for."""

        class Reads(Algorithm):
            runs_at = {Event.FIT_START: Stage.AUGMENT}
            writes = frozenset({"train_dataloader"})

            def apply(self, event, state, logger):
                raise NotImplementedError

        with pytest.raises(ValueError, match="Reads cannot run in Transformers' Trainer: it writes 'train_dataloader'"):
            make_trainer(Case(EMA, "bert"), tmp_path, [Reads()])

    @pytest.mark.parametrize(
        "algorithm", [Alibi(max_sequence_length=8), SeqLengthWarmup(min_seq_length=2, truncate=False)]
    )
    def test_other_rows_than_the_loss_compares(self, algorithm, tmp_path):
        """Preferences are compared as pairs of rows, which an algorithm must not split; the rows have no labels."""

        class Preferences(Trainer):
            def compute_loss(self, model, inputs, *_, **__):
                chosen, rejected = model(**inputs).logits.mean(dim=(1, 2)).chunk(2)
                return (rejected - chosen).mean()

        config = GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        trainer = composer_trainer(Preferences)(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(**settings(tmp_path)),
            train_dataset=[{"input_ids": torch.arange(8)} for _ in range(16)],
            algorithms=[algorithm],
        )

        with pytest.raises(ValueError, match=r"changed a batch of 4 rows to 16\. Without labels"):
            trainer.train()

    @pytest.mark.parametrize("config", [None, {"fused_linear_cross_entropy": False}])
    def test_fused_losses_of_liger(self, tmp_path, config):
        """Liger's fused loss does not call the head that ChunkedCrossEntropy has replaced; its other kernels do."""
        case = Case(ChunkedCrossEntropy, "gpt2")
        options = {"use_liger_kernel": True, "liger_kernel_config": config}

        raises = pytest.raises(ValueError, match="use_liger_kernel must be False with ChunkedCrossEntropy")
        with contextlib.nullcontext() if config else raises:
            make_trainer(case, tmp_path, [ChunkedCrossEntropy()], **options)


class TestDocumentation:
    """What users see and read."""

    def test_examples(self):
        """The examples in the docstrings are correct."""
        assert doctest.testmod(transformers, optionflags=doctest.ELLIPSIS).failed == 0

    def test_plan(self, tmp_path):
        """The plan lists the algorithms by event."""
        trainer = make_trainer(CASES["EMA-bert"], tmp_path, max_steps=1)
        assert "batch_end" in str(trainer.explain())
        assert "EMA" in str(trainer.explain())

    def test_state_is_data(self, tmp_path):
        """The file of the algorithms has tensors and JSON, and Transformers' own state is JSON."""
        trainer = make_trainer(CASES["EMA-bert"], tmp_path, max_steps=2, **STEP)
        trainer.train()
        with safe_open(tmp_path / "checkpoint-2" / STATE_FILE, "pt") as saved:
            data = json.loads(saved.metadata()["data"])
            assert list(saved.keys())
        assert [one["key"] for one in data["algorithms"]] == ["EMA"]
        assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
