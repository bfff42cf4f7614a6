"""The Trainer's loop on the device: algorithms, optimizers, callbacks, precisions and models."""

import contextlib
import os
import warnings

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PreTrainedTokenizerFast

import composer.algorithms as al
import composer.callbacks
import composer.optim
from composer import Callback, DataSpec
from composer import functional as cf
from composer.loggers import InMemoryLogger
from composer.models import (
    ComposerDetector,
    ComposerSegmenter,
    HuggingFaceModel,
    collate_detection,
    count_detection_samples,
    split_detection_batch,
)
from composer.optim import DecoupledAdamW, DecoupledSGDW, muon_with_adamw
from fixtures import make_classifier, same_bits, small_run
from fixtures.models import make_transformer
from on_fake_device.guards import standard_attention
from test_resume import FOR_TEXT, NAMES, SETTINGS, Images, Text, image_model, made, text_model

BATCHES = 6
TEACHER = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
WAYS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "amp_bf16", "device_train_microbatch_size": 2},
}
CASES = [
    (name, way)
    for place, name in enumerate(sorted(set(NAMES) - {"Factorize"}))
    for number, way in enumerate(WAYS)
    if os.environ.get("RESUME_MATRIX") == "all" or (place + number) % 2 == 0
]
OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
OPTIMIZERS = {name: kind for name, kind in OPTIMIZERS.items() if name not in ("Optimizer", "SparseAdam")}
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


@pytest.mark.parametrize(("name", "way"), CASES)
def test_algorithm(name, way, step, monkeypatch):
    """A run with each algorithm, in full precision or in bfloat16 with microbatches; ``RESUME_MATRIX=all`` in both."""
    monkeypatch.setitem(SETTINGS, "Distillation", {"teacher": TEACHER})
    is_text = name in FOR_TEXT
    tokens = name == "TokenSelection"
    model, data = (text_model(name, tokens=tokens), Text(tokens=tokens)) if is_text else (image_model(), Images())
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


def test_each_optimizer_is_here():
    """A new optimizer of this library has a case; Muon is that of the next test."""
    kinds = {name: kind for name, kind in vars(composer.optim).items() if isinstance(kind, type)}

    assert {name for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)} - {"Muon"} <= set(OURS)


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


def test_sparse_adam(step):
    """Gradients with few rows, from an embedding with an optimizer of its own beside that of the other layers."""
    network = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    optimizers = [torch.optim.SparseAdam(network[0].parameters()), torch.optim.AdamW(network[2].parameters())]
    data = TensorDataset(torch.arange(33).view(11, 3) % 9, torch.arange(11) % 3)

    run = train(step, make_classifier(network, train_metrics=[]), data, optimizer=optimizers)

    assert int(run.state.timestamp.batch) == BATCHES


def test_8_bits(step):
    """Products in 8 bits, of layers that torchao has replaced, for which the device has the capability."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(432, 32), nn.Linear(32, 16))
    data = TensorDataset(torch.rand(48, 3, 12, 12), torch.arange(48) % 16)
    loader = DataLoader(data, batch_size=16, pin_memory=True)

    run = train(step, make_classifier(network, num_classes=16), data, precision="amp_fp8", train_dataloader=loader)

    assert [type(layer).__name__ for layer in run.state.model.module] == ["Flatten", "Float8Linear", "Float8Linear"]


def test_compiled(step):
    """A compiled model, of which the graphs of the forward and backward pass are traced, without code for kernels."""
    config = {"backend": "aot_eager"}

    run = train(step, image_model(), Images(), [al.BlurPool(), al.MixUp()], compile_config=config)

    assert run.state.model._compiled_call_impl is not None


CALLBACKS = {
    "ActivationMonitor": lambda _: composer.callbacks.ActivationMonitor(interval="1ba", only_log_wandb=False),
    "CheckpointSaver": lambda folder: composer.callbacks.CheckpointSaver(str(folder), save_interval="1ep"),
    "CostMonitor": lambda _: composer.callbacks.CostMonitor(),
    "EarlyStopper": lambda _: composer.callbacks.EarlyStopper("MulticlassAccuracy", "train", patience="3ep"),
    "ExportForInferenceCallback": lambda folder: composer.callbacks.ExportForInferenceCallback(
        "torchexport", str(folder / "model.pt2")
    ),
    "FreeOutputs": lambda _: composer.callbacks.FreeOutputs(),
    "GarbageCollector": lambda _: composer.callbacks.GarbageCollector("2ba"),
    "GradualUnfreezing": lambda _: composer.callbacks.GradualUnfreezing(),
    "GradientNoiseScale": lambda _: composer.callbacks.GradientNoiseScale(),
    "ImageVisualizer": lambda _: composer.callbacks.ImageVisualizer("2ba"),
    "LRMonitor": lambda _: composer.callbacks.LRMonitor(),
    "MemoryMonitor": lambda _: composer.callbacks.MemoryMonitor(dist_aggregate_batch_interval=1),
    "MemorySnapshot": lambda folder: composer.callbacks.MemorySnapshot(folder=str(folder)),
    "NaNMonitor": lambda _: composer.callbacks.NaNMonitor(),
    "OOMObserver": lambda folder: composer.callbacks.OOMObserver(folder=str(folder)),
    "OptimizerMonitor": lambda _: composer.callbacks.OptimizerMonitor(),
    "ReduceLROnPlateau": lambda _: composer.callbacks.ReduceLROnPlateau("train/MulticlassAccuracy", patience=0),
    "RuntimeEstimator": lambda _: composer.callbacks.RuntimeEstimator(),
    "SpeedMonitor": lambda _: composer.callbacks.SpeedMonitor(window_size=2),
    "ThresholdStopper": lambda _: composer.callbacks.ThresholdStopper("MulticlassAccuracy", "train", threshold=2.0),
}
"""Each as in a run: what reads or writes all weights does so at the end of an epoch."""
NOT_HERE = {
    "Callback": "the base class, which the guard of these tests is made of",
    "Cost": "a row of CostMonitor's table",
    "MatrixVisualizer": "it draws the matrices of an evaluation, whose values are on the host",
    "SystemMetricsMonitor": "a thread reads the temperature and power from NVML, which the stand-in lacks",
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(name, step, tmp_path):
    """Callbacks compute what they log on the device, and leave it there."""
    model = make_classifier(nn.Sequential(nn.Flatten(), nn.Linear(432, 3)))
    callbacks, loggers = [CALLBACKS[name](tmp_path)], InMemoryLogger()

    run = train(step, model, images(), callbacks=callbacks, loggers=loggers, device_train_microbatch_size=2)

    assert int(run.state.timestamp.batch) == BATCHES


def test_load_checkpoint(step, tmp_path):
    """A run whose weights a callback has loaded, from a checkpoint that was saved on the device."""
    folder, network = str(tmp_path), lambda: nn.Sequential(nn.Flatten(), nn.Linear(432, 3))
    first = train(step, make_classifier(network()), images(), save_folder=folder)

    callback = composer.callbacks.LoadCheckpoint(f"{folder}/latest", load_weights_only=True)
    second = train(step, make_classifier(network()), images(), callbacks=[callback])

    # No kernel has changed the weights.
    saved, loaded = (
        {name: value.cpu() for name, value in run.state.model.state_dict().items()} for run in (first, second)
    )
    assert same_bits(saved, loaded)


def test_save_pretrained(step, tmp_path):
    """A model that is saved in the layout of Transformers at the end of each epoch."""
    model = standard_attention(HuggingFaceModel(make_transformer("gpt2")))
    row = torch.arange(8)
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}] * 12

    train(step, model, data, callbacks=[composer.callbacks.SavePretrained(str(tmp_path), "1ep")])

    assert [*tmp_path.rglob("model.safetensors")]


class Continuing(HuggingFaceModel):
    """Continues by two tokens. Transformers continues until a value ends it, which no kernel here computes."""

    def generate(self, input_ids, attention_mask):
        for _ in range(2):
            found = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, found], 1)
            attention_mask = torch.cat([attention_mask, torch.ones_like(found)], 1)
        return input_ids


def test_generate(step):
    """Prompts are continued where the model is, at the end of each epoch."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")
    model = standard_attention(Continuing(make_transformer("gpt2"), tokenizer=tokenizer))
    row, loggers = torch.arange(8), InMemoryLogger()
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}] * 12

    train(step, model, data, callbacks=[composer.callbacks.Generate(["a", "b"], "1ep")], loggers=loggers)

    assert [prompt for prompt, _ in loggers.tables["generations"]["rows"]] == ["a", "b"]


def test_each_callback_is_here():
    """A new callback has a case, or a reason."""
    elsewhere = {"Generate", "LoadCheckpoint", "SavePretrained"}

    assert not set(CALLBACKS) & (elsewhere | set(NOT_HERE))
    assert set(CALLBACKS) | elsewhere | set(NOT_HERE) == {*composer.callbacks.__all__}


class Detection(nn.Module):
    """Two losses of a detector, and one box for each image. Torchvision's detectors wait for the numbers of boxes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, images, targets=None):
        found = self.layer(torch.stack(list(images))).mean((2, 3))
        if targets is not None:
            boxes = torch.stack([target["boxes"][0] for target in targets])
            return {"boxes": (found - boxes).abs().mean(), "classes": found.square().mean()}
        ones = torch.ones(1, device=found.device)
        return [{"boxes": box[None], "scores": ones, "labels": ones.long()} for box in found]


def test_detector(step):
    """Images of several sizes, with boxes; an evaluation copies the boxes to the CPU, which COCO's metric needs."""
    samples = [
        (torch.rand(3, 12, 12), {"boxes": torch.tensor([[1.0, 2.0, 5.0, 6.0]] * (1 + place % 2)), "labels": ids})
        for place, ids in ((place, torch.ones(1 + place % 2, dtype=torch.long)) for place in range(11))
    ]
    loader = DataLoader(samples, batch_size=4, collate_fn=collate_detection, pin_memory=True)
    spec = DataSpec(loader, get_num_samples_in_batch=count_detection_samples, split_batch=split_detection_batch)

    run = train(step, ComposerDetector(Detection(), val_metrics=[]), samples, train_dataloader=spec)

    assert int(run.state.timestamp.batch) == BATCHES


def test_segmenter(step):
    """Masks of classes, in training and evaluation."""
    data = TensorDataset(torch.rand(11, 3, 12, 12), torch.randint(3, (11, 12, 12)))
    evaluated = DataLoader(data, batch_size=4)

    run = train(step, ComposerSegmenter(nn.Conv2d(3, 3, 1)), data, [al.CutOut()], eval_dataloader=evaluated)

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
