"""The folder of a run; complete trainings are in ``test_saver.py``."""

import sys

import pytest

from composer.checkpoint import CheckpointError, CheckpointSaveError, save_checkpoint, verify_checkpoint
from composer.checkpoint.former import FileLinks
from composer.checkpoint.local import LocalFolder
from composer.checkpoint.run_folder import Names, RunFolder


def make_folder(*, overwrite=False):
    return RunFolder(overwrite, False, -1, None, FileLinks(False, False))


def test_open_until_closed(runs, tmp_path):
    """A folder is opened once, and closing it lets another one open it."""
    folder = make_folder()

    opened = folder.open(str(tmp_path / "runs"), runs.make(), continues=False)
    assert folder.open(str(tmp_path / "runs"), runs.make(), continues=False) is opened

    folder.close()
    assert folder.opened is None


def test_later_checkpoints(runs, tmp_path):
    """Later checkpoints raise an error, unless they may be overwritten or the run continues."""
    save_checkpoint(runs.make(batch=9), tmp_path / "ba9")

    rejecting = make_folder()
    with pytest.raises(
        CheckpointSaveError, match=r"^Nothing more was trained: .* has ba9 of run 'blur', and .* batch 5"
    ):
        rejecting.open(str(tmp_path), runs.make(batch=5), continues=False)
    rejecting.close()
    for folder, continues in ((make_folder(overwrite=True), False), (make_folder(), True)):
        folder.open(str(tmp_path), runs.make(batch=5), continues=continues)
        folder.close()


class Unlisted(LocalFolder):
    """A folder that can be written to and not listed."""

    def names(self):
        """Fail as a folder without the permission to read it, which a superuser has."""
        raise CheckpointError(self, "cannot be read: Permission denied.")


def test_failing_list(runs, tmp_path):
    """A folder that cannot be listed after a save does not make it one that was not saved."""
    save_checkpoint(runs.make(batch=9), tmp_path / "ba9")
    unlisted, folder = Unlisted(tmp_path), RunFolder(False, False, 1, None, FileLinks(False, False))

    with pytest.raises(CheckpointSaveError, match=r"ba9 is complete, and .*cannot be read: Permission denied"):
        folder.finish(unlisted, Names(str(tmp_path), "ba9", None, None, []), unlisted.manifest("ba9"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://bucket/ba5", "nosuch://bucket is not a URL that fsspec supports"),
        ("adl://bucket/ba5", "adl://bucket needs another package"),
    ],
)
def test_copies_that_cannot_be_written(runs, tmp_path, monkeypatch, url, reason):
    """The error names the checkpoint, which is complete, if a URL of a copy is wrong or needs another package."""
    # A package that no test uses: fsspec remembers what it has imported, whatever sys.modules says then.
    monkeypatch.setitem(sys.modules, "adlfs", None)
    path = save_checkpoint(runs.make(), tmp_path / "ba5")
    folder = make_folder()
    opened = folder.open(str(tmp_path), runs.make(), continues=False)

    with pytest.raises(CheckpointSaveError, match=f"ba5 is complete, and .*: {reason}") as raised:
        folder.finish(opened, Names(str(tmp_path), "ba5", "latest", None, [url]), verify_checkpoint(path))
    assert raised.value.path == path
    folder.close()


def test_copies_of_an_earlier_run(runs, tmp_path):
    """A copy is replaced by the same run; after it is forgotten, it is that of another run, and is kept."""
    path, url = save_checkpoint(runs.make(), tmp_path / "ba5"), "memory://earlier/ba5"
    folder = make_folder()
    opened = folder.open(str(tmp_path), runs.make(), continues=False)
    names, manifest = Names(str(tmp_path), "ba5", None, None, [url]), verify_checkpoint(path)
    folder.finish(opened, names, manifest)
    folder.finish(opened, names, manifest)

    folder.forget()

    with pytest.raises(CheckpointSaveError, match="memory://earlier/ba5: exists"):
        folder.finish(opened, names, manifest)
    folder.close()
