"""A time series: forecast the next four values of a noisy sine from the last 24."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.models import ComposerRegressor


class Forecaster(nn.Module):
    """A recurrent network, which adds its forecast to the last value."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, series: Tensor) -> Tensor:
        """Return the next values ``(N, 4)`` for series ``(N, L)``."""
        return series[:, -1:] + self.out(self.recurrent(series.unsqueeze(2))[0][:, -1])


def main() -> dict:
    """Train on the past, evaluate and predict the rest; return what was computed."""
    torch.manual_seed(0)
    series = torch.linspace(0, 200, 1500).sin() + 0.1 * torch.randn(1500)
    past, rest = (part.unfold(0, 28, 1).split([24, 4], dim=1) for part in (series[:1200], series[1200:]))
    train = DataLoader(TensorDataset(*past), batch_size=64, shuffle=True)
    test = DataLoader(TensorDataset(*rest), batch_size=64)
    model = ComposerRegressor(Forecaster())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="5ep", seed=0)
    trainer.fit()
    predictions, targets = trainer.predict(test, join=True, with_targets=True)
    return {
        "metrics": trainer.eval(test)["eval"],
        "predictions": predictions,
        "targets": targets,
        "last": rest[0][:, -1:],
    }


if __name__ == "__main__":
    print(main()["metrics"])
