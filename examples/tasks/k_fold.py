"""K-fold cross-validation: one function trains on a fold, and the predictions of all folds are joined."""

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from composer import Trainer
from composer.distributed import all_gather_object
from composer.models import ComposerRegressor


def train_and_predict(train: Subset, test: Subset) -> tuple[dict, Tensor]:
    """Return the metrics of the second part, and its predictions, after a training on the first."""
    torch.manual_seed(0)
    model = ComposerRegressor(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer, loader = torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(train, batch_size=32, shuffle=True)
    with Trainer(model=model, train_dataloader=loader, optimizers=optimizer, max_duration="10ep", seed=0) as trainer:
        trainer.fit()
        rows = DataLoader(test, batch_size=64)
        metrics, parts = trainer.eval(rows)["eval"], all_gather_object(trainer.predict(rows, join=True).squeeze(1))
    predictions = torch.empty(len(test))
    for rank, part in enumerate(parts):  # in several processes each has predicted the rows rank, rank + n, ...
        predictions[rank :: len(parts)] = part
    return metrics, predictions


def main() -> dict:
    """Train on five folds; return the metrics of each, and a prediction for each row by a model without it."""
    columns, progression = (torch.tensor(one).float() for one in load_diabetes(return_X_y=True))
    data = TensorDataset(columns * 20, (progression - progression.mean()) / progression.std())
    metrics, predictions = [], torch.full_like(progression, torch.nan)
    for train, test in KFold(5, shuffle=True, random_state=0).split(columns):
        found, predictions[test] = train_and_predict(Subset(data, train), Subset(data, test))
        metrics.append(found)
    return {"metrics": metrics, "predictions": predictions, "targets": data.tensors[1]}


if __name__ == "__main__":
    print(main()["metrics"])
