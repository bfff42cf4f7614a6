"""The Trainer's loop on the device: algorithms, optimizers, callbacks, precisions and models."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composer.algorithms as al
import composer.callbacks
from composer import Callback
from composer import functional as cf
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, DecoupledSGDW, muon_with_adamw
from fixtures import make_classifier, small_run
from fixtures.models import make_transformer
from on_fake_device.guards import standard_attention
from test_resume import FOR_TEXT, NAMES, SETTINGS, Images, Text, image_model, made, text_model

BATCHES = 6
TEACHER = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
WAYS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "amp_bf16", "device_train_microbatch_size": 2},
}
OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
OPTIMIZERS = {name: kind for name, kind in OPTIMIZERS.items() if name not in ("Optimizer", "LBFGS", "SparseAdam")}
OURS = {
    "DecoupledAdamW": DecoupledAdamW,
    "DecoupledSGDW": lambda parameters: DecoupledSGDW(parameters, lr=0.1, momentum=0.9),
    "SAM": lambda parameters: cf.SAMOptimizer(torch.optim.SGD(parameters, lr=0.1)),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


class Guard(Callback):
    """Guards all between the start of the second batch and the end of the last one of an epoch, and each evaluation."""

    def __init__(self, step, batches):
        self.step, self.batches, self.stack, self.steps = step, batches, contextlib.ExitStack(), 0

    def batch_start(self, state, logger):
        """Begin, and continue after the batch, because the next one is loaded there."""
        if state.timestamp.batch_in_epoch == 1:
            self.stack.enter_context(self.step())

    def batch_end(self, state, logger):
        """End."""
        self.steps += 1
        if state.timestamp.batch_in_epoch == self.batches:
            self.stack.close()

    def eval_batch_start(self, state, logger):
        """Begin."""
        self.stack.enter_context(self.step())

    def eval_batch_end(self, state, logger):
        """End."""
        self.stack.close()

    def close(self, state, logger):
        """Reset the modes, also after an error."""
        self.stack.close()


def train(step, model, data, algorithms=(), *, batches=3, optimizer=None, callbacks=(), **options):
    """Train for two epochs of some batches, guarded, and return the Trainer."""
    options = {"train_dataloader": DataLoader(data, batch_size=4, pin_memory=True), "precision": "fp32"} | options
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(step, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of algorithms that have no effect on so few batches
        settings = {"model": model, "optimizers": optimizer, "algorithms": algorithms, "device": "gpu"}
        with small_run(max_duration="2ep", callbacks=[*callbacks, guard], **settings, **options) as run:
            run.fit()
    assert guard.steps == 2 * batches
    assert {weight.device.type for weight in run.state.model.parameters()} == {"cuda"}
    return run


def images():
    """Return eleven images of three classes, without draws."""
    return TensorDataset(torch.rand(11, 3, 12, 12), torch.arange(11) % 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"Factorize"}))
def test_algorithm(name, way, step, monkeypatch):
    """A run with each algorithm, in full precision, and in bfloat16 with microbatches."""
    monkeypatch.setitem(SETTINGS, "Distillation", {"teacher": TEACHER})
    is_text = name in FOR_TEXT
    model, data = (text_model(), Text()) if is_text else (image_model(), Images())
    options = dict(WAYS[way])
    if name == "InfoBatch":
        data = al.InfoBatchDataset(data)
        options["train_dataloader"] = DataLoader(data, batch_size=4, sampler=data.sampler, pin_memory=True)

    if name == "SkipSpikes":  # other optimizers count their steps on the host
        options["optimizer"] = torch.optim.AdamW(model.parameters(), fused=True)

    run = train(step, standard_attention(model), data, made([name], text=is_text), **options)

    assert int(run.state.timestamp.batch) == BATCHES


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OURS])
def test_optimizer(name, step):
    """Each optimizer of torch and of this library."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(432, 8, bias=False), nn.Linear(8, 3, bias=False))
    model = make_classifier(network, train_metrics=[])

    run = train(step, model, images(), optimizer=(OPTIMIZERS | OURS)[name](model.parameters()))

    assert int(run.state.timestamp.batch) == BATCHES


def test_muon_with_adamw(step):
    """Matrices and other parameters in two groups."""
    model = make_classifier(nn.Sequential(nn.Flatten(), nn.Linear(432, 8), nn.Linear(8, 3)), train_metrics=[])

    run = train(step, model, images(), optimizer=muon_with_adamw(model, lr=0.01))

    assert int(run.state.timestamp.batch) == BATCHES


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_loss_scaling(fused, step):
    """In float16 the scaler waits for its flag, unless the optimizer reads it on the device."""
    model = make_classifier(nn.Sequential(nn.Flatten(), nn.Linear(432, 3)), train_metrics=[])
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    run = train(step, model, images(), optimizer=optimizer, precision="amp_fp16")

    assert int(run.state.timestamp.batch) == BATCHES


CALLBACKS = {
    "ActivationMonitor": lambda: composer.callbacks.ActivationMonitor(interval="1ba"),
    "GradientNoiseScale": composer.callbacks.GradientNoiseScale,
    "LRMonitor": composer.callbacks.LRMonitor,
    "NaNMonitor": composer.callbacks.NaNMonitor,
    "OptimizerMonitor": composer.callbacks.OptimizerMonitor,
    "RuntimeEstimator": composer.callbacks.RuntimeEstimator,
    "SpeedMonitor": lambda: composer.callbacks.SpeedMonitor(window_size=2),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(name, step):
    """Callbacks compute what they log on the device, and leave it there."""
    model = make_classifier(nn.Sequential(nn.Flatten(), nn.Linear(432, 3)), train_metrics=[])

    run = train(step, model, images(), callbacks=[CALLBACKS[name]()], device_train_microbatch_size=2)

    assert int(run.state.timestamp.batch) == BATCHES


@pytest.mark.parametrize(
    "algorithms",
    [
        list,
        lambda: [al.LabelSmoothing(0.1, target_key="labels")],
        lambda: [al.Alibi(16)],
        lambda: [al.GatedLinearUnits()],
        lambda: [al.NEFTune()],
        lambda: [al.SeqLengthWarmup(min_seq_length=4, max_seq_length=8)],
    ],
    ids=["none", "LabelSmoothing", "Alibi", "GatedLinearUnits", "NEFTune", "SeqLengthWarmup"],
)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_transformers(kind, algorithms, step):
    """A model of Transformers, whose labels are compared with those of the batch before the loss is computed."""
    algorithms = algorithms()
    model = HuggingFaceModel(make_transformer(kind))
    standard_attention(model)
    ids = torch.randint(32, (12, 8))
    # GPT-2 looks for packed rows in batches without a mask, and BERT reads each mask.
    mask = {"attention_mask": torch.ones(8, dtype=torch.long)} if kind == "gpt2" else {}
    data = [{"input_ids": row, "labels": row, **mask} for row in ids]

    run = train(step, model, data, algorithms, eval_dataloader=DataLoader(data, batch_size=4))

    assert int(run.state.timestamp.batch) == BATCHES


def test_without_a_deterministic_implementation(step):
    """With deterministic_mode, torch's error for an operation on the device names its module and a way out."""
    model = make_classifier(nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)))

    try:
        with pytest.raises(RuntimeError, match="adaptive_avg_pool2d_backward_cuda") as caught:
            train(step, model, images(), deterministic_mode=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert any("module.1 (AdaptiveAvgPool2d)" in note for note in caught.value.__notes__)
