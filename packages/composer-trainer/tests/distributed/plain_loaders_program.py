"""Train and evaluate in processes on loaders without a sampler, and on the same ones with a sampler."""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric

from composer import distributed as cd
from composer.core import Callback
from composer.models import ComposerModel
from composer.trainer import Trainer

DATA = TensorDataset(torch.arange(1.0, 15.0))


class Scale(ComposerModel):
    """Multiplies its inputs by a weight; a metric is the mean of the inputs."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * batch[0]

    def loss(self, outputs, _):
        return outputs.square().mean()

    def get_metrics(self, is_train):
        return {} if is_train else {"mean": MeanMetric()}

    def update_metric(self, batch, _, metric):
        metric.update(batch[0])


class Samples(Callback):
    """Collects the samples that this process trains on, by epoch."""

    def __init__(self):
        self.epochs = {}

    def after_dataloader(self, state, _):
        self.epochs.setdefault(int(state.timestamp.epoch), []).extend(state.batch[0].tolist())


def train(loader, eval_loader=None, **options):
    samples, model = Samples(), Scale()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
        train_dataloader=loader,
        eval_dataloader=eval_loader,
        callbacks=samples,
        seed=3,
        device="cpu",
        progress_bar=False,
        **{"max_duration": "2ep"} | options,
    )
    trainer.fit()
    return trainer, {"samples": samples.epochs, "weight": model.weight.item()}


def with_sampler(*, shuffle, **options):
    return DataLoader(DATA, sampler=cd.get_sampler(DATA, shuffle=shuffle), **options)


def same_loader_again():
    """Train in two calls of fit(), of which the second continues in the epoch, with the loader of the first one."""
    loader = DataLoader(DATA, 2, shuffle=True)
    trainer, result = train(loader, max_duration="2ba")
    trainer.fit(train_dataloader=loader, duration="2ba")
    return result | {"own": type(loader.sampler).__name__}


def error_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def weighted(folder):
    """Draw three of the samples, and continue in the epoch from a checkpoint."""

    def loader():
        weights = [1.0 if sample < 3 else 0.0 for sample in range(14)]
        return DataLoader(DATA, 4, sampler=cd.DistributedWeightedSampler(weights, 13))

    _, complete = train(loader(), save_folder=f"{folder}/run", save_interval="1ba", save_num_checkpoints_to_keep=-1)
    _, resumed = train(loader(), load_path=f"{folder}/run/ep0-ba1")
    return complete | {"resumed": resumed["weight"]}


def predictions(count):
    """Predict as many samples as DATA has, or fewer, in batches of two; each has its row as the target."""
    rows = TensorDataset(DATA.tensors[0][:count], torch.arange(count))
    trainer, kind = Trainer(model=Scale(), device="cpu", progress_bar=False), {"join": True, "with_targets": True}
    joined = trainer.predict(DataLoader(rows, 2), **kind)
    sampled = trainer.predict(DataLoader(rows, 2, sampler=cd.get_sampler(rows)), **kind)
    return [[part.tolist() for part in one] for one in (joined, sampled)]


def scheduled(loader, steps, *, every_batch):
    """Return the warnings of a training of 2 epochs with a schedule of so many steps."""
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    settings = {"optimizers": optimizer, "schedulers": schedule, "step_schedulers_every_batch": every_batch}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(
            model=model, train_dataloader=loader, max_duration="2ep", device="cpu", progress_bar=False, **settings
        ).fit()
    return [str(one.message) for one in caught if "steps" in str(one.message)]


def main(folder):
    warnings.simplefilter("error")
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("composer.distributed.samplers").addHandler(handler)
    cd.initialize_dist("cpu", timeout=60)
    trainer, shuffled = train(DataLoader(DATA, 3, shuffle=True), DataLoader(DATA, 4))
    metrics = {
        "of the training": trainer.state.eval_metric_values["mean"].item(),
        "of eval()": trainer.eval(DataLoader(DATA, 4))["eval"]["mean"].item(),
    }
    results = {
        "shuffled": shuffled,
        "logged": logged[:],
        "metrics": metrics,
        "shuffled with a sampler": train(with_sampler(shuffle=True, batch_size=3))[1],
        "sequential": train(DataLoader(DATA, 3, drop_last=True))[1],
        "sequential with a sampler": train(with_sampler(shuffle=False, batch_size=3, drop_last=True))[1],
        "orders": [
            train(DataLoader(DATA, 3, shuffle=True, generator=torch.Generator().manual_seed(seed)))[1]["samples"]
            for seed in (5, 6)
        ],
        "again": same_loader_again(),
        "weighted": weighted(folder),
        "errors": {
            type(sampler).__name__: error_of(lambda sampler=sampler: train(DataLoader(DATA, 3, sampler=sampler)))
            for sampler in (WeightedRandomSampler([1.0] * 14, 14), SubsetRandomSampler(range(4)))
        },
        "predictions": {count: predictions(count) for count in (14, 13, 3, 1)},
        "scheduled": {
            "split": scheduled(DataLoader(DATA, 2), 14, every_batch=True),
            "each epoch": scheduled(DataLoader(DATA, 2), 14, every_batch=None),
            "divided": scheduled(DataLoader(DATA, 2), 7, every_batch=True),
            "with a sampler": scheduled(with_sampler(shuffle=False, batch_size=2), 14, every_batch=True),
        },
        "subset": train(DataLoader(Subset(DATA, range(4)), 2))[1],
    }
    Path(folder, f"{cd.get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
