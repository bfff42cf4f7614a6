"""Train with the Trainer in each process that torchrun starts; the results are written to ``<folder>/<rank>.json``."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import kornia.augmentation as ka
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Callback, Trainer, distributed
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    Augment,
    DepthStacking,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
)
from composer.callbacks import ExportForInferenceCallback
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

RUNS = {
    "ddp": {},
    "microbatches": {"device_train_microbatch_size": 1},
    "forced": {"ddp_sync_strategy": "forced_sync", "device_train_microbatch_size": 1},
    "multi": {"ddp_sync_strategy": "multi_auto_sync", "device_train_microbatch_size": 1},
    "fsdp": {"parallelism_config": {"fsdp": {}}},
    "fsdp, microbatches": {"parallelism_config": {"fsdp": {}}, "device_train_microbatch_size": 1},
    "algorithms": {"algorithms": lambda: [LabelSmoothing(0.1), GradientClipping("norm", 0.2), EMA("2ba")]},
    "fsdp, algorithms": {
        "algorithms": lambda: [LabelSmoothing(0.1), GradientClipping("norm", 0.2), EMA("2ba")],
        "parallelism_config": {"fsdp": {}},
    },
    "SWA": {"algorithms": lambda: [SWA("1ep", "1dur", update_interval="1ba")]},
    "fsdp, SWA": {
        "algorithms": lambda: [SWA("1ep", "1dur", update_interval="1ba")],
        "parallelism_config": {"fsdp": {}},
    },
    "freezing": {"algorithms": lambda: [LayerFreezing(0.0, 1.0)]},
    "line search": {"optimizer": lambda one: torch.optim.LBFGS(one, max_iter=3, line_search_fn="strong_wolfe")},
    "growth": {"algorithms": lambda: [DepthStacking("1ep", blocks="module.1"), EMA("2ba")], "blocks": 2},
    "fsdp, growth before": {
        "algorithms": lambda: [DepthStacking(None, blocks="module.1"), EMA("2ba")],
        "blocks": 2,
        "parallelism_config": {"fsdp": {}},
    },
    "class weights, microbatches": {
        "kind": lambda *args, **options: ComposerClassifier(*args, **options, loss_fn=class_weights()),
        "device_train_microbatch_size": 1,
    },
    "sum": {"kind": lambda *args, **options: ComposerClassifier(*args, **options, loss_fn=summed())},
    "sum, microbatches": {
        "kind": lambda *args, **options: ComposerClassifier(*args, **options, loss_fn=summed()),
        "device_train_microbatch_size": 1,
        "parallelism_config": {"fsdp": {}},
    },
    "class weights": {"kind": lambda *args, **options: ComposerClassifier(*args, **options, loss_fn=class_weights())},
}


def summed():
    """Return a loss that is a sum."""
    return nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.5)


def class_weights():
    """Return a loss that is a mean over the weights of labels that are not ignored."""
    weight = torch.tensor([0.1, 2.0, 0.4], dtype=torch.float64)
    return nn.CrossEntropyLoss(weight=weight, ignore_index=2)


class Stopper(Callback):
    """Sends one process a SIGTERM in its third batch."""

    def before_forward(self, state, logger):
        if distributed.get_global_rank() == 1 and int(state.timestamp.batch) == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def make_loader(samples, batch_size, seed):
    """Return a loader of this process's part of each batch."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    size = max(1, batch_size // distributed.get_world_size())
    return DataLoader(dataset, batch_size=size, sampler=distributed.get_sampler(dataset))


def make_trainer(**options):
    torch.manual_seed(distributed.get_global_rank())  # each process has different initial weights
    dropout = nn.Dropout(options.pop("dropout", 0.0))
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), dropout, nn.Linear(8, 3)).double()
    if number := options.pop("blocks", 0):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(number)]
        network.insert(1, nn.Sequential(*blocks).double())
    kind = options.pop("kind", ComposerClassifier)
    model = kind(network, train_metrics=MulticlassAccuracy(3, average="micro"), num_classes=3)
    algorithms = options.pop("algorithms", list)()
    make_optimizer = options.pop("optimizer", lambda one: torch.optim.SGD(one, lr=0.1, momentum=0.9))
    return Trainer(
        model=model,
        train_dataloader=make_loader(12, 4, seed=1),
        eval_dataloader=options.pop("eval_dataloader", None) or make_loader(7, 2, seed=2),
        optimizers=make_optimizer(model.parameters()),
        max_duration=options.pop("max_duration", "3ep"),
        algorithms=algorithms,
        loggers=InMemoryLogger(),
        seed=17,
        device="cpu",
        progress_bar=False,
        **options,
    )


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(options):
    trainer = make_trainer(**options)
    trainer.fit()
    state = trainer.state
    weights = [full(parameter).flatten().tolist() for parameter in state.model.parameters()]
    logged = trainer.logger.destinations[0].data
    trainer.close()
    return {
        "weights": [weight for each in weights for weight in each],
        "clock": [int(state.timestamp.batch), int(state.timestamp.sample)],
        "losses": [float(value) for _, value in logged["loss/train/total"]],
        "train metric": [float(value) for _, value in logged["metrics/train/MulticlassAccuracy"]],
        "eval metrics": {name: float(value) for name, value in state.eval_metric_values["eval"].items()},
    }


def stop(**options):
    """Return the numbers of batches and evaluations of a training in which one process receives a signal."""
    trainer = make_trainer(callbacks=Stopper(), max_duration="1000ep", **options)
    with contextlib.suppress(SystemExit):
        trainer.fit()
    return [
        int(trainer.state.timestamp.batch),
        len(trainer.logger.destinations[0].data.get("metrics/eval/MulticlassAccuracy", ())),
    ]


class CountsTerms(ComposerClassifier):
    """Counts the elements of its loss, as language models do."""

    def count_loss_terms(self, batch):
        return torch.tensor(len(batch[1]))


class Waits(Callback):
    """Waits before the first batch and in each, and records when."""

    def __init__(self):
        self.began = []

    def epoch_start(self, state, logger):
        self.began.append(time.perf_counter())
        time.sleep(0.1)

    batch_start = epoch_start


def compute_twice(**options):
    """Return the seconds on the clock, those from the epoch's start to the last batch, and those of `fit`."""
    waits = Waits()
    trainer = make_trainer(callbacks=waits, eval_interval=0, max_duration="1ep", **options)
    began = time.perf_counter()
    trainer.fit()
    duration = time.perf_counter() - began
    return [trainer.state.timestamp.total_wct.total_seconds(), waits.began[-1] - waits.began[0], duration]


COMPUTED_TWICE = {
    "samples": {"algorithms": lambda: [SAM()]},
    "loss terms": {"algorithms": lambda: [SAM()], "kind": CountsTerms},
    "search": {"device_train_microbatch_size": "auto"},
}


class EvaluationStopper(Callback):
    """Sends the second process a SIGTERM in the second batch of its first evaluation."""

    def eval_batch_start(self, state, logger):
        if distributed.get_global_rank() == 1 and int(state.eval_timestamp.batch) == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_in_evaluation(folder):
    """Return the results of a training whose evaluation is stopped in one process, and of one without a stop.

    The processes evaluate on different numbers of batches.
    """
    batch = next(iter(make_loader(4, 4, seed=3)))
    batches = [batch] * (4 - distributed.get_global_rank())
    results = []
    for name, callbacks in (("stopped", EvaluationStopper()), ("stopped", None), ("uninterrupted", None)):
        saving = {"save_folder": f"{folder}/{name}", "autoresume": True, "run_name": name}
        trainer = make_trainer(eval_dataloader=batches, callbacks=callbacks, dropout=0.3, **saving)
        with contextlib.suppress(SystemExit):
            trainer.fit()
        trainer.close()
        logged = trainer.logger.destinations[0].data
        evaluations = logged.get("metrics/eval/MulticlassAccuracy", ())
        results.append(
            {
                "weights": [one.flatten().tolist() for one in trainer.state.model.parameters()],
                "evaluations": [[int(clock.batch), float(value)] for clock, value in evaluations],
                "batch": int(trainer.state.timestamp.batch),
            }
        )
        distributed.barrier()
    return results


def failed_export():
    """Return the error of a training whose export fails in the first process."""

    def broken(model):
        raise ValueError("broken")

    callback = ExportForInferenceCallback("torchexport", "model.pt2", transforms=broken)
    try:
        make_trainer(max_duration="1ba", callbacks=callback, eval_interval=0).fit()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def end_by_time():
    """Return the batches and seconds of a training whose duration is in seconds."""
    trainer = make_trainer(max_duration="2sec", eval_interval=0)
    trainer.fit()
    return [int(trainer.state.timestamp.batch), trainer.state.timestamp.total_wct.total_seconds()]


def resume(folder):
    """Return the weights and metrics of an uninterrupted training, and of one resumed after its fourth batch."""
    results = []
    for options in ({"save_folder": folder, "save_interval": "2ba"}, {"load_path": f"{folder}/ep1-ba4"}):
        trainer = make_trainer(algorithms=lambda: [EMA("2ba"), MixUp(0.4)], dropout=0.3, **options)
        trainer.fit()
        weights = [parameter.flatten().tolist() for parameter in trainer.state.model.parameters()]
        saved = trainer.save_checkpoint(f"{folder}/last{len(results)}/ep{{epoch}}")
        metrics = trainer.logger.destinations[0].data["metrics/train/MulticlassAccuracy"]
        results.append(
            {"weights": weights, "metrics": [float(value) for _, value in metrics][-2:], "saved": saved[-3:]}
        )
        trainer.close()
        distributed.barrier()
    return results


class Recorder(Callback):
    """Records the images of each batch after they are augmented."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(state.batch[0].flatten().tolist())


def augment():
    """Return the augmented images of each batch, of two equal trainings on copies of one image."""
    seen = []
    for _ in range(2):
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(5))
        dataset = TensorDataset(image.expand(8, 3, 8, 8), torch.arange(8) % 3)
        loader = DataLoader(dataset, batch_size=2, sampler=distributed.get_sampler(dataset))
        model = ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), num_classes=3)
        pipeline = ka.AugmentationSequential(ka.RandomAffine(30.0, p=1.0), ka.RandomPlasmaBrightness(p=1.0))
        recorder = Recorder()
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="1ep",
            algorithms=[Augment(pipeline)],
            callbacks=[recorder],
            seed=17,
            device="cpu",
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
        seen.append(recorder.seen)
    return seen


def main(folder):
    results = {name: train(options) for name, options in RUNS.items()} | {"augmented": augment()}
    if distributed.get_world_size() > 1:
        saved = distributed.from_rank_zero(tempfile.mkdtemp())
        results |= {
            "stopped": stop(),
            "stopped later": stop(eval_interval=0),
            "stopped in an evaluation": stop_in_evaluation(saved),
            "by time": end_by_time(),
            "failed export": failed_export(),
            "computed twice": {name: compute_twice(**options) for name, options in COMPUTED_TWICE.items()},
            "resumed": resume(saved),
        }
    Path(folder, f"{distributed.get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
