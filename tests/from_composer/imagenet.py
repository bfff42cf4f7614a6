"""Train a ResNet with the medium recipe for ImageNet, in three phases of sizes of images."""

import argparse
import logging
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms
from torchvision.models import resnet

from composer import DataSpec, Time, Trainer
from composer.algorithms import (
    EMA,
    SAM,
    BlurPool,
    ChannelsLast,
    ColOut,
    LabelSmoothing,
    MixUp,
    ProgressiveResizing,
)
from composer.callbacks import CheckpointSaver, LRMonitor, OptimizerMonitor, SpeedMonitor
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.loss import binary_cross_entropy_with_logits
from composer.metrics import CrossEntropy
from composer.models.tasks import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW
from composer.utils import dist

parser = argparse.ArgumentParser()
parser.add_argument("--recipe_name", default="medium", choices=["mild", "medium", "hot"])
parser.add_argument("--train_crop_size", type=int, default=28)
parser.add_argument("--eval_resize_size", type=int, default=40)
parser.add_argument("--eval_crop_size", type=int, default=32)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--learning_rate", type=float, default=0.5)
parser.add_argument("--t_warmup", default="2ba")
parser.add_argument("--max_duration", default="3ep")
parser.add_argument("--save_checkpoint_dir", default="checkpoints/{run_name}")
parser.add_argument("--load_checkpoint_path")
parser.add_argument(
    "--device_train_microbatch_size", type=lambda text: text if text == "auto" else int(text), default=8
)

MEAN, STD = (0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255)


class Pictures(Dataset):
    """Pictures of a few classes, drawn from their number."""

    def __init__(self, number: int, classes: int, transform: Callable):
        self.number, self.classes, self.transform = number, classes, transform

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int):
        label = index % self.classes
        generator = torch.Generator().manual_seed(index)
        picture = torch.randint(0, 128, (3, 48, 48), generator=generator, dtype=torch.uint8)
        picture[label % 3] += 127
        return self.transform(transforms.functional.to_pil_image(picture)), label


def collate(samples):
    pictures, labels = zip(*samples, strict=True)
    batch = torch.stack([transforms.functional.pil_to_tensor(picture) for picture in pictures])
    return batch.contiguous(memory_format=torch.channels_last), torch.tensor(labels)


class Normalize:
    """Normalize the pixels of a batch on its device."""

    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))

    def __call__(self, batch):
        pictures, labels = batch
        mean, std = self.mean.to(pictures.device), self.std.to(pictures.device)
        return (pictures.float() - mean) / std, labels


def build_dataspec(number: int, args, *, is_train: bool) -> DataSpec:
    if is_train:
        crop = transforms.RandomResizedCrop(args.train_crop_size, scale=(0.35, 1.0), ratio=(0.75, 4 / 3))
        transform = transforms.Compose([crop, transforms.RandomHorizontalFlip()])
    else:
        resize, crop = transforms.Resize(args.eval_resize_size), transforms.CenterCrop(args.eval_crop_size)
        transform = transforms.Compose([resize, crop])
    dataset = Pictures(number, 5, transform)
    sampler = dist.get_sampler(dataset, drop_last=is_train, shuffle=is_train)
    size = args.batch_size // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=is_train, collate_fn=collate)
    return DataSpec(dataloader=loader, batch_transforms=Normalize(MEAN, STD))


def weight_init(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight)
    if isinstance(module, nn.BatchNorm2d):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.bias, -math.log(module.out_features))


def build_model(classes: int, loss_name: str) -> ComposerClassifier:
    network = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes, width_per_group=64)
    network.apply(weight_init)
    accuracy = MulticlassAccuracy(num_classes=classes, average="micro")
    return ComposerClassifier(
        network,
        train_metrics=MetricCollection([accuracy.clone()]),
        val_metrics=MetricCollection([CrossEntropy(), accuracy.clone()]),
        loss_fn=binary_cross_entropy_with_logits if loss_name == "binary_cross_entropy" else nn.CrossEntropyLoss(),
    )


def build_recipe(name: str):
    common = [BlurPool(), ChannelsLast()]
    recipes = {
        "mild": [
            *common,
            EMA(half_life="4ba", update_interval="4ba"),
            ProgressiveResizing(initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2),
            LabelSmoothing(smoothing=0.08),
        ],
        "medium": [
            *common,
            EMA(half_life="3ba", update_interval="2ba"),
            ProgressiveResizing(initial_scale=0.5, delay_fraction=0.3, finetune_fraction=0.2, size_increment=4),
            LabelSmoothing(smoothing=0.1),
            MixUp(alpha=0.2),
        ],
        "hot": [
            *common,
            ColOut(p_col=0.05, p_row=0.05, batch=True),
            SAM(rho=0.5, interval=4),
        ],
    }
    return recipes[name]


class FixResolution(Callback):
    """Train the classifier alone, on pictures of the size of the evaluation, in the last part of the training."""

    def __init__(self, start: str, size: int):
        self.start, self.size = Time.from_timestring(start), size
        self.began_at = None

    def epoch_start(self, state: State, logger: Logger) -> None:
        if self.began_at is not None or state.get_elapsed_duration() < self.start:
            return
        self.began_at = state.timestamp.batch.value
        for name, parameter in state.model.named_parameters():
            parameter.requires_grad_(name.startswith("module.fc"))
        logger.log_hyperparameters({"fix_resolution/start": self.began_at})

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.began_at is not None:
            pictures, labels = state.batch
            resized = nn.functional.interpolate(pictures, self.size, mode="bilinear", antialias=True)
            state.batch = (resized, labels)


def main(args):
    logging.basicConfig(level=logging.WARNING)
    train, evaluation = (build_dataspec(number, args, is_train=number == 64) for number in (64, 20))
    model = build_model(5, "binary_cross_entropy" if args.recipe_name != "mild" else "cross_entropy")
    optimizer = DecoupledSGDW(model.parameters(), lr=args.learning_rate, momentum=0.875, weight_decay=5e-5)
    fix = FixResolution("0.6dur", args.eval_crop_size)
    memory = InMemoryLogger()
    trainer = Trainer(
        run_name=f"resnet-{args.recipe_name}",
        model=model,
        train_dataloader=train,
        eval_dataloader=evaluation,
        eval_interval="1ep",
        optimizers=optimizer,
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup=args.t_warmup, t_max="1dur", alpha_f=0.0),
        algorithms=build_recipe(args.recipe_name),
        loggers=memory,
        max_duration=args.max_duration,
        callbacks=[
            SpeedMonitor(window_size=50),
            LRMonitor(),
            OptimizerMonitor(),
            CheckpointSaver(folder=args.save_checkpoint_dir, save_interval="1ep", num_checkpoints_to_keep=1),
            fix,
        ],
        load_path=args.load_checkpoint_path,
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=args.device_train_microbatch_size,
        seed=17,
        progress_bar=False,
    )
    trainer.fit()
    return trainer, memory, fix


if __name__ == "__main__":
    trainer, memory, fix = main(parser.parse_args())
