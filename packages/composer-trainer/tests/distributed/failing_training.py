"""Train with the Trainer in processes of torchrun, of which one fails in its second batch.

torchrun ... failing_training.py HOW FOLDER

``HOW`` is ``raises``, ``dies``, ``signalled`` for a SIGTERM that only the last process gets, ``signalled-twice`` for a
further one to the first process when all have stopped, which the program handles, or ``trains`` for a training without
failures. ``DEVICE`` is ``cpu``, or ``gpu`` with a GPU for each process. With ``restarts``, some random processes die at
random moments of every start but the last, and each start resumes from the last checkpoint. The last rank fails, and
writes the time to ``<folder>/failed``; rank 0 writes the final weights to ``<folder>/weights.pt``.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer, distributed
from composer.algorithms import EMA
from composer.models import ComposerClassifier

DIST_TIMEOUT = float(os.environ.get("DIST_TIMEOUT", "15"))
DEVICE = os.environ.get("DEVICE", "cpu")
PARALLELISM = os.environ.get("PARALLELISM", "ddp")
BATCH_SECONDS = float(os.environ.get("BATCH_SECONDS", "0.01"))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def is_last():
    return distributed.get_global_rank() == distributed.get_world_size() - 1


class Fails(Callback):
    """Fails in the second batch of the last process, whose counts are not exchanged."""

    def __init__(self, how, folder):
        self.how, self.folder = how, folder

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) != 1 or not is_last():
            return
        (self.folder / "failed").write_text(str(time.time()))
        if self.how == "raises":
            raise KeyError("the labels")
        if self.how == "dies":
            die()
        os.kill(os.getpid(), signal.SIGTERM)

    def fit_end(self, state, logger):
        if self.how == "signalled-twice" and distributed.get_global_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def die_at_random():
    """Kill this process at a random moment of the training, in all starts but the last."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    draw = random.Random(f"{os.environ['FAILING_SEED']} {start}")
    victim, seconds = draw.randrange(distributed.get_world_size()), draw.uniform(0.0, 0.6)
    if start < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) and victim == distributed.get_global_rank():
        timer = threading.Timer(seconds, die)
        timer.daemon = True
        timer.start()


class Slow(Callback):
    """Makes each batch take some time, so that a failure is in the middle of the training."""

    def batch_end(self, state, logger):
        time.sleep(BATCH_SECONDS)


def main(how, folder):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)).double()
    # Each start would import TorchMetrics, which takes three seconds of a processor.
    model = ComposerClassifier(network, num_classes=3, train_metrics=[], val_metrics=[])
    inputs = torch.randn(44, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    saving = {"save_folder": str(folder / "run"), "save_interval": "2ba", "autoresume": True, "run_name": "run"}
    is_saved = how in {"restarts", "trains"}
    if how == "signalled-twice":
        signal.signal(signal.SIGTERM, lambda *_: None)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=distributed.get_sampler(data, shuffle=True)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="8ep",
        algorithms=[EMA("2ba")],
        callbacks=[Slow()] if is_saved else [Fails(how, folder)],
        parallelism_config={PARALLELISM: {}},
        dist_timeout=DIST_TIMEOUT,
        device=DEVICE,
        seed=17,
        progress_bar=False,
        **(saving if is_saved else {}),
    )
    if how == "restarts":
        die_at_random()
    result = trainer.fit()
    (folder / f"reason {distributed.get_global_rank()}").write_text(result.reason)
    weights = {name: one.full_tensor() if PARALLELISM == "fsdp" else one for name, one in model.state_dict().items()}
    if distributed.get_global_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
