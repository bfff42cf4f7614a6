"""Generate handwritten digits with a generative adversarial network (GAN), and measure how good they are.

    python -m pip install scikit-learn
    python examples/gan.py
    python examples/gan.py --picture digits.png

The generator draws an image of a wanted digit, and the discriminator distinguishes it from images of scikit-learn's
digits. Each has a loss and an optimizer; one step trains both. Two numbers state the quality, before and after the
training: how many of the drawn images a classifier of real digits recognizes as the wanted one, and the Fréchet
distance of their pixels to those of test images (0: equal means and covariances).
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot
from torch.utils.data import DataLoader, TensorDataset, random_split

from composer import Trainer
from composer.models import ComposerModel

NOISE, DIGITS = 16, 10


def make_network(inputs: int, outputs: int, width: int = 256) -> nn.Module:
    """Return a network with two hidden layers."""
    layers = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class GAN(ComposerModel):
    """A generator and a discriminator of images ``(N, 64)`` in [-1, 1] that get the digits, ``(N,)``, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(make_network(NOISE + DIGITS, 64), nn.Tanh())
        self.discriminator = make_network(64 + DIGITS, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return an image for each digit of the batch."""
        images, digits = batch
        return self.generator(torch.cat([images.new_empty(len(images), NOISE).normal_(), one_hot(digits, DIGITS)], 1))

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the loss of each network, which gives no gradients to the other one."""
        images, digits = batch
        wanted = one_hot(digits, DIGITS)
        real, fake = torch.cat([images, wanted], 1), torch.cat([outputs, wanted], 1)
        of_real, of_fake = self.discriminator(real), self.discriminator(fake.detach())
        fixed = {name: weight.detach() for name, weight in self.discriminator.named_parameters()}
        judged = functional_call(self.discriminator, fixed, (fake,))
        ones, zeros = torch.ones_like(of_real), torch.zeros_like(of_real)
        return {
            "discriminator": binary_cross_entropy_with_logits(of_real, 0.9 * ones)
            + binary_cross_entropy_with_logits(of_fake, zeros),
            "generator": binary_cross_entropy_with_logits(judged, ones),
        }


def load_data() -> list[TensorDataset]:
    """Return images and digits to train on, and to compare with."""
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(digits))
    parts = random_split(data, [1200, 597], generator=torch.Generator().manual_seed(0))
    return [TensorDataset(*data[part.indices]) for part in parts]


def frechet_distance(images: Tensor, others: Tensor) -> float:
    """Return the squared distance of the normal distributions with the means and covariances of two sets, ``(N, D)``.

    ``|m - n|² + tr(A + B - 2 (A B)^½)`` (Dowson and Landau 1982; as the FID, here of pixels).
    """
    (mean, a), (other_mean, b) = ((part.double().mean(0), part.double().T.cov()) for part in (images, others))
    root = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
    return ((mean - other_mean).square().sum() + a.trace() + b.trace() - 2 * root).item()


def run(duration: str = "150ep") -> tuple[dict[str, dict[str, float]], Tensor]:
    """Train, and return the measures before and after, with those of real images, and the drawn images."""
    train, test = load_data()
    classifier = LogisticRegression(max_iter=1000).fit(*train.tensors)
    torch.manual_seed(0)
    model = GAN()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(train, batch_size=64, shuffle=True),
        optimizers=[
            torch.optim.Adam(model.generator.parameters(), lr=5e-4, betas=(0.5, 0.99)),
            torch.optim.Adam(model.discriminator.parameters(), lr=5e-4, betas=(0.5, 0.99)),
        ],
        max_duration=duration,
        seed=0,
        progress_bar=False,
    )
    wanted = DataLoader(test, batch_size=597)

    def measure(images: Tensor) -> dict[str, float]:
        recognized = float(classifier.score(images, test.tensors[1]))
        return {"recognized": recognized, "distance": frechet_distance(images, test.tensors[0])}

    with trainer:
        before = trainer.predict(wanted, join=True)
        print(trainer.fit())
        after = trainer.predict(wanted, join=True)
    results = {"before training": before, "after training": after}
    measures = {name: measure(images) for name, images in results.items()}
    real = frechet_distance(train.tensors[0], test.tensors[0])
    measures["real images"] = {"recognized": float(classifier.score(*test.tensors)), "distance": real}
    return measures, after


def main() -> None:
    """Train, and print the measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", default="150ep", help="of the training (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="write a picture of 40 drawn digits; needs matplotlib")
    options = parser.parse_args()
    measures, images = run(options.duration)
    for name, values in measures.items():
        print(f"{name:16} recognized {values['recognized']:.3f}   Fréchet distance {values['distance']:.2f}")
    if options.picture:
        from matplotlib import image  # noqa: PLC0415  (only for the picture)

        rows = images[:40].view(4, 10, 8, 8).transpose(1, 2).reshape(32, 80)
        image.imsave(options.picture, rows.numpy(), cmap="gray")


if __name__ == "__main__":
    main()
