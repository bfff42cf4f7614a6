"""The loaders that people use, each over the same samples, whose values are their numbers."""

import io
import json
import tarfile

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from composer.distributed import barrier, get_global_rank, get_sampler, get_world_size

SAMPLES, BATCH = 38, 4


def sampling(data):
    """Return how a loader shuffles: by itself, or in several processes by a sampler that splits the data."""
    return {"sampler": get_sampler(data, shuffle=True)} if get_world_size() > 1 else {"shuffle": True}


def written(path, write):
    """Return a path after the first process has written it."""
    if get_global_rank() == 0 and not path.exists():
        write(path)
    barrier()
    return str(path)


def batch_of(numbers):
    """Return a batch of samples, whose inputs and classes follow from their numbers."""
    numbers = torch.tensor(numbers)
    return numbers[:, None] / SAMPLES * torch.ones(4), numbers % 3


class Numbers(Dataset):
    """Samples by index, of which each draws from torch's global generator."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index + 0.01 * torch.rand(()).item(), index


class NumberStream(IterableDataset):
    """The same samples in a stream without a length, whose processes and workers have every n-th of them."""

    def __iter__(self):
        worker = get_worker_info()
        of_process = range(SAMPLES)[get_global_rank() :: get_world_size()]
        for index in of_process[worker.id :: worker.num_workers] if worker else of_process:
            yield index + 0.01 * torch.rand(()).item(), index


def collate_pairs(samples):
    """Return a batch of pairs of a value and a class."""
    values, labels = zip(*samples, strict=True)
    return torch.tensor(values)[:, None] / SAMPLES * torch.ones(4), torch.tensor(labels) % 3


def map_style(folder, workers):
    """Return torch's loader over samples that draw, shuffled."""
    return DataLoader(Numbers(), BATCH, **sampling(Numbers()), num_workers=workers, collate_fn=collate_pairs)


def iterable(folder, workers):
    """Return torch's loader over a stream that draws."""
    return DataLoader(NumberStream(), BATCH, num_workers=workers, collate_fn=collate_pairs)


def torchdata(folder, workers):
    """Return torchdata's loader, which saves its own state, shuffled; its data does not draw."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = range(SAMPLES)
    return StatefulDataLoader(data, BATCH, **sampling(data), num_workers=workers, collate_fn=batch_of)


def hugging_face(folder, workers):
    """Return a shuffled stream of Hugging Face in torch's loader; the streams of workers are shards of the files."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    def write(path):
        part = int(path.stem)
        path.write_text("\n".join(json.dumps({"number": number}) for number in range(part, SAMPLES, 4)))

    paths = [written(folder / f"{part}.jsonl", write) for part in range(4)]
    features = datasets.Features({"number": datasets.Value("int64")})
    stream = datasets.load_dataset(
        "json", data_files=paths, split="train", streaming=True, features=features, cache_dir=str(folder / "cache")
    ).shuffle(seed=3, buffer_size=8)
    if get_world_size() > 1:
        stream = split_dataset_by_node(stream, get_global_rank(), get_world_size())
    return DataLoader(
        stream, BATCH, num_workers=workers, collate_fn=lambda rows: batch_of([row["number"] for row in rows])
    )


def webdataset(folder, workers):
    """Return WebDataset's loader over archives, whose shuffle depends on the epoch that the trainer sets."""
    import webdataset as wds

    class ByEpoch(wds.WebDataset):
        def set_epoch(self, epoch):
            for stage in self.pipeline:
                if isinstance(stage, wds.detshuffle):
                    stage.epoch = epoch - 1  # it counts when it begins

    return _webdataset(ByEpoch, folder, workers)


def webdataset_that_counts(folder, workers):
    """Return the same as WebDataset has it: its shuffle counts the epochs, which no state contains."""
    import webdataset as wds

    return _webdataset(wds.WebDataset, folder, workers)


def _webdataset(kind, folder, workers):
    import webdataset as wds

    def write(path):
        with tarfile.open(path, "w") as archive:
            for number in range(int(path.stem), SAMPLES, 4):
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:03}.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))

    paths = [written(folder / f"{part}.tar", write) for part in range(4)]
    data = kind(paths, shardshuffle=False, nodesplitter=wds.split_by_node)
    data = data.compose(wds.detshuffle(8, seed=3)).decode().map(lambda sample: int(sample["txt"]))
    return DataLoader(data, BATCH, num_workers=workers, collate_fn=batch_of)


def streaming(folder, workers):
    """Return the loader of mosaicml-streaming over .mds files, shuffled."""
    import streaming as library

    def write(path):
        with library.MDSWriter(out=str(path), columns={"number": "int"}) as writer:
            for number in range(SAMPLES):
                writer.write({"number": number})

    library.base.util.clean_stale_shared_memory()
    local = written(folder / "mds", write)
    data = library.StreamingDataset(local=local, shuffle=True, batch_size=BATCH, shuffle_seed=3)
    return library.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, collate_fn=lambda rows: batch_of([row["number"] for row in rows])
    )


LOADERS = {
    "map_style": map_style,
    "iterable": iterable,
    "torchdata": torchdata,
    "hugging_face": hugging_face,
    "webdataset": webdataset,
    "webdataset_that_counts": webdataset_that_counts,
    "streaming": streaming,
}
