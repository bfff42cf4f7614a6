"""What saving and loading a checkpoint costs, compared with torch.save, safetensors and plain files.

ResNet-50 with the state of Adam (293 MiB), one thread of torch. Every variant runs in fresh processes, in turns; each
process does its work several times. The table shows the medians over the rounds, and the medians of the ratios to torch
within a round. A run saves often and loads once. The time of saving is therefore the best of a process, since touching
memory for the first time costs more than the work itself. The time of loading is the first of a process, which has to
touch new memory; the best of the later ones is shown separately ("again"). Files are in the system's cache, and all
imports are done before.

Saving, until the bytes are with the operating system (``--sync``: until they are on the disk):

    torch.save       one file, no checksum but that of its archive
    torch + SHA-256  the same, and the file's SHA-256 afterwards
    safetensors      two files by safetensors.torch.save_file, no checksum
    plain write      the bytes, one after the other
    ours             a checkpoint: two files, state.json, layout.json, XXH3 of each, manifest; on the disk
    ours, no sync    the same without waiting for the disk, to be compared with the others without --sync

Loading, into memory that the file does not back:

    torch.load       weights_only=True
    safetensors      two files by safetensors.torch.load_file, then a copy
    plain read       the bytes into memory
    torch, loaded    torch.load, then load_state_dict of model and optimizer
    torch, resumed   the same, into an optimizer that has not made a step, as in a program that is started again
    ours             manifest, XXH3 of all files, everything compared with the run, then into model and optimizer
    ours, resumed    the same, into an optimizer that has not made a step

``--weights 4002`` saves a model of so many small weights with the state of Adam instead: torch.save with fsync and a
checkpoint in turns, in one process; the table has the median of the ratios of neighbours. The limit is 1.5.

Standing still: how long training waits until a save in the background has copied the tensors, compared with a plain
copy of the same tensors.
"""

from __future__ import annotations

import argparse
import hashlib
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

SAVING = ("torch.save", "torch + SHA-256", "safetensors", "plain write", "ours", "ours, no sync")
LOADING = ("torch.load", "safetensors", "plain read", "torch, loaded", "torch, resumed", "ours", "ours, resumed")
STANDING = ("copy", "ours")
GROUPS = {"save": SAVING, "load": LOADING, "stand": STANDING}
REFERENCES = {"save": "torch.save", "load": "torch.load", "again": "torch.load", "stand": "copy"}
CHUNK = 8 << 20


def main() -> None:
    """Measure all variants in turns, or, as a child, one."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(*arguments.child, arguments)))
        return
    folder = Path(tempfile.mkdtemp(prefix="composer-bench-", dir=arguments.folder))
    try:
        if arguments.weights:
            save_many(arguments, folder)
            return
        times = rounds(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {group: report(group, measured) for group, measured in times.items()}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant runs (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="how often a process does its work (default: 4)")
    parser.add_argument("--weights", type=int, help="save so many small weights instead of ResNet-50")
    parser.add_argument("--sync", action="store_true", help="wait for the disk in every way of saving")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the system's)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def rounds(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the seconds that each variant took in each round."""
    times: dict[str, dict[str, list[float]]] = {group: {} for group in REFERENCES}
    for number in range(arguments.rounds):
        for group, variants in GROUPS.items():
            for variant in variants:
                measured = run_in_subprocess(group, variant, folder, arguments)
                times[group].setdefault(variant, []).append(measured[0] if group == "load" else min(measured))
                if group == "load" and measured[1:]:
                    times["again"].setdefault(variant, []).append(min(measured[1:]))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    return times


def save_many(arguments: argparse.Namespace, folder: Path) -> None:
    """Print how long a save of many small weights takes, compared with torch.save and fsync in turns."""
    import torch

    torch.set_num_threads(1)
    blocks = [torch.nn.Linear(4, 4) for _ in range(arguments.weights // 2)]
    state, arguments.sync = make_state(torch.nn.Sequential(*blocks)), True
    remove, reference = saving("torch.save", state, folder, arguments)
    ways, pairs = (reference, saving("ours", state, folder, arguments)[1]), []
    for _ in range(2 + 5 * arguments.rounds):
        pair = []
        for way in ways:
            remove()
            began = time.perf_counter()
            way()
            pair.append(time.perf_counter() - began)
        pairs.append(pair)
    first, second = zip(*pairs[2:], strict=True)  # after two to warm up
    report("save", {"torch.save": [*first], "ours": [*second]})


def run_in_subprocess(group: str, variant: str, folder: Path, arguments: argparse.Namespace) -> list[float]:
    """Return the seconds that a variant takes in a process of its own, each time."""
    options = ["--repeats", str(arguments.repeats), *(["--sync"] if arguments.sync else [])]
    command = [sys.executable, __file__, "--child", group, variant, str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return [float(seconds) for seconds in json.loads(output.splitlines()[-1])]


def measure(group: str, variant: str, folder: str, arguments: argparse.Namespace) -> list[float]:
    """Return the seconds that one variant takes, each time."""
    import torch
    import torchvision

    torch.set_num_threads(1)
    state = make_state(torchvision.models.resnet50())
    prepare, call = {"save": saving, "load": loading, "stand": standing}[group](variant, state, Path(folder), arguments)
    times = []
    for _ in range(arguments.repeats):
        prepare()
        began = time.perf_counter()
        kept = call()
        times.append(time.perf_counter() - began)
        del kept
    return times


def make_state(model: Any) -> Any:
    """Return a run whose Adam has made a step."""
    import torch

    from composer.core import State

    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return State(model, optimizers=optimizer)


def nothing(*_: object) -> None:
    """Do nothing."""


def tensors_of(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of the model and of the optimizer, by name."""
    held = state.optimizers[0].state_dict()["state"]
    return dict(state.model.state_dict()), {
        f"{number}/{name}": one for number, values in held.items() for name, one in values.items()
    }


def saving(
    variant: str, state: Any, folder: Path, arguments: argparse.Namespace
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what prepares a way of saving, and the way itself."""
    import torch
    from safetensors.torch import save_file

    from composer.checkpoint import folders, save_checkpoint

    weights, moments = tensors_of(state)
    one, two, ours = folder / "one", folder / "two", folder / "ours"

    def remove() -> None:
        for path in (one, two):
            path.unlink(missing_ok=True)
        shutil.rmtree(ours, ignore_errors=True)
        os.sync()

    def synced(*paths: Path) -> None:
        for path in paths if arguments.sync else ():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def torch_save() -> None:
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizers[0].state_dict()}, one)
        synced(one)

    def with_checksum() -> str:
        torch_save()
        with one.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def safetensors() -> None:
        save_file(weights, one)
        save_file(moments, two)
        synced(one, two)

    pieces = [
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in (*weights.values(), *moments.values())
    ]

    def plain_write() -> None:
        with one.open("wb", buffering=0) as file:
            for piece in pieces:
                file.write(memoryview(piece))
        synced(one)

    def save() -> str:
        return save_checkpoint(state, ours)

    if variant == "ours, no sync":
        folders.os = _WithoutSync()  # type: ignore[attr-defined]
    ways = (torch_save, with_checksum, safetensors, plain_write, save, save)
    return remove, dict(zip(SAVING, ways, strict=True))[variant]


class _WithoutSync:
    """The module os, whose functions that make the disk write do nothing."""

    def __getattr__(self, name: str) -> Any:
        return nothing if name == "fsync" else getattr(os, name)


def loading(
    variant: str, state: Any, folder: Path, _: argparse.Namespace
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what prepares a way of loading, and the way itself."""
    import torch
    from safetensors.torch import load_file, save_file

    from composer.checkpoint import load_checkpoint, save_checkpoint

    archive, one, two, ours = folder / "archive", folder / "one.st", folder / "two.st", folder / "load"
    if not ours.exists():
        weights, moments = tensors_of(state)
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizers[0].state_dict()}, archive)
        save_file(weights, one)
        save_file(moments, two)
        save_checkpoint(state, ours)
    for path in (archive, one, two, *ours.iterdir()):
        path.read_bytes()
    warm_up(folder)

    def torch_load() -> object:
        return torch.load(archive, weights_only=True)

    def torch_loaded() -> None:
        content = torch.load(archive, weights_only=True)
        state.model.load_state_dict(content["model"])
        state.optimizers[0].load_state_dict(content["optimizer"])

    def safetensors() -> list[Any]:
        return [tensor.clone() for path in (one, two) for tensor in load_file(path).values()]

    def plain_read() -> bytearray:
        content = bytearray(archive.stat().st_size)
        view, position = memoryview(content), 0
        with archive.open("rb", buffering=0) as file:
            while count := file.readinto(view[position : position + CHUNK]):
                position += count
        return content

    def load() -> object:
        return load_checkpoint(ours, state)

    def reset_state() -> None:
        if variant.endswith("resumed"):
            state.optimizers[0].state.clear()

    ways = (torch_load, safetensors, plain_read, torch_loaded, torch_loaded, load, load)
    return reset_state, dict(zip(LOADING, ways, strict=True))[variant]


def warm_up(folder: Path) -> None:
    """Load something small in each way: what is imported or begun by that is not measured."""
    import torch
    from safetensors.torch import load_file, save_file

    from composer.checkpoint import load_checkpoint, save_checkpoint
    from composer.core import State

    with tempfile.TemporaryDirectory(dir=folder) as here:
        small, path = State(torch.nn.Linear(2, 2)), Path(here) / "small"
        torch.save(small.model.state_dict(), path)
        torch.load(path, weights_only=True)
        save_file(dict(small.model.state_dict()), path)
        load_file(path)
        load_checkpoint(save_checkpoint(small, Path(here) / "ours"), small)


def standing(
    variant: str, state: Any, folder: Path, _: argparse.Namespace
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return nothing to prepare, and the copy that training waits for."""
    from composer.checkpoint.folders import open_folder
    from composer.checkpoint.saving import take_snapshot

    weights, moments = tensors_of(state)
    memory: dict[tuple[str, str], Any] = {}

    def ours() -> None:
        take_snapshot(state, open_folder(folder), "one", memory=memory)

    def copy() -> list[Any]:
        return [tensor.clone() for tensor in (*weights.values(), *moments.values())]

    return nothing, copy if variant == "copy" else ours


def report(group: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print a table and return it as data."""
    reference, rows = times[REFERENCES[group]], []
    print(f"\n{group:<16} {'ms':>7} {'x ' + REFERENCES[group]:>14} {'spread':>14}")
    for variant, measured in times.items():
        ratio = statistics.median(one / base for one, base in zip(measured, reference, strict=True))
        milliseconds = [1000 * seconds for seconds in measured]
        spread = f"{min(milliseconds):.0f}…{max(milliseconds):.0f}"
        print(f"{variant:<16} {statistics.median(milliseconds):>7.0f} {ratio:>14.2f} {spread:>14}")
        rows.append({"variant": variant, "ms": statistics.median(milliseconds), "ratio": ratio, "all": milliseconds})
    return rows


if __name__ == "__main__":
    main()
