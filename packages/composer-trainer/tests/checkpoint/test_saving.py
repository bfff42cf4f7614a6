"""Saving a run, the content of the folder, and several processes, which are threads here: all succeed or none does."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from composer.checkpoint import CheckpointSaveError, load_checkpoint, save_checkpoint, verify_checkpoint
from composer.checkpoint.folders import LocalFolder
from composer.checkpoint.layout import TensorInfo, describe_tensors, plan_files
from composer.checkpoint.manifest import Manifest
from composer.checkpoint.saving import Snapshot, Writers, saving_in_all, take_snapshot
from composer.core import Callback, NotSerializableError, Timestamp
from composer.functional.dtensors import Region


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


class Remembers(Callback):
    """Saves its argument."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class TestSaveCheckpoint:
    def test_weights_are_plain(self, runs, saved):
        """Safetensors loads the model's file strictly into the unwrapped model."""
        model = runs.make(seed=9).model

        model.load_state_dict(load_file(saved / "model.safetensors"), strict=True)

        assert runs.same_tensors(model.state_dict(), runs.make().model.state_dict())

    def test_optimizer_tensors_have_names(self, saved):
        """Names have optimizer, parameter and tensor."""
        names = load_file(saved / "optimizers.safetensors").keys()

        assert "optimizers.Adam.state.0.weight.exp_avg" in names
        assert len(names) == 4 * 3

    def test_state_is_json(self, saved):
        """Clock, seed and extra data are readable JSON."""
        data = json.loads((saved / "state.json").read_text())

        assert data["timestamp"]["batch"] == 5
        assert data["rank_zero_seed"] == 17
        assert data["extra"] == {"data": {"position": 7}}
        assert data["environment"]["torch"] == torch.__version__

    def test_manifest_lists_all_files(self, saved):
        """The folder contains the manifest and the listed files."""
        manifest = verify_checkpoint(saved)

        assert {*manifest.files, "manifest.json"} == set(names_in(saved))
        assert manifest.run_name == "blur"
        assert not manifest.weights_only

    def test_name_is_filled_in(self, runs, tmp_path):
        """The name may contain run and clock; missing folders are created."""
        path = save_checkpoint(runs.make(), tmp_path / "{run_name}" / "ep{epoch}-ba{batch}")

        assert path == str(tmp_path / "blur" / "ep1-ba5")

    @pytest.mark.parametrize("name", ["{what}", "ep{epoch", "{0}", ".hidden", "{}", "ba\0", ""])
    def test_invalid_names_raise(self, runs, name, tmp_path):
        """Unknown placeholders and invalid folder names raise."""
        with pytest.raises(ValueError, match=r"nothing else in braces|must be the name of a"):
            save_checkpoint(runs.make(), name and f"{tmp_path}/{name}")

        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "value",
        [
            math.nan,
            -math.inf,
            0.1 + 0.2,
            5e-324,
            2**100,
            -(2**64),
            {2: "a", None: 2, True: 3.0, (1, "b"): []},
            (1, (2.0, None)),
            {"$tensor": "x"},
            "\ud800",
            [],
        ],
    )
    def test_json_extensions_round_trip(self, runs, value, tmp_path):
        """Tuples, non-string keys and special numbers are restored with their types."""
        path = save_checkpoint(runs.make(callbacks=Remembers(value)), tmp_path / "one")
        later = runs.make(callbacks=Remembers())

        load_checkpoint(path, later)

        assert repr(later.callbacks[0].value) == repr(value)

    def test_unserializable_extra_raises(self, runs, tmp_path):
        """Unserializable extra data raise with the path, before anything is written."""
        with pytest.raises(NotSerializableError, match=r"extra\.data\.sampler"):
            save_checkpoint(runs.make(), tmp_path / "one", extra={"data": {"sampler": object()}})

        assert not list(tmp_path.iterdir())

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
    def test_unsupported_weights_raise(self, kind, runs, tmp_path):
        """A weight without its own memory raises with its name, before anything is written."""
        make = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "meta": lambda: torch.ones(2, device="meta"),
        }
        state = runs.make()
        state.model[2].register_buffer("odd", make[kind]())

        with pytest.raises(NotSerializableError, match=rf"model\.2\.odd: a {kind} tensor cannot be saved"):
            save_checkpoint(state, tmp_path / "one")

        assert not list(tmp_path.iterdir())

    def test_weights_only(self, runs, tmp_path):
        """Without the training state there are only weights and their metadata."""
        path = Path(save_checkpoint(runs.make(), tmp_path / "one", weights_only=True, extra={"data": 1}))

        data = json.loads((path / "state.json").read_text())

        assert sorted(names_in(path)) == ["layout.json", "manifest.json", "model.safetensors", "state.json"]
        assert not {"optimizers", "extra", "callbacks", "rank_zero_seed"} & data.keys()
        assert verify_checkpoint(path).weights_only

    def test_ignored_keys_are_not_saved(self, runs, tmp_path):
        """Patterns exclude weights and other parts."""
        path = Path(save_checkpoint(runs.make(), tmp_path / "one", ignore_keys=["model/2.*", "state/optimizers/*"]))

        assert load_file(path / "model.safetensors").keys() == {"0.weight", "0.bias"}
        assert not (path / "optimizers.safetensors").exists()

    def test_extra_state_of_modules(self, runs, tmp_path):
        """A module's extra state is restored, also if it is not a tensor."""

        class Counts(nn.Linear):
            seen = 0

            def get_extra_state(self):
                return {"seen": self.seen, "mean": torch.ones(2)}

            def set_extra_state(self, state):
                self.seen = state["seen"] + int(state["mean"].sum())

        state = runs.make(model=Counts(4, 2))
        state.model.seen = 7
        later, weights = runs.make(model=Counts(4, 2)), runs.make(model=Counts(4, 2))

        path = save_checkpoint(state, tmp_path / "one")
        load_checkpoint(path, later)
        load_checkpoint(path, weights, weights_only=True)

        assert (later.model.seen, weights.model.seen) == (9, 9)

    def test_overwrite(self, runs, tmp_path):
        """Another checkpoint of the same name is replaced with overwrite=True only."""
        path = save_checkpoint(runs.make(), tmp_path / "one")

        with pytest.raises(CheckpointSaveError, match=r"one was not saved: there is one already.*batch 5.*overwrite"):
            save_checkpoint(runs.make(batch=6), path)
        save_checkpoint(runs.make(batch=6), path, overwrite=True)

        assert int(verify_checkpoint(path).timestamp.batch) == 6
        assert names_in(tmp_path) == ["one"]

    def test_damaged_checkpoint_is_replaced(self, runs, saved):
        """A damaged checkpoint is replaced."""
        (saved / "model.safetensors").write_bytes(b"")

        save_checkpoint(runs.make(), saved)

        assert verify_checkpoint(saved)

    def test_same_moment_is_replaced(self, runs, saved):
        """The run may have changed since, for example by an evaluation: the later save of a moment counts."""
        run = runs.make()
        with torch.no_grad():
            next(run.model.parameters()).zero_()

        save_checkpoint(run, saved)

        load_checkpoint(saved, later := runs.make(seed=1))
        assert not next(later.model.parameters()).any()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_other_folders_raise(self, runs, overwrite, tmp_path):
        """A folder of that name that is not a checkpoint is neither replaced nor emptied."""
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "model.safetensors").write_text("precious")

        with pytest.raises(CheckpointSaveError, match="of that name is not a checkpoint"):
            save_checkpoint(runs.make(), tmp_path / "one", overwrite=overwrite)

        assert (tmp_path / "one" / "model.safetensors").read_text() == "precious"


class Switching(torch.optim.SGD):
    """Has separate evaluation weights, as schedule-free optimizers do, and rounds."""

    def eval(self):
        self._scale(1 / 3, False)

    def train(self):
        self._scale(3.0, True)

    def _scale(self, factor, mode):
        for group in self.param_groups:
            group["train_mode"] = mode
            for parameter in group["params"]:
                parameter.data.mul_(factor)


class TestSnapshot:
    def test_snapshot_is_independent(self, runs, tmp_path):
        """A snapshot does not change while training continues."""
        state = runs.make()
        before = state.model[0].weight.detach().clone()

        snapshot = take_snapshot(state, LocalFolder(tmp_path), "one")
        state.model[0].weight.data.zero_()
        state.optimizers[0].param_groups[0]["lr"] = 99.0

        contents = b"".join(bytes(piece) for pieces in snapshot.contents.values() for piece in pieces)
        assert before.numpy().tobytes() in contents
        assert "99.0" not in str(snapshot.data)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_weights_of_schedule_free_optimizers(self, runs, weights_only, tmp_path):
        """Full checkpoints have the training weights, weights-only ones the evaluation weights."""
        state = runs.make(optimizer=Switching, steps=0)
        before = {name: value.clone() for name, value in state.model.state_dict().items()}

        path = Path(save_checkpoint(state, tmp_path / "one", weights_only=weights_only))

        written = load_file(path / "model.safetensors")["0.weight"]
        assert torch.equal(written, before["0.weight"] * (1 / 3) if weights_only else before["0.weight"])
        assert runs.same_tensors(state.model.state_dict(), before)
        assert state.optimizers[0].param_groups[0].get("train_mode", True)


WEIGHT = torch.arange(8.0)


class Group:
    """Two processes with half of a weight each, which write to one folder."""

    def __init__(self, path, timeout=20.0):
        self.folder, self.store = LocalFolder(path), torch.distributed.HashStore()
        self.timeout, self.saves, self.finished = timeout, 0, []
        self.threads = ThreadPoolExecutor(4)

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
            writers.rank, writers.world_size, writers.saves, writers._messages._store = rank, 2, self.saves, self.store
            contents = {file: [memoryview(WEIGHT[4 * rank : 4 * rank + 4].numpy()).cast("B")] for file in files}
            snapshots.append(Snapshot(self.folder, "one", {}, contents, manifest, layout, writers, self.timeout))
        return snapshots

    def start(self, snapshot):
        """Start to write in a process."""
        return self.threads.submit(snapshot.write, finish=self.finished.append)

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
        assert (names_in(tmp_path), group.finished, group.store.num_keys()) == ([], [], 0)
        assert group.errors(*[group.start(one) for one in group.snapshots()]) == [None, None]

    def test_a_missing_part(self, tmp_path):
        """If a process does not write its part in time, the others raise an error, and nothing is left."""
        group = Group(tmp_path, timeout=0.2)

        [reason] = group.errors(group.start(group.snapshots()[0]))

        assert reason == "process 1 has not answered in 0.2 seconds; is it still running?"
        assert names_in(tmp_path) == []


def test_tensors_of_one_process():
    """A tensor that is not sharded belongs to the first process."""
    tensors = {"model.safetensors": {"w": WEIGHT}}
    assert describe_tensors(tensors, is_first=False) == {"model.safetensors": {}}


def described(rows):
    return describe_tensors({"model.safetensors": {"weight": torch.ones(rows, 2)}}, is_first=True)


def test_plan():
    """A process alone writes each tensor, and plans again only if a tensor has changed."""
    writers = Writers(is_alone=True)

    layouts, writes = zip(*(writers.plan(described(rows), are_shards=False) for rows in (3, 3, 4)), strict=True)

    assert list(writes) == [{"model.safetensors": ["weight"]}] * 3
    assert [layout.tensors["model.safetensors"]["weight"].shape for layout in layouts] == [[3, 2], [3, 2], [4, 2]]
    assert layouts[0] is layouts[1]
    assert writers.saves == 3


def test_error_of_one_process():
    """The process in which a save fails raises its own error."""
    with pytest.raises(KeyError, match="weight"), saving_in_all("runs/one"):
        raise KeyError("weight")
