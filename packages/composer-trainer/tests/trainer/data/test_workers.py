"""Workers of a loader obey the process that started them, and no other."""

import multiprocessing
import signal
import subprocess
import sys
import time

import pytest
from torch.utils.data import DataLoader

from composer.trainer.data.workers import iterate

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="workers are shielded on Linux only"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def wait_forever(worker):
    """Hang, as a worker that waits for a file system does."""
    time.sleep(300)


def test_signals_of_others_are_ignored():
    """Workers load all batches, though another process sends them the signals of a job."""
    others = {*multiprocessing.active_children()}  # persistent workers of other tests
    batches = iterate(DataLoader(range(40), batch_size=2, num_workers=1))
    first = next(batches)
    [worker] = {*multiprocessing.active_children()} - others

    for name in ("TERM", "INT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
        time.sleep(0.05)

    assert (first.tolist(), len(list(batches))) == ([0, 1], 19)


def test_the_parent_ends_a_worker_that_hangs():
    """Torch terminates workers that do not end, and the program then waits for them; signals are as before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    others = {*multiprocessing.active_children()}
    loader = DataLoader(range(4), num_workers=1, worker_init_fn=wait_forever)
    batches = iterate(loader)
    [worker] = {*multiprocessing.active_children()} - others
    time.sleep(0.5)

    worker.terminate()
    worker.join(20)

    assert worker.exitcode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert loader.worker_init_fn is wait_forever
    del batches


GROUP_PROGRAM = """
import os, signal, subprocess, sys
from torch.utils.data import DataLoader
from composer.trainer.data.workers import iterate

signal.signal(signal.SIGTERM, lambda *_: None)
for _ in range(2):
    batches = iterate(DataLoader(range(40), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1]))
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"])  # another process than the one that may end workers
    next(batches)
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"])
    print(1 + len(list(batches)), flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_signals_to_the_process_group(method):
    """Workers that start by any method load all batches, also if they are just starting, and so do later ones."""
    command = [sys.executable, "-W", "ignore", "-c", GROUP_PROGRAM, method]
    process = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=120, check=False)

    assert (process.returncode, process.stdout) == (0, "20\n20\n"), process.stderr
