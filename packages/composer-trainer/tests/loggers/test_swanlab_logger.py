"""Runs of SwanLab on this machine without a network, read back from their files."""

import pytest

pytest.importorskip("swanlab", reason="it needs an older protobuf than the other products; nox -s trackers installs it")

FINISHED, ABORTED = 1, 3  # SwanLab's states of a run

PROGRAM = """
import os, signal
from pathlib import Path
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader


def records(run):
    reader = DataStoreReader()
    reader.open(next(Path(run.dir).glob("*.swanlab")))
    return [Record.FromString(content) for content in reader]


def numbers(run, name):
    scalars = [record.scalar for record in records(run) if record.HasField("scalar")]
    return [[one.step, one.value.number] for one in scalars if one.key == name]


class Interrupt(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 3:
            os.kill(os.getpid(), signal.SIGINT)


options = {"mode": "offline", "log_dir": "logs"}
first = SwanLabLogger("digits", **options)
trainer, memory = make_trainer(first)
trainer.fit()
trainer.logger.log_table(["id", "x"], [[1, 0.5]], name="best")
trainer.logger.log_images(torch.rand(2, 3, 8, 8), name="pair")
trainer.close()
media = {record.media.key: len(record.media.value.items) for record in records(first.run) if record.HasField("media")}

later = SwanLabLogger("digits", every="0ba", **options)
later.load_state_dict(first.state_dict())
again, _ = make_trainer(later, epochs=1)
again.close()

other = SwanLabLogger("digits", name="its-own", **options)
other.load_state_dict(first.state_dict())
last, interrupted = make_trainer(other, epochs=1, callbacks=[Interrupt()])
try:
    last.fit()
except KeyboardInterrupt:
    last.close()

report_facts(
    losses=series(memory, "loss/train/total"),
    stored=numbers(first.run, "loss/train/total"),
    accuracy=numbers(first.run, "metrics/eval/MulticlassAccuracy"),
    media=media,
    config=Path(first.run.dir, "files", "config.yaml").read_text(),
    ids=[one.run_id for one in (first, later, other)],
    ends=[records(one.run)[-1].finish.state for one in (first, other)],
    losses_before_interrupt=series(interrupted, "loss/train/total"),
    stored_before_interrupt=numbers(other.run, "loss/train/total"),
)
"""


@pytest.fixture(scope="module")
def facts(run_in_subprocess, tmp_path_factory):
    """Return the facts from a program with three runs."""
    return run_in_subprocess(PROGRAM, tmp_path_factory.mktemp("swanlab"))


class TestRun:
    def test_numbers(self, facts):
        """SwanLab has each loss with its batch, and the metrics of the evaluations."""
        assert len(facts["losses"]) == 10
        assert facts["stored"] == facts["losses"]
        assert [step for step, _ in facts["accuracy"]] == [5, 10]

    def test_settings_tables_and_images(self, facts):
        """The hyperparameters are the run's configuration; a table is one item, and a batch has its images."""
        assert "rank_zero_seed:\n  desc: ''\n  sort: " in facts["config"]
        assert facts["media"] == {"best": 1, "pair": 2}

    def test_a_resumed_run_continues(self, facts):
        """A run with the same project and name has the id of the first; a run of another name has its own."""
        first, later, other = facts["ids"]
        assert first == later
        assert first != other

    def test_an_interrupted_run_is_complete(self, facts):
        """After Ctrl-C, SwanLab has all losses until then, and a state other than that of a completed run."""
        assert len(facts["losses_before_interrupt"]) == 3
        assert facts["stored_before_interrupt"] == facts["losses_before_interrupt"]
        assert facts["ends"] == [FINISHED, ABORTED]
