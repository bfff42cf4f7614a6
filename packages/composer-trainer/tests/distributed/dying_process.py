"""One of two processes, of which the second ends, fails or hangs in the middle of a training.

It adds up gradients by itself: what DDP imports when it is used would take longer than the timeout here.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from composer import distributed as cd
from composer.core import State


def meet(folder):
    """Wait until both have been started."""
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)


def main(how, folder):
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{os.environ['RANK']}.json"
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
        batch = parallel.exchange_counts(cd.BatchShare(4))
        parallel.begin_microbatch(is_last=True)
        (parallel.forward(torch.ones(4, 2)).sum() * batch.weight()).backward()
        parallel.complete_gradients(batch)
        print("step", step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
