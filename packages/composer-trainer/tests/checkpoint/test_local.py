"""Local folders are written atomically."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest

from composer.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    FileRecord,
    FolderInUseError,
    Manifest,
    find_checkpoints,
    load_checkpoint,
    local,
    save_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.local import FolderLock, LocalFolder, records_while
from composer.checkpoint.manifest import write_json
from composer.checkpoint.saving import take_snapshot
from composer.core.background import ThreadError

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


def failing(number):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    return fail


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
    def test_a_failure_leaves_what_was_there(self, runs, folder, monkeypatch, step, number, sentence, name):
        """Any system error is raised as one sentence, and the folder does not change."""
        before = verify_checkpoint(folder.path / "ep1-ba5")
        monkeypatch.setattr(os, step, failing(number))
        monkeypatch.setattr(Path, "rename", failing(number) if step == "rename" else Path.rename)

        with pytest.raises(CheckpointSaveError, match=rf"{name} was not saved: {sentence}"):
            folder.write(name, take_snapshot(runs.make(batch=9)))

        monkeypatch.undo()
        assert names_in(folder.path) == ["ep1-ba5"]
        assert verify_checkpoint(folder.path / "ep1-ba5") == before

    def test_on_the_disk_before_it_has_its_name(self, runs, tmp_path, monkeypatch):
        """Every file and the folder they are in are on the disk before the rename, and the rename itself afterwards."""
        order, synced, renamed = [], os.fsync, Path.rename

        def sync(descriptor):
            order.append(os.fstat(descriptor).st_ino)
            synced(descriptor)

        def rename(path, target):
            order.append("rename")
            return renamed(path, target)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(Path, "rename", rename)
        LocalFolder(tmp_path).write("one", take_snapshot(runs.make()))

        inodes = {path.stat().st_ino for path in [tmp_path / "one", *(tmp_path / "one").iterdir()]}
        place = order.index("rename")
        assert set(order[:place]) == inodes
        assert order[place + 1 :] == [tmp_path.stat().st_ino]
        assert order[place - 2] == (tmp_path / "one" / "manifest.json").stat().st_ino

    def test_a_real_limit_of_the_system(self, runs, tmp_path):
        """A file that the system cuts off is a failed save, not a short file."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        snapshot = take_snapshot(runs.make())
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))
        try:
            with pytest.raises(CheckpointSaveError, match="File too large"):
                LocalFolder(tmp_path).write("one", snapshot)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

        assert not names_in(tmp_path)

    def test_short_writes_are_finished(self, runs, tmp_path, monkeypatch):
        """Where the system writes only a part, the rest is written after it."""
        snapshot = take_snapshot(runs.make())
        opened = Path.open

        class Short:
            def __init__(self, file):
                self.file = file

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self.file.close()

            def fileno(self):
                return self.file.fileno()

            def write(self, content):
                return self.file.write(content[:7])

        def short(path, mode="r", *args, **options):
            return Short(opened(path, mode, *args, **options)) if mode == "xb" else opened(path, mode, *args, **options)

        monkeypatch.setattr(Path, "open", short)
        LocalFolder(tmp_path).write("one", snapshot)

        assert verify_checkpoint(tmp_path / "one")

    def test_a_folder_that_is_gone(self, runs, tmp_path):
        """A folder that was removed during the run is not created again."""
        with pytest.raises(CheckpointSaveError, match="its folder does not exist any more"):
            LocalFolder(tmp_path / "gone").write("one", take_snapshot(runs.make()))

        assert not names_in(tmp_path)

    def test_a_crash_between_two_renames(self, runs, folder):
        """A checkpoint that was about to be replaced is found under the name that it has aside."""
        (folder.path / "ep1-ba5").rename(folder.path / ".ep1-ba5.replaced")

        [found] = find_checkpoints(folder.path)
        folder.write("ep1-ba5", take_snapshot(runs.make()))

        assert found.is_whole
        assert [one.name for one in find_checkpoints(folder.path)] == ["ep1-ba5"]

    @pytest.mark.parametrize("names", ["new", "same"])
    def test_killed_at_any_moment(self, names, tmp_path):
        """Whenever the process is killed, there is a whole checkpoint, and nothing that only looks like one."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", KILLED, str(tmp_path), names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            process.stdout.readline()
            for _ in range(400):
                time.sleep(0.005)
                if any(one.is_whole for one in find_checkpoints(tmp_path)):
                    break
            time.sleep(0.03 * (1 + time.time() % 1))
            process.kill()
            process.wait()
        found = find_checkpoints(tmp_path)
        LocalFolder(tmp_path).tidy()

        assert found
        assert all(verify_checkpoint(one.path) for one in found)
        assert not [name for name in names_in(tmp_path) if name.endswith(".tmp")]


class TestTidy:
    def test_only_our_leftovers_are_removed(self, folder):
        """What a killed save has left goes, and what others keep in the folder stays."""
        for name in (".ep2.123-0a1b2c3d.tmp", "notes", ".config", "x.tmp"):
            (folder.path / name).mkdir()

        folder.tidy()

        assert sorted(names_in(folder.path)) == [".config", "ep1-ba5", "notes", "x.tmp"]

    def test_a_save_of_this_process_is_left_alone(self, runs, tmp_path, monkeypatch):
        """A second trainer that begins in the same folder removes nothing that the first is writing."""
        write = local._write_file

        def begin_another(path, pieces):
            write(path, pieces)
            LocalFolder(tmp_path).tidy()

        monkeypatch.setattr(local, "_write_file", begin_another)
        LocalFolder(tmp_path).write("one", take_snapshot(runs.make()))

        assert verify_checkpoint(tmp_path / "one")

    def test_leftovers_of_this_process(self, runs, tmp_path, monkeypatch):
        """What a save leaves that this process has given up goes, though it has the number of this process."""
        folder = LocalFolder(tmp_path)
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(CheckpointSaveError):
            folder.write("one", take_snapshot(runs.make()))
        monkeypatch.undo()
        left = names_in(tmp_path)

        folder.tidy()

        assert len(left) == 1
        assert names_in(tmp_path) == []


class TestMake:
    def test_a_save_under_way_is_left_alone(self, runs, folder):
        """What another process is just writing into the folder stays there when something else is saved beside it."""
        (folder.path / ".ep2.123-0a1b2c3d.tmp").mkdir()

        save_checkpoint(runs.make(), folder.path / "best")

        assert names_in(folder.path) == [".ep2.123-0a1b2c3d.tmp", "best", "ep1-ba5"]

    def test_a_file_in_the_way(self, tmp_path):
        """A file at the path of the folder raises an error."""
        (tmp_path / "file").write_text("")

        with pytest.raises(CheckpointSaveError, match="File exists"):
            LocalFolder(tmp_path / "file").make()


class TestSetAside:
    @pytest.mark.parametrize("what", ["half written", "file", "with notes"])
    def test_what_no_checkpoint_can_replace(self, runs, folder, what):
        """What is half written, or not ours, is kept under a hidden name, and the place is free."""
        place = folder.path / "ep2-ba9"
        if what == "file":
            place.write_text("precious")
        else:
            if what == "with notes":
                save_checkpoint(runs.make(), place)
            place.mkdir(exist_ok=True)
            (place / "notes.txt").write_text("precious")

        aside = Path(folder.set_aside("ep2-ba9"))
        folder.write("ep2-ba9", take_snapshot(runs.make(batch=9)))
        folder.tidy()

        assert (aside if what == "file" else aside / "notes.txt").read_text() == "precious"
        assert aside.name.startswith(".ep2-ba9.aside-")
        assert [one.name for one in find_checkpoints(folder.path)] == ["ep1-ba5", "ep2-ba9"]

    def test_what_can_be_replaced(self, folder):
        """A checkpoint, also a damaged one, is not moved, nor is a link to the latest one."""
        folder.set_latest("latest", "ep1-ba5")
        (folder.path / "ep1-ba5" / "state.json").unlink()

        moved = [folder.set_aside("ep1-ba5"), folder.set_aside("none"), folder.set_aside("latest", for_link=True)]

        assert moved == [None, None, None]
        assert names_in(folder.path) == ["ep1-ba5", "latest"]

    def test_cannot_be_moved(self, folder, monkeypatch):
        """Where the system does not let it be moved, a sentence says so."""
        (folder.path / "ep2-ba9").mkdir()
        monkeypatch.setattr(Path, "rename", failing(errno.EACCES))

        with pytest.raises(CheckpointSaveError, match="ep2-ba9 was not saved: what has its name cannot be renamed"):
            folder.set_aside("ep2-ba9")


class TestDelete:
    def test_deleted(self, folder):
        """A deleted checkpoint is gone; deleting it again does nothing."""
        folder.delete("ep1-ba5")
        folder.delete("ep1-ba5")

        assert not names_in(folder.path)


class TestPoint:
    def test_link(self, folder):
        """The link leads to the checkpoint, also after the next one, and relatively."""
        folder.set_latest("latest", "other")
        folder.set_latest("latest", "ep1-ba5")

        assert str((folder.path / "latest").readlink()) == "ep1-ba5"
        assert folder.get_latest("latest") == "ep1-ba5"
        assert sorted(names_in(folder.path)) == ["ep1-ba5", "latest"]

    def test_file_where_there_are_no_links(self, folder, monkeypatch):
        """Without links, a file holds the name."""
        monkeypatch.setattr(Path, "symlink_to", failing(errno.EPERM))

        folder.set_latest("latest", "ep1-ba5")

        assert (folder.path / "latest").read_text() == "ep1-ba5\n"
        assert folder.get_latest("latest") == "ep1-ba5"
        assert verify_checkpoint(folder.path / "latest")

    def test_a_folder_in_the_way(self, folder):
        """A real folder of the link's name is left alone."""
        (folder.path / "latest").mkdir()

        with pytest.raises(CheckpointSaveError, match="a folder has the name of the link"):
            folder.set_latest("latest", "ep1-ba5")


class TestReadManifest:
    @pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizers.safetensors", "manifest.json"])
    @pytest.mark.parametrize("damage", ["missing", "cut", "longer", "flipped", "empty", "link", "folder"])
    def test_each_file_in_each_way(self, saved, name, damage):
        """A file that is missing, cut off, changed or no file is always named."""
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
        """A file of the same size from another checkpoint is noticed."""
        other = Path(save_checkpoint(runs.make(seed=3), tmp_path / "other"))
        (other / "model.safetensors").replace(saved / "model.safetensors")

        with pytest.raises(CheckpointError, match=r"model\.safetensors has been changed"):
            verify_checkpoint(saved)

    @pytest.mark.parametrize("name", [".DS_Store", ".nfs000000000a1b2c3d", "notes.txt", "extra.safetensors", "more/"])
    def test_foreign_files(self, runs, saved, name):
        """What the manifest does not list is ignored by all that reads, with a warning that names it."""
        (saved / name).mkdir() if name.endswith("/") else (saved / name).write_text("")
        later = runs.make(seed=1, batch=0)

        with pytest.warns(UserWarning, match=f"does not list, and they are ignored: '{name.rstrip('/')}'"):
            verify_checkpoint(saved)
        with pytest.warns(UserWarning, match="they are ignored"):
            load_checkpoint(saved, later)

        assert runs.same(later, runs.make())

    def test_loading_compares_one_checksum_and_verifying_all(self, saved, runs):
        """A wrong SHA-256 is found by who verifies a checkpoint; loading looks at the quicker one."""
        record_again(saved, lambda record: attrs.evolve(record, sha256="0" * 64))

        load_checkpoint(saved, runs.make(seed=1, batch=0))
        with pytest.raises(CheckpointError, match=r"has been changed since it was written: its sha256 is not"):
            verify_checkpoint(saved)

    def test_the_quick_checksum_is_compared(self, saved, runs):
        """A wrong XXH3 is found by loading and by verifying."""
        record_again(saved, lambda record: attrs.evolve(record, xxh3_128="0" * 32))

        for check in (verify_checkpoint, lambda path: load_checkpoint(path, runs.make(seed=1, batch=0))):
            with pytest.raises(CheckpointError, match=r"its xxh3_128 is not the manifest's"):
                check(saved)

    def test_format_1(self, saved, runs):
        """A checkpoint of before there was a quick checksum is loaded, if its SHA-256 is right."""
        record_again(saved, lambda record: attrs.evolve(record, xxh3_128=None), format_version=1)
        later = runs.make(seed=1, batch=0)
        load_checkpoint(saved, later)
        assert int(later.timestamp.batch) > 0

        weights = saved / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors has been changed .* its sha256 is not"):
            load_checkpoint(saved, runs.make(seed=1, batch=0))


def record_again(saved, change, **fields):
    """Let a checkpoint's manifest say something else of each file, and have other fields."""
    manifest = Manifest.from_bytes((saved / "manifest.json").read_bytes(), saved)
    manifest.files.update({name: change(record) for name, record in manifest.files.items()})
    data = json.loads(manifest.to_bytes()) | fields
    del data["sha256"]
    data["sha256"] = hashlib.sha256(write_json(data)).hexdigest()
    (saved / "manifest.json").write_bytes(write_json(data))


def test_a_checksum_that_cannot_be_made(runs, tmp_path, monkeypatch):
    """What goes wrong beside the writing is raised as it is, and nothing that looks like a checkpoint is left."""

    def fail(pieces):
        raise MemoryError("too little for a checksum")

    monkeypatch.setattr(FileRecord, "of", fail)

    with pytest.raises(MemoryError, match="too little for a checksum"):
        save_checkpoint(runs.make(), tmp_path / "one")
    assert names_in(tmp_path) == []


def refuse_thread(_):
    raise ThreadError("no thread can be started")


class DeadTask:
    """A thread that ends without a result."""

    def __init__(self, call):
        self.call = call

    def wait(self):
        """Return at once."""

    def result(self):
        """Report that there is no result."""
        raise ThreadError("its thread ended")


class TestRecordsWhile:
    @pytest.mark.parametrize("task", [refuse_thread, DeadTask])
    def test_without_a_thread(self, task, monkeypatch):
        """Where no thread can hash, the records are computed when they are needed."""
        monkeypatch.setattr(local, "Task", task)

        with records_while({"a": [memoryview(b"content")]}) as records:
            assert records() == {"a": FileRecord.of([b"content"])}

    def test_waits_after_an_error(self):
        """After an error in the context, no thread reads the contents any more: their memory may be released."""
        go, done = threading.Event(), []

        def pieces():
            go.wait(10)
            done.append(1)
            yield memoryview(b"content")

        def write():
            threading.Timer(0.05, go.set).start()
            raise OSError("full")

        with pytest.raises(OSError, match="full"), records_while({"a": pieces()}):
            write()

        assert done == [1]


HOLDER = """
import os, sys, time
from composer.checkpoint.local import FolderLock
lock = FolderLock(sys.argv[1])
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def hold(folder, kind):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), kind], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


class TestFolderLock:
    @pytest.mark.parametrize("kind", ["alone", "fork"])
    def test_living_process(self, kind, tmp_path):
        """A living process is named; killed, it does not stand in the way, even if one that it has forked lives on."""
        process = hold(tmp_path, kind)
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

    def test_one_process_shares_it(self, tmp_path):
        """Savers of one process do not lock each other out, and the last of them frees the folder."""
        first, second = FolderLock(tmp_path), FolderLock(tmp_path)
        first.release()
        first.release()
        command = [
            sys.executable,
            "-c",
            f"from composer.checkpoint.local import FolderLock; FolderLock({str(tmp_path)!r})",
        ]

        while_held = subprocess.run(command, capture_output=True, text=True, check=False)
        second.release()
        afterwards = subprocess.run(command, capture_output=True, text=True, check=False)

        assert "FolderInUseError" in while_held.stderr
        assert afterwards.returncode == 0
