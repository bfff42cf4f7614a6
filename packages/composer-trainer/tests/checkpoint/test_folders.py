"""Local folders are written atomically."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.folders import LocalFolder
from composer.checkpoint.saving import take_snapshot

KILLED = """
import sys, torch
from composer.checkpoint import save_checkpoint
from composer.core import State, Timestamp
state = State(torch.nn.Linear(300, 300), run_name="killed")
print("ready", flush=True)
for batch in range(1, 100000):
    state.timestamp = Timestamp(batch=batch)
    save_checkpoint(state, sys.argv[1] + "/ba" + (str(batch) if sys.argv[2] == "new" else ""), overwrite=True)
"""


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def folder(saved):
    return LocalFolder(saved.parent)


class TestWrite:
    @pytest.mark.parametrize(
        ("step", "number", "sentence"),
        [
            ("fsync", errno.ENOSPC, "the disk is full. Free some space"),
            ("fsync", errno.EIO, "Input/output error"),
            ("mkdir", errno.EACCES, "there is no permission to write"),
            ("rename", errno.EROFS, "there is no permission to write"),
        ],
    )
    @pytest.mark.parametrize("name", ["ep1-ba5", "ep2-ba9"])
    def test_failure_preserves_the_folder(self, runs, folder, break_call, monkeypatch, step, number, sentence, name):
        """Any system error is raised as one sentence, and the folder does not change."""
        before = verify_checkpoint(folder.path / "ep1-ba5")
        break_call(step, number)

        with pytest.raises(CheckpointSaveError, match=rf"{name} was not saved: {sentence}"):
            take_snapshot(runs.make(batch=9), folder, name).write(overwrite=True)

        monkeypatch.undo()
        assert names_in(folder.path) == ["ep1-ba5"]
        assert verify_checkpoint(folder.path / "ep1-ba5") == before

    def test_synced_before_the_rename(self, runs, tmp_path, monkeypatch):
        """Each file and its folder are synced before the rename, and the parent folder afterwards."""
        order, synced, renamed = [], os.fsync, Path.rename

        def sync(descriptor):
            order.append(os.fstat(descriptor).st_ino)
            synced(descriptor)

        def rename(path, target):
            order.append("rename")
            return renamed(path, target)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(Path, "rename", rename)
        take_snapshot(runs.make(), LocalFolder(tmp_path), "one").write()

        inodes = {path.stat().st_ino for path in [tmp_path / "one", *(tmp_path / "one").iterdir()]}
        place = order.index("rename")
        assert set(order[:place]) == inodes
        assert order[place + 1 :] == [tmp_path.stat().st_ino]
        assert order[place - 2] == (tmp_path / "one" / "manifest.json").stat().st_ino

    @pytest.mark.parametrize("path", ["ep1-ba5", "latest", "."])
    def test_crash_between_renames(self, runs, folder, path, monkeypatch):
        """A checkpoint whose replacement was interrupted is found by its name, a link and a search, and replaced."""
        folder.set_latest("latest", "ep1-ba5")
        before = verify_checkpoint(folder.path / "ep1-ba5")
        rename, targets = Path.rename, []

        def interrupted(path, target):
            if targets:
                raise KeyboardInterrupt
            targets.append(target)
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", interrupted)
            with pytest.raises(KeyboardInterrupt):
                take_snapshot(runs.make(seed=1), folder, "ep1-ba5").write(overwrite=True)

        assert not (folder.path / "ep1-ba5").exists()
        assert verify_checkpoint(folder.path / path) == before
        take_snapshot(runs.make(seed=1), folder, "ep1-ba5").write(overwrite=True)
        folder.tidy()
        assert names_in(folder.path) == ["ep1-ba5", "latest"]
        assert verify_checkpoint(folder.path / path) != before

    @pytest.mark.parametrize("names", ["new", "same"])
    def test_killed_at_any_time(self, names, tmp_path):
        """Whenever the process is killed, there is a complete checkpoint and no invalid one."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", KILLED, str(tmp_path), names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            process.stdout.readline()
            for _ in range(400):
                time.sleep(0.005)
                if any(one.is_complete for one in find_checkpoints(tmp_path)):
                    break
            time.sleep(0.03 * (1 + time.time() % 1))
            process.kill()
            process.wait()
        result = find_checkpoints(tmp_path)
        LocalFolder(tmp_path).tidy()

        assert result
        assert all(verify_checkpoint(one.path) for one in result)
        assert not [name for name in names_in(tmp_path) if name.endswith(".tmp")]


class TestTidy:
    def test_only_own_leftovers_are_removed(self, folder):
        """Leftovers of a killed save are removed, other files stay."""
        for name in (".ep2.123-0a1b2c3d.tmp", "notes", ".config", "x.tmp"):
            (folder.path / name).mkdir()

        folder.tidy()

        assert sorted(names_in(folder.path)) == [".config", "ep1-ba5", "notes", "x.tmp"]

    @pytest.mark.parametrize("links", [True, False], ids=["links", "files"])
    def test_links_of_a_killed_process(self, folder, links, break_call):
        """A link, or the file in its place, that a killed process has not renamed is removed; user's files stay."""
        (folder.path / "user.tmp").write_text("precious")
        if not links:
            break_call("symlink", errno.EPERM)
        if not (process := os.fork()):
            Path.replace = lambda *_: os._exit(0)
            folder.set_latest("latest", "ep1-ba5")
        os.waitpid(process, 0)
        left = names_in(folder.path)

        folder.tidy()

        assert len(left) == 3
        assert names_in(folder.path) == ["ep1-ba5", "user.tmp"]


class TestSetLatest:
    def test_link(self, folder):
        """The relative link points to the checkpoint, and later to the next."""
        folder.set_latest("latest", "other")
        folder.set_latest("latest", "ep1-ba5")

        assert str((folder.path / "latest").readlink()) == "ep1-ba5"
        assert folder.get_latest("latest") == "ep1-ba5"
        assert sorted(names_in(folder.path)) == ["ep1-ba5", "latest"]

    def test_file_without_link_support(self, folder, break_call):
        """Without links, a file contains the name."""
        break_call("symlink", errno.EPERM)

        folder.set_latest("latest", "ep1-ba5")

        assert (folder.path / "latest").read_text() == "ep1-ba5\n"
        assert folder.get_latest("latest") == "ep1-ba5"
        assert verify_checkpoint(folder.path / "latest")


class TestReadManifest:
    @pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizers.safetensors", "manifest.json"])
    @pytest.mark.parametrize("damage", ["missing", "cut", "longer", "flipped", "empty", "link", "folder"])
    def test_missing_truncated_and_changed_files(self, saved, name, damage):
        """A missing, truncated, changed or non-regular file is always named."""
        path = saved / name
        content = bytearray(path.read_bytes())
        path.unlink()
        if damage == "cut":
            path.write_bytes(content[:-1])
        elif damage == "longer":
            path.write_bytes(content + b"\0")
        elif damage == "flipped":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "link":
            (saved.parent / "elsewhere").write_bytes(content)
            path.symlink_to(saved.parent / "elsewhere")
        elif damage == "folder":
            path.mkdir()

        with pytest.raises(CheckpointError, match=rf"{name} "):
            verify_checkpoint(saved)

    def test_swapped_files(self, saved, runs, tmp_path):
        """A file of equal size from another checkpoint is detected."""
        other = Path(save_checkpoint(runs.make(seed=3), tmp_path / "other"))
        (other / "model.safetensors").replace(saved / "model.safetensors")

        with pytest.raises(CheckpointError, match=r"model\.safetensors has been changed"):
            verify_checkpoint(saved)

    @pytest.mark.parametrize("name", [".DS_Store", ".nfs000000000a1b2c3d", "notes.txt", "extra.safetensors", "more/"])
    def test_unlisted_files(self, runs, saved, name):
        """Files that the manifest does not list are ignored."""
        (saved / name).mkdir() if name.endswith("/") else (saved / name).write_text("")
        later = runs.make(seed=1, batch=0)

        verify_checkpoint(saved)
        load_checkpoint(saved, later)

        assert runs.same(later, runs.make())
