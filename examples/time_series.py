"""Forecast the next values of several channels from windows of a time series.

    python -m pip install matplotlib scikit-learn
    python examples/time_series.py
    python examples/time_series.py --csv sensors.csv --length 48 --horizon 12

Without ``--csv`` the series is matplotlib's sample of an electroencephalogram: four channels, 800 steps. The parts for
training, validation and test follow each other in time, and means and deviations are those of the first. The baselines
are the last value of the window and a linear autoregression.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.models import ComposerRegressor
from composer.optim import CosineAnnealingWithWarmupScheduler


def read_series(path: str | None = None) -> Tensor:
    """Return a series ``(T, C)``: the columns of a CSV file with a header, in the order of time, or the sample."""
    if path is not None:
        return torch.tensor(np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2), dtype=torch.float32)
    with get_sample_data("eeg.dat") as file:
        return torch.tensor(np.frombuffer(file.read()).reshape(-1, 4), dtype=torch.float32)


class Scaler:
    """Makes channels comparable by their means and deviations in the training part, and reverses it."""

    def __init__(self, train_part: Tensor) -> None:
        self.mean, self.std = train_part.mean(dim=0), train_part.std(dim=0) + 1e-6

    def scale(self, series: Tensor) -> Tensor:
        """Return a series ``(T, C)`` with mean 0 and deviation 1 in the training part."""
        return (series - self.mean) / self.std

    def restore(self, forecast: Tensor) -> Tensor:
        """Return forecasts ``(N, C, H)`` in the units of the series."""
        return forecast * self.std[:, None] + self.mean[:, None]


def cut_windows(part: Tensor, length: int, horizon: int) -> TensorDataset:
    """Return all windows ``(C, length)`` of a part ``(T, C)``, with the ``(C, horizon)`` that follow."""
    windows = part.unfold(0, length + horizon, 1)  # a view (N, C, length + horizon)
    return TensorDataset(windows[..., :length], windows[..., length:])


def make_windows(series: Tensor, length: int, horizon: int) -> tuple[list[TensorDataset], Scaler]:
    """Return windows of the first 60 % of the time, the next 20 % and the last 20 %, none in two parts."""
    ends = len(series) * 3 // 5, len(series) * 4 // 5
    parts = series.tensor_split(ends)
    scaler = Scaler(parts[0])
    return [cut_windows(scaler.scale(part), length, horizon) for part in parts], scaler


class Network(nn.Module):
    """A convolution over time, whose result is added to the last value: the network learns the changes."""

    def __init__(self, channels: int, length: int, horizon: int, width: int = 32) -> None:
        super().__init__()
        self.horizon = horizon
        self.layers = nn.Sequential(
            nn.Conv1d(channels, width, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(width * length, channels * horizon),
        )

    def forward(self, windows: Tensor) -> Tensor:
        """Return forecasts ``(N, C, H)`` for windows ``(N, C, L)``."""
        changes = self.layers(windows).unflatten(1, (windows.shape[1], self.horizon))
        return windows[..., -1:] + changes


def run(series: Tensor, length: int, horizon: int, duration: str = "12ep") -> dict[str, Tensor]:
    """Train, and return the mean absolute errors ``(C,)`` in the last part, in the units of the series."""
    (train, validation, test), scaler = make_windows(series, length, horizon)
    torch.manual_seed(0)
    model = ComposerRegressor(Network(series.shape[1], length, horizon))
    with Trainer(
        model=model,
        train_dataloader=DataLoader(train, batch_size=32, shuffle=True),
        eval_dataloader=DataLoader(validation, batch_size=256),
        eval_interval="0.25dur",
        optimizers=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        max_duration=duration,
        seed=0,
        progress_bar=False,
    ) as trainer:
        print(trainer.fit())
        forecast, truth = trainer.predict(DataLoader(test, batch_size=256), join=True, with_targets=True)

    inputs, targets = train.tensors
    linear = Ridge(1.0).fit(inputs.flatten(1), targets.flatten(1)).predict(test.tensors[0].flatten(1))
    forecasts = {
        "last value": test.tensors[0][..., -1:].expand_as(truth),
        "linear autoregression": torch.tensor(linear).view_as(truth),
        "network": forecast,
    }
    restored = {name: scaler.restore(values) for name, values in forecasts.items()}
    return {name: (values - scaler.restore(truth)).abs().mean(dim=(0, 2)) for name, values in restored.items()}


def main() -> None:
    """Train on a series and print the errors of each channel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="FILE", help="columns of numbers with a header (default: the sample)")
    parser.add_argument("--length", type=int, default=8, help="steps of a window (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=2, help="steps to forecast (default: %(default)s)")
    parser.add_argument("--duration", default="12ep", help="of the training (default: %(default)s)")
    options = parser.parse_args()
    errors = run(read_series(options.csv), options.length, options.horizon, options.duration)
    print("\nMean absolute error in the last 20 % of the time")
    for name, of_channels in errors.items():
        print(f"  {name:22} {of_channels.mean():.3f}   by channel {[round(one, 3) for one in of_channels.tolist()]}")


if __name__ == "__main__":
    main()
