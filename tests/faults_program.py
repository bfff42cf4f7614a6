"""Kill a training repeatedly, at random moments or in a given batch, and resume it; started by ``test_faults.py``.

Modules are imported once and each training is a fork, so that a hundred kills take a minute instead of an hour. The
output is one line of JSON with the numbers of runs and kills, and the runs whose results differ.
"""

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torchmetrics.classification  # noqa: F401  (each fork of a process would import it again)
from torch import nn
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer
from composer.algorithms import EMA, SAM, Augment, MixUp
from composer.callbacks import EarlyStopper
from composer.checkpoint import find_checkpoints, newest_checkpoint, verify_checkpoint
from composer.checkpoint.folders import LocalFolder
from composer.core import Evaluator, Event
from composer.distributed import get_sampler
from composer.loggers import FileLogger
from composer.models import ComposerClassifier

warnings.simplefilter("ignore")


class Points(Dataset):
    """Points with random noise."""

    def __len__(self):
        """Thirty."""
        return 30

    def __getitem__(self, index):
        """Draw."""
        point = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return point + 0.1 * torch.rand(8) + 0.1 * random.random(), int(point[:3].argmax())


class OwnDraws(Points):
    """Points with noise from a generator of the data set."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(4)

    def __getitem__(self, index):
        """Draw."""
        point, label = super().__getitem__(index)
        return point + torch.rand(8, generator=self.generator), label


class Killer(Callback):
    """Kills the process in a batch, before the forward pass."""

    def __init__(self, batch):
        self.batch = batch

    def before_forward(self, state, logger):
        """Kill."""
        if int(state.timestamp.batch) == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def train_augmented(folder, result, pipeline, workers, kill_in):
    """Train on images that a pipeline of kornia augments, as :func:`train` does."""
    from test_resume import PIPELINES, Images, image_model

    run(
        folder,
        result,
        model=image_model(),
        train_dataloader=DataLoader(Images(), batch_size=4, shuffle=True, num_workers=workers),
        algorithms=[Augment(PIPELINES[pipeline]())],
        callbacks=[] if kill_in is None else [Killer(kill_in)],
        max_duration="3ep",
        save_interval="2ba",
    )


def train(folder, result):
    """Train like a user's program."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 3))
    model = ComposerClassifier(network, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run(
        folder,
        result,
        model=model,
        train_dataloader=DataLoader(Points(), batch_size=4, shuffle=True),
        eval_dataloader=DataLoader(Points(), batch_size=16),
        eval_interval="5ba",
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        algorithms=[MixUp(), EMA(half_life="4ba"), SAM(interval=3)],
        device_train_microbatch_size=2,
        max_duration="4ep",
        save_interval="2ba",
        save_num_checkpoints_to_keep=3,
    )


def train_sharded(folder, result, rank, store, attempt):
    """Train a sharded model in one of two processes, which write slowly, as :func:`train` does."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    files = torch.distributed.PrefixStore(str(attempt), torch.distributed.FileStore(store, -1))
    torch.distributed.init_process_group(
        "gloo", store=files, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
    )
    for name in ("put", "commit"):
        setattr(LocalFolder, name, slowed(getattr(LocalFolder, name)))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 3))
    model, data = ComposerClassifier(network, num_classes=3), Points()
    run(
        folder,
        result,
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=get_sampler(data, shuffle=True)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        algorithms=[MixUp(), EMA(half_life="4ba")],
        parallelism_config={"fsdp": {}},
        max_duration="3ep",
        save_interval="1ba",
        save_num_checkpoints_to_keep=3,
    )
    torch.distributed.barrier()


def run(folder, result, **settings):
    """Train, resuming from the newest checkpoint; write a digest of the final state."""
    settings |= {"run_name": "run", "save_folder": folder, "autoresume": True, "seed": 3}
    with Trainer(device="cpu", progress_bar=False, **settings) as trainer:
        trainer.fit()
    Path(result).write_text(digest(trainer.state))


class Watch(Callback):
    """Writes each event to a file, and sends a SIGTERM to its own process at one of them."""

    def __init__(self, path, at):
        self.file, self.left = Path(path).open("w"), at  # noqa: SIM115  (the process ends with it)

    def run_event(self, event, state, logger):
        """Write, and send."""
        if event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.FIT_END):
            return
        clock = state.timestamp
        print(event, f"ep{clock.epoch}-ba{clock.batch}", state.dataloader_label, file=self.file, flush=True)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train_stopped(folder, result, part, at):
    """Train with evaluations of two data sets, as :func:`train` does, and stop at an event; 0 does not stop."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    model = ComposerClassifier(network, num_classes=3)
    data = torch.utils.data.Subset(Points(), range(12))
    sets = {"often": "2ba", "rarely": "1ep"}
    with contextlib.suppress(SystemExit):
        run(
            folder,
            result,
            model=model,
            train_dataloader=DataLoader(data, batch_size=4, shuffle=True),
            eval_dataloader=[
                Evaluator(label=label, dataloader=DataLoader(OwnDraws(), batch_size=15), eval_interval=every)
                for label, every in sets.items()
            ],
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            algorithms=[MixUp(), EMA(half_life="4ba")],
            callbacks=[Watch(f"{result}.events{part}", at), EarlyStopper("MulticlassAccuracy", "rarely", patience=1)],
            loggers=FileLogger(f"{result}.log{part}"),
            max_duration="7ba",
            save_interval="2ba",
        )
        os._exit(0)
    os._exit(143)


def stop_at_each_event(every):
    """Send a SIGTERM at every so manieth event of a training, and resume it; return a report."""
    home, report = Path(tempfile.mkdtemp(prefix="stops-")), {"stops": 0, "failed": []}

    def start(name, part, at):
        status = wait(forked(f"{home}/{name}", f"{home}/{name}.txt", part, at, program=train_stopped), 300)
        return os.waitstatus_to_exitcode(status)

    def outcome(name):
        parts = [Path(f"{home}/{name}.txt.events{part}").read_text().splitlines() for part in (0, 1)]
        return Path(f"{home}/{name}.txt").read_text(), without_interrupted(*parts), logged(f"{home}/{name}.txt.log")

    codes = [start("uninterrupted", part, 0) for part in (0, 1)]
    if codes != [0, 0]:
        return report | {"failed": [codes, Path(f"{home}/uninterrupted.txt.log").read_text()]}
    expected = outcome("uninterrupted")
    report["events"], report["codes"] = len(expected[1]), codes
    for at in range(1, len(expected[1]) + 1, every):
        codes = [start(at, 0, at), start(at, 1, 0)]
        report["stops"] += 1
        found = outcome(at) if codes == [143, 0] else codes
        if found != expected:
            where = expected[1][at - 1]
            report["failed"].append([where, codes, *(a for a, b in zip(found, expected, strict=False) if a != b)])
    return report


def without_interrupted(stopped, resumed):
    """Return the events of both parts of a training, without those of an evaluation that was stopped."""
    if stopped and stopped[-1].startswith("eval_") and not stopped[-1].startswith("eval_after_all"):
        begin = max(index for index, line in enumerate(stopped) if line.startswith("eval_before_all"))
        done = [index for index, line in enumerate(stopped) if line.startswith("eval_end") and index > begin]
        stopped = stopped[: done[-1] + 1] if done else stopped[:begin]
        resumed = resumed[1:] if done else resumed  # eval_before_all
    return [*stopped, *resumed]


def logged(path):
    """Return the metrics that both parts of a training have logged, in order, without times."""
    records = [json.loads(line) for part in (0, 1) for line in Path(f"{path}{part}").read_text().splitlines()]
    return [[one["batch"], one["metrics"]] for one in records if "metrics" in one]


def slowed(call):
    """Return a function that waits for a moment before and after the call."""

    def slow(*arguments):
        time.sleep(0.005)
        call(*arguments)
        time.sleep(0.005)

    return slow


def digest(state):
    """Return a digest of the complete state of a run."""
    result = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            result.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                if not str(key).endswith("_wct"):
                    result.update(str(key).encode())
                    add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            result.update(repr(value).encode())

    saved = state.state_dict()
    saved.pop("callbacks")
    add([state.get_model_state_dict(), state.get_optim_state_dict(), saved])
    return result.hexdigest()


def forked(folder, result, *arguments, program=train):
    """Start a training in a new process, and return its id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        sys.stderr = Path(f"{result}.log").open("a")  # noqa: SIM115  (the process ends with it)
        program(folder, result, *arguments)
        os._exit(0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def wait(child, seconds):
    """Wait for a process; return its exit status, or None if it is still running after some seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    return None


def kill_in_mid_epoch(pipeline):
    """Kill a training with a pipeline in its second epoch, with 0 and 2 workers of the loader; return a report."""
    home, report = Path(tempfile.mkdtemp(prefix="faults-")), {"resumed from": [], "failed": []}
    status = wait(
        forked(f"{home}/uninterrupted", f"{home}/uninterrupted.txt", pipeline, 0, None, program=train_augmented), 300
    )
    if status != 0:
        report["failed"].append(Path(f"{home}/uninterrupted.txt.log").read_text()[-2000:])
        return report
    for workers in (0, 2):
        folder, result = f"{home}/{workers}", f"{home}/{workers}.txt"
        killed = wait(forked(folder, result, pipeline, workers, 5, program=train_augmented), 300)
        report["resumed from"].append(sorted(Path(found.path).name for found in find_checkpoints(folder))[-1])
        status = wait(forked(folder, result, pipeline, workers, None, program=train_augmented), 300)
        same = status == 0 and Path(result).read_text() == Path(f"{home}/uninterrupted.txt").read_text()
        if killed != signal.SIGKILL or not same:
            log = Path(f"{result}.log").read_text()[-2000:]
            report["failed"].append({"workers": workers, "killed": killed, "status": status, "log": log})
    return report


def kill_sharded(kills, choose):
    """Train a sharded model in two processes, kill one of them at random moments, and resume; return a report."""
    # Imported once, before the forks.
    import torch.distributed.fsdp

    torch.optim.AdamW([torch.zeros(1)])
    home, report = Path(tempfile.mkdtemp(prefix="faults-")), {"kills": 0, "damaged": 0, "failed": [], "after": []}
    attempts = itertools.count()

    def start(name):
        attempt = next(attempts)
        return [
            forked(f"{home}/{name}", f"{home}/{name}-{rank}.txt", rank, f"{home}/store", attempt, program=train_sharded)
            for rank in range(2)
        ]

    def finish(name):
        statuses = [wait(child, 300) for child in start(name)]
        if statuses != [0, 0]:
            report["failed"].append([statuses, *(Path(f"{home}/{name}-{rank}.txt.log").read_text() for rank in (0, 1))])
        return None if statuses != [0, 0] else [Path(f"{home}/{name}-{rank}.txt").read_text() for rank in (0, 1)]

    began = time.monotonic()
    expected = finish("uninterrupted")
    lasted, run = time.monotonic() - began, 0
    while expected and report["kills"] < kills and not report["failed"]:
        run += 1
        for _ in range(5):
            children = start(run)
            victim = choose.randrange(2)
            if wait(children[victim], choose.uniform(0.2, 0.8) * lasted) is not None:
                wait(children[1 - victim], 300)
                break
            os.kill(children[victim], signal.SIGKILL)
            os.waitpid(children[victim], 0)
            if wait(children[1 - victim], choose.uniform(0, 0.5)) is None:  # as torchrun does
                os.kill(children[1 - victim], signal.SIGKILL)
                os.waitpid(children[1 - victim], 0)
            report["kills"] += 1
            report["damaged"] += damaged(f"{home}/{run}") if Path(f"{home}/{run}").exists() else 0
            report["after"].append([run, *batches_in(f"{home}/{run}")])
        found = finish(run)
        if found is not None and found != expected:
            report["failed"].append(f"run {run} has other results")
    return report


def batches_in(folder):
    """Return the batches of the newest complete checkpoint and of the one that ``latest`` names; 0 for none."""
    newest, latest = newest_checkpoint(folder), Path(folder, "latest")
    names = ["-ba0" if newest is None else newest.name, latest.readlink().name if latest.is_symlink() else "-ba0"]
    return [int(name.rpartition("-ba")[2]) for name in names]


def main():
    """Run, kill, compare, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=8, help="maximum in each run")
    parser.add_argument("--at-least", type=int, default=0, help="kills, for which up to five times the runs are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--remote", action="store_true", help="save through fsspec")
    parser.add_argument("--sharded", action="store_true", help="kill one of two processes, --kills times in total")
    parser.add_argument("--stops", type=int, help="send a SIGTERM at every so manieth event instead")
    parser.add_argument("--pipeline", help="a pipeline of test_resume.py, for a training that is killed in one batch")
    options = parser.parse_args()
    if options.sharded:
        print(json.dumps(kill_sharded(options.kills, random.Random(options.seed))))
        return
    if options.stops is not None:
        print(json.dumps(stop_at_each_event(options.stops)))
        return
    if options.pipeline is not None:
        print(json.dumps(kill_in_mid_epoch(options.pipeline)))
        return
    choose, home = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="faults-"))
    scheme = "slowfile://" if options.remote else ""
    if options.remote:
        register_slow_files()

    began = time.monotonic()
    status = wait(forked(f"{scheme}{home}/uninterrupted", f"{home}/uninterrupted.txt"), 300)
    lasted = time.monotonic() - began
    report = {"runs": 0, "kills": 0, "damaged": 0, "failed": [], "seconds": round(lasted, 2)}
    if status != 0:
        report["failed"].append(Path(f"{home}/uninterrupted.txt.log").read_text())
    expected = None if status else Path(f"{home}/uninterrupted.txt").read_text()

    for number in range(5 * options.runs if expected else 0):
        if number >= options.runs and report["kills"] >= options.at_least:
            break
        folder, result = f"{home}/{number}", f"{home}/{number}.txt"
        for attempt in range(options.kills):
            began, child = time.monotonic(), forked(scheme + folder, result)
            status = wait(child, choose.uniform(0, 0.6 * lasted))
            if status is not None:
                if attempt == 0:  # a complete training: the machine is faster now
                    lasted = min(lasted, time.monotonic() - began)
                break
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            report["kills"] += 1
            if not options.remote:
                report["damaged"] += damaged(folder)
        status = wait(forked(scheme + folder, result), 300)
        report["runs"] += 1
        if status != 0 or Path(result).read_text() != expected:
            log = Path(f"{result}.log")
            report["failed"].append({"run": number, "status": status, "log": log.read_text()[-2000:]})
    print(json.dumps(report))


def damaged(folder):
    """Return the number of folders with a manifest that are not valid checkpoints."""
    count = 0
    for result in find_checkpoints(folder):
        if result.is_complete:
            try:
                verify_checkpoint(result.path)
            except ValueError:
                count += 1
        else:
            count += 1
    return count


def register_slow_files():
    """Register a file system that writes in small pieces, so that kills interrupt uploads."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class SlowFiles(LocalFileSystem):
        protocol = ("slowfile",)

        def __init__(self, **options):
            super().__init__(**options | {"auto_mkdir": True})

        def _open(self, path, mode="rb", **options):
            file = super()._open(path, mode, **options)
            if "w" in mode:
                write = file.f.write
                file.write = lambda content: sum(slowly(write, memoryview(content).cast("B")))
            return file

    def slowly(write, content):
        for start in range(0, len(content), 4096):
            time.sleep(0.0002)
            yield write(content[start : start + 4096])

    fsspec.register_implementation("slowfile", SlowFiles, clobber=True)


if __name__ == "__main__":
    main()
