"""The Trainer in four processes that torchrun starts; each writes its results into ``<folder>/<rank>.json``."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchmetrics.classification import MulticlassAccuracy

from composer import Callback, Trainer
from composer import distributed as cd
from composer.core import DataSpec, Evaluator
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

SAMPLES = 22


class Table(nn.Module):
    """One number per sample. Trained by SGD with learning rate 1, each batch subtracts 1 / (samples in the batch)."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, batch):
        return self.numbers[batch]

    def loss(self, outputs, batch):
        return outputs.mean() + batch.double().mean()


class Recorder(Callback):
    """Records the decrease of the numbers in each epoch, and the samples of this process's first batch."""

    def __init__(self):
        self.losses, self.first = [], None

    def batch_start(self, state, logger):
        self.first = self.first or state.batch.tolist()

    def epoch_end(self, state, logger):
        before = torch.tensor(self.losses, dtype=torch.float64).sum(dim=0)
        self.losses.append((-state.model.numbers.detach() - before).tolist())


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Terms(Table):
    """Counts the elements of its loss in batches whose numbers, from 1 on, ``counts`` accepts."""

    def __init__(self, counts):
        super().__init__()
        self.counts, self.batches = counts, 0

    def count_loss_terms(self, batch):
        self.batches += 1
        return torch.tensor(len(batch)) if self.counts(self.batches) else None


def make_trainer(loader, *, max_duration="2ep", seed=17, on="cpu", kind=Table, **options):
    with torch.device(on):
        model, recorder = kind(), Recorder()
    return Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration=max_duration,
        callbacks=recorder,
        loggers=InMemoryLogger(),
        seed=seed,
        dist_timeout=60,
        device="cpu",
        progress_bar=False,
        **options,
    )


def fit(loader, **options):
    """Train, and return the result with the warnings."""
    with warnings.catch_warnings(record=True) as caught, make_trainer(loader, **options) as trainer:
        warnings.simplefilter("always")
        trainer.fit()
        clock = trainer.state.timestamp
        [recorder] = [one for one in trainer.state.callbacks if isinstance(one, Recorder)]
        return {
            "clock": [int(clock.epoch), int(clock.batch), int(clock.sample)],
            "losses": [float(loss) for _, loss in trainer.logger.destinations[0].data["loss/train/total"]],
            "lost": recorder.losses,
            "first": recorder.first,
            "warnings": [str(one.message) for one in caught if issubclass(one.category, UserWarning)],
        }


def dealt(batch_size=5, **options):
    dataset = range(SAMPLES)
    return DataLoader(dataset, batch_size=batch_size, sampler=cd.get_sampler(dataset, **options))


def error_of(call):
    try:
        call()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_samples():
    """Batches of which some processes have a smaller last part, or none."""
    return {
        "some have nothing": fit(dealt(5)),
        "some have less": fit(dealt(4)),
        "shuffled": fit(dealt(5, shuffle=True)),
        "microbatches": fit(dealt(4), device_train_microbatch_size=1, ddp_sync_strategy="multi_auto_sync"),
        "dropped": fit(dealt(5, drop_last=True)),
        "terms": fit(dealt(4), kind=lambda: Terms(lambda batch: True)),
        "terms in every second batch": fit(dealt(4), kind=lambda: Terms(lambda batch: batch % 2)),
    }


def check_terms():
    """Process 2 counts the elements of the loss in other batches than the rest."""
    is_other = cd.get_global_rank() == 2
    cases = {
        "never": (lambda batch: True, lambda batch: False),
        "alone": (lambda batch: False, lambda batch: True),
        "no longer": (lambda batch: True, lambda batch: batch < 3),
        "later": (lambda batch: False, lambda batch: batch > 2),
    }
    result = {}
    for name, choices in cases.items():
        with make_trainer(dealt(4), kind=lambda: Terms(choices[is_other])) as trainer:  # noqa: B023
            result[name] = error_of(trainer.fit), int(trainer.state.timestamp.batch)
    return result


def check_order():
    """The first batches of runs with seeds 1, 2 and 1; in the last, each process's loader has another generator."""
    with_generator = DataLoader(
        range(SAMPLES),
        5,
        sampler=cd.get_sampler(range(SAMPLES), shuffle=True),
        generator=torch.Generator().manual_seed(cd.get_global_rank()),
    )
    seeds = ((1, dealt(shuffle=True)), (2, dealt(shuffle=True)), (1, with_generator))
    return [fit(loader, seed=seed, max_duration="1ep")["first"] for seed, loader in seeds]


class SizedStream(Stream):
    def __len__(self):
        return len(self.samples)


class Announcing:
    """A batch sampler, or a loader, whose length is one batch in each process, whatever it has."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return 1

    def __iter__(self):
        return iter(self.batches)


class StatefulLoader:
    """Saves its position, which is the end of the samples until the end is asked for."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield torch.tensor(self.batches[self.position - 1])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class SizedStatefulLoader(StatefulLoader):
    """The same, with its length, which other processes may exceed."""

    def __len__(self):
        return len(self.batches)


def shift(batch):
    """Change a batch in place; a third time leads out of the table."""
    return batch.add_(8)


def check_streams(folder):
    rank, world_size = cd.get_global_rank(), cd.get_world_size()
    own = list(range(rank, 20, world_size))
    unequal = DataLoader(Stream(own[:2] if rank in {1, 2} else own), batch_size=2)
    batches = [own[:2]] if rank in {1, 2} else [own[:2], own[2:4], own[4:]]
    resumed = {}
    for kind, make_loader in {
        "stream": lambda: unequal,
        "stateful": lambda: StatefulLoader(batches),
        "stateful with a length": lambda: SizedStatefulLoader(batches),
        "batch sampler": lambda: DataLoader(range(20), batch_sampler=Announcing(batches)),
        "announcing": lambda: Announcing([torch.tensor(batch) for batch in batches]),
    }.items():
        options = {"save_folder": str(folder / kind), "save_interval": "1ba"}
        with make_trainer(make_loader(), run_name=kind, **options) as trainer:
            trainer.fit()
        cd.barrier()
        for place in ("ep0-ba2", "ep0-ba3", "ep1-ba5"):
            path = folder / kind / place
            resumed[f"{kind}, {place}"] = fit(make_loader(), run_name=kind, load_path=str(path))
    sized = DataLoader(SizedStream(own[:1] if rank in {1, 2} else own[:3]), batch_size=1)
    return {
        "split": fit(DataLoader(Stream(own), batch_size=2)),
        "not split": fit(DataLoader(Stream(range(8)), batch_size=2)),
        "unequal": fit(unequal),
        "batch sampler": fit(DataLoader(range(20), batch_sampler=Announcing(batches))),
        "announcing": fit(Announcing([torch.tensor(batch) for batch in batches])),
        "empty": fit(DataLoader(Stream([] if rank in {0, 3} else own), batch_size=2)),
        "microbatches": fit(unequal, device_train_microbatch_size=1, ddp_sync_strategy="multi_auto_sync"),
        "lengths": fit(DataSpec(sized, batch_transforms=shift)),
        "resumed": resumed,
        "evaluated": evaluate_sharded(rank),
    }


def evaluate_sharded(rank):
    """Evaluate a sharded model on streams with rank + 1 batches; process 3 has none."""
    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3, val_metrics=MulticlassAccuracy(3, average="micro"))
    samples = [(torch.tensor([1.0, index]), index % 3) for index in range(rank, 30, 4)]
    loader = DataLoader(Stream([] if rank == 3 else samples[: 2 * (rank + 1)]), batch_size=2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(Stream(samples), batch_size=2),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        parallelism_config={"fsdp": {}},
        max_duration="1ba",
        seed=17,
        dist_timeout=60,
        device="cpu",
        progress_bar=False,
    )
    with trainer:
        trainer.fit()
        trainer.eval(loader)
        counts = [len(outputs) for outputs in trainer.predict(loader)]
        [metric] = trainer.state.eval_metrics["eval"].values()
        counted = int(metric.tp + metric.fn)
        return [counted, counts, evaluate_in_microbatches(trainer, samples, rank), *evaluate_repeats(trainer)]


def drop_first(batch):
    """Remove the first field of a batch in place, which has three."""
    batch.pop(0)
    return batch


def triple(samples):
    """Make three samples of each."""
    return [field.repeat_interleave(3, dim=0) for field in default_collate(samples)]


class OwnIteration(DataLoader):
    def __iter__(self):
        return super().__iter__()


def evaluate_repeats(trainer):
    """Return how many samples count with a loader of which repeats cannot be removed, and the warnings."""
    complete = [(torch.tensor([1.0, index]), index % 3) for index in range(SAMPLES)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = OwnIteration(complete, 4, sampler=cd.get_sampler(complete))
        trainer.eval([Evaluator(label="repeats", dataloader=loader)])
    [metric] = trainer.state.eval_metrics["repeats"].values()
    return [int(metric.tp + metric.fn), [str(one.message) for one in caught if issubclass(one.category, UserWarning)]]


def evaluate_in_microbatches(trainer, samples, rank):
    """Return how many samples count if processes have different numbers of microbatches in one or all batches."""
    complete = [(torch.zeros(1), torch.tensor([1.0, index]), index % 3) for index in range(SAMPLES)]
    own = [(torch.zeros(1), *sample) for sample in ([] if rank == 3 else samples[: 2 * rank + 1])]
    nothing = [torch.zeros(0, 1), torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)]
    loaders = {
        "sampled": DataLoader(complete, 4, sampler=cd.get_sampler(complete)),  # the last parts have 2, 2, 1, 1 samples
        "stream": DataLoader(Stream(own), 3),
        "empty batch": [nothing] if rank == 0 else DataLoader(Stream(own), 3),
        "tripled": DataLoader(complete, 4, sampler=cd.get_sampler(complete), collate_fn=triple),
    }
    evaluators = [
        Evaluator(
            label=label, dataloader=DataSpec(one, microbatch_transforms=drop_first), device_eval_microbatch_size=1
        )
        for label, one in loaders.items()
    ]
    trainer.eval(evaluators)
    metrics = [metric for label in loaders for metric in trainer.state.eval_metrics[label].values()]
    return [int(metric.tp + metric.fn) for metric in metrics]


class Lost(MemoryFileSystem):
    """A remote folder that process 0 can list only once."""

    protocol, listed = "lost", 0

    def ls(self, path, detail=True, **options):
        Lost.listed += 1
        if cd.get_global_rank() == 0 and Lost.listed > 1:
            raise PermissionError("the key has expired")
        return super().ls(path, detail, **options)


def check_resuming(folder):
    """A run is saved; then some processes have other checkpoints than rank 0."""
    register_implementation("lost", Lost)
    rank = cd.get_global_rank()
    shared, other, empty = (folder / name for name in ("shared", "other", "empty"))
    for place in (shared, other):
        with make_trainer(dealt(), max_duration="1ep", run_name="first", save_folder=str(place)) as trainer:
            trainer.fit()
    cd.barrier()
    if rank != 3:  # each process has its own memory
        MemoryFileSystem().put(str(shared / "ep1-ba2"), "/runs/ep1-ba2", recursive=True)

    def resume(**options):
        result = []

        def continue_training():
            with make_trainer(dealt(), run_name="first", **options) as trainer:
                result.append(int(trainer.state.timestamp.batch))

        said = error_of(continue_training)
        cd.barrier()
        return said or result

    return {
        "together": resume(save_folder=str(shared), autoresume=True),
        "by rank": resume(save_folder=str(shared if rank == 0 else empty), autoresume=True),
        "not shared": resume(load_path="memory://runs/ep1-ba2"),
        "load_path": resume(load_path=str((shared if rank == 0 else other) / "ep1-ba2")),
        "lost": resume(save_folder="lost://run", autoresume=True),
    }


def check_failing_in_all_processes(failure):
    def fail():
        with cd.collectives.failing_in_all_processes("Reading"):
            if cd.get_global_rank() == 2:
                raise failure

    try:
        fail()
    except (KeyError, RuntimeError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def check_unusable_folder(folder):
    """Only the first process opens the folder, which is a file there."""
    if cd.get_global_rank() == 0:
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("")
    cd.barrier()
    with make_trainer(dealt(), save_folder=str(folder)) as trainer:
        return error_of(trainer.fit)


def main(folder):
    folder = Path(folder)
    cd.initialize_dist("cpu", timeout=60)
    saved = Path(cd.from_rank_zero(str(folder / "saved")))
    results = {
        "samples": check_samples(),
        "terms": check_terms(),
        "order": check_order(),
        "streams": check_streams(saved / "streams"),
        "resuming": check_resuming(saved),
        "failing": check_failing_in_all_processes(KeyError("settings")),
        "interrupted": check_failing_in_all_processes(KeyboardInterrupt()),
        "unusable": check_unusable_folder(saved / "unusable"),
    }
    cd.barrier()
    if cd.get_global_rank() == 0:
        shutil.rmtree(saved)
    (folder / f"{cd.get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
