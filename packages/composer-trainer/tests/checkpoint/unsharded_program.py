"""Two processes save a model that is not sharded, which the first one writes, and load; used by test_unsharded.py."""

import sys
import warnings
from pathlib import Path

import torch
from sharded_program import in_group
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer, distributed
from composer.callbacks import CheckpointSaver
from composer.checkpoint.folders import LocalFolder
from composer.checkpoint.reading import OpenCheckpoint
from composer.models import ComposerClassifier


class Fails(Callback):
    """Cannot be saved at a batch."""

    fails = False

    def state_dict(self):
        """Return what cannot be saved."""
        return {"value": print} if self.fails else {}


class AtBatch(Callback):
    """Calls a function after a batch."""

    def __init__(self, batch, call):
        self.batch, self.call = batch, call

    def batch_end(self, state, logger):
        """Call it."""
        if int(state.timestamp.batch) == self.batch:
            self.call()


def make_trainer(folder, *callbacks, **options):
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    sampler = distributed.get_sampler(data, shuffle=True)
    return Trainer(
        model=ComposerClassifier(nn.Linear(3, 2)),
        train_dataloader=DataLoader(data, 2, sampler=sampler),
        max_duration="8ba",
        save_folder=folder,
        save_interval="3ba",
        callbacks=list(callbacks),
        progress_bar=False,
        device="cpu",
        **options,
    )


def error_of(call):
    """Return the class and message of the error that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (compared by the test)
        return f"{type(error).__name__}: {error}"
    return None


def fail(world_size, folder):
    """Let saves fail in the first process, and return the errors, and the batches at which they were raised."""
    del world_size
    is_first, put, found = distributed.get_global_rank() == 0, LocalFolder.put, {}

    def full(*_):
        raise OSError(28, "No space left on device")

    def break_disk():
        if is_first:
            LocalFolder.put = full

    trainer = make_trainer(f"{folder}/disk-{distributed.get_global_rank()}/runs")  # as on hosts with disks of their own
    found["other disk"] = error_of(trainer.fit), int(trainer.state.timestamp.batch)
    trainer.close()
    trainer = make_trainer(f"{folder}/writing", AtBatch(3, break_disk))
    found["writing"] = error_of(trainer.fit), int(trainer.state.timestamp.batch)
    LocalFolder.put = put
    trainer.close()

    fails = Fails()

    def break_state():
        fails.fails = is_first

    trainer = make_trainer(f"{folder}/taking", fails, AtBatch(3, break_state))
    found["taking"] = error_of(trainer.fit), int(trainer.state.timestamp.batch)
    fails.fails = False
    trainer.close()
    return found


class Draws(Callback):
    """Draws from the global generator at each batch, which is another one in each process."""

    def __init__(self, seed=None):
        self.seed, self.draws = seed, []

    def fit_start(self, state, logger):
        """Seed it."""
        if self.seed is not None:
            torch.manual_seed(self.seed)

    def batch_start(self, state, logger):
        """Draw."""
        self.draws.append(float(torch.rand(())))


def own(world_size, folder):
    """Return the draws of a run, and those of one that resumes from its first checkpoint; both need no gathering."""
    del world_size
    first, second, save = Draws(distributed.get_global_rank()), Draws(), CheckpointSaver.save

    def save_without_gathering(saver, state):
        gather, torch.distributed.all_gather_object = torch.distributed.all_gather_object, None
        save(saver, state)
        torch.distributed.all_gather_object = gather

    CheckpointSaver.save = save_without_gathering
    trainer = make_trainer(f"{folder}/own-{{rank}}", first, run_name="run")
    trainer.fit()
    weights = Path(trainer.save_checkpoint(f"{folder}/weights-{{rank}}", weights_only=True))
    trainer.close()
    CheckpointSaver.save = save
    path = Path(folder, "own-0", "ep0-ba3")
    trainer = make_trainer(None, second, run_name="run", load_path=str(path))
    trainer.fit()
    trainer.close()
    found = {"run": first.draws, "resumed": second.draws, "files": [file.name for file in path.glob("process*")]}
    return found | {"weights": [weights.name, *sorted(file.name for file in weights.iterdir())]}


def alone(world_size, folder):
    """Resume in one process from the checkpoint of two, in which the file of the second one is damaged."""
    del world_size
    path = Path(folder, "own-0", "ep0-ba3")
    damage(path / "process-00002-of-00002.safetensors")
    trainer = make_trainer(None, Draws(), run_name="run", load_path=str(path))
    return int(trainer.state.timestamp.batch)


def damage(file):
    """Change the last byte of a file."""
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def choose(world_size, folder):
    """Load from a folder whose newest checkpoint is damaged, and return what was loaded and which files were hashed."""
    del world_size
    runs, checked, check = f"{folder}/runs", [], OpenCheckpoint.check

    def note(checkpoint, files=None):
        checked.append((checkpoint.name, *(checkpoint.manifest.files if files is None else files)))
        check(checkpoint, files)

    trainer = make_trainer(runs, run_name="run")
    trainer.fit()
    trainer.close()
    if distributed.get_global_rank() == 0:
        damage(Path(runs, "ep0-ba8", "model.safetensors"))
    distributed.barrier()
    OpenCheckpoint.check = note
    later = make_trainer(None, load_path=runs)
    found = {"batch": int(later.state.timestamp.batch)}
    later.close()
    distributed.barrier()
    if distributed.get_global_rank() == 0:
        for path in Path(runs).glob("ep*"):
            damage(path / "model.safetensors")
    distributed.barrier()
    found["none"] = error_of(lambda: make_trainer(None, load_path=runs))
    return found | {"checked": checked}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).mkdir(exist_ok=True)
    in_group(2, sys.argv[1], fail)
    in_group(2, sys.argv[1], choose)
    in_group(2, sys.argv[1], own)
    in_group(1, sys.argv[1], alone)
