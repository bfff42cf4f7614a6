"""The processes of a study's runs: new interpreters, or forks of one that has imported what a run needs."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from composer.ablation.results import Result
from composer.ablation.runs import RUN_VARIABLE, Job, StudyError, measure, memory_of_files
from composer.core.checks import abridged
from composer.core.files import write_atomically
from composer.core.saving.records import read

_JOB, _ANSWER, _MODULES = "job.pickle", "result.json", "modules.json"
_PROGRAM = "from composer.ablation.processes import main; main()"


def run_alone(job: Job) -> int:
    """Execute a job, whose file is in its folder, in a new interpreter, and return the exit code."""
    with (job.run_folder / "log.txt").open("wb") as log:
        # Nothing is written to standard input: its end shows the process that this one has died.
        process = _start(job, str(job.run_folder), stdout=log, stderr=log)
        try:
            return process.wait()
        finally:
            _end(process)


class Forks:
    """Executes jobs like :func:`run_alone`, in forks of interpreters that have imported what the baseline needs.

    Imports take longer than many runs. What a run changes is not visible to others, as with a new interpreter. If
    importing its modules starts threads, opens files or uses a GPU, which forks cannot have or would share, and on
    other systems than Linux, each run is a new interpreter. There is one interpreter for each run at a time.
    """

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._can_fork = sys.platform == "linux"

    def __call__(self, job: Job) -> int:
        """Execute a job and return the exit code of its process."""
        if not self._can_fork:
            return run_alone(job)
        try:
            process = self._idle.pop()  # another thread may take the last one
        except IndexError:
            with (job.run_folder / "log.txt").open("wb") as log:
                process = _start(job, stdout=subprocess.PIPE, stderr=log)
        answer = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(str(job.run_folder)).encode() + b"\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            answer = process.stdout.readline()  # type: ignore[union-attr]
        finally:
            if answer:
                self._idle.append(process)
            else:
                _end(process)
        if answer:
            return int(answer)
        self._can_fork = not (job.run_folder / _JOB).exists()
        return process.returncode or 1 if self._can_fork else run_alone(job)

    def close(self) -> None:
        """End the interpreters."""
        while self._idle:
            _end(self._idle.pop())


def _start(job: Job, *arguments: str, **streams: object) -> subprocess.Popen[bytes]:
    search_path = dict.fromkeys(entry or str(Path.cwd()) for entry in (*job.search_path, *sys.path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path), RUN_VARIABLE: "1"}
    if job.threads is not None:
        environment["OMP_NUM_THREADS"] = str(job.threads)
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, **streams)  # type: ignore[call-overload, no-any-return]  # noqa: S603  (this interpreter)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # closes its streams, of which forks read the first
        pass


def run_job(job: Job, execute: Callable[[Job], int] = run_alone) -> Result:
    """Run a job in a process of its own and return its result; a crash of that process is a failure of the run.

    Raises:
        StudyError: The run shows that the study is not set up correctly.
    """
    folder, began = job.run_folder, time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
    folder.mkdir(parents=True)
    (folder / _JOB).write_bytes(pickle.dumps(job))
    code = execute(job)
    answer = folder / _ANSWER
    if code or not answer.exists():
        result = Result(job.arm, job.seed, failure=_describe_exit(code, folder / "log.txt"))
    else:
        measured = json.loads(answer.read_text())
        answer.unlink()
        if "error" in measured:
            raise StudyError(measured["error"])
        result = read(measured, Result, "the result of a run")
    return result if job.only_start else attrs.evolve(result, wall_seconds=time.perf_counter() - began)


def _describe_exit(code: int, log: Path) -> str:
    reason = f"the process ended with exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            reason = f"the process was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += ", as the system does when memory is used up"
    lines = log.read_text(errors="replace").strip().splitlines()
    return abridged(reason + (f": {lines[-1]}" if lines else ""))


def main() -> None:
    """Run the job in the folder that the command line names, or fork for each that standard input names."""
    folder, imported = (Path(sys.argv.pop()), 0) if len(sys.argv) > 1 else _fork_for_each()
    if folder is None:
        return
    job: Job = pickle.loads((folder / _JOB).read_bytes())  # noqa: S301  (from the parent process)
    (folder / _JOB).unlink()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        measured = attrs.asdict(measure(job, imported))
    except StudyError as error:
        measured = {"error": str(error)}
    if job.only_start and not job.arm:
        names = json.dumps(list(sys.modules))
        write_atomically(lambda unfinished: unfinished.write_text(names), folder.with_name(_MODULES))
    (folder / _ANSWER).write_text(json.dumps(measured, allow_nan=False))
    # Threads of the user's libraries must not keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _fork_for_each() -> tuple[Path | None, int]:
    """Answer each folder with the exit code of a fork; in the fork, return its folder and what ``measure`` adds."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # forks end, and then this process at the end of its input
    answers = os.dup(1)
    os.dup2(2, 1)  # what imported modules print is no answer
    is_prepared = False
    for line in sys.stdin:
        folder = Path(json.loads(line))
        names = folder.with_name(_MODULES)
        if not is_prepared and names.exists():
            is_prepared, before = True, _shared_with_forks()
            for name in json.loads(names.read_text()):
                with contextlib.suppress(Exception):  # a module that cannot be imported by its name
                    importlib.import_module(name)
            if _shared_with_forks() != before:
                break
        imported = memory_of_files()
        child = os.fork()
        if not child:
            os.close(answers)
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.signal(signal.SIGINT, interrupt)
            return folder, imported
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return None, 0


def _shared_with_forks() -> tuple[int, int, bool]:
    """Return the numbers of threads and open files, and whether a GPU is in use."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    # That thread is pyarrow's, which scikit-learn imports, and allows forks.
    threads = sum(name != "jemalloc_bg_thd\n" for name in names)
    return threads, len(list(Path("/proc/self/fd").iterdir())), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
