"""MLflow runs in a local store, read by MLflow's own client."""

import json
import sqlite3
from pathlib import Path

import pytest

from composer.loggers import MLFlowLogger

PROGRAM = """
import torch
from pathlib import Path
from mlflow import MlflowClient

URI = "sqlite:///mlflow.db"
options = dict(experiment_name="digits", tracking_uri=URI, log_system_metrics=False,
               ignore_hyperparameters=["rank_zero_seed"])
first = MLFlowLogger(**options, tags={"who": "me"}, run_group="group", rename_metrics={"loss/train/total": "loss"},
                     ignore_metrics=["time/*"])
trainer, memory = make_trainer(first)
trainer.fit()
trainer.logger.log_table(["id", "x"], [[1, 0.5], [2, "text"]], name="best")
trainer.logger.log_images(torch.ones(1, 3, 8, 8), name="white")
trainer.logger.log_images(torch.rand(2, 3, 8, 8), name="pair")
trainer.logger.log_images(torch.ones(1, 3, 8, 8), name="shown", masks={"found": torch.ones(1, 8, 8)})
Path("file.txt").write_text("content")
trainer.logger.upload_file("sub/renamed.txt", "file.txt")
Path("folder").mkdir()
Path("folder", "a.txt").write_text("a")
trainer.logger.upload_file("checkpoints/folder", "folder")
refused = []
with warnings.catch_warnings(record=True) as facts:
    warnings.simplefilter("always")
    trainer.logger.upload_file("sub/renamed.txt", "file.txt")
    refused = [str(one.message) for one in facts]
trainer.logger.upload_file("sub/renamed.txt", "file.txt", overwrite=True)
first.download_file("sub/renamed.txt", "back/again.txt")
first.download_file("checkpoints/folder", "back/folder")
try:
    first.download_file("sub/renamed.txt", "back/again.txt")
except FileExistsError as error:
    exists = str(error)
version = first.register_model(f"runs:/{first.run_id}/sub", "net")
trainer.close()

resumed = MLFlowLogger(**options, synchronous=True)
resumed.load_state_dict(first.state_dict())
again, _ = make_trainer(resumed, epochs=1)
again.close()

foreign = []
for given in ({"run_name": "foreign"}, {"experiment_name": "another"}):
    elsewhere = MLFlowLogger(**options | given)
    elsewhere.load_state_dict(first.state_dict())
    make_trainer(elsewhere, epochs=1)[0].close()
    foreign.append(elsewhere.run_id)

by_name = MLFlowLogger(**options, resume=True)
another, _ = make_trainer(by_name, epochs=1)
another.close()

other = MLFlowLogger(**options, run_name="other", log_duplicated_metric_every_n_steps=4)
failing, _ = make_trainer(other, epochs=1)
for step in range(10):
    failing.logger.log_metrics({"constant": 7}, step=step)
failing.logger.log_metrics({"acc@5": 0.5}, step=3)
try:
    raise OSError("failed")
except OSError:
    failing.close()

interrupted = MLFlowLogger(**options, run_name="interrupted")
stopped, _ = make_trainer(interrupted, epochs=1)
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    stopped.close()

with_system = MLFlowLogger(**options | {"log_system_metrics": True}, run_name="system")
measured, _ = make_trainer(with_system, epochs=1)
thread = with_system._monitor._process
measuring = thread.is_alive()
measured.close()

client = MlflowClient(URI)
run = client.get_run(first.run_id)
report_facts(
    history={name: [[one.step, one.value] for one in client.get_metric_history(first.run_id, name)]
             for name in run.data.metrics},
    losses=series(memory, "loss/train/total"),
    accuracies=series(memory, "metrics/eval/MulticlassAccuracy"),
    parameters=run.data.params,
    tags=run.data.tags,
    name=run.info.run_name,
    status=run.info.status,
    statuses={name: client.get_run(logger.run_id).info.status
              for name, logger in [("other", other), ("interrupted", interrupted)]},
    experiment=client.get_experiment(run.info.experiment_id).name,
    files=sorted(str(path.relative_to(Path(run.info.artifact_uri))) for path in Path(run.info.artifact_uri).rglob("*")
                 if path.is_file()),
    table=client.download_artifacts(first.run_id, "best_10.json"),
    fetched=[Path("back/again.txt").read_text(), Path("back/folder/a.txt").read_text()],
    refused=refused,
    exists=exists,
    version=[version.name, str(version.version), version.run_id],
    foreign=foreign,
    ids=[first.run_id, resumed.run_id, by_name.run_id],
    constant=[one.step for one in client.get_metric_history(other.run_id, "constant")],
    renamed=[[one.step, one.value] for one in client.get_metric_history(other.run_id, "acc_5")],
    system=[measuring, thread.is_alive()],
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def facts(run_in_subprocess, folder):
    """Return MLflow's records of some runs."""
    return run_in_subprocess(PROGRAM, folder)


class TestRun:
    def test_every_loss_and_metric(self, facts):
        """MLflow has the same values and steps as InMemoryLogger; metrics can be renamed."""
        assert facts["history"]["loss"] == facts["losses"]
        assert facts["history"]["metrics/eval/MulticlassAccuracy"] == facts["accuracies"]

    def test_ignored_metrics(self, facts):
        """Metrics that match a pattern are not logged."""
        assert [name for name in facts["history"] if name.startswith("time/")] == []
        assert "loss/train/total" not in facts["history"]

    def test_settings(self, facts):
        """Hyperparameters are parameters with flat names, except for ignored ones."""
        assert facts["parameters"]["max_duration"] == "2ep"
        assert "rank_zero_seed" not in facts["parameters"]

    def test_names_and_tags(self, facts):
        """The run has the configured experiment, name and tags."""
        assert (facts["experiment"], facts["name"], facts["status"]) == ("digits", "the-run", "FINISHED")
        assert (facts["tags"]["who"], facts["tags"]["run_group"]) == ("me", "group")

    def test_run_status(self, facts):
        """A run that raises has failed, one that is interrupted was killed."""
        assert facts["statuses"] == {"other": "FAILED", "interrupted": "KILLED"}

    def test_tracking_uri(self, facts, folder):
        """The values are in the given database."""
        with sqlite3.connect(folder / "mlflow.db") as database:
            (count,) = database.execute("select count(*) from metrics where key = 'loss'").fetchone()
        database.close()

        assert count == 10

    def test_unchanged_metrics(self, facts):
        """Equal values are written only every given number of steps."""
        assert facts["constant"] == [0, 4, 8]

    def test_system_metrics(self, facts):
        """MLflow's thread measures the machine during the run."""
        assert facts["system"] == [True, False]


class TestFiles:
    def test_table(self, facts):
        """A table is JSON in MLflow's format."""
        assert json.loads(Path(facts["table"]).read_text()) == {
            "columns": ["id", "x"],
            "data": [[1, 0.5], [2, "text"]],
        }

    def test_images(self, facts):
        """Each image is a file with its key and step."""
        images = [name for name in facts["files"] if name.startswith("images") and name.endswith(".png")]

        names = ["pair~0", "pair~1", "shown", "shown~found", "white"]  # a mask is drawn, as MLflow stores none
        assert sorted(name.split("+")[0] for name in images) == [f"images/{name}" for name in names]
        assert all("+step+10+" in name for name in images)

    def test_upload_and_download(self, facts):
        """Uploaded files and folders can be downloaded."""
        assert {"sub/renamed.txt", "checkpoints/folder/a.txt"} <= set(facts["files"])
        assert facts["fetched"] == ["content", "a"]

    def test_overwrite(self, facts):
        """Neither remote nor local files are overwritten by default."""
        assert len(facts["refused"]) == 1
        assert "MLFlowLogger.upload_file failed" in facts["refused"][0]
        assert "sub/renamed.txt" in facts["refused"][0]
        assert "overwrite=True" in facts["exists"]

    def test_register_model(self, facts):
        """A saved model is registered with a version."""
        assert facts["version"] == ["net", "1", facts["ids"][0]]


def test_resume(facts):
    """With the state of an earlier run, or by name on request, a later one uses the same run."""
    assert len(set(facts["ids"])) == 1


def test_a_checkpoint_does_not_choose_the_run(facts):
    """The id of a run of another name or experiment is not used."""
    assert len({facts["ids"][0], *facts["foreign"]}) == 3


def test_experiment_from_the_environment(monkeypatch):
    """The experiment's name is read from MLflow's variable."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")

    assert MLFlowLogger().experiment_name == "theirs"
    assert MLFlowLogger("mine").experiment_name == "mine"
