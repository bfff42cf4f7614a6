"""An ordinal target, levels in an order: in which fifth of the patients the progression of a disease is."""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassCohenKappa

from composer import Trainer
from composer.models import ComposerClassifier


class ProportionalOdds(nn.Module):
    """One score, and four ordered cuts: the probability of a level is that of a score between two cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.gaps = nn.Parameter(torch.tensor([-1.0, 1.0, 1.0, 1.0]))

    def forward(self, input: Tensor) -> Tensor:
        """Return the logarithms of the probabilities ``(N, 5)``."""
        cuts = torch.cat([self.gaps[:1], nn.functional.softplus(self.gaps[1:])]).cumsum(dim=0)
        below = nn.functional.pad((cuts - self.score(input)).sigmoid(), (1, 0), value=0.0)
        return nn.functional.pad(below, (0, 1), value=1.0).diff(dim=1).clamp(min=1e-6).log()


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    columns, progression = (torch.tensor(one).float() for one in load_diabetes(return_X_y=True))
    levels = torch.bucketize(progression, progression.quantile(torch.tensor([0.2, 0.4, 0.6, 0.8])))
    parts = random_split(TensorDataset(columns * 20, levels), [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, batch_size=32, shuffle=part is parts[0]) for part in parts)
    torch.manual_seed(0)
    model = ComposerClassifier(ProportionalOdds(), 5, val_metrics=MulticlassCohenKappa(5, weights="quadratic"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="10ep", seed=0)
    trainer.fit()
    scores, targets = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval(test)["eval"], "probabilities": scores.exp(), "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
