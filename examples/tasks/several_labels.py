"""Several labels for each sample: whether a digit is even, at least five, or has a loop; with tuned thresholds."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional.classification import multilabel_f1_score

from composer import Trainer
from composer.models import ComposerClassifier


def main() -> dict:
    """Train, choose a threshold for each label, evaluate and predict; return what was computed."""
    pixels, digits = (torch.tensor(one) for one in load_digits(return_X_y=True))
    labels = torch.stack([digits % 2 == 0, digits >= 5, torch.isin(digits, torch.tensor([0, 6, 8, 9]))], dim=1).long()
    data = TensorDataset(pixels.float() / 16, labels)
    parts = random_split(data, [0.7, 0.15, 0.15], generator=torch.Generator().manual_seed(0))
    train, valid, test = (DataLoader(part, batch_size=64, shuffle=part is parts[0]) for part in parts)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    positive = labels[parts[0].indices].float().mean(dim=0)
    model = ComposerClassifier(network, loss_fn=nn.BCEWithLogitsLoss(pos_weight=(1 - positive) / positive))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="5ep", seed=0)
    trainer.fit()
    scores, targets = trainer.predict(valid, join=True, with_targets=True)
    candidates = torch.linspace(0.05, 0.95, 19).tolist()
    f1 = torch.stack([multilabel_f1_score(scores.sigmoid(), targets, 3, at, average="none") for at in candidates])
    thresholds = torch.tensor(candidates)[f1.argmax(dim=0)]
    scores, targets = trainer.predict(test, join=True, with_targets=True)
    predicted = (scores.sigmoid() > thresholds).long()
    metrics = trainer.eval(test)["eval"] | {"tuned": multilabel_f1_score(predicted, targets, 3)}
    return {"metrics": metrics, "scores": scores, "predicted": predicted, "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
