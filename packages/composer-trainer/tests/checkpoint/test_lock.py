"""Only one living process saves to a folder."""

import os
import signal
import subprocess
import sys

import pytest

from composer.checkpoint import FolderInUseError
from composer.checkpoint.lock import FolderLock

HOLDER = """
import os, sys, time
from composer.checkpoint.lock import FolderLock
lock = FolderLock(sys.argv[1])
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def hold_lock(folder, kind):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), kind], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


class TestFolderLock:
    @pytest.mark.parametrize("kind", ["alone", "fork"])
    def test_running_process(self, kind, tmp_path):
        """A running process is named; after it is killed the lock is free, even if a forked child is running."""
        process = hold_lock(tmp_path, kind)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        try:
            with pytest.raises(FolderInUseError, match=rf"process {process.pid} on .*Choose another save_folder"):
                FolderLock(tmp_path)
        finally:
            process.kill()
            process.wait()

        FolderLock(tmp_path).release()

        assert len(children) == (kind == "fork")
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.stdout.close()

    def test_shared_within_a_process(self, tmp_path):
        """Savers of one process share the lock, and the last one releases it."""
        first, second = FolderLock(tmp_path), FolderLock(tmp_path)
        first.release()
        first.release()
        command = [
            sys.executable,
            "-c",
            f"from composer.checkpoint.lock import FolderLock; FolderLock({str(tmp_path)!r})",
        ]

        while_held = subprocess.run(command, capture_output=True, text=True, check=False)
        second.release()
        afterwards = subprocess.run(command, capture_output=True, text=True, check=False)

        assert "FolderInUseError" in while_held.stderr
        assert afterwards.returncode == 0
