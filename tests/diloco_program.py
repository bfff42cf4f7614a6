"""Train with DiLoCo or DDP in each of two processes; the results are written to ``<folder>/<rank>.json``."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer, distributed
from composer.algorithms import DiLoCo
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW, muon_with_adamw

RANK = int(os.environ.get("RANK", "0"))
SAMPLES = 22  # three global batches of 8, of which the last has 6, in an epoch


class Recorder(Callback):
    """Records the first weights of this process, its batches, and its weights after each; and stops after one."""

    def __init__(self, stop_at=None, *, calls=False):
        self.first, self.batches, self.weights, self.stop_at, self.calls = [], [], [], stop_at, calls

    def batch_start(self, state, logger):
        self.first = self.first or flat(state.model)
        self.batches.append([one.tolist() for one in state.batch])

    def batch_end(self, state, logger):
        self.weights.append(flat(state.model))
        if int(state.timestamp.batch) == self.stop_at and RANK == 1:
            state.stop_training() if self.calls else os.kill(os.getpid(), signal.SIGTERM)


def flat(model):
    """Return the parameters of a model, and in the first process its statistics, as a list."""
    tensors = [*model.parameters(), *(one for one in model.buffers() if one.is_floating_point() and not RANK)]
    return torch.cat([one.detach().flatten() for one in tensors]).tolist()


def make_model(dtype=torch.float64, *, norm=False):
    torch.manual_seed(RANK)  # each process has other weights, until the first are broadcast
    layers = [
        nn.Linear(4, 8),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    ]
    return ComposerClassifier(nn.Sequential(*layers).to(dtype), num_classes=3)


def data(samples=SAMPLES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator, dtype=dtype)
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    return DataLoader(dataset, batch_size=4, sampler=distributed.get_sampler(dataset, shuffle=True))


def make_trainer(algorithms, make_optimizer, *callbacks, dtype=torch.float64, norm=False, **options):
    distributed.initialize_dist("cpu")
    model = make_model(dtype, norm=norm)
    return Trainer(
        model=model,
        train_dataloader=data(dtype=dtype),
        optimizers=make_optimizer(model),
        algorithms=algorithms,
        callbacks=callbacks,
        **{"max_duration": "3ep", "seed": 17, "device": "cpu", "progress_bar": False} | options,
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3)


def in_bf16(model):
    return DecoupledAdamW(model.parameters(), lr=0.3, rounding="stochastic")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def muon(model):
    return muon_with_adamw(model, lr=0.02)


def train(algorithms, make_optimizer, stop_at=None, *, calls=False, **options):
    """Train, and return the weights of this process after each batch and at the end, and the trainer."""
    recorder = Recorder(stop_at, calls=calls)
    trainer = make_trainer(algorithms, make_optimizer, recorder, **options)
    with contextlib.suppress(SystemExit):
        trainer.fit()
    trainer.close()
    return recorder.weights, flat(trainer.state.model), trainer, recorder


def local_sgd(every=1, lr=1.0, momentum=0.0):
    return [DiLoCo(f"{every}ba", outer_lr=lr, outer_momentum=momentum)]


def gradient_elements(algorithms):
    """Return how many elements are reduced in a training, without counts and losses, and how often."""
    with profile(record_shapes=True) as profiled:
        _, _, trainer, _ = train(algorithms, sgd)
    reduced = [one for one in profiled.events() if one.name == "gloo:all_reduce"]
    sizes = [torch.Size(one.input_shapes[0] or ()).numel() for one in reduced]
    acted = [one.acted for one in trainer.state.algorithms]
    return [sum(size for size in sizes if size > 8), sum(size > 8 for size in sizes), acted]


def resumed(make_optimizer, folder, batch, *, calls=False, **options):
    """Return the weights of a run that is stopped after a batch and resumed: of each batch, at the stop and the end."""
    before, stopped, *_ = train(
        [DiLoCo("4ba")], make_optimizer, batch, calls=calls, save_folder=folder, save_interval="100ep", run_name="run",
        **options,
    )  # fmt: skip
    after, end, *_ = train(
        [DiLoCo("4ba")], make_optimizer, save_folder=folder, save_interval="100ep", run_name="run", autoresume=True,
        **options,
    )  # fmt: skip
    return [before + after, end, stopped]


def restarted(folder):
    """Return the weights of four batches after those that a stopped run of two has saved, from a new clock on."""
    train([DiLoCo("4ba")], adamw, 2, save_folder=folder, save_interval="100ep", run_name="run")
    options = {"load_path": folder, "load_ignore_keys": ["timestamp"], "max_duration": "4ba"}
    return train([DiLoCo("4ba")], adamw, **options)[:2]


def error_of(algorithms, make_optimizer, **options):
    try:
        train(algorithms, make_optimizer, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


class Evaluated(Callback):
    """Records the weights in evaluations and after them."""

    def __init__(self):
        self.weights = []

    def eval_start(self, state, logger):
        self.weights.append(flat(state.model))

    def batch_checkpoint(self, state, logger):
        self.weights.append(flat(state.model))


def evaluations():
    """Return the weights before, in and after evaluations of three batches, and at the end."""
    recorder, evaluated = Recorder(), Evaluated()
    options = {"eval_dataloader": data(), "eval_interval": "1ba", "max_duration": "3ba"}
    trainer = make_trainer([DiLoCo("2ba")], adamw, recorder, evaluated, norm=True, **options)
    trainer.fit()
    return [recorder.weights, evaluated.weights[::2], evaluated.weights[1::2]]


def main():
    folder = Path(sys.argv[1])
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Profiler clears events|Warning: Profiler|DiLoCo has taken no outer step until")
    shared = [None if RANK else tempfile.mkdtemp(dir=folder)]
    distributed.initialize_dist("cpu")
    distributed.broadcast_object_list(shared)
    results = {
        "ddp": train([], sgd)[:2],
        "every batch": train(local_sgd(), sgd)[:2],
        "every third": train(local_sgd(3), sgd)[:2],
        "AdamW": (of_adamw := train([DiLoCo("4ba")], adamw))[:2],
        "AdamW's batches": [of_adamw[3].first, of_adamw[3].batches],
        "Muon": train([DiLoCo("4ba")], muon, norm=True)[:2],
        "elements": {"ddp": gradient_elements([]), "DiLoCo": gradient_elements(local_sgd(3))},
        "evaluations": evaluations(),
        "microbatches": train(local_sgd(3), sgd, device_train_microbatch_size=1)[:2],
    }
    for kind, make_optimizer, options in (("AdamW", adamw, {}), ("Muon", muon, {"norm": True})):
        for batch in (2, 4, 5):
            results[f"{kind}, resumed at {batch}"] = resumed(
                make_optimizer, f"{shared[0]}/{kind}{batch}", batch, **options
            )
    for batch in (1, 3, 8):
        folder_of_run = f"{shared[0]}/stop_training{batch}"
        results[f"AdamW, stop_training at {batch}"] = resumed(adamw, folder_of_run, batch, calls=True)
    results["restarted"] = restarted(f"{shared[0]}/restarted")
    results["errors"] = {
        "fsdp": error_of([DiLoCo()], sgd, parallelism_config={"fsdp": {}}),
        "divided": error_of([DiLoCo()], lambda model: muon_with_adamw(model, 0.1, divide_work=True)),
        "16 bits": error_of([DiLoCo()], in_bf16, dtype=torch.bfloat16),
    }
    (folder / f"{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
