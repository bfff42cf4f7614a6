"""Check the law of an exact resume for one loader, in one or several processes.

program.py FOLDER LOADER WORKERS STOP...
"""

import functools
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from composer import Trainer
from composer.diagnostics import check_exact_resume
from composer.distributed import get_sampler, initialize_dist
from composer.models import ComposerClassifier
from laws.loaders import LOADERS


def in_evaluation(trainer):
    """Stop in the first evaluation."""
    trainer.engine.on("eval_batch_end", lambda state, _: state.stop_training())


STOPS = {"evaluation": in_evaluation}
FOREIGN = [
    "train_dataloader cannot begin in the middle of an epoch",  # exact here, as these loaders repeat their batches
    "'set_vital' is deprecated",  # torchdata with torch 2.15
]


def make_trainer(make_loader, settings):
    """Return a run of two epochs with dropout, a metric and an evaluation after each epoch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    model = ComposerClassifier(network, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    evaluation = [(torch.full((4,), number / 8), number % 3) for number in range(8)]
    evaluation = DataLoader(evaluation, 2, sampler=get_sampler(evaluation))
    defaults = {"eval_dataloader": evaluation, "max_duration": "2ep", "seed": 5, "device": "cpu"}
    return Trainer(
        model=model, optimizers=optimizer, train_dataloader=make_loader(), progress_bar=False, **defaults | settings
    )


def check(folder, name, workers, stops, **settings):
    """Check the law for one loader."""
    make_loader = functools.partial(LOADERS[name], Path(folder), workers)
    check_exact_resume(
        lambda **ours: make_trainer(make_loader, settings | ours),
        stops=[STOPS.get(stop, stop) for stop in stops],
        folder=Path(folder, "runs"),
    )


if __name__ == "__main__":
    warnings.simplefilter("error")
    for text in FOREIGN:
        warnings.filterwarnings("ignore", f".*{text}")
    initialize_dist("cpu")
    check(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    print("exact")
