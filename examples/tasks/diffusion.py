"""A diffusion model (DDPM, arXiv:2006.11239): learn to find the noise in images, and draw images from noise."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composer import DataSpec, Trainer
from composer.models import ComposerRegressor

RATES, STEPS = torch.linspace(1e-3, 0.2, 50), torch.eye(50)
SHARES = torch.cumprod(1 - RATES, dim=0)  # of the image in the variance after each step


def add_noise(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 64)`` after a random number of steps, with this number, and the noise to find in them."""
    noise, steps = torch.randn_like(images), torch.randint(50, images.shape[:1])
    noisy = SHARES[steps, None].sqrt() * images + (1 - SHARES[steps, None]).sqrt() * noise
    return torch.cat([noisy, STEPS[steps]], dim=1), noise


def draw(network: nn.Module, images: Tensor) -> Tensor:
    """Return images from noise ``(N, 64)``, by the reverse steps."""
    for step in reversed(range(50)):
        found = network(torch.cat([images, STEPS[step].expand(len(images), 50)], dim=1))
        images = (images - RATES[step] / (1 - SHARES[step]).sqrt() * found) / (1 - RATES[step]).sqrt()
        images = images + (step > 0) * RATES[step].sqrt() * torch.randn_like(images)
    return images.detach()


def main() -> dict:
    """Train, evaluate and draw; return what was computed."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(114, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))
    images = torch.tensor(load_digits().data).float() / 8 - 1
    train, test = (DataSpec(DataLoader(part, 100), batch_transforms=add_noise) for part in images.split(1400))
    options = {"optimizers": torch.optim.Adam(network.parameters(), lr=2e-3), "max_duration": "40ep", "seed": 0}
    trainer = Trainer(model=ComposerRegressor(network), train_dataloader=train, eval_dataloader=test, **options)
    trainer.fit()
    found, noise = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval()["eval"], "found": found, "noise": noise, "drawn": draw(network, noise)}


if __name__ == "__main__":
    print(main()["metrics"])
