"""One of two processes, of which the second ends, fails or hangs in the middle of a training.

It adds up gradients by itself: what DDP imports when it is used would take longer than the timeout here.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from composer import distributed as cd
from composer.core import Callback, State


def meet(folder):
    """Wait until both have been started."""
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)


class Fails(Callback):
    """Ends the second process, by an error, in its third batch."""

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) == 2 and cd.get_global_rank() == 1:
            raise KeyError("the labels")


def train():
    """Train with the Trainer, and report its error."""
    from composer import Trainer

    model = nn.Linear(2, 2)
    model.loss = lambda outputs, batch: outputs.sum()
    sampler = cd.get_sampler(range(8))
    try:
        Trainer(
            model=model,
            train_dataloader=DataLoader(torch.ones(8, 2), sampler=sampler),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="1ep",
            callbacks=Fails(),
            ddp_sync_strategy="forced_sync",
            dist_timeout=60,
            device="cpu",
            progress_bar=False,
        ).fit()
    except RuntimeError as error:
        print(*error.__notes__, flush=True)
        raise


def main(how, folder):
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{os.environ['RANK']}.json"
    if how == "fails in a trainer":
        train()
        return
    parallel, state = cd.Parallelism(ddp_sync_strategy="forced_sync"), State(nn.Linear(2, 2))
    meet(Path(folder))
    cd.initialize_dist("cpu", timeout=5)
    parallel.prepare(state)
    for step in range(3):
        if step == 2 and cd.get_global_rank() == 1:
            if how == "dies":
                os._exit(9)
            if how == "fails":
                raise KeyError("the labels")
            time.sleep(300)
        batch = parallel.begin_batch(cd.BatchShare(4))
        parallel.begin_microbatch(is_last=True)
        (parallel.forward(torch.ones(4, 2)).sum() * batch.weight()).backward()
        parallel.end_batch(batch)
        print("step", step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
