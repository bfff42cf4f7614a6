"""Writing a checkpoint, also from several processes, which are threads here: all succeed or none does."""

import threading
import time

import pytest
import torch
from torch import nn

from composer.checkpoint import CheckpointSaveError, verify_checkpoint, writing
from composer.checkpoint.layout import TensorInfo, describe_tensors, plan_files
from composer.checkpoint.local import LocalFolder
from composer.checkpoint.manifest import Manifest
from composer.checkpoint.writing import Message, Snapshot, Writers, failing_in_all, writers_of
from composer.core import Timestamp
from composer.core.background import Task
from composer.functional.dtensors import Region

WEIGHT = torch.arange(8.0)


class Group:
    """Two processes with half of a weight each, which write to one folder."""

    def __init__(self, path, timeout=20.0):
        self.folder, self.store = LocalFolder(path), torch.distributed.HashStore()
        self.timeout, self.saves, self.finished = timeout, 0, []

    def snapshots(self, batch=1):
        """Return what the processes write."""
        self.saves += 1
        halves = [Region((4 * rank,), (4,)) for rank in range(2)]
        described = [{"model.safetensors": {"w": (TensorInfo("float32", (8,), None, (0,)), half)}} for half in halves]
        layout, writes = plan_files(described)
        manifest = Manifest(files={}, timestamp=Timestamp(batch=batch))
        snapshots = []
        for rank, files in enumerate(writes):
            writers = Writers(is_alone=False)
            writers.rank, writers.world_size, writers.saves, writers._exchange._store = rank, 2, self.saves, self.store
            contents = {file: [memoryview(WEIGHT[4 * rank : 4 * rank + 4].numpy()).cast("B")] for file in files}
            snapshots.append(Snapshot({}, contents, manifest, layout, writers, self.timeout))
        return snapshots

    def start(self, snapshot, name="one"):
        """Start to write in a process."""
        return Task(lambda: snapshot.write(self.folder, name, finish=self.finished.append))

    def errors(self, *tasks):
        """Return the reasons of errors, None where a process has succeeded."""
        reasons = []
        for task in tasks:
            try:
                task.result()
                reasons.append(None)
            except CheckpointSaveError as error:
                reasons.append(error.reason)
        return reasons


@pytest.fixture
def group(tmp_path):
    return Group(tmp_path)


def names_in(path):
    return sorted(entry.name for entry in path.iterdir())


class TestWrite:
    def test_complete(self, group, tmp_path):
        """Each process writes its part, the first one everything else, and then finishes it."""
        tasks = [group.start(one) for one in group.snapshots()]

        assert group.errors(*tasks) == [None, None]
        manifest = verify_checkpoint(tmp_path / "one")
        assert sorted(manifest.files) == [
            "layout.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "state.json",
        ]
        assert group.finished == [manifest]

    @pytest.mark.parametrize("failing", [0, 1])
    def test_one_fails(self, group, tmp_path, failing):
        """If one process cannot write, none succeeds, all name it, and nothing is left; the next save succeeds."""
        snapshots = group.snapshots()
        snapshots[failing].contents = CheckpointSaveError("x", "the disk is full.")

        reasons = group.errors(*[group.start(one) for one in snapshots])

        others = f"process {failing} failed: the disk is full."
        assert reasons == (["the disk is full.", others] if failing == 0 else [others, "the disk is full."])
        assert (names_in(tmp_path), group.finished) == ([], [])
        assert group.errors(*[group.start(one) for one in group.snapshots()]) == [None, None]

    def test_a_missing_part(self, tmp_path):
        """If a process does not write its part in time, the others raise an error, and nothing is left."""
        group = Group(tmp_path, timeout=0.2)

        [reason] = group.errors(group.start(group.snapshots()[0]))

        assert reason == "process 1 has not answered in 0.2 seconds; is it still running?"
        assert names_in(tmp_path) == []

    @pytest.mark.parametrize("error", [CheckpointSaveError("x", "the disk is full."), None])
    def test_the_first_process_ends(self, group, error):
        """Without the exchange's store, a process raises its own error, or that the first one cannot be reached."""
        _, second = group.snapshots()
        second.writers.send("1: draft for 1", Message(draft=".one"))
        second.contents = error or second.contents

        class Ending:
            """The store of a first process that ends while the others write."""

            def __init__(self):
                self.check, self.get, self.delete_key = group.store.check, group.store.get, group.store.delete_key

            def set(self, *_):
                self.check = self.set
                raise torch.distributed.DistNetworkError("Broken pipe")

        second.writers._exchange._store = Ending()
        (group.folder.path / ".one").mkdir()

        [reason] = group.errors(group.start(second))

        assert reason == ("the disk is full." if error else "process 0 cannot be reached: Broken pipe")

    def test_limited_waiting(self, group):
        """A process that ends waits no longer than a moment for the others."""
        began = time.monotonic()
        first, second = group.snapshots()
        tasks = [group.start(first)]
        first.limit_waiting(0.1)
        second.limit_waiting(0.0)
        tasks.append(group.start(second))

        assert all("has not answered" in reason for reason in group.errors(*tasks))
        assert time.monotonic() - began < group.timeout / 2

    def test_another_process_ends(self, group, tmp_path, monkeypatch):
        """A process does not wait for one that has ended, unless that has answered before."""
        first, second = group.snapshots()
        began = time.monotonic()
        tasks = [group.start(first), group.start(second)]
        assert group.errors(*tasks) == [None, None]

        first, _ = group.snapshots(batch=2)
        tasks = [group.start(first, "two")]
        monkeypatch.setattr(writing, "lost_processes", lambda: "process 1 is gone")

        assert group.errors(*tasks) == ["process 1 is gone."]
        assert (names_in(tmp_path), time.monotonic() - began < group.timeout / 2) == (["one"], True)

    def test_a_part_that_comes_late(self, tmp_path):
        """A process that is late raises the error of the others, and leaves nothing."""
        group = Group(tmp_path, timeout=0.2)
        first, second = group.snapshots()
        group.errors(group.start(first))

        [reason] = group.errors(group.start(second))

        assert reason == "process 1 has not answered in 0.2 seconds; is it still running?"
        assert names_in(tmp_path) == []

    def test_existing(self, group, tmp_path):
        """If the first process keeps an existing checkpoint, no process writes."""
        for _ in range(2):
            assert group.errors(*[group.start(one) for one in group.snapshots()]) == [None, None]

        existing = verify_checkpoint(tmp_path / "one")
        assert (names_in(tmp_path), group.finished) == (["one"], [existing, existing])

    def test_slow_to_finish(self, group, tmp_path, monkeypatch):
        """A process does not wait for what the first one does with a complete checkpoint, such as copying it."""
        monkeypatch.setattr(writing, "_LONGER", 0.0)
        group.timeout, is_copied = 1.0, threading.Event()
        group.finished = type("Slow", (), {"append": staticmethod(lambda _: is_copied.wait(20.0))})

        first, second = [group.start(one) for one in group.snapshots()]

        assert group.errors(second) == [None]
        verify_checkpoint(tmp_path / "one")
        is_copied.set()
        assert group.errors(first) == [None]

    def test_cannot_be_finished(self, group, tmp_path):
        """An error after the checkpoint is complete is one of the first process, which its saver raises in all."""

        def fail(_):
            raise CheckpointSaveError("one", "a folder has the link's name.", outcome="has no link")

        group.finished = type("Failing", (), {"append": staticmethod(fail)})

        assert group.errors(*[group.start(one) for one in group.snapshots()]) == ["a folder has the link's name.", None]
        verify_checkpoint(tmp_path / "one")

    def test_two_saves_at_the_same_time(self, group, tmp_path):
        """A process that is slow in one save finds its texts, though another save has ended meanwhile."""
        (first, slow), other = group.snapshots(), group.snapshots()
        tasks = [group.start(first)]

        reasons = group.errors(*[group.start(one, name="two") for one in other])
        tasks.append(group.start(slow))

        assert [*reasons, *group.errors(*tasks)] == [None] * 4
        assert names_in(tmp_path) == ["one", "two"]

    def test_no_text_is_left(self, group):
        """The store of the exchange is empty after a save."""
        group.errors(*[group.start(one) for one in group.snapshots()])

        assert group.store.num_keys() == 0


def test_tensors_of_one_process():
    """A tensor that is not sharded belongs to the first process."""
    tensors = {"model.safetensors": {"w": WEIGHT}}
    assert describe_tensors(tensors, is_first=False) == {"model.safetensors": {}}


def described(rows):
    return describe_tensors({"model.safetensors": {"weight": torch.ones(rows, 2)}}, is_first=True)


def test_model_that_is_not_sharded():
    """One process writes alone, and several models do not share what is written."""
    one, other = writers_of(nn.Linear(2, 2)), writers_of(nn.Linear(2, 2))

    assert (one.is_alone, one.rank, one.world_size) == (True, 0, 1)
    assert one is not other


def test_plan():
    """A process alone writes each tensor, and plans again only if a tensor has changed."""
    writers = Writers(is_alone=True)

    layouts, writes = zip(*(writers.plan(described(rows)) for rows in (3, 3, 4)), strict=True)

    assert list(writes) == [{"model.safetensors": ["weight"]}] * 3
    assert [layout.tensors["model.safetensors"]["weight"].shape for layout in layouts] == [[3, 2], [3, 2], [4, 2]]
    assert layouts[0] is layouts[1]
    assert writers.saves == 3


def test_error_of_one_process():
    """The process in which a save fails raises its own error."""
    with pytest.raises(KeyError, match="weight"), failing_in_all("runs/one"):
        raise KeyError("weight")
