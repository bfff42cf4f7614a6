"""A table of numbers and a category: the progression of a disease from nine measurements and the sex."""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset, random_split

from composer import Trainer
from composer.models import ComposerRegressor


class Network(nn.Module):
    """Layers after standardized numbers ``(N, 9)`` and an embedding of the category ``(N,)``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed = nn.BatchNorm1d(9, affine=False), nn.Embedding(2, 4)
        self.layers = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, input: dict[str, Tensor]) -> Tensor:
        """Return predictions ``(N, 1)``."""
        return self.layers(torch.cat([self.norm(input["numbers"]), self.embed(input["sex"])], dim=1))


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    columns, progression = (torch.tensor(one).float() for one in load_diabetes(return_X_y=True, scaled=False))
    input = StackDataset(numbers=columns[:, [0, *range(2, 10)]], sex=columns[:, 1].long() - 1)
    data = StackDataset(input, progression / 100)
    parts = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, batch_size=32, shuffle=part is parts[0]) for part in parts)
    torch.manual_seed(0)
    model = ComposerRegressor(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="10ep", seed=0)
    trainer.fit()
    predictions, targets = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval(test)["eval"], "predictions": predictions.squeeze(1), "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
