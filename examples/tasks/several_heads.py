"""Regression with several heads: a loss, a weight and metrics for each of three measurements of patients."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, StackDataset, random_split
from torchmetrics import MeanAbsoluteError, R2Score

from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerMultiTask, ComposerRegressor


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    columns, progression = (torch.tensor(one).float() for one in load_diabetes(return_X_y=True))
    targets = StackDataset(progression=(progression - 152) / 77, ldl=columns[:, 5] * 20, glucose=columns[:, 9] * 20)
    data = StackDataset(columns[:, [0, 1, 2, 3, 4, 6, 7, 8]] * 20, targets)
    parts = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, batch_size=32, shuffle=part is parts[0]) for part in parts)
    torch.manual_seed(0)
    losses = {"progression": nn.MSELoss(), "ldl": nn.L1Loss(), "glucose": nn.HuberLoss()}
    metrics = {"MAE": MeanAbsoluteError(), "R2": R2Score()}
    tasks = {name: ComposerRegressor(nn.Linear(32, 1), [], metrics, loss_fn) for name, loss_fn in losses.items()}
    trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    model, log = ComposerMultiTask(trunk, tasks, weights={"glucose": 0.5}), InMemoryLogger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="10ep", loggers=log)
    trainer.fit()
    predictions, targets = trainer.predict(test, join=True, with_targets=True)
    logged = {name: values[-1][1] for name, values in log.data.items() if name.startswith("loss/train/")}
    return {"metrics": trainer.eval(test)["eval"], "predictions": predictions, "targets": targets, "logged": logged}


if __name__ == "__main__":
    print(main()["metrics"])
