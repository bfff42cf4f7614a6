"""What a checkpoint of a sharded model costs beside ``torch.distributed.checkpoint`` (DCP).

A model is sharded by FSDP2 over processes of one machine, with the state of AdamW. In each round both libraries save,
load and save in the background in turns, in the same processes, in another order in each round. A time is the slowest
process's; ratios are medians over the rounds, composer to DCP's in the same round.

    save         until it is committed: on the disk, ours with SHA-256 and XXH3 of each file and XXH3 of each block
    processor    processor time of the save, the mean of the processes, all threads
    load         into model and optimizer, ours with the checksums of all blocks compared
    loading      processor time of the load
    standstill   how long training waits for a save in the background; DCP's ``async_save``, with a group of its own
    memory       the peak above what the process had before, for a save, a load, and a save in the background after the
                 first; beside the size of its shard

Also measured, without processes: the size of ``layout.json`` of 10,000 tensors in 64 processes, and the processor time
until a process that loads it has its plan.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = ("small", "resnet50", "transformer")
LIMITS = {"save": 0.40, "processor": 0.40, "load": 0.25, "loading": 0.25, "standstill": 0.5}


def main() -> None:
    """Measure, or, as a child, be one of the processes."""
    arguments = parse_arguments()
    if arguments.child is not None:
        be_process(arguments, Path(arguments.child))
        return
    result: dict[str, Any] = {"layout": measure_layout(), "load average": os.getloadavg()}
    print("layout.json: {megabytes:.1f} MB, planned in {planned:.2f} s of processor time".format(**result["layout"]))
    for model in arguments.models:
        for count in arguments.processes:
            result[f"{model}, {count} processes"] = report(model, count, run_processes(model, count, arguments))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the system's)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_layout(tensors: int = 10_000, processes: int = 64) -> dict[str, float]:
    """Return the size of a synthetic layout, and the processor time from its bytes to the plan of one process."""
    from composer.checkpoint.sharded import Layout, PartFile, TensorLayout

    rows, size = 64, 64 * 4096 * 4
    cuts = [[rows * rank for rank in range(processes)], [0]]
    of_kind = {
        f"model.layers.{place // 10}.block.linear{place % 10}.weight": TensorLayout(
            "float32", [rows * processes, 4096], cuts, [*range(processes)], [place * size] * processes
        )
        for place in range(tensors)
    }
    blocks = "0123456789abcdef" * 2 * (tensors * size // (4 << 20))
    files = {f"model-{place:05}-of-{processes:05}.safetensors": PartFile(1000, blocks) for place in range(processes)}
    content = Layout(files, {"model.safetensors": of_kind}).to_bytes()
    began = time.process_time()
    read = Layout.from_bytes(content, "layout.json")
    for one in read.tensors["model.safetensors"].values():
        list(one.cells(((rows, 0), (rows, 4096))))
    return {"megabytes": len(content) / 1e6, "planned": time.process_time() - began}


def run_processes(model: str, count: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each process has measured."""
    folder = Path(tempfile.mkdtemp(prefix="composer-bench-", dir=arguments.folder))
    command = [sys.executable, __file__, "--child", str(folder), "--models", model, "--rounds", str(arguments.rounds)]
    try:
        children = [
            subprocess.Popen(
                command,
                env=os.environ
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(count)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            sys.exit("a process failed")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def be_process(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure in one of the processes, and write the figures to a file."""
    import torch

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    state, shard_bytes = make_state(arguments.models[0])
    ways = {"ours": our_ways(state, folder), "dcp": dcp_ways(state, folder)}
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(arguments.rounds + 1):
        for what in ("save", "load", "standstill"):
            for library in ("ours", "dcp") if number % 2 else ("dcp", "ours"):
                call, settle = ways[library][what]
                measured = measure(call, settle)
                if number:  # the first round imports modules and touches memory
                    figures.setdefault(what, {}).setdefault(library, []).append(measured)
    result = {"shard": shard_bytes, "figures": figures}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(call: Callable[[], object], settle: Callable[[], object]) -> dict[str, float]:
    """Return the seconds, seconds of the processor and MiB of memory that a call takes in this process.

    Args:
        call: The call; its end is that of the time.
        settle: Completes what the call has started, which counts for processor time and memory.
    """
    import torch

    os.sync()
    torch.distributed.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed, and which the call would use again
    reset_peak()
    before, processor, began = memory("VmRSS"), time.process_time(), time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    settle()
    used, peak = time.process_time() - processor, memory("VmHWM")
    torch.distributed.barrier()
    return {"seconds": seconds, "processor": used, "memory": peak - before}


def reset_peak() -> None:
    """Set the peak of the process's memory to its current memory."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> float:
    """Return an entry of the process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def make_state(model_name: str) -> tuple[Any, int]:
    """Return a run of a sharded model whose AdamW has made a step, and the bytes of this process's shard."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from composer.core import State

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if model_name == "resnet50":
        import torchvision

        model: nn.Module = torchvision.models.resnet50()
    else:
        width, layers = (1024, 24) if model_name == "transformer" else (64, 2)
        blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)]
        model = nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = [*model.parameters(), *(one for held in optimizer.state.values() for one in held.values())]
    shard = sum(one.to_local().nbytes for one in tensors if hasattr(one, "to_local"))
    return State(model, optimizers=optimizer, rank=torch.distributed.get_rank()), shard


Ways = dict[str, tuple["Callable[[], object]", "Callable[[], object]"]]


def our_ways(state: Any, folder: Path) -> Ways:
    """Return how a checkpoint is saved, loaded, and saved in the background, each with what completes it."""
    from composer.callbacks import CheckpointSaver
    from composer.checkpoint import load_checkpoint, save_checkpoint
    from composer.core import Timestamp

    saver = CheckpointSaver(str(folder / "background"), "{batch}", save_interval="1ba", num_checkpoints_to_keep=1)
    saver.fit_start(state, None)  # type: ignore[arg-type]  # not used

    def save_in_background() -> None:
        state.timestamp = Timestamp(batch=int(state.timestamp.batch) + 1)
        saver.save(state)

    return {
        "save": (lambda: save_checkpoint(state, folder / "ours", overwrite=True), nothing),
        "load": (lambda: load_checkpoint(folder / "ours", state), nothing),
        "standstill": (save_in_background, saver._wait),
    }


def dcp_ways(state: Any, folder: Path) -> Ways:
    """Return the same for DCP, as its documentation shows it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    group = torch.distributed.new_group(backend="gloo")
    model, [optimizer] = state.model, state.optimizers
    pending: list[Any] = []

    def content() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load() -> None:
        loaded = content()
        dcp.load(loaded, checkpoint_id=folder / "dcp")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

    def save_in_background() -> None:
        pending.append(dcp.async_save(content(), checkpoint_id=folder / "dcp background", process_group=group))

    return {
        "save": (lambda: dcp.save(content(), checkpoint_id=folder / "dcp"), nothing),
        "load": (load, nothing),
        "standstill": (save_in_background, lambda: pending.pop().result()),
    }


def nothing() -> None:
    """Do nothing."""


def report(model: str, count: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the ratios and the memory of a model in some processes, and return them."""
    shard = max(one["shard"] for one in measured) / 2**20

    def over(what: str, library: str, figure: str, combine: Callable[[list[float]], float]) -> list[float]:
        of_ranks = [[one[figure] for one in rank["figures"][what][library]] for rank in measured]
        return [combine(list(of_round)) for of_round in zip(*of_ranks, strict=True)]

    rows: dict[str, Any] = {"shard in MiB": shard}
    print(f"\n{model}, {count} processes, {shard:.0f} MiB each, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<12} {'ours ms':>9} {'DCP ms':>9} {'ratio':>7} {'at most':>8}")
    timed = {
        "save": ("save", "seconds"),
        "processor": ("save", "processor"),
        "load": ("load", "seconds"),
        "loading": ("load", "processor"),
        "standstill": ("standstill", "seconds"),
    }
    for name, (what, figure) in timed.items():
        combine = statistics.mean if figure == "processor" else max
        ours, dcp = (over(what, library, figure, combine) for library in ("ours", "dcp"))
        ratio = statistics.median(one / other for one, other in zip(ours, dcp, strict=True))
        rows[name] = {"ours": ours, "dcp": dcp, "ratio": ratio}
        milliseconds = [1000 * statistics.median(times) for times in (ours, dcp)]
        print(f"{name:<12} {milliseconds[0]:>9.0f} {milliseconds[1]:>9.0f} {ratio:>7.2f} {LIMITS[name]:>8.2f}")
    for what in ("save", "load", "standstill"):
        peaks = {library: statistics.median(over(what, library, "memory", max)) for library in ("ours", "dcp")}
        rows[f"memory, {what}"] = peaks
        label = "background" if what == "standstill" else what
        print(f"memory of {label:<10} ours {peaks['ours']:.0f} MiB, DCP {peaks['dcp']:.0f} MiB, shard {shard:.0f} MiB")
    return rows


if __name__ == "__main__":
    main()
