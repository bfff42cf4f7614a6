"""Train with an algorithm, a callback, a logger and a model of the program's own."""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from composer import Algorithm, Callback, ComposerModel, Event, Logger, State, Time, Timestamp, TimeUnit, Trainer
from composer.algorithms.mixup.mixup import mixup_batch
from composer.core import Precision, get_precision_context
from composer.core.time import ensure_time
from composer.core.types import PyTorchScheduler
from composer.devices import DeviceCPU
from composer.loggers.logger_destination import LoggerDestination
from composer.profiler.profiler_schedule import cyclic_schedule
from composer.utils import module_surgery
from composer.utils.batch_helpers import batch_get, batch_set
from composer.utils.iter_helpers import ensure_tuple

parser = argparse.ArgumentParser()
parser.add_argument("--duration", default="12ba")
parser.add_argument("--interval", default="4ba")


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.train_metric, self.eval_metric = MeanSquaredError(), MeanSquaredError()

    def forward(self, batch):
        inputs, _ = batch
        return self.network(inputs)

    def loss(self, outputs, batch, *args, **kwargs):
        _, targets = batch
        if self.logger is not None:
            self.logger.log_metrics({"outputs/largest": outputs.abs().max().item()})
        return F.mse_loss(outputs, targets)

    def get_metrics(self, is_train=False):
        metric = self.train_metric if is_train else self.eval_metric
        return {"MeanSquaredError": metric}

    def update_metric(self, batch, outputs, metric):
        _, targets = batch
        metric.update(outputs, targets)


class SmoothActivations(Algorithm):
    """Replace ReLU by GELU at the start, and blend the samples of each batch."""

    def __init__(self, alpha: float = 0.2):
        self.alpha = alpha
        self.num_replaced = 0

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.AFTER_DATALOADER)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            replaced = module_surgery.replace_module_classes(
                state.model, policies={nn.ReLU: lambda module, index: nn.GELU()}, optimizers=state.optimizers
            )
            self.num_replaced = len(replaced)
            logger.log_hyperparameters({"smooth_activations/num_replaced": self.num_replaced})
            return
        inputs, targets = batch_get(state.batch, [0, 1])
        mixed, permuted, mixing = mixup_batch(inputs, targets, alpha=self.alpha)
        state.batch = batch_set(state.batch, 0, mixed)
        state.batch_set_item(1, (1 - mixing) * targets + mixing * permuted)


class GradientNorms(Callback):
    """Log the norm of the gradients at an interval, and stop if it is not finite."""

    def __init__(self, interval: str):
        self.interval = ensure_time(interval, TimeUnit.BATCH)
        self.times: list[int] = []

    def after_backward(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.get(self.interval.unit)) % int(self.interval) != 0:
            return
        norm = torch.stack([p.grad.norm() for p in state.model.parameters() if p.grad is not None]).norm()
        logger.log_metrics({"gradients/norm": norm.item()})
        self.times.append(state.timestamp.batch.value)
        if not torch.isfinite(norm):
            state.stop_training()

    def eval_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics({"progress": float(state.get_elapsed_duration())})


class Lines(LoggerDestination):
    def __init__(self):
        self.lines: list[tuple[int | None, str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.lines.extend((step, name, value) for name, value in metrics.items())


def shorter(duration: Time[int], by: Time[int]) -> Time[int]:
    """Return a shorter time, or the time itself if the units differ."""
    try:
        return duration + -by
    except RuntimeError:
        return duration


def scheduler(optimizer) -> PyTorchScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def main(args):
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    norms, lines, algorithm = GradientNorms(args.interval), Lines(), SmoothActivations(alpha=0.1)
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=data,
        eval_interval=shorter(Time(1, TimeUnit.EPOCH), by=ensure_time(args.interval, TimeUnit.BATCH)),
        max_duration=args.duration,
        optimizers=optimizer,
        schedulers=scheduler(optimizer),
        step_schedulers_every_batch=True,
        algorithms=ensure_tuple(algorithm),
        callbacks=[norms],
        loggers=[lines],
        device=DeviceCPU(),
        precision=Precision.FP32,
        progress_bar=False,
        seed=3,
    )
    trainer.fit()
    assert isinstance(trainer.state.timestamp, Timestamp)
    with get_precision_context(Precision.FP32), torch.no_grad():
        predictions = trainer.predict(DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=32))
    return trainer, norms, lines, torch.cat(predictions)


if __name__ == "__main__":
    assert cyclic_schedule(wait=1) is not None
    trainer, norms, lines, predictions = main(parser.parse_args())
