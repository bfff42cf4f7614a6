"""A rare class: find the digit 8, a tenth of the images, by class weights or by a sampler."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryAveragePrecision, MulticlassAccuracy

from composer import Trainer
from composer.distributed import DistributedWeightedSampler
from composer.models import ComposerClassifier


def main() -> dict:
    """Train with class weights and with a sampler, which also splits over processes; evaluate and predict."""
    pixels, digits = (torch.tensor(one) for one in load_digits(return_X_y=True))
    data = TensorDataset(pixels.float() / 16, (digits == 8).long())
    train, test = random_split(data, [0.7, 0.3], generator=torch.Generator().manual_seed(0))
    labels, test_loader = data.tensors[1][train.indices], DataLoader(test, batch_size=64)
    counts = labels.bincount()
    sampler = DistributedWeightedSampler((1 / counts)[labels].tolist())
    drawn, shuffled = DataLoader(train, 64, sampler=sampler), DataLoader(train, 64, shuffle=True)
    plain, weighted = nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(pos_weight=counts[0] / counts[1])
    results = {}
    for name, loss, loader in (("plain", plain, shuffled), ("weights", weighted, shuffled), ("sampler", plain, drawn)):
        torch.manual_seed(0)
        metrics = {"balanced accuracy": MulticlassAccuracy(2, average="macro"), "precision": BinaryAveragePrecision()}
        model = ComposerClassifier(nn.Linear(64, 1), val_metrics=metrics, loss_fn=loss)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, max_duration="5ep", seed=0)
        trainer.fit()
        scores, targets = trainer.predict(test_loader, join=True, with_targets=True)
        results[name] = {"metrics": trainer.eval(test_loader)["eval"], "scores": scores[:, 0], "targets": targets}
    return results


if __name__ == "__main__":
    print({name: one["metrics"] for name, one in main().items()})
