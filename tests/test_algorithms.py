"""Every algorithm trains in the Trainer: with microbatches, in mixed precision, with evaluations."""

import tempfile
import warnings

import kornia.augmentation as ka
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import composer.algorithms as al
from composer.core import Algorithm, Engine, State
from composer.models import ComposerClassifier
from fixtures import trained, weights
from fixtures.models import Teacher, WithLoss

FOLDER = tempfile.TemporaryDirectory()
SETTINGS = {
    "ActivationCheckpointing": {"modules": "Bottleneck", "policy": "matmuls"},
    "Alibi": None,  # for transformers
    **dict.fromkeys(("GatedAttention", "GatedLinearUnits", "QKNorm", "ValueResidual")),
    "SeqLengthWarmup": None,
    "AugMix": {"batch": True},
    "Augment": {"augmentation": ka.RandomAffine(30.0)},
    "ChunkedCrossEntropy": {"head": "module.11", "chunk_size": 2},
    "CutMix": {},
    "DepthStacking": None,  # for a list of blocks
    "Distillation": {"teacher": Teacher()},
    "EMA": {"half_life": "2ba"},
    "DiLoCo": {"sync_every": "2ba"},
    "Factorize": {"min_channels": 16, "min_features": 16, "latent_features": 0.25},
    "FusedLayerNorm": None,  # for norms that are written out
    "GhostBatchNorm": {"ghost_batch_size": 2},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "GyroDropout": {"sigma": 4, "tau": 2},
    "NEFTune": None,  # for embeddings
    "NoOpModel": None,  # trains nothing
    "PatchDropout": None,  # for vision transformers
    "PostHocEMA": {"folder": FOLDER.name, "snapshot_interval": "2ba", "overwrite": True},
    "RandAugment": {"batch": True},
    "SAM": {"interval": 2},
    "SWA": {"swa_start": "1ep", "swa_end": "2ep"},
    "SelectiveBackprop": {"start": 0.0},
    "SkipSpikes": {"threshold": "0.5std", "window": 4},
    "SqueezeExcite": {"latent_channels": 4, "min_channels": 16},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "stochastic_method": "sample"},
    "TokenSelection": None,  # for texts
}
NAMES = [
    name
    for name, kind in vars(al).items()
    if isinstance(kind, type) and issubclass(kind, Algorithm) and SETTINGS.get(name, {}) is not None
]


class Images(Dataset):
    """Noise whose brightest channel is the class."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(16, 3, 16, 16, generator=generator)
        self.labels = torch.arange(16) % 3
        for image, label in zip(self.images, self.labels, strict=True):
            image[label] = (image[label] + 1) / 2

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def make_model():
    """A residual network that every surgery on images changes."""
    from torchvision.models.resnet import Bottleneck

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), Bottleneck(16, 4), nn.GroupNorm(4, 16)]
    head = [
        nn.Conv2d(16, 16, 3, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.LayerNorm(32),
        nn.Dropout(0.1),
    ]
    return ComposerClassifier(nn.Sequential(*layers, *head, nn.Linear(32, 3)), num_classes=3)


def make_loader(data, *algorithms):
    """Return a loader of batches of eight samples, for InfoBatch with its sampler."""
    if not any(isinstance(one, al.InfoBatch) for one in algorithms):
        return DataLoader(data, batch_size=8)
    data = al.InfoBatchDataset(data)
    return DataLoader(data, batch_size=8, sampler=data.sampler)


def fit(*algorithms, **options):
    """Train for three epochs; return the weights at the end."""
    model = make_model()
    data = {
        "train_dataloader": make_loader(Images(), *algorithms),
        "eval_dataloader": DataLoader(Images(), batch_size=8),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {"max_duration": "3ep", "seed": 1} | options
    return weights(trained(model=model, optimizers=optimizer, algorithms=list(algorithms), **data, **settings))


@pytest.mark.parametrize("name", NAMES)
class TestEach:
    def test_trains_and_trains_the_same_again(self, name):
        """Two runs with one seed produce bit-identical, finite weights."""
        first, second = (fit(getattr(al, name)(**SETTINGS.get(name, {})), precision="amp_bf16") for _ in range(2))

        assert torch.isfinite(first).all()
        assert torch.equal(first, second)

    @pytest.mark.filterwarnings("ignore:device_train_microbatch_size=3 does not give")  # BatchNorm
    def test_trains_in_microbatches(self, name):
        """Training also works with microbatches of three samples, of which the last is smaller."""
        end = fit(getattr(al, name)(**SETTINGS.get(name, {})), device_train_microbatch_size=3, precision="amp_bf16")

        assert torch.isfinite(end).all()


def recorder():
    """Return a model, and the list of its inputs."""
    model, inputs = WithLoss(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))), []
    model.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0][0].clone()))
    return model, inputs


@pytest.mark.parametrize("name", ["MixUp", "CutMix", "CutOut"])
def test_a_plain_loop_draws_like_the_trainer(name):
    """A loop without microbatches has the same batches as a trainer that does not split them."""
    batches = [(torch.rand(8, 3, 16, 16), torch.arange(8) % 3) for _ in range(3)]
    (model, in_trainer), (looped, in_loop) = recorder(), recorder()
    trained(model=model, train_dataloader=batches, algorithms=getattr(al, name)(), seed=3)

    state = State(looped, rank_zero_seed=3)
    engine = Engine(state, algorithms=getattr(al, name)())
    for state.batch in batches:
        engine.run_event("after_dataloader")
        engine.run_event("before_forward")
        looped(state.batch)
        state.timestamp = state.timestamp.to_next_batch()

    assert [torch.equal(*both) for both in zip(in_trainer, in_loop, strict=True)] == [True] * 3
    assert not torch.equal(in_loop[0], batches[0][0])


SPLIT_MATTERS = {
    "CutMix": "mixes within a microbatch, with its own draw",
    "GhostBatchNorm": "a batch norm's statistics are those of the microbatch",
    "GyroDropout": "drops other units in each forward pass",
    "MixUp": "mixes within a microbatch, with its own draw",
    "StochasticDepth": "drops other layers in each forward pass",
}


class TestSplitMakesNoDifference:
    """The sum of the weighted gradients of microbatches is the gradient of the batch."""

    def end(self, name, size):
        """Return the weights after six steps in float64, in parts of ``size``, without batch norm and dropout."""
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Tanh(), nn.Conv2d(16, 16, 3, stride=2)]
        head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3)]
        model = ComposerClassifier(nn.Sequential(*layers, *head).double(), num_classes=3, train_metrics=[])
        data = [(image.double(), label) for image, label in Images()]
        of_head = {"ChunkedCrossEntropy": {"head": "module.9", "chunk_size": 2, "z_loss": 0.1, "softcap": 2.0}}
        algorithms = [getattr(al, name)(**(SETTINGS | of_head).get(name, {}))] if name else []
        settings = {
            "train_dataloader": make_loader(data, *algorithms),
            "optimizers": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            "algorithms": algorithms,
            "device_train_microbatch_size": size,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of algorithms that have no effect on this network
            return weights(trained(model=model, max_duration="3ep", seed=1, **settings))

    @pytest.mark.parametrize("name", [None, *(name for name in NAMES if name not in SPLIT_MATTERS)])
    @pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")
    def test_for_each_algorithm(self, name):
        """Complete batches and microbatches of three, three and two samples give the same weights up to rounding."""
        torch.testing.assert_close(self.end(name, 3), self.end(name, None), rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("name", SPLIT_MATTERS)
    @pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")
    def test_exclusions_have_a_reason(self, name):
        """For each algorithm excluded above, the split changes the weights, or it has no effect on this network."""
        changed = not torch.allclose(self.end(name, 3), self.end(name, None), rtol=1e-9, atol=1e-11)

        assert changed or name in {"GhostBatchNorm", "GyroDropout", "StochasticDepth"}, SPLIT_MATTERS[name]


def test_many_together():
    """Thirteen algorithms in one run give no warning."""
    algorithms = [
        al.BlurPool(),
        al.SqueezeExcite(latent_channels=4, min_channels=16),
        al.GhostBatchNorm(2),
        al.ChannelsLast(),
        al.CutOut(),
        al.ColOut(),
        al.MixUp(),
        al.CutMix(),
        al.LabelSmoothing(),
        al.GradientClipping("norm", 1.0),
        al.SAM(interval=2),
        al.EMA(half_life="2ba"),
        al.LayerFreezing(),
    ]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = fit(*algorithms)

    assert torch.isfinite(weights).all()
