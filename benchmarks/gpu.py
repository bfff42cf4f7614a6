"""Measure on a GPU: overhead of trainers, ResNet-50 and GPT-2 with each method, packing, losses, saving and kernels.

    python benchmarks/gpu.py --half first                 half of the parts, in less than eight minutes
    python benchmarks/gpu.py --half second                the others, likewise
    python benchmarks/gpu.py --parts overhead gpt         some of them
    python benchmarks/gpu.py --device cpu --size tiny     all parts with tiny sizes, to check the program
    python benchmarks/gpu.py --publish build/*.jsonl      write these figures to gpu.jsonl and README.md beside it

Each part runs in a process of its own, for its share of what is left of ``--budget``: the last parts get what the first
have not used. A variant that has not begun by then is not measured. Variants run in
turns with a reference, which is a plain PyTorch loop where a model is trained, after a warm-up, and the device is
synchronized before and after each timed block. A figure is the median over the blocks. Each row is written to
``--output`` as a JSON line when it is measured, and the tables of Markdown beside it at the end. An error becomes a
row, the other variants and parts are measured, if necessary by another process, and the exit code is 1.

Images and tokens per second are those that are loaded, from pinned memory, also if a method leaves some of them out.
MFU is the FLOPs of the plain model's convolutions and matrix products, forward and backward as torch counts them,
divided by the time and by the dense peak of the device. Without a known peak there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import checkpoint as saving
import losses
import torch
import trainers
from _gpu_training import SIZES, attempt, fastest, gpt, make_clock, make_resnet, measure_peak, packing, resnet50

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _gpu_training import Options, Row

FOLDER = Path(__file__).resolve().parent
# Transformers imports any package with the name of kernels.py.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER]
LIBRARIES = ["torch", "torchvision", "kornia", "timm", "transformers", "lightning", "accelerate"]
BLOCK = re.compile(r"(<!-- gpu -->\n).*?(<!-- end -->)", re.DOTALL)
OVERTIME = 30
"""Seconds after the end of its share when the process of a part is killed: no variant should take as long."""


END = "{}"
"""The line after the last row of a process, which may be killed at its exit."""


def main() -> None:
    """Measure the parts in processes of their own, or one of them as a child."""
    options = parse_arguments()
    if options.publish:
        publish("".join(file.read_text() for file in options.publish), FOLDER)
    elif options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs a GPU, and torch finds none. --device cpu --size tiny checks the program.")
    elif options.child:
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # the other programs print tables
            for row in measure(options.child, options):
                print(json.dumps(row), file=out, flush=True)
            print(END, file=out, flush=True)
    else:
        sys.exit(int(any("error" in row for row in write(options))))


def parse_arguments() -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--half", choices=HALVES, help="these parts, with an output of their own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="full", help="default: %(default)s")
    choices = ["fp32", "amp_bf16", "amp_fp16"]
    parser.add_argument("--precision", choices=choices, help="default: amp_bf16, with --device cpu fp32")
    parser.add_argument("--budget", type=float, help="seconds for all parts (default: 440, with --size tiny 1800)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each variant (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu.jsonl"), help="default: %(default)s")
    parser.add_argument("--publish", type=Path, nargs="+", metavar="FILE", help="publish JSON lines, measure nothing")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.budget = options.budget or (1800 if options.size == "tiny" else 440)
    # bfloat16 is slow on CPUs without instructions for it.
    options.precision = options.precision or ("fp32" if options.device == "cpu" else "amp_bf16")
    if options.half:
        options.parts = HALVES[options.half]
        options.output = options.output.with_stem(f"{options.output.stem}-{options.half}")
    return options


def write(options: Options) -> list[Row]:
    """Measure the parts, write their rows as soon as they are there, then the tables, and return the rows."""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    end, shares, rows = time.time() + options.budget, [SHARES.get(part, 1) for part in options.parts], []
    parts = (
        run_part(part, options, end, shares[place] / sum(shares[place:])) for place, part in enumerate(options.parts)
    )
    with options.output.open("w") as file:
        for row in itertools.chain([environment(options)], *parts):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    tables = render(rows)
    options.output.with_suffix(".md").write_text(tables)
    print(tables)
    return rows


def run_part(part: str, options: Options, end: float, share: float) -> Iterator[Row]:
    """Yield the rows of a part in its share of the time until the end."""
    deadline = time.time() + (end - time.time()) * share
    done, seen, code, is_complete = [], -1, 1, False
    # After some errors a process cannot use the GPU any more. Another one continues after the last row.
    while code and len(done) > seen and time.time() < deadline:
        seen = len(done)
        with start(part, options, deadline, done) as process:
            for line in process.stdout or ():
                if line.startswith("{"):  # libraries in C may print, too
                    if line.strip() == END:
                        is_complete = True
                        continue
                    row = json.loads(line)
                    done.append(row["name"])
                    yield row
        code = 0 if is_complete else process.returncode
    if seen < 0:
        yield {"part": part, "name": part, "skipped": "not measured: no time was left"}
    elif code:
        yield {"part": part, "name": part, "error": f"the process has ended with {code}, what follows is missing"}


def start(part: str, options: Options, deadline: float, done: list[str]) -> subprocess.Popen[str]:
    """Return a new process that measures a part, except what is done. It is killed if it does not end in time."""
    passed = [f"--{name}={getattr(options, name)}" for name in ("device", "size", "precision", "rounds")]
    command = [sys.executable, __file__, "--child", part, *passed, f"--deadline={deadline}", "--done", *done]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(deadline + OVERTIME - time.time(), process.kill)
    timer.daemon = True
    timer.start()
    return process


def measure(part: str, options: Options) -> Iterator[Row]:
    """Yield the rows of a part; what prevents further rows is an error in the last one."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of algorithms without an effect in so few steps
        for row in attempt(part, lambda: PARTS[part](options), options):
            if row["name"] not in options.done:
                yield {"part": part, **row}


def environment(options: Options) -> Row:
    """Return what the figures depend on."""
    libraries = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            libraries[name] = version(name)
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    settings = {name: getattr(options, name) for name in ("size", "precision", "rounds")}
    settings |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    return {"part": "environment", "name": device, **settings, **libraries}


def overhead(options: Options) -> Iterator[Row]:
    """Compare trainers with a plain loop on a tiny MLP, whose steps take a GPU less time than the host."""
    settings = argparse.Namespace(steps=SIZES[options.size].steps, model="mlp", device=options.device)
    settings.environments = None

    def run(case: str, package: str) -> Iterator[Row]:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed", name=package)
        try:
            figures = trainers.run_child(case, "bare", settings, timeout=options.deadline + OVERTIME / 2 - time.time())
        except subprocess.CalledProcessError as error:
            raise RuntimeError(error.stderr.strip().splitlines()[-1]) from error
        yield {
            "a step, µs": figures["us"],
            "above the plain loop, µs": figures["above"],
            "relative to the plain loop": figures["ratio"],
            "synchronizations in a step": figures.get("synchronizations"),
            "peak, MiB": figures["mib"] if options.device == "cuda" else None,
        }

    for case in trainers.ON_GPU:
        name = {"loop": "plain loop, compared with itself", "ours": "composer"}.get(case, case.title())
        package = {"loop": "torch", "ours": "composer", "fabric": "lightning"}.get(case, case)
        yield from attempt(name, functools.partial(run, case, package), options)


def loss(options: Options) -> Iterator[Row]:
    """Compare the cross entropy of a large vocabulary in chunks with that of all logits, forward and backward."""
    dtype = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16"}[options.precision]
    settings = argparse.Namespace(device=options.device, dtype=dtype, **SIZES[options.size].loss)
    tensors = losses.make_tensors(settings)

    def call(variant: Callable[..., torch.Tensor]) -> None:
        losses.run(variant, tensors)
        tensors[0].grad = tensors[1].grad = None  # the peak is that above the inputs

    backend = "eager" if options.size == "tiny" else "inductor"  # a rehearsal does not wait for the compiler
    variants = losses.variants(SIZES[options.size].chunks, backend).items()
    return in_turns({name: functools.partial(call, variant) for name, variant in variants}, options)


def checkpoint(options: Options) -> Iterator[Row]:
    """Save ResNet-50 with Adam: how long training waits for a save in the background, and complete saves."""
    from composer.checkpoint import save_checkpoint
    from composer.checkpoint.folders import open_folder
    from composer.checkpoint.saving import take_snapshot

    state = saving.make_state(make_resnet(options.size).to(options.device))
    tensors = [tensor for group in saving.tensors_of(state) for tensor in group.values()]
    pinned = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors]
    folder, kept = Path(tempfile.mkdtemp(prefix="composer-bench-")), {}

    def copy() -> None:
        for target, tensor in zip(pinned, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)

    def torch_save() -> None:
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizers[0].state_dict()}, folder / "one")

    calls: dict[str, Callable[[], object]] = {
        "copy to pinned memory": copy,
        "what training waits for": lambda: take_snapshot(state, open_folder(folder), "one", memory=kept),
        "torch.save, without waiting for the disk": torch_save,
        "save, until it is on the disk": lambda: save_checkpoint(state, str(folder / "two"), overwrite=True),
    }
    try:
        yield from in_turns(calls, options)
    finally:
        shutil.rmtree(folder)


def in_turns(calls: dict[str, Callable[[], object]], options: Options) -> Iterator[Row]:
    """Yield the time of each call, in turns after a first round that allocates memory, its ratio, and its peak."""
    clock, first = make_clock(options), next(iter(calls))
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, float] = {}
    failed: dict[str, Row] = {}

    def run(name: str) -> list[Row]:
        began = clock()
        peaks[name] = measure_peak(calls[name], options)
        times[name].append(clock() - began)
        return []

    for _, name in itertools.product(range(options.rounds + 1), calls):
        if name not in failed:
            for row in attempt(name, functools.partial(run, name), options):
                failed[name] = row
    for name in calls:
        own = times[name][1:]
        pairs = list(zip(own, times[first][1:], strict=False))  # none if the first failed
        yield failed.get(name) or {
            "name": name,
            "ms": statistics.median(own) * 1e3,
            f"relative to {first}": statistics.median(one / other for one, other in pairs) if pairs else None,
            "peak, MiB": peaks[name] if options.device == "cuda" else None,
        }


def kernels(options: Options) -> Iterator[Row]:
    """Compare kernels with the cheapest calls of torch, with torchvision, kornia and timm."""
    sys.path.insert(0, str(FOLDER))
    program = importlib.import_module("kernels")
    sys.path.remove(str(FOLDER))
    cases = [case for case in program.CASES if case.runs_on_gpu and case.name.startswith(SIZES[options.size].kernels)]
    # Those that compile and that augment on the host take the longest.
    for case in sorted(cases, key=lambda case: case.name.startswith("Augment in")):
        call = functools.partial(program.measure, case, options.rounds, 0.02, options.device)
        for row in attempt(case.name, call, options):
            yield {name: value for name, value in row.items() if name != "case"}


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "loss": loss,
    "checkpoint": checkpoint,
    "packing": packing,
    "overhead": overhead,
    "kernels": kernels,
    "fastest": fastest,
    "gpt": gpt,
    "resnet50": resnet50,
}
SHARES = {"fastest": 5, "resnet50": 4, "kernels": 2, "gpt": 3}
"""Of the time that is left, 1 for other parts: fastest compiles several graphs, the others have many variants."""
HALVES = {
    "first": ["fastest", "loss", "checkpoint", "packing", "resnet50"],
    "second": ["overhead", "kernels", "gpt"],
}


def render(rows: list[Row]) -> str:
    """Return the tables of all parts in Markdown."""
    lines = []
    for row in rows:
        if row["part"] == "environment":
            others = [f"{name} {value}" for name, value in row.items() if name not in ("part", "name")]
            lines.append(f"{row['name']}: {', '.join(others)}.")
    lines = [*dict.fromkeys(lines)]  # halves were measured with the same
    for part, call in PARTS.items():
        lines += ["", f"### {part}", "", str(call.__doc__), ""]
        found = [row for row in rows if row["part"] == part]
        columns = list(dict.fromkeys(name for row in found for name in row))
        columns = [name for name in columns if name not in ("part", "name", "error", "skipped")] or [""]
        lines += [line(["", *columns]), "|---" * (len(columns) + 1) + "|"] if found else ["Not measured yet."]
        for row in found:
            why = row.get("error") or row.get("skipped")
            lines.append(line([row["name"], *([why] if why else [cell(row.get(name)) for name in columns])]))
    return "\n".join(lines).lstrip() + "\n"


def line(cells: list[str]) -> str:
    """Return a row of a table; missing cells at its end are empty."""
    return f"| {' | '.join(one.replace('|', ' ') for one in cells)} |"


def cell(value: object) -> str:
    """Return three digits of a figure, or a string."""
    if isinstance(value, float | int):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def publish(text: str, folder: Path) -> None:
    """Write JSON lines to ``gpu.jsonl`` in a folder, and their tables into its ``README.md``."""
    page, rows = folder / "README.md", [json.loads(one) for one in text.splitlines()]
    page.write_text(BLOCK.sub(lambda match: match[1] + render(rows) + match[2], page.read_text()))
    (folder / "gpu.jsonl").write_text(text)


if __name__ == "__main__":
    main()
