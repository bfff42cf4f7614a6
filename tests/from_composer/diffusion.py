"""Train a small denoising diffusion model on images, with averaged weights and a logger of samples."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError, Metric

from composer import Callback, ComposerModel, Evaluator, Logger, State, Time, Trainer
from composer.algorithms import EMA, GradientClipping
from composer.callbacks import CheckpointSaver, LRMonitor, NaNMonitor, RuntimeEstimator, SpeedMonitor
from composer.core import DataSpec, Event, TimeUnit
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.optim import ConstantWithWarmupScheduler, DecoupledAdamW
from composer.utils import dist, get_device, reproducibility
from composer.utils.iter_helpers import ensure_tuple
from composer.utils.misc import is_model_fsdp

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("diffusion"))
parser.add_argument("--max_duration", default="12ba")
parser.add_argument("--size", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)


class Shapes(Dataset):
    """Images of a bright square at a place that depends on the class."""

    def __init__(self, number, size):
        self.number, self.size = number, size

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        image = torch.full((1, self.size, self.size), -1.0)
        label = index % 4
        row, column = divmod(label, 2)
        half = self.size // 2
        image[:, row * half : row * half + half, column * half : column * half + half] = 1.0
        return {"image": image + 0.05 * torch.randn(image.shape), "label": label}


class Noising(nn.Module):
    """The forward process, with a linear schedule of the noise."""

    def __init__(self, steps):
        super().__init__()
        kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, steps), dim=0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("noise", (1 - kept).sqrt())

    def forward(self, images, noise, times):
        shape = (-1, 1, 1, 1)
        return self.signal[times].view(shape) * images + self.noise[times].view(shape) * noise


class Denoiser(nn.Module):
    def __init__(self, width, steps, classes):
        super().__init__()
        self.time, self.label = nn.Embedding(steps, width), nn.Embedding(classes + 1, width)
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, images, times, labels):
        hidden = self.enter(images) + (self.time(times) + self.label(labels))[:, :, None, None]
        return self.leave(hidden + self.middle(hidden))


class DiffusionModel(ComposerModel):
    """Predicts the noise in an image; some labels are dropped, for guidance without a classifier."""

    def __init__(self, width=16, steps=20, classes=4, dropped=0.1):
        super().__init__()
        self.network, self.noising = Denoiser(width, steps, classes), Noising(steps)
        self.steps, self.classes, self.dropped = steps, classes, dropped
        self.train_metrics = {"MeanSquaredError": MeanSquaredError()}
        self.val_metrics = {f"MeanSquaredError-{part}": MeanSquaredError() for part in ("early", "late")}
        self.generator = None

    def forward(self, batch):
        images, labels = batch["image"], batch["label"]
        noise = torch.randn(images.shape, generator=self.generator)
        times = torch.randint(self.steps, (len(images),), generator=self.generator)
        if self.training:
            labels = torch.where(torch.rand(len(labels)) < self.dropped, self.classes, labels)
        return self.network(self.noising(images, noise, times), times, labels), noise, times

    def loss(self, outputs, batch):
        predicted, noise, _ = outputs
        return F.mse_loss(predicted, noise)

    def eval_forward(self, batch, outputs=None):
        if outputs is not None:
            return outputs
        self.generator = torch.Generator().manual_seed(11)
        try:
            return self.forward(batch)
        finally:
            self.generator = None

    def get_metrics(self, is_train=False) -> dict[str, Metric]:
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch, outputs, metric):
        predicted, noise, times = outputs
        if metric is self.val_metrics["MeanSquaredError-early"]:
            chosen = times < self.steps // 2
        elif metric is self.val_metrics["MeanSquaredError-late"]:
            chosen = times >= self.steps // 2
        else:
            chosen = torch.ones_like(times, dtype=torch.bool)
        if chosen.any():
            metric.update(predicted[chosen], noise[chosen])

    @torch.no_grad()
    def generate(self, labels, size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn((len(labels), 1, size, size), generator=generator)
        for step in reversed(range(self.steps)):
            times = torch.full((len(labels),), step)
            noise = self.network(images, times, labels)
            clean = ((images - self.noising.noise[step] * noise) / self.noising.signal[step]).clamp(-1, 1)
            images = self.noising(clean, noise, times - 1) if step else clean
        return images


class LogSamples(Callback):
    """Generate images at the end of each evaluation, with the weights that are evaluated, and log them."""

    def __init__(self, size: int, labels=(0, 1, 2, 3)):
        self.size, self.labels = size, torch.tensor(labels)

    def eval_start(self, state: State, logger: Logger) -> None:
        model = state.model
        assert isinstance(model, DiffusionModel)
        assert not is_model_fsdp(model)
        images = model.generate(self.labels, self.size).add(1).div(2)
        logger.log_images(
            list(images), name="samples", channels_last=False, step=state.timestamp.batch.value, use_table=False
        )


class Gallery(LoggerDestination):
    """Keeps the images of a run, and writes them at its end."""

    def __init__(self, folder: Path):
        self.folder, self.images = folder, {}

    def log_images(self, images, name="Images", channels_last=False, step=None, masks=None, mask_class_labels=None,
                   use_table=True):  # fmt: skip
        self.images[step] = torch.stack([torch.as_tensor(image) for image in ensure_tuple(images)])

    def close(self, state: State, logger: Logger) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.images, self.folder / "samples.pt")


class GradientNorm(Callback):
    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH and state.timestamp.get(TimeUnit.BATCH) % Time.from_batch(4) == Time(
            0, "ba"
        ):
            norms = [p.grad.norm() for p in state.model.parameters() if p.grad is not None]
            logger.log_metrics({"gradients/norm": torch.stack(norms).norm().item()})


def loader(number, size, batch_size, shuffle):
    dataset = Shapes(number, size)
    sampler = dist.get_sampler(dataset, drop_last=shuffle, shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=shuffle)


def main(args):
    reproducibility.seed_all(5)
    model = DiffusionModel(steps=args.steps)
    optimizer = DecoupledAdamW(model.network.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-5)
    memory, gallery = InMemoryLogger(), Gallery(args.folder)
    evaluation = Evaluator(
        label="shapes",
        dataloader=DataSpec(
            loader(16, args.size, 8, shuffle=False), get_num_samples_in_batch=lambda b: len(b["label"])
        ),
        metric_names=list(model.get_metrics(is_train=False)),
        eval_interval="6ba",
    )
    trainer = Trainer(
        run_name="shapes",
        model=model,
        train_dataloader=loader(64, args.size, 8, shuffle=True),
        eval_dataloader=[evaluation],
        max_duration=args.max_duration,
        optimizers=optimizer,
        schedulers=ConstantWithWarmupScheduler(t_warmup="4ba"),
        algorithms=[
            EMA(half_life="3ba", update_interval="2ba", ema_start="2ba"),
            GradientClipping(clipping_type="norm", clipping_threshold=1.0),
        ],
        callbacks=[
            LogSamples(args.size),
            GradientNorm(),
            LRMonitor(),
            NaNMonitor(),
            SpeedMonitor(window_size=4),
            RuntimeEstimator(),
            CheckpointSaver(str(args.folder / "{run_name}"), save_interval="6ba", filename="ba{batch}.pt"),
        ],
        loggers=[memory, gallery],
        device=get_device("cpu"),
        device_train_microbatch_size=4,
        precision="fp32",
        seed=5,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return trainer, memory


if __name__ == "__main__":
    args = parser.parse_args()
    trainer, memory = main(args)
