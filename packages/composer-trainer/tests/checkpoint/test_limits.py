"""Saving without available threads or memory."""

import os
import subprocess
import sys

import pytest

LIMITED = """
import faulthandler, os, resource, sys, tempfile, torch
from composer.callbacks import CheckpointSaver
from composer.checkpoint import CheckpointSaveError, load_checkpoint, save_checkpoint, verify_checkpoint
from composer.core import State

faulthandler.dump_traceback_later(40, exit=True)
limit, in_background = sys.argv[1], sys.argv[2] == "True"
state = State(torch.nn.Linear(300, 300))

def save(folder):
    saver = CheckpointSaver(folder, save_interval="1ep")
    try:
        saver.save(state) if in_background else save_checkpoint(state, folder + "/one")
    finally:
        saver.close(state, None)

def check(folder):
    for name in ("one",) * (not in_background) + ("ep0-ba0",) * in_background:
        verify_checkpoint(f"{folder}/{name}")
        load_checkpoint(f"{folder}/{name}", state)

with tempfile.TemporaryDirectory() as folder:  # all that is imported late is imported now
    save(folder)
    check(folder)
if limit == "processes":
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if os.getuid() == 0:
        os.setuid(65534)  # the limit is none for root
with tempfile.TemporaryDirectory() as folder:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if limit == "memory":
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    try:
        save(folder)
    except (CheckpointSaveError, MemoryError) as error:
        result = f"refused: {error}"
    else:
        result = "saved"
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    if result == "saved":
        check(folder)
    print(result)
"""


def run(program, *arguments, timeout=120):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
class TestLimits:
    @pytest.mark.parametrize(("in_background", "expected"), [(True, "refused: The checkpoint "), (False, "saved")])
    def test_no_threads_available(self, in_background, expected):
        """Without threads a background save raises; other saves do not use them."""
        done = run(LIMITED, "processes", str(in_background))

        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(expected)
        assert not in_background or "ep0-ba0 was not saved: no thread can be started" in done.stdout

    @pytest.mark.parametrize("in_background", [True, False])
    def test_no_memory_for_a_thread(self, in_background):
        """If a thread cannot allocate memory at its start, a save ends with an error or a complete checkpoint."""
        done = run(LIMITED, "memory", str(in_background))

        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(("refused: ", "saved"))
