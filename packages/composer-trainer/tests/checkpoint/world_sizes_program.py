"""Train in two processes, and resume in four and in one; write weights, clock and metrics to ``<folder>/*.json``.

python world_sizes_program.py FOLDER
"""

import sys
import warnings
from pathlib import Path

import torch
from sharded_program import in_group
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer, distributed
from composer.algorithms import EMA, GradientClipping
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

SAMPLES, GLOBAL_BATCH = 46, 12  # the last global batch of an epoch has 10 samples


def make_trainer(**options):
    """Return a trainer of a small network without dropout; a global batch has 12 samples in any number of processes."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = ComposerClassifier(network, num_classes=3, train_metrics=MulticlassAccuracy(3, average="micro"))
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    sampler = distributed.get_sampler(data, shuffle=True)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=GLOBAL_BATCH // distributed.get_world_size(), sampler=sampler),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="3ep",
        algorithms=[EMA("2ba"), GradientClipping("norm", 0.5)],
        loggers=InMemoryLogger(),
        run_name="run",
        device="cpu",
        seed=17,
        progress_bar=False,
        **options,
    )


def result_of(trainer):
    """Return weights, clock and metrics at the end of a training."""
    trainer.fit()
    logged = trainer.logger.destinations[0].data["metrics/train/MulticlassAccuracy"]
    parameters = trainer.state.model.parameters()
    weights = [getattr(one, "full_tensor", lambda one=one: one)().flatten().tolist() for one in parameters]
    clock = trainer.state.timestamp
    trainer.close()
    return {
        "weights": [number for each in weights for number in each],
        "clock": [int(clock.batch), int(clock.sample), int(clock.epoch)],
        "metrics": [float(value) for _, value in logged][-2:],
    }


def train(world_size, folder):
    """Train without interruption, with and without sharding."""
    sharded = {"parallelism_config": {"fsdp": {}}, "save_folder": f"{folder}/fsdp", "save_interval": "1ba"}
    return {
        "ddp": result_of(make_trainer(save_folder=f"{folder}/ddp", save_interval="1ba")),
        "fsdp": result_of(make_trainer(**sharded)),
    }


def resume(world_size, folder):
    """Resume from the middle of the second epoch and after its last batch; return also the warnings."""
    found = {}
    for kind, options in {"ddp": {}, "fsdp": {"parallelism_config": {"fsdp": {}}}}.items():
        for place in ("ep1-ba6", "ep1-ba8"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer = make_trainer(load_path=f"{folder}/{kind}/{place}", **options)
                result = result_of(trainer)
            texts = [str(one.message) for one in caught if "processes, and" in str(one.message)]
            found[f"{kind}, {place}"] = {**result, "warnings": texts}
    return found


def main(folder):
    in_group(2, folder, train)
    for world_size in (4, 1):
        in_group(world_size, folder, resume)
    Path(folder, "done").touch()


if __name__ == "__main__":
    main(sys.argv[1])
