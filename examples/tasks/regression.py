"""Regression with one number for each sample: the progression of a disease, in its own unit."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanAbsoluteError, R2Score

from composer import Trainer
from composer.models import ComposerRegressor


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    columns, progression = (torch.tensor(one).float() for one in load_diabetes(return_X_y=True))
    data = TensorDataset(columns * 20, progression)
    parts = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, batch_size=32, shuffle=part is parts[0]) for part in parts)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    network[-1].bias.data.fill_(progression[parts[0].indices].mean())
    metrics = [MeanAbsoluteError(), R2Score()]
    trainer = Trainer(
        model=ComposerRegressor(network, val_metrics=metrics, loss_fn=nn.HuberLoss(delta=50.0)),
        train_dataloader=train,
        eval_dataloader=test,
        optimizers=torch.optim.AdamW(network.parameters(), lr=1e-2),
        max_duration="10ep",
        seed=0,
    )
    trainer.fit()
    predictions, targets = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval()["eval"], "predictions": predictions.squeeze(1), "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
