"""Segmentation with several classes: the pixels of a digit by its half, and pixels at the border that do not count."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from composer import Trainer
from composer.metrics import Dice, MIoU
from composer.models import ComposerSegmenter


def main() -> dict:
    """Train, evaluate and predict masks; return what was computed."""
    images = torch.tensor(load_digits().images).float().unsqueeze(1) / 16
    halves = torch.tensor([1, 2]).repeat_interleave(4).view(1, 8, 1)
    masks = torch.where(images[:, 0] > 0.3, halves, 0)  # the background, the upper and the lower half of the ink
    masks[:, [0, -1]] = -1
    data = TensorDataset(images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0)), masks)
    parts = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, batch_size=64, shuffle=part is parts[0]) for part in parts)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 3, 7, padding=3))
    model = ComposerSegmenter(
        network, ignore_index=-1, val_metrics=[MIoU(3, ignore_index=-1), Dice(3, ignore_index=-1)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="5ep", seed=0)
    trainer.fit()
    scores, targets = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval(test)["eval"], "masks": scores.argmax(dim=1), "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
