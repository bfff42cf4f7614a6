"""Checkpoints that this release cannot read are neither skipped, nor replaced, nor deleted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer.algorithms import EMA
from composer.checkpoint import CheckpointError, CheckpointSaveError, newest_checkpoint, verify_checkpoint
from composer.checkpoint.manifest import FORMAT_VERSION
from fixtures import small_run

OTHER_FORMAT = r"is of format 99, and this release reads format \d+\. It was written by composer-trainer 9\.9; load it"


FORMATS = Path(__file__).parent / "formats"


def trained(folder, **options):
    """Return a trainer that saves five checkpoints of a run and keeps two, after its training."""
    options = {"run_name": "one", "save_interval": "4ba", "save_num_checkpoints_to_keep": 2} | options
    trainer = small_run(save_folder=str(folder), max_duration="4ep", **options)
    with trainer:
        trainer.fit()
    return trainer


def change(checkpoint):
    """Let a checkpoint be of a later format, which may have another checksum."""
    path = checkpoint / "manifest.json"
    data = json.loads(path.read_text())
    data["format_version"], data["versions"]["composer-trainer"] = 99, "9.9"
    path.write_text(json.dumps(data))


def damage(checkpoint, file="manifest.json"):
    """Change a byte of a file."""
    content = bytearray((checkpoint / file).read_bytes())
    content[-5] ^= 1
    (checkpoint / file).write_bytes(content)


def contents(folder):
    """Return all files of a folder with their contents, without locks."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class TestOtherFormat:
    @pytest.mark.parametrize("changed", [["ep4-ba20"], ["ep3-ba16"], ["ep3-ba16", "ep4-ba20"]])
    def test_autoresume_stops(self, tmp_path, changed):
        """It names both versions, also if it could read another checkpoint, and changes nothing."""
        trained(tmp_path)
        for name in changed:
            change(tmp_path / name)
        before = contents(tmp_path)

        with pytest.raises(CheckpointError, match=OTHER_FORMAT):
            trained(tmp_path, autoresume=True)

        assert contents(tmp_path) == before

    def test_other_field_of_another_release(self, tmp_path):
        """A manifest of this format with a field that only another release has is not a damaged one."""
        from composer.checkpoint.manifest import _signed

        trained(tmp_path)
        path = tmp_path / "ep4-ba20" / "manifest.json"
        data = json.loads(path.read_text())
        del data["sha256"]
        data["versions"]["composer-trainer"] = "9.9"
        path.write_bytes(_signed(data | {"more": 1}))

        with pytest.raises(CheckpointError, match=r"unknown field 'more'.* It was written by composer-trainer 9\.9"):
            newest_checkpoint(tmp_path)

    def test_it_is_never_replaced(self, tmp_path):
        """A run that may replace others stops at the name of such a checkpoint, which remains with the others."""
        trained(tmp_path)
        change(tmp_path / "ep3-ba16")
        before = contents(tmp_path / "ep3-ba16")

        with pytest.raises(CheckpointSaveError, match=f"ep3-ba16 was not saved: one of another .*{OTHER_FORMAT}"):
            trained(tmp_path, save_overwrite=True)

        assert contents(tmp_path / "ep3-ba16") == before


class TestDamaged:
    @pytest.mark.filterwarnings("ignore:Skipped a checkpoint that is incomplete or damaged")
    @pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
    def test_one_before_is_resumed(self, tmp_path, file):
        """The run resumes from the one before; the damaged one is kept beside the new one of its name."""
        trained(tmp_path)
        damage(tmp_path / "ep4-ba20", file)
        before = (tmp_path / "ep4-ba20" / file).read_bytes()

        resumed = trained(tmp_path, autoresume=True)

        [aside] = tmp_path.glob(".ep4-ba20.aside-*")
        assert (aside / file).read_bytes() == before
        assert verify_checkpoint(tmp_path / "ep4-ba20").timestamp.batch == 20
        assert resumed.saved_checkpoints == [str(tmp_path / "ep4-ba20")]
        assert newest_checkpoint(tmp_path).name == "ep4-ba20"

    @pytest.mark.filterwarnings("ignore:Skipped a checkpoint that is incomplete or damaged")
    @pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
    def test_all_are_damaged(self, tmp_path, file):
        """A run without a checkpoint to resume from does not train from the beginning over its damaged ones."""
        trained(tmp_path)
        for name in ("ep3-ba16", "ep4-ba20"):
            damage(tmp_path / name, file)
        before = contents(tmp_path)

        with pytest.raises(CheckpointError, match=r"none that run 'one' can resume from: ep\d-ba\d+ is damaged\. Move"):
            trained(tmp_path, autoresume=True)

        assert contents(tmp_path) == before


def test_another_run(tmp_path):
    """A run that finds checkpoints of another one, and none of its own, does not train in their folder."""
    trained(tmp_path)
    before = contents(tmp_path)

    with pytest.raises(CheckpointSaveError, match=r"Nothing was trained: .* has ep3-ba16 of run 'one', and this run"):
        trained(tmp_path, run_name="two", autoresume=True)

    assert contents(tmp_path) == before


def example():
    """Return the run whose checkpoints are in ``formats``, one of each format: after ``fit(duration="3ba")``."""
    return small_run(max_duration="2ep", algorithms=EMA("2ba"), seed=17, run_name="example")


class TestFormats:
    def test_each_has_an_example(self):
        """A new format has the next number and a checkpoint here, saved by ``example().save_checkpoint``."""
        assert sorted(path.name for path in FORMATS.iterdir()) == ["1", str(FORMAT_VERSION)]

    def test_former_formats_raise(self):
        """The error names the release that reads format 1, which has other encodings of values."""
        with pytest.raises(
            CheckpointError, match=r"is of format 1, and this release reads format 3.*composer-trainer 0"
        ):
            small_run(load_path=str(FORMATS / "1"))

    @pytest.mark.filterwarnings("ignore:.*was saved with:UserWarning")
    @pytest.mark.filterwarnings("ignore:.*may not be bit-identical. torch was")  # it was saved by another release
    def test_example_is_resumed(self):
        """A checkpoint of the format resumes: with its weights, and until the end of the training."""
        path = FORMATS / str(FORMAT_VERSION)
        trainer = example()
        resumed = small_run(max_duration="2ep", algorithms=EMA("2ba"), seed=17, run_name="example", load_path=str(path))
        weights = resumed.state.model.state_dict()

        assert all(torch.equal(weights[name], saved) for name, saved in load_file(path / "model.safetensors").items())
        assert int(resumed.state.timestamp.batch) == 3
        assert resumed.fit().steps == trainer.fit().steps - 3
