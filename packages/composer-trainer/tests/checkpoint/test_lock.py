"""One running process saves to a folder."""

import os
import signal
import subprocess
import sys

import pytest

from composer.checkpoint import CheckpointSaveError, FolderInUseError
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

    @pytest.mark.parametrize("exists", [True, False])
    def test_link(self, tmp_path, exists):
        """A link in place of the lock's file raises an error, and the file that it leads to is not changed."""
        other, folder = tmp_path / "other", tmp_path / "runs"
        folder.mkdir()
        (folder / ".lock").symlink_to(other)
        if exists:
            other.write_text("precious")

        with pytest.raises(CheckpointSaveError, match=r"runs/\.lock is a link, through which nothing is written"):
            FolderLock(folder)

        assert (other.read_text() if exists else not other.exists()) == ("precious" if exists else True)

    def test_hard_link(self, tmp_path):
        """A lock's file that is also another file is locked, and not changed."""
        other, folder = tmp_path / "other", tmp_path / "runs"
        folder.mkdir()
        other.write_text("precious")
        (folder / ".lock").hardlink_to(other)
        process = hold_lock(folder, "python")

        try:
            with pytest.raises(FolderInUseError, match="runs: an unknown process"):
                FolderLock(folder)
            assert other.read_text() == "precious"
        finally:
            process.kill()
            process.wait()
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
