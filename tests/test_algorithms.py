"""Every algorithm trains in the complete trainer: in parts, in mixed precision, with an evaluation in between."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import composer.algorithms as al
from composer import Trainer
from composer.core import Algorithm
from composer.models import ComposerClassifier

SETTINGS = {
    "Alibi": None,  # for transformers
    "GatedLinearUnits": None,
    "SeqLengthWarmup": None,
    "AugMix": {"batch": True},
    "CutMix": {},
    "EMA": {"half_life": "2ba"},
    "Factorize": {"min_channels": 16, "min_features": 16, "latent_features": 0.25},
    "FusedLayerNorm": None,  # for norms that are written out
    "GhostBatchNorm": {"ghost_batch_size": 2},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "GyroDropout": {"sigma": 4, "tau": 2},
    "NoOpModel": None,  # trains nothing
    "RandAugment": {"batch": True},
    "SAM": {"interval": 2},
    "SWA": {"swa_start": "1ep", "swa_end": "2ep"},
    "SelectiveBackprop": {"start": 0.0},
    "SqueezeExcite": {"latent_channels": 4, "min_channels": 16},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "stochastic_method": "sample"},
}
NAMES = [name for name in al.__all__ if issubclass(getattr(al, name), Algorithm) and SETTINGS.get(name, {}) is not None]


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
    """A residual network that every surgery on images finds something in."""
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


def fit(*algorithms, **options):
    """Train for three epochs; return the weights at the end."""
    model = make_model()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(Images(), batch_size=8),
        eval_dataloader=DataLoader(Images(), batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        algorithms=list(algorithms),
        max_duration="3ep",
        progress_bar=False,
        device="cpu",
        seed=1,
        **options,
    )
    trainer.fit()
    trainer.close()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.state.model.parameters()])


@pytest.mark.parametrize("name", NAMES)
class TestEach:
    def test_trains_and_trains_the_same_again(self, name):
        """Two runs with one seed end with the same weights, bit for bit, which are numbers."""
        first, second = (fit(getattr(al, name)(**SETTINGS.get(name, {})), precision="amp_bf16") for _ in range(2))

        assert torch.isfinite(first).all()
        assert torch.equal(first, second)

    def test_trains_in_microbatches(self, name):
        """Batches in parts of three samples, of which the last is smaller, train as well."""
        weights = fit(getattr(al, name)(**SETTINGS.get(name, {})), device_train_microbatch_size=3, precision="amp_bf16")

        assert torch.isfinite(weights).all()


def test_many_together():
    """A dozen algorithms in one run, with nothing to warn about but that two of them blend labels in turn."""
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
