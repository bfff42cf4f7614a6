"""Loaders with the interface of mosaicml-streaming, which save their own position."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from composer import Trainer
from composer.models import ComposerClassifier

SAMPLES, BATCH = 40, 4


class Dataset(IterableDataset):
    """Samples in a shuffled order, from a saved position, as StreamingDataset documents it; noise may be added.

    Its workers load one batch each in turn.
    """

    def __init__(self, noise=0.0):
        self.epoch, self.sample, self.noise = 0, 0, noise

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))[self.sample :]
        self.epoch, self.sample = self.epoch + 1, 0
        worker = get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for place in itertools.chain(*order.split(BATCH)[first::workers]):
            yield {"x": torch.full((4,), float(place)) + self.noise * torch.rand(4), "y": int(place) % 3}

    def state_dict(self, num_samples, from_beginning):
        started = 0 if from_beginning else self.sample
        return {"epoch": self.epoch - (num_samples > 0), "sample_in_epoch": started + num_samples, "shuffle_seed": 0}

    def load_state_dict(self, state):
        self.epoch, self.sample = state["epoch"], state["sample_in_epoch"]


def collate(samples):
    inputs = torch.stack([torch.tensor(one["x"].tolist()) for one in samples])
    return inputs / SAMPLES, torch.tensor([int(one["y"]) for one in samples])


def in_other_loader(folder):
    """Return a loader of torch, which does not save the position."""
    return DataLoader(Dataset(noise=0.5), batch_size=BATCH, collate_fn=collate)


def in_workers(folder):
    """Return the same with two workers, which stay for the second epoch."""
    return DataLoader(Dataset(noise=0.5), batch_size=BATCH, collate_fn=collate, num_workers=2, persistent_workers=True)


def streaming(folder):
    """Return a loader of mosaicml-streaming, of .mds files."""
    library = pytest.importorskip("streaming", reason="needs mosaicml-streaming: nox -s streaming")
    np = pytest.importorskip("numpy")
    library.base.util.clean_stale_shared_memory()
    if not folder.exists():
        with library.MDSWriter(out=str(folder), columns={"x": "ndarray:float32:4", "y": "int"}) as writer:
            for place in range(SAMPLES):
                writer.write({"x": np.full(4, place, np.float32), "y": place % 3})
    data = library.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, shuffle_seed=3)
    return library.StreamingDataLoader(data, batch_size=BATCH, collate_fn=collate)


def streaming_in_workers(folder):
    """Return a loader of torch with two workers, whose data has more samples in an epoch than its files."""
    streaming(folder)  # writes the files
    library = pytest.importorskip("streaming")
    data = library.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, epoch_size=2 * SAMPLES)
    return DataLoader(data, batch_size=BATCH, collate_fn=collate, num_workers=2)


def streaming_in_other_loader(folder):
    """Return a loader of torch over the same data set."""
    return DataLoader(streaming(folder).dataset, batch_size=BATCH, collate_fn=collate)


# Each StreamingDataset keeps hundreds of files open, more with each one before it, so that a process has few of them.
@pytest.mark.parametrize(
    ("make", "stop"),
    [
        *itertools.product([in_other_loader, streaming_in_other_loader], ["3ba", "10ba", "13ba"]),
        (in_workers, "3ba"),
        (in_workers, "13ba"),
        (streaming_in_workers, "23ba"),
    ],
)
def test_a_resumed_run_continues_at_the_position_of_the_loader(make, stop, tmp_path):
    """Stopped within and between epochs, the rest of the batches and the weights are those of one run."""

    def train(name, duration=None):
        torch.manual_seed(0)
        model = ComposerClassifier(nn.Linear(4, 3), num_classes=3, train_metrics=[])
        trainer = Trainer(
            model=model,
            train_dataloader=make(tmp_path / "mds"),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="2ep",
            device="cpu",
            progress_bar=False,
            seed=3,
            run_name="run",
            save_folder=tmp_path / name,
            save_interval="1ba",
            autoresume=True,
        )
        seen = []
        trainer.engine.on("batch_end", lambda state, _: seen.append(state.batch[0][:, 0].tolist()))
        trainer.fit(duration=duration)
        trainer.close()
        return model.state_dict(), seen

    weights, whole = train("whole")
    _, first = train("parts", stop)
    resumed, rest = train("parts")

    assert len(whole) > len(first) == int(stop.removesuffix("ba"))
    assert first + rest == whole
    assert all(torch.equal(value, weights[name]) for name, value in resumed.items())


def test_another_number_of_processes_continues_with_the_same_batches(tmp_path):
    """Stopped with two processes within two epochs, a run of one has the samples of the other global batches."""
    streaming(tmp_path / "mds")
    program, kinds, stops = Path(__file__).parent / "streaming_program.py", ("own", "torch"), ("3ba", "7ba")

    def train(processes, runs):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run([*launcher, program, tmp_path, str(processes), *runs], check=True)

    def batches(processes, run):
        parts = [json.loads((tmp_path / f"{run}-{processes}-{rank}.json").read_text()) for rank in range(processes)]
        return [sorted(itertools.chain(*batch)) for batch in zip(*parts, strict=True)]

    train(2, [f"{kind}-{name}" for kind in kinds for name in ("whole-all", *(f"{stop}-{stop}" for stop in stops))])
    train(1, [f"{kind}-{stop}-all" for kind in kinds for stop in stops])

    for kind, stop in itertools.product(kinds, stops):
        stopped, resumed = batches(2, f"{kind}-{stop}-{stop}"), batches(1, f"{kind}-{stop}-all")
        assert stopped + resumed == batches(2, f"{kind}-whole-all")
