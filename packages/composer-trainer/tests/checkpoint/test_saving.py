"""Saving a run, and the content of the folder."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn

from composer.checkpoint import CheckpointSaveError, load_checkpoint, save_checkpoint, verify_checkpoint
from composer.checkpoint.layout import describe_tensors, plan_files
from composer.checkpoint.local import open_folder
from composer.checkpoint.saving import pack_files, take_snapshot
from composer.core import Callback, NotSerializableError, Timestamp


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
        assert data["modules"] == {"": "Sequential", "0": "Linear", "1": "ReLU", "2": "Linear"}
        assert data["environment"]["torch"] == torch.__version__

    def test_manifest_lists_all_files(self, saved):
        """The folder contains the manifest and the listed files."""
        manifest = verify_checkpoint(saved)

        assert {*manifest.files, "manifest.json"} == set(names_in(saved))
        assert manifest.run_name == "blur"
        assert not manifest.weights_only

    @pytest.mark.parametrize("path", ["file://one", "file://{folder}/one/", "file://runs/one", "one/"])
    def test_local_urls(self, runs, path, tmp_path, monkeypatch):
        """A URL of a relative or absolute local path is that path, to save and to load."""
        monkeypatch.chdir(tmp_path)
        path = path.replace("{folder}", str(tmp_path))

        saved = save_checkpoint(runs.make(), path)

        assert saved == str(tmp_path / path.removeprefix("file://"))
        assert load_checkpoint(path, runs.make(seed=1)).path == saved

    @pytest.mark.parametrize("path", ["file://", "file:///", "/"])
    def test_folder_without_a_name(self, runs, path):
        """The root of the file system, or an empty path, is no name of a checkpoint."""
        with pytest.raises(ValueError, match="must be the name of a folder"):
            save_checkpoint(runs.make(), path)

    def test_braces_in_the_name_of_a_run(self, runs, tmp_path):
        """A field in the name of a run is part of it, and not filled in."""
        path = save_checkpoint(runs.make(run_name="run {epoch}"), f"{tmp_path}/{{run_name}} at {{batch}}")

        assert path == f"{tmp_path}/run {{epoch}} at 5"

    def test_name_is_filled_in(self, runs, tmp_path):
        """The name may contain run and clock; missing folders are created."""
        path = save_checkpoint(runs.make(), tmp_path / "{run_name}" / "ep{epoch}-ba{batch}")

        assert path == str(tmp_path / "blur" / "ep1-ba5")

    @pytest.mark.parametrize(
        "name", ["{what}", "ep{epoch", "{0}", ".hidden", "{epoch.__class__}", "{run_name[0]}", "{}", "ba\0", ""]
    )
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

    def test_tensors_in_extra_round_trip(self, runs, tmp_path):
        """Extra data may contain tensors."""
        extra = {"rng": {"cpu": torch.get_rng_state(), "more": [torch.tensor(1.5), (torch.ones(2), "x")]}}

        loaded = load_checkpoint(save_checkpoint(runs.make(), tmp_path / "one", extra=extra), runs.make(seed=1))

        assert torch.equal(loaded.extra["rng"]["cpu"], extra["rng"]["cpu"])
        assert loaded.extra["rng"]["more"][0].item() == 1.5
        assert loaded.extra["rng"]["more"][1][1] == "x"

    def test_unserializable_extra_raises(self, runs, tmp_path):
        """Unserializable extra data raise with the path, before anything is written."""
        with pytest.raises(NotSerializableError, match=r"extra\.data\.sampler"):
            save_checkpoint(runs.make(), tmp_path / "one", extra={"data": {"sampler": object()}})

        assert not list(tmp_path.iterdir())

    def test_state_that_is_too_large(self, runs, tmp_path, monkeypatch):
        """What could not be loaded is not saved: lists of numbers that are too long for JSON belong into tensors."""
        monkeypatch.setattr("composer.checkpoint.writing.MAX_STATE_BYTES", 10_000)

        with pytest.raises(CheckpointSaveError, match=r"state.json would have \d+ bytes, and none of more than 10000"):
            save_checkpoint(runs.make(), tmp_path / "one", extra={"losses": [0.5] * 10_000})
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

    def test_model_metadata(self, runs, tmp_path):
        """The metadata of a model are saved."""

        class Known(nn.Linear):
            def get_metadata(self):
                return {"model": {"name": "linear"}}

        path = Path(save_checkpoint(runs.make(model=Known(4, 2)), tmp_path / "one"))

        assert json.loads((path / "state.json").read_text())["integrations"] == {"model": {"name": "linear"}}

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

    def test_repeated_save_changes_nothing(self, runs, tmp_path):
        """Saving the same run at the same time again changes nothing."""
        path = Path(save_checkpoint(runs.make(), tmp_path / "one"))
        before = (path / "manifest.json").stat().st_mtime_ns

        save_checkpoint(runs.make(), path)

        assert (path / "manifest.json").stat().st_mtime_ns == before

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

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_other_folders_raise(self, runs, overwrite, tmp_path):
        """A folder of that name that is not a checkpoint is neither replaced nor emptied."""
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "model.safetensors").write_text("precious")

        with pytest.raises(CheckpointSaveError, match="of that name is not a checkpoint"):
            save_checkpoint(runs.make(), tmp_path / "one", overwrite=overwrite)

        assert (tmp_path / "one" / "model.safetensors").read_text() == "precious"

    def test_user_files_raise(self, runs, saved):
        """A checkpoint with user files is not replaced."""
        (saved / "notes.txt").write_text("precious")

        with pytest.raises(CheckpointSaveError, match=r"'notes\.txt' in it is not a file of a checkpoint"):
            save_checkpoint(runs.make(batch=6), saved, overwrite=True)

        assert (saved / "notes.txt").read_text() == "precious"


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
    def test_snapshot_is_independent(self, runs):
        """A snapshot does not change while training continues."""
        state = runs.make()
        before = state.model[0].weight.detach().clone()

        snapshot = take_snapshot(state)
        state.model[0].weight.data.zero_()
        state.optimizers[0].param_groups[0]["lr"] = 99.0

        contents = b"".join(bytes(piece) for pieces in snapshot.contents.values() for piece in pieces)
        assert before.numpy().tobytes() in contents
        assert "99.0" not in str(snapshot.data)

    def test_a_clock_that_is_loaded_in_place(self, runs, tmp_path):
        """The manifest, which is written last, has the clock of the snapshot, as Composer's programs change theirs."""
        state = runs.make()
        state.timestamp = Timestamp(batch=5)
        snapshot = take_snapshot(state)

        state.timestamp.load_state_dict(Timestamp(batch=9).state_dict())
        snapshot.write(open_folder(str(tmp_path)), "saved", overwrite=False, prepare=lambda: None)

        assert verify_checkpoint(tmp_path / "saved").timestamp == Timestamp(batch=5)

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


def test_header_is_padded():
    """The tensors begin at a multiple of 8 bytes, and the safetensors package reads the file."""
    tensors = {"model.safetensors": {"weight": torch.arange(3.0)}}
    described = describe_tensors(tensors, is_first=True)
    _, [writes] = plan_files([described])

    [(header, weight)] = pack_files(tensors, described, writes, copy=True).values()

    assert len(header) % 8 == 0
    assert load(bytes(header) + bytes(weight))["weight"].tolist() == [0, 1, 2]
