"""One of two processes that train a sharded model and try to save it in every way; prints the errors as JSON."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from composer import Trainer, distributed
from composer.callbacks import CheckpointSaver
from composer.checkpoint import load_checkpoint, save_checkpoint
from composer.core import Callback, State
from composer.models import ComposerClassifier


class SavesOnce(Callback):
    """Saves a checkpoint after the first batch, when the model is sharded, like a custom saver."""

    def __init__(self, save):
        self.save, self.refusals = save, None

    def batch_end(self, state, logger):
        if self.refusals is None:
            self.refusals = refusal(self.save, state)


def refusal(call, *arguments, **options):
    """Return the error of a call as text."""
    try:
        call(*arguments, **options)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is printed)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make_trainer(**options):
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3, train_metrics=[])
    return Trainer(
        model=model,
        train_dataloader=[(torch.rand(4, 4), torch.tensor([0, 1, 2, 0]))] * 2,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration="2ba",
        parallelism_config={"fsdp": {}},
        device="cpu",
        progress_bar=False,
        **options,
    )


def fit(save):
    saver = SavesOnce(save)
    trainer = make_trainer(callbacks=saver)
    trainer.fit()
    return saver.refusals, trainer


def main(folder):
    saver = CheckpointSaver(f"{folder}/callback")
    refusals = {"callback": refusal(make_trainer, callbacks=saver), "folder": refusal(make_trainer, save_folder=folder)}
    refusals["saver"], trainer = fit(saver.save)
    refusals["function"] = refusal(save_checkpoint, trainer.state, f"{folder}/function")
    refusals["trainer"] = refusal(trainer.save_checkpoint, f"{folder}/trainer")
    refusals["trainer, weights only"] = refusal(trainer.save_checkpoint, f"{folder}/weights", weights_only=True)
    refusals["start of another fit"] = refusal(saver.fit_start, trainer.state, trainer.logger)
    with tempfile.TemporaryDirectory() as elsewhere:
        path = save_checkpoint(State(ComposerClassifier(nn.Linear(4, 3), num_classes=3)), f"{elsewhere}/one")
        refusals["loading"] = refusal(load_checkpoint, path, trainer.state, weights_only=True)
    wrapped = State(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))))
    refusals["wrapper of FSDP 1"] = refusal(save_checkpoint, wrapped, f"{folder}/wrapped")
    trainer.close()
    distributed.barrier()
    print(json.dumps({"refusals": refusals, "left": [path.name for path in Path(folder).iterdir()]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
