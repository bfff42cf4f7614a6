"""A tiny training for each algorithm, and its weights after 12 steps of our Trainer, for comparison with the hosts.

A host is right if it gets the same weights bit for bit::

    @each_case
    def test_weights(case):
        model = case.make_model()
        adapter = ...(model, case.make_algorithms(), optimizer=case.make_optimizer(model), seed=SEED)
        ... three epochs of case.make_data(), with case.forward and case.loss ...
        assert_same(weights_of(adapter.state, model), our_weights(case))

What the host needs to compute the same:

- **Seed**: pass ``SEED`` as the seed of the adapter. The global generators need no seed: surgery seeds its own draws,
  the models have no dropout, and StochasticDepth, which draws from the global generator in each forward pass
  (``case.draws``), comes with :class:`SeedDraws`, which seeds it at ``BEFORE_FORWARD``.
- **Length**: pass ``max_duration`` and ``dataloader_len`` to ``adapter.prepare``, for GyroDropout.
- **Data**: ``EPOCHS`` epochs of four batches in the order of ``case.make_data()``; the last batch is not smaller.
  Batches are tuples ``(images, labels)``, or dictionaries with ``labels``. ``case.make_data(dicts=True)`` gives
  dictionaries for each model, ``case.samples(dicts=True)`` the dataset, for hosts that make their own loader.
- **Optimizer**: constant learning rate, no schedule, no clipping, no accumulation. Gradients set to None or zero.
- **Precision**: float32, except for ``case.precision == "amp_bf16"``: autocast of forward pass and loss to bfloat16.
- **Loss**: ``case.loss(case.forward(model, batch), batch)``, computed from the logits. Hosts that use the loss that a
  model of Transformers computes itself compare with ``our_weights(case, own_loss=True)``, of a ``HuggingFaceModel``.

NoOpModel and DepthStacking have no case: they raise in each host, which keeps its model object, and loads
its checkpoints into the model as the program has made it.

The weights include those for evaluation, with the prefix ``averaged.``, if the algorithm averages them (EMA, SWA).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import kornia.augmentation as ka
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import composer.algorithms as al
from composer import Trainer
from composer.core import Algorithm, Event, Stage, State
from composer.core.evaluator import evaluation_weights
from composer.models import ComposerModel, HuggingFaceModel
from fixtures.models import WrittenOutNorm

__all__ = [
    "CASES",
    "EPOCHS",
    "SEED",
    "STEPS",
    "Case",
    "SeedDraws",
    "assert_same",
    "each_case",
    "our_weights",
    "weights_of",
]

SEED = 17
EPOCHS = 3
STEPS = 12
_BATCH_SIZE = 4
_CLASSES = 3
_TOKENS = 32


class SeedDraws(Algorithm):
    """Seeds torch's global generator before each forward pass, so that its draws are the same in each host."""

    runs_at = {Event.BEFORE_FORWARD: Stage.AUGMENT}
    reads = frozenset({"timestamp"})

    def apply(self, event, state, logger):
        torch.manual_seed(SEED + int(state.timestamp.batch))


class Block(nn.Module):
    """Two convolutions with batch norms, and a shortcut."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """A small residual network for images (N, 3, 16, 16): ``model(images)`` returns scores.

    ``model(images, labels)`` returns a dictionary with ``loss`` and ``logits``, as models of Transformers do.
    """

    def __init__(self, dropout=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2, 2)
        self.blocks = nn.Sequential(Block(16), nn.Conv2d(16, 16, 3, stride=2, padding=1), Block(16))
        # Without a rate there is no layer, so that nothing draws from the global generator.
        drop = [nn.Dropout(dropout)] if dropout else []
        self.head = nn.Sequential(nn.Linear(16, 16), norm(16), *drop, nn.Linear(16, _CLASSES))

    def forward(self, pixel_values, labels=None):
        x = self.blocks(self.pool(torch.relu(self.norm(self.stem(pixel_values)))))
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


class Bottlenecks(nn.Module):
    """Two residual blocks of torchvision, for StochasticDepth."""

    def __init__(self):
        super().__init__()
        from torchvision.models.resnet import Bottleneck

        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(Bottleneck(16, 4), Bottleneck(16, 4))
        self.head = nn.Linear(16, _CLASSES)

    def forward(self, pixel_values, labels=None):
        logits = self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def _make_transformer(kind):
    """Return a tiny model of Transformers without dropout, and initialise it from the global generator."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "vit":
        config = transformers.ViTConfig(**sizes, **no_dropout, image_size=16, patch_size=4, num_labels=_CLASSES)
        return transformers.ViTForImageClassification(config)
    if kind == "bert":
        config = transformers.BertConfig(
            **sizes, **no_dropout, vocab_size=_TOKENS, max_position_embeddings=16, num_labels=_CLASSES
        )
        return transformers.BertForSequenceClassification(config)
    config = transformers.GPT2Config(
        vocab_size=_TOKENS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "resnet with dropout": lambda: ResNet(dropout=0.2),
    "resnet with written-out norm": lambda: ResNet(norm=WrittenOutNorm),
    "bottlenecks": Bottlenecks,
    "vit": lambda: _make_transformer("vit"),
    "bert": lambda: _make_transformer("bert"),
    "gpt2": lambda: _make_transformer("gpt2"),
}
_TRANSFORMERS = ("vit", "bert", "gpt2")


@attrs.frozen
class Case:
    """A tiny training with one algorithm.

    Args:
        algorithm: Returns a new algorithm.
        architecture: ``"resnet"``, ``"vit"``, ``"bert"``, ``"gpt2"`` or a variant.
        draws: Whether forward passes draw from torch's global generator.
        precision: ``"fp32"`` or ``"amp_bf16"``.
        reference: Whether samples of text have losses of a reference model, which the algorithm takes out.
    """

    algorithm: Callable[[], Algorithm]
    architecture: str = "resnet"
    draws: bool = False
    precision: str = "fp32"
    reference: bool = False

    def make_algorithms(self) -> list[Algorithm]:
        """Return the algorithm of the case as a new object, after :class:`SeedDraws` if it draws."""
        return [*([SeedDraws()] if self.draws else []), self.algorithm()]

    def make_model(self) -> nn.Module:
        """Return the model with the same weights each time; see :meth:`forward` for its arguments."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _MODELS[self.architecture]().train()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum for images, AdamW for text."""
        if self.architecture in {"bert", "gpt2"}:
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    @property
    def is_transformer(self) -> bool:
        """Whether the model is one of Transformers, whose outputs are a mapping with ``logits``."""
        return self.architecture in _TRANSFORMERS

    def samples(self, *, dicts: bool = False) -> list[Any]:
        """Return the 16 samples: tuples for the residual networks, otherwise or with ``dicts=True`` dictionaries."""
        generator = torch.Generator().manual_seed(1)
        count = STEPS // EPOCHS * _BATCH_SIZE
        labels = torch.randint(_CLASSES, (count,), generator=generator)
        if self.architecture in {"bert", "gpt2"}:
            ids = torch.randint(_TOKENS, (count, 16), generator=generator)
            labels = labels if self.architecture == "bert" else ids.clone()
            names, columns = ("input_ids", "attention_mask", "labels"), (ids, torch.ones_like(ids), labels)
            if self.reference:
                names = (*names, "reference_losses")
                columns = (*columns, 3 + torch.rand(count, 16, generator=generator))
        else:
            names, columns = ("pixel_values", "labels"), (torch.rand(count, 3, 16, 16, generator=generator), labels)
        rows = zip(*columns, strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows] if self.is_transformer or dicts else [*rows]

    def make_data(self, *, dicts: bool = False) -> DataLoader:
        """Return a loader of four batches of four samples, in the same order each time."""
        return DataLoader(self.samples(dicts=dicts), batch_size=_BATCH_SIZE)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Call the model with a batch without its labels."""
        if isinstance(batch, Mapping):
            return model(**{name: value for name, value in batch.items() if name not in self.not_inputs})
        return model(batch[0])

    @property
    def not_inputs(self) -> set[str]:
        """Return the items of a batch that the model does not take, as the algorithm leaves it."""
        removes = isinstance(self.algorithm(), al.TokenSelection)
        return {"labels"} if removes else {"labels", "reference_losses"}

    def loss(self, outputs: Any, batch: Any, reduction: str = "mean") -> Tensor:
        """Return the loss of the logits; labels may be ids or probabilities."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
        labels = batch["labels"] if isinstance(batch, Mapping) else batch[1]
        if self.architecture == "gpt2":
            losses = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(0, 1), reduction=reduction)
            return losses if reduction == "mean" else losses.view(len(logits), -1).mean(1)
        return cross_entropy(logits, labels, reduction=reduction)


class _Ours(ComposerModel):
    """The model of a case, for our Trainer."""

    def __init__(self, case):
        super().__init__()
        self.model, self._case = case.make_model(), case

        self.shift_labels = case.architecture == "gpt2"

    def forward(self, batch):
        return self._case.forward(self.model, batch)

    def loss(self, outputs, batch, reduction="mean"):
        return self._case.loss(outputs, batch, reduction)


@functools.cache
def our_weights(case: Case, *, own_loss: bool = False) -> dict[str, Tensor]:
    """Return the weights after 12 steps of our Trainer; see :func:`weights_of`.

    Args:
        case: The case.
        own_loss: Whether the loss is the one that the model of Transformers computes, for models of Transformers.
    """
    wrapped = HuggingFaceModel(case.make_model()) if own_loss else _Ours(case)
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(
            model=wrapped,
            train_dataloader=case.make_data(),
            optimizers=case.make_optimizer(wrapped.model),
            algorithms=case.make_algorithms(),
            max_duration=f"{EPOCHS}ep",
            precision=case.precision,
            device="cpu",
            seed=SEED,
            progress_bar=False,
        )
        trainer.fit()
        assert trainer.state.timestamp.batch == STEPS
        weights = weights_of(trainer.state, wrapped.model)
        trainer.close()
    return weights


def weights_of(state: State, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights and buffers by name, with ``averaged.`` those for evaluation if they are others.

    Args:
        state: The state that has the algorithms, such as ``adapter.state``.
        model: The model of :meth:`Case.make_model`, without wrappers.
    """
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with evaluation_weights(state) as differ:
        if differ:
            weights |= {f"averaged.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return weights


def assert_same(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that both have the same tensors bit for bit.

    Raises:
        AssertionError: They differ; the message has the first name and the greatest difference.
    """
    missing, extra = sorted({*expected} - {*weights}), sorted({*weights} - {*expected})
    assert not missing, f"{len(missing)} of {len(expected)} weights are missing, such as {missing[0]!r}."
    assert not extra, f"{len(extra)} weights are unexpected, such as {extra[0]!r}."
    different = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    if different:
        name = different[0]
        got, want = weights[name], expected[name]
        assert got.shape == want.shape, f"{name!r} has shape {tuple(got.shape)}, expected {tuple(want.shape)}."
        distance = (got.double() - want.double()).abs().max().item()
        raise AssertionError(
            f"{len(different)} of {len(expected)} weights differ, first {name!r}, by {distance:.3g} at most."
        )


def _make_student(architecture: str) -> Algorithm:
    """Return a distillation from a teacher of the same architecture with larger weights."""
    teacher = Case(al.ChannelsLast, architecture).make_model()
    for parameter in teacher.parameters():
        parameter.data *= 1.5
    return al.Distillation(teacher, temperature=2.0)


def _cases() -> Iterable[tuple[str, Case]]:
    """Yield the cases by id: the algorithm's name, a variant if any, and the architecture."""
    any_architecture = {
        "EMA": lambda: al.EMA("2ba"),
        "GradientClipping": lambda: al.GradientClipping("norm", 0.1),
        "LabelSmoothing": lambda: al.LabelSmoothing(0.1),
        "LayerFreezing": lambda: al.LayerFreezing(0.2, 0.8),
        "SAM": al.SAM,
        "SWA": lambda: al.SWA("1ep", "3ep"),
    }
    for name, make in any_architecture.items():
        for architecture in ("resnet", *_TRANSFORMERS):
            yield f"{name}-{architecture}", Case(make, architecture)
    on_images = {
        "AugMix": lambda: al.AugMix(batch=True),
        "Augment": lambda: al.Augment(ka.RandomHorizontalFlip(p=0.5)),
        "CutMix": al.CutMix,
        "CutOut": lambda: al.CutOut(length=0.5),
        "MixUp": al.MixUp,
        "MixUp of losses": lambda: al.MixUp(interpolate_loss=True),
        "RandAugment": lambda: al.RandAugment(batch=True),
        "SelectiveBackprop": lambda: al.SelectiveBackprop(start=0.2, end=0.9),
    }
    for name, make in on_images.items():
        for architecture in ("resnet", "vit"):
            yield f"{name}-{architecture}", Case(make, architecture)
    on_convolutions = {
        "BlurPool": lambda: al.BlurPool(min_channels=8),
        "ChannelsLast": al.ChannelsLast,
        "ColOut": al.ColOut,
        "DiLoCo": lambda: al.DiLoCo("2ba"),
        "GhostBatchNorm": lambda: al.GhostBatchNorm(2),
        "GradientClipping adaptively": lambda: al.GradientClipping("adaptive", 0.01),
        "SkipSpikes": lambda: al.SkipSpikes("0.5std", 4),
        "SkipSpikes by clipping": lambda: al.SkipSpikes("0.5std", 4, "clip"),
        "PostHocEMA": lambda: al.PostHocEMA(tempfile.mkdtemp(), "2ba"),
        "ProgressiveResizing": al.ProgressiveResizing,
        "SAM at every second step": lambda: al.SAM(interval=2),
        "SWA with learning rates": lambda: al.SWA("0.2dur", schedule_swa_lr=True, swa_lr=0.01, anneal_steps=2),
        "WeightStandardization": al.WeightStandardization,
    }
    for name, make in on_convolutions.items():
        yield f"{name}-resnet", Case(make)
    for architecture in ("resnet", *_TRANSFORMERS):
        teach = functools.partial(_make_student, architecture)
        yield f"Distillation-{architecture}", Case(teach, architecture)
    for architecture in ("bottlenecks", "bert", "gpt2"):
        yield f"ActivationCheckpointing-{architecture}", Case(al.ActivationCheckpointing, architecture)
    yield "Factorize-resnet", Case(lambda: al.Factorize(True, True, 16, 4, 16, 4))
    yield "FusedLayerNorm-resnet", Case(al.FusedLayerNorm, "resnet with written-out norm")
    yield "GyroDropout-resnet", Case(lambda: al.GyroDropout(0.2, 4, 2), "resnet with dropout")
    yield "SqueezeExcite-resnet", Case(lambda: al.SqueezeExcite(4, 16))
    for method in ("sample", "block"):
        make = functools.partial(al.StochasticDepth, "ResNetBottleneck", method, 0.4, drop_warmup=0.5)
        yield f"StochasticDepth by {method}-resnet", Case(make, "bottlenecks", draws=True)
    yield "LowPrecisionGroupNorm-resnet", Case(al.LowPrecisionGroupNorm, precision="amp_bf16")
    yield "LowPrecisionLayerNorm-vit", Case(al.LowPrecisionLayerNorm, "vit", precision="amp_bf16")
    yield "PatchDropout-vit", Case(al.PatchDropout, "vit", draws=True)
    for architecture in ("bert", "gpt2"):
        yield f"NEFTune-{architecture}", Case(al.NEFTune, architecture)
        yield f"Alibi-{architecture}", Case(lambda: al.Alibi(16), architecture)
        yield f"GatedLinearUnits-{architecture}", Case(al.GatedLinearUnits, architecture)
    for kind in (al.GatedAttention, al.QKNorm, al.ValueResidual):
        yield f"{kind.__name__}-gpt2", Case(kind, "gpt2")
    yield "ChunkedCrossEntropy-gpt2", Case(lambda: al.ChunkedCrossEntropy(chunk_size=4, z_loss=0.01), "gpt2")
    yield "TokenSelection-gpt2", Case(lambda: al.TokenSelection(0.5), "gpt2", reference=True)
    yield "SeqLengthWarmup-gpt2", Case(lambda: al.SeqLengthWarmup(0.7, 4, 16, 4), "gpt2")


CASES: dict[str, Case] = dict(_cases())
"""The cases by id, such as ``"MixUp-vit"`` and ``"SAM at every second step-resnet"``."""

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
