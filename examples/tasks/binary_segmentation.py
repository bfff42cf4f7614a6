"""Binary segmentation with one logit for each pixel: the ink of a noisy digit; pixels at the border do not count."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryJaccardIndex

from composer import Trainer
from composer.loss import DiceLoss
from composer.metrics import Dice
from composer.models import ComposerSegmenter


def main() -> dict:
    """Train with the cross entropy and with the Dice loss, evaluate and predict masks; return what was computed."""
    images = torch.tensor(load_digits().images).float().unsqueeze(1) / 16
    masks = (images[:, 0] > 0.3).long()
    masks[:, [0, -1]] = -1
    data = TensorDataset(images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0)), masks)
    parts = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, batch_size=64, shuffle=part is parts[0]) for part in parts)
    results = {}
    for name, loss_fn in {"cross entropy": None, "Dice": DiceLoss(softmax=True)}.items():  # both ignore pixels with -1
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
        metrics = [BinaryJaccardIndex(ignore_index=-1), Dice(2, ignore_index=-1)]
        model = ComposerSegmenter(network, val_metrics=metrics, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="3ep", seed=0)
        trainer.fit()
        scores, targets = trainer.predict(test, join=True, with_targets=True)
        results[name] = {"metrics": trainer.eval(test)["eval"], "masks": scores[:, 0] > 0, "targets": targets}
    return results


if __name__ == "__main__":
    print({name: one["metrics"] for name, one in main().items()})
