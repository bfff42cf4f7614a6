"""Contrastive learning (SimCLR): embeddings of images without labels, from two random views of each."""

import torch
from kornia import augmentation
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import DataSpec, Trainer
from composer.algorithms import Augment
from composer.models import ComposerContrastive


class TwoViews(nn.Module):
    """Maps images ``(N, 1, 8, 8)`` to ``(N, 2, 1, 8, 8)``; ``Augment`` draws them from the generator of the run."""

    view = augmentation.RandomAffine(15.0, (0.1, 0.1), (0.8, 1.2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Draw two views of each image."""
        return torch.stack([self.view(images), self.view(images)], dim=1)


def main() -> dict:
    """Train on images alone; return embeddings before and after, with the labels to measure them by."""
    pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 32))
    model = ComposerContrastive(network, temperature=0.2)
    loader = DataLoader(TensorDataset(images[:1200]), batch_size=300, shuffle=True)
    data = DataSpec(loader, split_batch=model.split_batch)  # the model splits, and compares all 300
    options = {"optimizers": torch.optim.AdamW(network.parameters(), lr=3e-3), "algorithms": Augment(TwoViews())}
    options |= {"device_train_microbatch_size": 100, "max_duration": "30ep", "seed": 0}
    trainer = Trainer(model=model, train_dataloader=data, **options)
    before = trainer.predict(DataLoader(images, batch_size=500), join=True)
    trainer.fit()
    after = trainer.predict(DataLoader(images, batch_size=500), join=True)
    return {"before": before, "after": after, "labels": digits}


if __name__ == "__main__":
    print({name: part.shape for name, part in main().items()})
