"""Train on data of mosaicml-streaming, and write the samples of each batch to ``<folder>/<name>-<rank>.json``.

torchrun --nproc-per-node=2 streaming_program.py FOLDER PROCESSES RUN...

Each run is ``<loader>-<folder of its checkpoints>-<batches>``.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch import nn
from torch.utils.data import DataLoader

from composer import Trainer, distributed
from composer.models import ComposerClassifier

GLOBAL_BATCH = 8


def collate(samples):
    """Return a batch of inputs and classes, whose inputs are the number of the sample."""
    return torch.stack([torch.from_numpy(one["x"].copy()) for one in samples]), torch.tensor(
        [one["y"] for one in samples]
    )


def train(folder, kind, name, batches):
    """Train for some batches, from the newest checkpoint of the folder on; return the samples of each batch."""
    size = GLOBAL_BATCH // distributed.get_world_size()
    data = StreamingDataset(
        local=str(folder / "mds"), shuffle=True, batch_size=size, num_canonical_nodes=2, shuffle_seed=3, epoch_size=40
    )
    loader = {"own": StreamingDataLoader, "torch": DataLoader}[kind](
        data, batch_size=size, num_workers=2, collate_fn=collate
    )
    torch.manual_seed(5)
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3, train_metrics=[])
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-4),
        max_duration="3ep",
        device="cpu",
        progress_bar=False,
        seed=17,
        run_name="run",
        save_folder=folder / f"{kind}-{name}",
        save_interval="100ba",
        autoresume=True,
    )
    seen = []
    trainer.engine.on("batch_end", lambda state, _: seen.append(state.batch[0][:, 0].int().tolist()))
    trainer.fit(duration=None if batches == "all" else batches)
    trainer.close()
    return seen


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "The checkpoint was saved by .* processes")
    distributed.initialize_dist("cpu")
    folder, processes = Path(sys.argv[1]), sys.argv[2]
    for run in sys.argv[3:]:
        seen = train(folder, *run.split("-"))
        (folder / f"{run}-{processes}-{distributed.get_global_rank()}.json").write_text(json.dumps(seen))
        clean_stale_shared_memory()  # of a data set in the same folder
