"""What one of 1,024 processes does for a checkpoint of a sharded model, simulated in one process.

The processes are described, not started: each has a shard of 900 tensors, as of a transformer with the state of AdamW.

    plan         who writes which shard, which is made once for a run, from what all processes have described
    manifest     what the first process writes in a save, and each process reads in a load: a line for each file
    own file     what a process saves and loads of its own: its place in the data, generators and metrics

Seconds are processor time. The plan has a limit of 1 s. Of everything else only the manifest grows with the number of
processes, by a line for each file; no data of a process is sent to another.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = {"plan": 1.0}


def main() -> None:
    """Measure for one process and for many, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1024, help="the number of processes (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=900, help="the number of sharded tensors (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    numbers = (1, arguments.processes)
    result = {str(processes): measure(processes, arguments.tensors) for processes in numbers}
    print(f"{'':<24} {'1 process':>12} {f'{arguments.processes} processes':>16}")
    for name in result["1"]:
        one, many = (result[str(processes)][name] for processes in numbers)
        print(f"{name:<24} {one:>12.4f} {many:>16.4f}{' !' if many > LIMITS.get(name, many) else ''}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


def measure(processes: int, tensors: int) -> dict[str, float]:
    """Return seconds of the processor, and bytes, for a number of processes."""
    from composer.checkpoint.layout import plan_files
    from composer.checkpoint.manifest import FileRecord, Manifest, process_file
    from composer.core import Timestamp

    described = describe(processes, tensors)
    plan, (layout, _) = timed(lambda: plan_files(described))
    names = [*layout.files, *(process_file(rank, processes) for rank in range(1, processes))]
    manifest = Manifest(files=dict.fromkeys(names, FileRecord(1 << 20, "0" * 32)), timestamp=Timestamp())
    write, content = timed(manifest.to_bytes)
    read, _ = timed(lambda: Manifest.from_bytes(content, "manifest.json"))
    saving, loading, size = measure_own_file()
    return {
        "plan": plan,
        "manifest, written": write,
        "manifest, read": read,
        "manifest, bytes": len(content),
        "own file, saved": saving,
        "own file, loaded": loading,
        "own file, bytes": size,
    }


def describe(processes: int, tensors: int) -> list[Any]:
    """Return what each process describes: its rows of matrices, the rest of which the others have."""
    from composer.checkpoint.layout import TensorInfo
    from composer.functional.dtensors import Region

    infos = [TensorInfo("float32", (count * processes, 8), None, (0,)) for count in range(1, 10)]
    described = []
    for rank in range(processes):
        regions = [Region((rank * count, 0), (count, 8)) for count in range(1, 10)]
        shards = [*zip(infos, regions, strict=True)]
        of_kind = {f"layers.{number}.weight": shards[number % len(shards)] for number in range(tensors)}
        described.append(pickle.loads(pickle.dumps({"model.safetensors": of_kind})))  # as it is exchanged
    return described


def measure_own_file() -> tuple[float, float, int]:
    """Return the seconds in which a process packs and reads what belongs to it, and its bytes."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from composer import Trainer
    from composer.checkpoint.layout import join_process, pack_files, split_process
    from composer.models import ComposerClassifier

    model = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3)
    data = TensorDataset(torch.rand(8, 4), torch.zeros(8, dtype=torch.int64))
    options: dict[str, Any] = {"max_duration": "1ep", "progress_bar": False, "device": "cpu"}
    trainer = Trainer(model=model, train_dataloader=DataLoader(data), **options)
    process = trainer._resume_state.values()["process"]

    def pack() -> bytes:
        metadata, tensors = split_process(process)
        kinds = {"process.safetensors": tensors}
        writes = {"process.safetensors": [*tensors]}
        files = pack_files(kinds, writes, copy=True, metadata={"process.safetensors": metadata})
        return b"".join(files["process.safetensors"])

    saving, content = timed(pack)
    loading, _ = timed(lambda: join_process(content, "process.safetensors"))
    return saving, loading, len(content)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call in seconds, and its result."""
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


if __name__ == "__main__":
    main()
