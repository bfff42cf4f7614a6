"""Errors of checkpoints have their details as attributes."""

import traceback

import pytest
import torch

from composer.checkpoint import load_checkpoint, save_checkpoint
from composer.checkpoint.errors import (
    CheckpointError,
    CheckpointSaveError,
    FolderInUseError,
    LaterCheckpointError,
)
from composer.checkpoint.loading import LoadedCheckpoint
from composer.core import LoadReport, State

ERRORS = [
    (CheckpointError("a/state.json", "is missing."), ("a/state.json", "is missing."), "a/state.json is missing."),
    (CheckpointSaveError("a", "the disk is full."), ("a", "the disk is full."), "The checkpoint a was not saved: the "),
]


@pytest.mark.parametrize(("error", "details", "text"), ERRORS)
def test_path_and_reason(error, details, text):
    """The text has the path and the reason, which are attributes, too."""
    assert (error.path, error.reason) == details
    assert str(error).startswith(text)


def test_folder_in_use():
    """The error names the folder, its holder and the remedy."""
    error = FolderInUseError("runs/blur", "process 17 on host")

    assert (error.folder, error.holder) == ("runs/blur", "process 17 on host")
    assert "Choose another save_folder or run_name" in str(error)


URL = "ftp://me:s3cr3t@127.0.0.1:1/runs"


@pytest.mark.parametrize(
    "act",
    [
        lambda: load_checkpoint(f"{URL}/ep1", State(torch.nn.Linear(2, 2))),
        lambda: load_checkpoint("https://127.0.0.1:1/runs/ep1?sig=s3cr3t", State(torch.nn.Linear(2, 2))),
        lambda: load_checkpoint("nothing://me:s3cr3t@host/runs/ep1", State(torch.nn.Linear(2, 2))),
        lambda: save_checkpoint(State(torch.nn.Linear(2, 2)), f"{URL}/ep1"),
        lambda: load_checkpoint("ftp://me:s3cr3t@", State(torch.nn.Linear(2, 2))),
    ],
)
def test_secrets_of_urls(act, monkeypatch):
    """No part of an error's report contains the password or the query of a URL."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    with pytest.raises((CheckpointError, CheckpointSaveError)) as caught:
        act()

    assert "(hidden)" in str(caught.value)
    lines = traceback.format_exception(caught.value)
    assert not [line for line in lines if "s3cr3t" in line and not line.lstrip().startswith("File ")]


def test_the_path_of_a_url_remains():
    """A program can still use the path of the error."""
    error = LaterCheckpointError(URL, "ep1", "first", 0)

    assert error.path == URL
    assert "s3cr3t" not in str(error)
    assert "s3cr3t" not in str(LoadedCheckpoint(URL, LoadReport()))
