"""Neptune runs without a network, read from its offline data."""

import json

import pytest

PROGRAM = """
import logging
import torch
from pathlib import Path

logging.getLogger("neptune").setLevel(logging.ERROR)
quiet = {"capture_hardware_metrics": False, "capture_stdout": False, "capture_stderr": False, "git_ref": False}
first = NeptuneLogger(mode="offline", upload_checkpoints=True, base_namespace="here", **quiet)
trainer, memory = make_trainer(first)
trainer.fit()
trainer.logger.log_table(["id", "x"], [[1, 0.5]], name="best")
trainer.logger.log_images(torch.rand(2, 3, 8, 8), name="pair")
Path("folder").mkdir()
Path("folder", "a.txt").write_text("a")
trainer.logger.upload_file("checkpoints/ep1", "folder")
trainer.logger.upload_file("notes", Path("folder", "a.txt"))
trainer.close()

later = NeptuneLogger(mode="offline", every="0ba", **quiet)
later.load_state_dict(first.state_dict())
again, _ = make_trainer(later, epochs=1)
again.fit()
again.close()

others = []
for options in ({"name": "other"}, {"custom_run_id": "mine"}):
    other = NeptuneLogger(mode="offline", **quiet, **options)
    other.load_state_dict(first.state_dict())
    make_trainer(other, epochs=1)[0].close()
    others.append(other.run_id)

report_facts(
    losses=series(memory, "loss/train/total"),
    ids=[first.state_dict(), later.state_dict()],
    others=others,
    runs=[first.run._id, later.run._id],
    uploads=[first.can_upload_files(), later.can_upload_files()],
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("neptune")


@pytest.fixture(scope="module")
def facts(run_in_subprocess, folder):
    """Return the facts from a program with two trainings."""
    return run_in_subprocess(PROGRAM, folder)


@pytest.fixture(scope="module")
def operations(facts, folder):
    """Return the queued operations of both runs."""
    result = []
    for run in facts["runs"]:
        (queue,) = (folder / ".neptune" / "offline").glob(f"run__{run}__*")
        text = "".join(path.read_text() for path in sorted(queue.glob("data-*.log")))
        decoder, place, of_run = json.JSONDecoder(), 0, []
        while place < len(text.rstrip()):
            entry, place = decoder.raw_decode(text, place)
            place += len(text[place:]) - len(text[place:].lstrip())
            of_run.append(entry["obj"])
        result.append(of_run)
    return result


def floats(operations, *path):
    return [
        [value["step"], value["value"]]
        for operation in operations
        if operation["path"] == list(path) and operation["type"] == "LogFloats"
        for value in operation["values"]
    ]


def test_every_loss_with_its_step(facts, operations):
    """Neptune has the same values as InMemoryLogger, in the given namespace."""
    assert floats(operations[0], "here", "metrics", "loss", "train", "total") == facts["losses"]


def test_settings_and_name(operations):
    """Hyperparameters are single values, and the run has the run's name."""
    values = {tuple(one["path"]): one["value"] for one in operations[0] if "value" in one}

    assert values["here", "hyperparameters", "max_duration"] == "2ep"
    assert values["sys", "name"] == "the-run"


def test_images_tables_and_files(operations):
    """Images are series, tables and files are files."""
    kinds = {tuple(one["path"]): one["type"] for one in operations[0]}

    assert kinds["here", "images", "pair", "0"] == kinds["here", "images", "pair", "1"] == "LogImages"
    assert kinds["here", "tables", "best_10"].startswith("UploadFile")
    assert kinds["here", "files", "checkpoints", "ep1", "a.txt"].startswith("UploadFile")
    assert kinds["here", "files", "notes"].startswith("UploadFile")


def test_resume(facts):
    """With the state of an earlier run a later one has its custom id."""
    assert facts["ids"][0] == facts["ids"][1] != {}


def test_a_checkpoint_does_not_choose_the_run(facts):
    """The custom id of a run of another name is not used, and the user's own takes precedence."""
    other, own = facts["others"]

    assert other != facts["ids"][0]["custom_run_id"]
    assert own == "mine"
