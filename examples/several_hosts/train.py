"""Train on handwritten digits in any number of processes and hosts; run it again, and it resumes.

torchrun --nproc-per-node=2 train.py --save-folder=runs/digits
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer, distributed
from composer.algorithms import EMA, LabelSmoothing
from composer.models import ComposerClassifier


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-folder", required=True, help="a folder that all hosts share, or a URL like s3://…")
    parser.add_argument("--max-duration", default="20ep", help="how long to train")
    parser.add_argument("--global-batch-size", type=int, default=256, help="samples in a step of all processes")
    parser.add_argument("--dist-timeout", type=float, default=300.0, help="seconds that a process waits for the others")
    return parser.parse_args(arguments)


def train(settings: argparse.Namespace) -> Trainer:
    """Train from the newest checkpoint in the folder, or from the start."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    distributed.initialize_dist(device, timeout=settings.dist_timeout)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), num_classes=10)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(
            data,
            batch_size=settings.global_batch_size // distributed.get_data_world_size(),
            sampler=distributed.get_sampler(data, shuffle=True),
        ),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.003),
        max_duration=settings.max_duration,
        algorithms=[LabelSmoothing(0.1), EMA("20ba")],
        device=device,
        dist_timeout=settings.dist_timeout,
        run_name="digits",
        seed=17,
        save_folder=settings.save_folder,
        save_interval="5ba",
        save_num_checkpoints_to_keep=3,
        autoresume=True,
        progress_bar=False,
    )
    with trainer:
        trainer.fit()
    return trainer


if __name__ == "__main__":
    train(parse_arguments())
