"""Runs of Trackio on this machine, read back from its store."""

import pytest

pytest.importorskip("trackio", reason="it needs an older Pillow than the other products; nox -s trackers installs it")

PROGRAM = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage

first = TrackioLogger("digits")
trainer, memory = make_trainer(first)
trainer.fit()
trainer.logger.log_table(["id", "x"], [[1, 0.5]], name="best")
trainer.logger.log_images(torch.rand(2, 3, 8, 8), name="pair")
trainer.close()

later = TrackioLogger("digits", every="0ba")
later.load_state_dict(first.state_dict())
again, _ = make_trainer(later, epochs=1)
again.close()

other = TrackioLogger("digits", name="its-own")
other.load_state_dict(first.state_dict())
last, _ = make_trainer(other, epochs=1)
last.fit()
last.close()

logs = SQLiteStorage.get_logs("digits", "the-run")
report_facts(
    losses=series(memory, "loss/train/total"),
    stored=[[row["step"], row["loss/train/total"]] for row in logs if row.get("loss/train/total") is not None],
    names=sorted({name for row in logs for name in row}),
    tables=[row["best"]["_value"] for row in logs if row.get("best")],
    config=json.loads(json.dumps(SQLiteStorage.get_run_config("digits", "the-run"), default=str)),
    runs=[run.name for run in trackio.Api().runs("digits")],
    ids=[first.state_dict(), later.state_dict(), other.state_dict()],
    same=first.run.id == later.run.id,
)
"""


@pytest.fixture(scope="module")
def facts(run_in_subprocess, tmp_path_factory):
    """Return the facts from a program with three runs."""
    folder = tmp_path_factory.mktemp("trackio")
    return run_in_subprocess(PROGRAM, folder, TRACKIO_DIR=str(folder / "store"))


class TestRun:
    def test_numbers(self, facts):
        """Trackio has each loss with its batch, and the metrics of the evaluations."""
        assert facts["stored"] == facts["losses"]
        assert "metrics/eval/MulticlassAccuracy" in facts["names"]

    def test_settings_tables_and_images(self, facts):
        """The hyperparameters are the run's configuration; a table has its rows, and an image its name."""
        assert (facts["config"]["rank_zero_seed"], facts["config"]["max_duration"]) == (3, "2ep")
        assert facts["tables"] == [[{"id": 1, "x": 0.5}]]
        assert {"pair/0", "pair/1"} <= {*facts["names"]}

    def test_a_resumed_run_continues(self, facts):
        """A run with the same project and name is continued; a checkpoint does not select the run of another name."""
        assert facts["ids"] == [{"run_id": "the-run"}, {"run_id": "the-run"}, {"run_id": "its-own"}]
        assert facts["same"]
        assert sorted(facts["runs"]) == ["its-own", "the-run"]
