"""Train in one, two and four processes, and resume in others; write weights, clock and metrics to ``<folder>/*.json``.

python world_sizes_program.py FOLDER
"""

import itertools
import sys
import warnings
from pathlib import Path

import torch
from sharded_program import in_group
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Callback, Trainer, distributed
from composer.algorithms import EMA, GradientClipping, SelectiveBackprop
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

SAMPLES, GLOBAL_BATCH = 46, 12  # the last global batch of an epoch has 10 samples
SEEN = {}
FSDP = {"parallelism_config": {"fsdp": {}}}
KINDS = {"ddp": {}, "fsdp": FSDP, "selective": {}, "selective, fsdp": FSDP}


def make_trainer(samples=SAMPLES, global_batch=GLOBAL_BATCH, max_duration="3ep", **options):
    """Return a trainer of a small network without dropout, with the same global batches in any number of processes."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = ComposerClassifier(network, num_classes=3, train_metrics=MulticlassAccuracy(3, average="micro"))
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    sampler = distributed.get_sampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=global_batch // distributed.get_world_size(), sampler=sampler)
    return Trainer(
        model=model,
        train_dataloader=options.pop("train_dataloader", loader),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration=max_duration,
        callbacks=options.pop("callbacks", None),
        algorithms=[EMA("2ba"), GradientClipping("norm", 0.5), *options.pop("selection", [])],
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
    return {
        "ddp": result_of(make_trainer(save_folder=f"{folder}/ddp", save_interval="1ba")),
        "fsdp": result_of(make_trainer(save_folder=f"{folder}/fsdp", save_interval="1ba", **FSDP)),
    }


def resume(world_size, folder):
    """Resume from the middle of the second epoch and after its last batch; return also the warnings."""
    found = {}
    for kind, options in {"ddp": {}, "fsdp": FSDP}.items():
        for place in ("ep1-ba6", "ep1-ba8"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer = make_trainer(load_path=f"{folder}/{kind}/{place}", **options)
                result = result_of(trainer)
            texts = [str(one.message) for one in caught if "processes, and" in str(one.message)]
            found[f"{kind}, {place}"] = {**result, "warnings": texts}
    return found


class Seen(Callback):
    """Stores the numbers of the samples of each epoch, and a draw of each batch, where no checkpoint restores them."""

    def batch_start(self, state, logger):
        numbers = state.batch[0][:, 0].tolist() if state.batch_counts else []
        SEEN["samples"].setdefault(int(state.timestamp.epoch), []).extend(int(number) for number in numbers)
        SEEN["draws"].append(torch.rand(()).item())


def numbered(world_size, folder, **options):
    """Train on numbered samples in this number of processes; return the clock, and what each process has seen."""
    numbers = torch.arange(SAMPLES, dtype=torch.float64)[:, None].expand(SAMPLES, 4)
    data = TensorDataset(numbers, torch.zeros(SAMPLES, dtype=torch.int64))
    SEEN.update(samples={}, draws=[])
    batch_size, drops = options.pop("global_batch") // world_size, options.pop("drop_last", False)
    loader = DataLoader(data, batch_size, sampler=distributed.get_sampler(data, shuffle=True), drop_last=drops)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another number of processes, which other tests compare
        trainer = make_trainer(train_dataloader=loader, callbacks=Seen(), **options)
        clock = result_of(trainer)["clock"]
    return {"clock": clock, **SEEN}


def begin_numbered(world_size, folder):
    """Stop after 24 samples of the first epoch, in two processes with batches of six."""
    return numbered(world_size, folder, global_batch=12, max_duration="2ba", save_folder=f"{folder}/numbered")


def resume_numbered(world_size, folder):
    """Resume with other batch sizes, with and without the last incomplete batch."""
    options = {"load_path": f"{folder}/numbered/latest", "max_duration": "2ep"}
    return {
        f"{size}, {drops}": numbered(world_size, folder, global_batch=size, drop_last=drops, **options)
        for size, drops in itertools.product((8, 12), (False, True))
    }


class Stream(IterableDataset):
    """The part of each process in the samples."""

    def __iter__(self):
        inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return iter([(one, 0) for one in inputs[distributed.get_global_rank() :: distributed.get_world_size()]])


def stream(world_size, folder):
    """Stop in an epoch of a stream with two processes, and resume with four; return the warnings."""
    options = {"train_dataloader": DataLoader(Stream(), batch_size=3)}
    if world_size == 2:
        options |= {"save_folder": f"{folder}/stream", "save_interval": "2ba", "max_duration": "2ba"}
    else:
        options |= {"load_path": f"{folder}/stream/ep0-ba2", "max_duration": "1ep"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result_of(make_trainer(**options))
    return [str(one.message) for one in caught if "processes, and" in str(one.message)]


def uneven(world_size, folder):
    """Train four epochs whose last global batch cannot be distributed evenly."""
    results = {}
    for kind, samples, global_batch in itertools.product(KINDS, (21, 22), (8, 20)):
        options = dict(KINDS[kind])
        if "selective" in kind:
            options["selection"] = [SelectiveBackprop(start=0.25, end=1, interrupt=0, scope="global")]
        trainer = make_trainer(samples, global_batch, "4ep", **options)
        results[f"{kind}, {samples}, {global_batch}"] = result_of(trainer)
    return results


def main(folder):
    in_group(2, folder, train)
    for world_size in (4, 1):
        in_group(world_size, folder, resume)
    in_group(2, folder, begin_numbered)
    for world_size in (4, 2, 1):
        in_group(world_size, folder, resume_numbered)
    for world_size in (2, 4):
        in_group(world_size, folder, stream)
    for world_size in (1, 2, 4):
        in_group(world_size, folder, uneven)
    Path(folder, "done").touch()


if __name__ == "__main__":
    main(sys.argv[1])
