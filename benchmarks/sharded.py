"""What a checkpoint of a sharded model costs, compared with ``torch.distributed.checkpoint`` (DCP).

A model is sharded by FSDP2 over processes of one machine, with the state of AdamW. In each round both libraries save,
load and save in the background in turns, in the same processes, in another order in each round. A time is that of the
slowest process; only ``save`` is that of the first process whose call returns. Ratios are medians over the rounds,
composer's time to DCP's in the same round.

    save         until it is committed: on the disk, in place of an earlier one, ours with XXH3 of each file and block
    returned     until the call returns in all processes: ours deletes the earlier one when the new one is committed
    new          a save to a new folder
    writing      the same number of bytes, written without a format; compared with DCP's save to a new folder, this is
                 the least that any format takes
    processor    processor time of the save, the mean of the processes, all threads
    load         into a model and a new optimizer, as in a new process, ours with the checksums of all blocks compared
                 and the files in the system's page cache
    loading      processor time of the load, for which there is no limit
    from disk    a load whose files are not in the page cache, for which there is no limit
    standstill   how long training waits for a save in the background; DCP's ``async_save``, with a group of its own
    memory       the peak above what the process had before in MiB, for a save, a load, and a save in the background
                 after the first; the limit is the size of its shard and 64 MiB more

Also measured:

- what a step of ``Trainer.fit`` takes above the same step of a plain loop with DistributedDataParallel, in two
  processes, and the processor time of its thread above the loop's. The processes wait for each other for most of a
  step, so the times of two equal loops differ by up to a hundred microseconds;
- the size of ``layout.json`` of 10,000 tensors in 64 processes, and the processor time until a process has the plan of
  a load, or of a first save.

A table with the limits is printed at the end; figures above them have a ``!``. All of it takes eleven minutes on two
idle cores.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = ("resnet50:2", "resnet50:4", "transformer:2", "transformer:4")
LIMITS = {
    "save": 0.70,
    "returned": None,
    "new": None,
    "writing": None,
    "processor": None,
    "load": 0.40,
    "loading": None,
    "from disk": None,
    "standstill": 0.5,
}
MORE_MEMORY = 64.0
"""MiB that a process may need above the size of its shard."""
BLOCK, SETTLING = 50, 10
"""Steps of a block, and those at its beginning that are not counted."""
STEP_LIMIT, LAYOUT_LIMITS = 60.0, {"megabytes": 20.0, "planned": 1.0, "planned to save": 1.0}
TRANSFORMER_GIB, TRANSFORMER_ROUNDS = 16, 2
"""The transformer of 300 million parameters: the memory without which it is skipped, and rounds, as each takes long."""


def main() -> None:
    """Measure, or, as a child, be one of the processes."""
    arguments = parse_arguments()
    if arguments.child is not None:
        be_process(arguments, Path(arguments.child))
        return
    began = time.monotonic()
    result: dict[str, Any] = {"layout": measure_layout(), "step": measure_steps(run_processes("step", 2, arguments))}
    cases = {}
    for case in arguments.cases:
        model, _, count = case.partition(":")
        if model == "transformer" and available() < TRANSFORMER_GIB:
            print(f"\n{case} is skipped: {available():.0f} GiB of memory are free, and it needs {TRANSFORMER_GIB}.")
            continue
        cases[case] = report(model, int(count), run_processes(model, int(count), arguments))
    print_table(result, cases)
    print(f"\nload average {os.getloadavg()[0]:.1f}, {time.monotonic() - began:.0f} s in all")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result | cases | {"load average": os.getloadavg()}, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="*",
        default=CASES,
        metavar="MODEL:PROCESSES",
        help="small, resnet50 or transformer, as in %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2500, help="of a loop in a round (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the system's)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def available() -> float:
    """Return the GiB of memory that programs can use."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    return int(line.split()[1]) / 2**20


def measure_layout(tensors: int = 10_000, processes: int = 64) -> dict[str, float]:
    """Return the size of a synthetic layout, and the processor time of the plan of a save, and of that of a load."""
    from composer.checkpoint.layout import Layout, TensorFile, TensorInfo, plan_files
    from composer.checkpoint.manifest import BLOCK_BYTES
    from composer.functional.dtensors import Region

    rows, columns = 64, 4096
    info = TensorInfo("float32", (rows * processes, columns), placements=(0,))
    names = [f"model.layers.{place // 10}.block.linear{place % 10}.weight" for place in range(tensors)]
    described = [
        {"model.safetensors": dict.fromkeys(names, (info, Region((rows * rank, 0), (rows, columns))))}
        for rank in range(processes)
    ]
    began = time.process_time()
    layout, _ = plan_files(described)
    saved = time.process_time() - began
    blocks = "0123456789abcdef" * 2 * (tensors * rows * columns * 4 // BLOCK_BYTES)
    content = layout.to_bytes(dict.fromkeys(layout.files, TensorFile(1000, blocks)))
    began = time.process_time()
    read = Layout.from_bytes(content, "layout.json")
    for one in read.tensors["model.safetensors"].values():
        list(one.cells(((rows, 0), (rows, columns))))
    return {"megabytes": len(content) / 1e6, "planned": time.process_time() - began, "planned to save": saved}


def run_processes(model: str, count: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each process has measured."""
    folder = Path(tempfile.mkdtemp(prefix="composer-bench-", dir=arguments.folder))
    options = {"--child": folder, "--model": model, "--rounds": arguments.rounds, "--steps": arguments.steps}
    command = [sys.executable, __file__, *(str(one) for option in options.items() for one in option)]
    try:
        children = [
            subprocess.Popen(
                command,
                env=os.environ
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
                | {"OMP_NUM_THREADS": "1"},
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
    warnings.simplefilter("ignore")  # DCP warns of each folder that it overwrites
    store = torch.distributed.FileStore(str(folder / "store"), count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    if arguments.model == "step":
        result: Any = run_steps(arguments.rounds, arguments.steps)
    else:
        is_large = arguments.model == "transformer"
        rounds = min(arguments.rounds, TRANSFORMER_ROUNDS) if is_large else arguments.rounds
        result = run_rounds(arguments.model, folder, rounds)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_rounds(model: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of saves and loads in this process."""
    import torch

    state, shard_bytes = make_state(model)
    ways = {"ours": our_ways(state, folder), "dcp": dcp_ways(state, folder)}
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(rounds + 1):
        for what in ("save to a new folder", "save", "load", "load from disk", "standstill"):
            for library in ("ours", "dcp") if number % 2 else ("dcp", "ours"):
                if what == "save to a new folder" and state.rank == 0:
                    shutil.rmtree(folder / library, ignore_errors=True)
                if what.startswith("load"):
                    state.optimizers = torch.optim.AdamW(state.model.parameters())
                    if state.rank == 0:
                        set_cached(folder / library, is_cached=what == "load")
                call, settle = ways[library][what.partition(" ")[0]]
                measured = measure(call, settle, free=2 * shard_bytes)
                if number:  # the first round imports modules and touches memory
                    figures.setdefault(what, {}).setdefault(library, []).append(measured)
        path = folder / str(state.rank)
        path.unlink(missing_ok=True)
        measured = measure(partial(write, path, shard_bytes), nothing)
        if number:
            figures.setdefault("writing", {}).setdefault("ours", []).append(measured)
    figures["writing"]["dcp"] = figures["save to a new folder"]["dcp"]
    return {"shard": shard_bytes, "figures": figures}


def touch_free_memory(size: int) -> None:
    """Write to free memory and release it; all processes do so at once, so that each touches other memory.

    The host of a virtual machine takes unused memory back after a few seconds. It returns it page by page on the next
    access, which takes longer than reading the same number of bytes from a file.
    """
    import torch

    torch.distributed.barrier()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for place in range(0, size, 4096):
            memory[place] = 1
        torch.distributed.barrier()


def set_cached(folder: Path, *, is_cached: bool) -> None:
    """Read the files of a folder into the system's page cache, or remove them from there."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while is_cached and file.read(1 << 20):
                pass


def write(path: Path, size: int) -> None:
    """Write some bytes to a file and to the disk, without the page cache."""
    chunk = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chunk.madvise(mmap.MADV_HUGEPAGE)
    chunk.write(os.urandom(len(chunk)))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(-(-size // len(chunk))):
        os.write(descriptor, chunk)
    os.fsync(descriptor)
    os.close(descriptor)


Pairs = list[tuple[float, float]]


def run_steps(rounds: int, steps: int) -> dict[str, list[Pairs]]:
    """Return pairs of microseconds of a step: of ``Trainer.fit``, and of a plain loop with DDP before it.

    Blocks of steps alternate within a fit, so that both run under the same load of the machine. A round has three
    parts: a fit; a second loop in its place, whose difference from the first is the error of the measurement; and a fit
    of which the processor time of its thread is measured.
    """
    import torch
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from trainers import Turns

    from composer import Callback, Trainer, distributed
    from composer.models import ComposerClassifier

    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    count = 2 * 16 * steps * (rounds + 1)  # one epoch of the trainer has enough batches for all rounds
    data = TensorDataset(torch.randn(count, 32), torch.randint(0, 10, (count,)))

    class Blocks(Callback):
        def __init__(self, train: Callable[[int], object]) -> None:
            self.turns = Turns(train, BLOCK, SETTLING)

        def batch_start(self, *_: object) -> None:
            self.turns()

    def make_loop(count_step: Callable[[object, object], None]) -> Callable[[int], None]:
        plain = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        batches = itertools.chain.from_iterable(itertools.repeat(loader))

        def loop(count: int) -> None:
            for inputs, targets in itertools.islice(batches, count):
                count_step(None, None)
                optimizer.zero_grad()
                loss = functional.cross_entropy(plain(inputs), targets)
                loss.backward()
                optimizer.step()

        return loop

    # The fit calls the counter for each batch, so the loop calls one, too: counting is not a cost of the trainer. The
    # second loop's counter is ``blocks.turns``, called before each of its steps.
    loop, other = make_loop(Blocks(lambda _: None).batch_start), make_loop(lambda *_: None)
    blocks = Blocks(loop)
    model = ComposerClassifier(network(), num_classes=10, train_metrics=[])
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8, sampler=distributed.get_sampler(data, shuffle=True)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=blocks,
        progress_bar=False,
        precision="fp32",
        device="cpu",
        seed=0,
    )
    pairs: dict[str, list[Pairs]] = {"ours": [], "loop": [], "processor": []}
    for number in range(rounds + 1):
        for name, of_name in pairs.items():
            clock = time.thread_time if name == "processor" else time.perf_counter
            blocks.turns = Turns(loop, BLOCK, SETTLING, clock)
            torch.distributed.barrier()
            if name == "loop":
                for _ in range(steps):
                    blocks.turns()
                    other(1)
            else:
                trainer.fit(duration=f"{steps}ba")
            if number:
                of_name.append(blocks.turns.pairs)
    return pairs


def measure(call: Callable[[], object], settle: Callable[[], object], free: int = 1) -> dict[str, float]:
    """Return the seconds, seconds of the processor and MiB of memory that a call takes in this process.

    Args:
        call: The call; its end is that of the time.
        settle: Completes what the call has started, which counts for processor time and memory.
        free: Bytes of free memory to touch before.
    """
    import torch

    os.sync()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed, and which the call would use again
    touch_free_memory(free)
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
    model = state.model
    pending: list[Any] = []

    def content() -> dict[str, Any]:
        weights, moments = get_state_dict(model, state.optimizers)
        return {"model": weights, "optimizer": moments}

    def load() -> None:
        loaded = content()
        dcp.load(loaded, checkpoint_id=folder / "dcp")
        set_state_dict(model, state.optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

    def save_in_background() -> None:
        pending.append(dcp.async_save(content(), checkpoint_id=folder / "dcp background", process_group=group))

    return {
        "save": (lambda: dcp.save(content(), checkpoint_id=folder / "dcp"), nothing),
        "load": (load, nothing),
        "standstill": (save_in_background, lambda: pending.pop().result()),
    }


def nothing() -> None:
    """Do nothing."""


def measure_steps(measured: list[dict[str, list[Pairs]]]) -> dict[str, float]:
    """Return medians of a step of the loop, and of the trainer and of another loop above it, in the slower process.

    The spread is that of the medians of the rounds.
    """

    def above(name: str) -> list[list[float]]:
        by_rank = [[[one - loop for one, loop in pairs] for pairs in of_rank[name]] for of_rank in measured]
        return max(by_rank, key=lambda rounds: statistics.median(itertools.chain.from_iterable(rounds)))

    ours = above("ours")
    medians = [statistics.median(pairs) for pairs in ours]
    return {
        "loop": statistics.median(loop for of_rank in measured for pairs in of_rank["ours"] for _, loop in pairs),
        "above": statistics.median(itertools.chain.from_iterable(ours)),
        "from": min(medians),
        "to": max(medians),
        "other": statistics.median(itertools.chain.from_iterable(above("loop"))),
        "processor": statistics.median(itertools.chain.from_iterable(above("processor"))),
    }


def report(model: str, count: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the times of a model in some processes, and return ratios and memory."""
    shard = max(one["shard"] for one in measured) / 2**20

    def over(what: str, library: str, figure: str, combine: Callable[[list[float]], float]) -> list[float]:
        of_ranks = [[one[figure] for one in rank["figures"][what][library]] for rank in measured]
        return [combine(list(of_round)) for of_round in zip(*of_ranks, strict=True)]

    rows: dict[str, Any] = {"shard in MiB": shard}
    print(f"\n{model}, {count} processes, {shard:.0f} MiB each, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<12} {'ours ms':>9} {'DCP ms':>9} {'ratio':>7}   from to")
    timed = {
        "save": ("save", "seconds"),
        "returned": ("save", "seconds"),
        "new": ("save to a new folder", "seconds"),
        "writing": ("writing", "seconds"),
        "processor": ("save", "processor"),
        "load": ("load", "seconds"),
        "loading": ("load", "processor"),
        "from disk": ("load from disk", "seconds"),
        "standstill": ("standstill", "seconds"),
    }
    for name, (what, figure) in timed.items():
        combine = statistics.mean if figure == "processor" else min if name == "save" else max
        ours, dcp = (over(what, library, figure, combine) for library in ("ours", "dcp"))
        ratios = [one / other for one, other in zip(ours, dcp, strict=True)]
        rows[name] = {"ours": ours, "dcp": dcp, "ratio": statistics.median(ratios)}
        milliseconds = [1000 * statistics.median(times) for times in (ours, dcp)]
        spread = f"{min(ratios):.2f} {max(ratios):.2f}"
        print(f"{name:<12} {milliseconds[0]:>9.0f} {milliseconds[1]:>9.0f} {rows[name]['ratio']:>7.2f}   {spread}")
    for what in ("save", "load", "standstill"):
        rows[f"memory, {'background' if what == 'standstill' else what}"] = {
            library: statistics.median(over(what, library, "memory", max)) for library in ("ours", "dcp")
        }
    return rows


def print_table(result: dict[str, Any], cases: dict[str, Any]) -> None:
    """Print all figures that have a limit beside it."""

    def cell(value: float, limit: float, digits: int) -> str:
        return f"{value:.{digits}f}{'!' if value > limit else ' '}"

    print(f"\n{'':<20} {'at most':>10} " + " ".join(f"{case:>15}" for case in cases))
    for name, limit in LIMITS.items():
        if limit is not None:
            shown = " ".join(f"{cell(rows[name]['ratio'], limit, 2):>15}" for rows in cases.values())
            print(f"{name + ', ratio':<20} {limit:>10.2f} {shown}")
    for what in ("save", "load", "background"):
        limits = [rows["shard in MiB"] + MORE_MEMORY for rows in cases.values()]
        peaks = [rows[f"memory, {what}"]["ours"] for rows in cases.values()]
        cells = [f"{cell(peak, limit, 0)}/ {limit:.0f}" for peak, limit in zip(peaks, limits, strict=True)]
        shown = " ".join(f"{one:>15}" for one in cells)
        print(f"{'memory, ' + what:<20} {'shard + 64':>10} {shown}")
    step, layout = result["step"], result["layout"]
    spread = f"rounds {step['from']:.0f} to {step['to']:.0f}, another loop {step['other']:.0f}"
    spread += f"; processor time {step['processor']:.0f}"
    shown = f"{cell(step['above'], STEP_LIMIT, 0):>15} of {step['loop']:.0f}; {spread}"
    print(f"{'step, µs above loop':<20} {STEP_LIMIT:>10.0f} {shown}")
    for name, unit in (
        ("megabytes", "layout.json, MB"),
        ("planned", "load planned, s"),
        ("planned to save", "save planned, s"),
    ):
        print(f"{unit:<20} {LAYOUT_LIMITS[name]:>10.0f} {cell(layout[name], LAYOUT_LIMITS[name], 2):>15}")


if __name__ == "__main__":
    main()
