"""One of several processes that train with scheduled batch sizes; each writes its results to ``<folder>/<rank>.json``.

scheduled_program.py FOLDER [CHECKPOINTS OF OTHER PROCESSES]
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.distributed import ScheduledBatchSampler, get_global_rank
from composer.models import ComposerClassifier

SIZES = {"0ba": 2, "3ba": 4, "6ba": 8}
PLACES = ("ep0-ba2", "ep0-ba3", "ep0-ba4", "ep0-ba7", "ep1-ba8")


class Seen(Callback):
    """Stores the numbers of the samples of each batch."""

    def __init__(self):
        self.batches = []

    def batch_start(self, state, logger):
        self.batches.append([int(number) for number in state.batch[0][:, 0].tolist()])


def run(max_duration="2ep", workers=0, sizes=None, **options):
    """Train on 23 numbered samples; return the weights, and the samples of this process."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 3)).double()
    inputs = torch.randn(23, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs[:, 0] = torch.arange(23)
    data, seen = TensorDataset(inputs, inputs[:, 1:].argmax(dim=1)), Seen()
    sampler = ScheduledBatchSampler(data, sizes or SIZES, shuffle=True)
    model = ComposerClassifier(network, num_classes=3, train_metrics=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_sampler=sampler, num_workers=workers),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            max_duration=max_duration,
            callbacks=seen,
            device="cpu",
            seed=17,
            progress_bar=False,
            **options,
        ) as trainer:
            trainer.fit()
    weights = [number for one in model.parameters() for number in one.flatten().tolist()]
    messages = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    done = int(trainer.state.timestamp.batch) - len(seen.batches)
    return {"weights": weights, "batches": seen.batches, "done": done, "warnings": messages}


def main(folder, checkpoints=None):
    """Train, and resume at all places."""
    source = checkpoints or f"{folder}/saved"
    results = {}
    if checkpoints is None:
        results["full"] = run(save_folder=source, save_interval="1ba")
        results["six batches"] = run(max_duration="6ba", sizes={"0ba": 2, "3ba": 4})
        results["workers"] = run(workers=2, load_path=f"{source}/ep0-ba4")
        results["other"] = run(sizes={"0ba": 4}, load_path=f"{source}/ep0-ba4", max_duration="5ba")
    results |= {place: run(load_path=f"{source}/{place}") for place in PLACES}
    Path(folder, f"{get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
