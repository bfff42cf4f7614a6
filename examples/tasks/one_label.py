"""One label for each sample: which digit an image shows."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from composer import Trainer
from composer.models import ComposerClassifier


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(train, batch_size=64, shuffle=True),
        eval_dataloader=DataLoader(test, batch_size=100),
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
        max_duration="5ep",
        seed=0,
    )
    trainer.fit()
    scores, targets = trainer.predict(DataLoader(test, batch_size=100), join=True, with_targets=True)
    return {"metrics": trainer.eval()["eval"], "probabilities": scores.softmax(dim=1), "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
