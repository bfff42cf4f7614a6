"""Errors of checkpoints have their details as attributes."""

import pytest

from composer.checkpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointSaveError, FolderInUseError

ERRORS = [
    (CheckpointError("a/state.json", "is missing."), ("a/state.json", "is missing."), "a/state.json is missing."),
    (CheckpointSaveError("a", "the disk is full."), ("a", "the disk is full."), "The checkpoint a was not saved: the "),
]


@pytest.mark.parametrize(("error", "details", "text"), ERRORS)
def test_path_and_reason(error, details, text):
    """The text has the path and the reason, which are attributes, too."""
    assert (error.path, error.reason) == details
    assert str(error).startswith(text)


def test_problems():
    """Each mismatch has a line of its own."""
    error = CheckpointMismatchError("ep1-ba5", ["model.bias is not saved.", "model.a is not in the model."])

    assert error.problems == ("model.bias is not saved.", "model.a is not in the model.")
    assert str(error).splitlines()[1:] == ["- model.bias is not saved.", "- model.a is not in the model."]
    assert isinstance(error, ValueError)


def test_folder_in_use():
    """The error names the folder, its holder and the remedy."""
    error = FolderInUseError("runs/blur", "process 17 on host")

    assert (error.folder, error.holder) == ("runs/blur", "process 17 on host")
    assert "Choose another save_folder or run_name" in str(error)


def test_long_reasons_are_abridged():
    """A reason of a hundred thousand characters does not fill the screen."""
    assert len(str(CheckpointError("a", "x" * 100_000))) < 10_000
