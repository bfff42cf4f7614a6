"""Train on data of mosaicml-streaming, and write the samples of each batch to ``<folder>/<name>-<rank>.json``.

torchrun --nproc-per-node=2 streaming_program.py FOLDER NAME LOADER BATCHES
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from streaming import StreamingDataLoader, StreamingDataset
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


def train(folder, name, kind, batches):
    """Train for some batches, from the newest checkpoint of the folder on."""
    distributed.initialize_dist("cpu")
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
        save_folder=folder / f"{kind}-{name.rpartition('-')[0]}",
        save_interval="100ba",
        autoresume=True,
    )
    seen = []
    trainer.engine.on("batch_end", lambda state, _: seen.append(state.batch[0][:, 0].int().tolist()))
    trainer.fit(duration=batches)
    trainer.close()
    (folder / f"{kind}-{name}-{distributed.get_global_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "The checkpoint was saved by .* processes")
    train(Path(sys.argv[1]), *sys.argv[2:4], sys.argv[4] if sys.argv[4] != "all" else None)
