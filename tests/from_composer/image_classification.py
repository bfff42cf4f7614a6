"""Train a small ResNet on images in the format of CIFAR-10, with a recipe of algorithms."""

import argparse
import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import composer.functional as cf
from composer import DataSpec, Evaluator, Time, Trainer
from composer.algorithms import EMA, BlurPool, ChannelsLast, CutOut, LabelSmoothing, MixUp, ProgressiveResizing
from composer.callbacks import CheckpointSaver, LRMonitor, MemoryMonitor, SpeedMonitor
from composer.callbacks.early_stopper import EarlyStopper
from composer.loggers import InMemoryLogger
from composer.loss import soft_cross_entropy
from composer.models.tasks import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW
from composer.optim.scheduler import ComposerScheduler
from composer.utils import dist, ensure_tuple, get_device, module_surgery, reproducibility

logging.basicConfig(level=logging.INFO)

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="A file of images and labels, as torch.save writes it.")
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--max_duration", default="2ep")
parser.add_argument("--save_folder", default="checkpoints")
parser.add_argument("--seed", type=int, default=17)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


def build_model(num_classes):
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, stride=2, bias=False),
        Residual(16),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
    return ComposerClassifier(
        module=network,
        num_classes=num_classes,
        train_metrics=MulticlassAccuracy(num_classes=num_classes, average="micro"),
        val_metrics=MulticlassAccuracy(num_classes=num_classes, average="micro"),
        loss_fn=soft_cross_entropy,
    )


def build_dataspec(images, labels, batch_size, is_train):
    dataset = TensorDataset(images, labels)
    sampler = dist.get_sampler(dataset, drop_last=is_train, shuffle=is_train)
    return DataSpec(DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=is_train))


class HalvedCosine(ComposerScheduler):
    def __init__(self, t_warmup, alpha_f):
        self.cosine = CosineAnnealingWithWarmupScheduler(t_warmup=t_warmup, alpha_f=alpha_f)

    def __call__(self, state, ssr=1.0):
        return self.cosine(state, ssr) * 0.5 ** (state.timestamp.epoch.value // 10)


def main(args):
    reproducibility.configure_deterministic_mode()
    reproducibility.seed_all(args.seed)
    device = get_device("cpu")
    dist.initialize_dist(device, timeout=60)

    images, labels = torch.load(args.data)
    split = len(images) * 3 // 4
    batch_size = args.batch_size // dist.get_world_size()
    train = build_dataspec(images[:split], labels[:split], batch_size, is_train=True)
    evaluation = build_dataspec(images[split:], labels[split:], batch_size, is_train=False)

    model = build_model(num_classes=10)
    print("convolutions:", module_surgery.count_module_instances(model, nn.Conv2d))
    optimizer = DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    cf.apply_channels_last(model)
    logger = InMemoryLogger()

    trainer = Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=Evaluator(label="test", dataloader=evaluation, metric_names=["MulticlassAccuracy"]),
        eval_interval="1ep",
        max_duration=Time.from_timestring(args.max_duration),
        optimizers=optimizer,
        schedulers=[HalvedCosine(t_warmup="2ba", alpha_f=0.01)],
        algorithms=ensure_tuple(
            [
                BlurPool(min_channels=8),
                ChannelsLast(),
                CutOut(num_holes=1, length=0.25),
                EMA(half_life="10ba", update_interval="1ba"),
                LabelSmoothing(smoothing=0.1),
                MixUp(alpha=0.2),
                ProgressiveResizing(initial_scale=0.5, size_increment=4),
            ]
        ),
        callbacks=[
            LRMonitor(),
            SpeedMonitor(window_size=2),
            EarlyStopper("MulticlassAccuracy", "test", patience="5ep"),
            CheckpointSaver(args.save_folder, save_interval="1ep", overwrite=True),
        ]
        + ([MemoryMonitor()] if torch.cuda.is_available() else []),
        loggers=[logger],
        device=device,
        precision="fp32",
        seed=args.seed,
        progress_bar=False,
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        print("rates:", logger.get_timeseries("lr-DecoupledSGDW/group0")["lr-DecoupledSGDW/group0"])
        print("accuracy:", trainer.state.eval_metric_values["MulticlassAccuracy"])
    dist.barrier()
    return trainer, logger


if __name__ == "__main__":
    trainer, logger = main(parser.parse_args())
