"""Weights & Biases runs without a network, read from their files."""

import json
import time

import pytest
import torch
import wandb
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix
from wandb.proto import wandb_internal_pb2

from composer.callbacks import MatrixVisualizer
from composer.loggers import InMemoryLogger, WandBLogger
from fixtures import make_classifier, make_loader, small_run, trained


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Disable wandb's output and connections."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "240")  # 30 seconds are too few for a busy machine


@pytest.fixture
def make_logger(tmp_path):
    """Return a function that makes a logger whose run is in the test's folder."""

    def make(**options):
        settings = wandb.Settings(x_disable_stats=True, x_disable_machine_info=True, disable_git=True, console="off")
        init_kwargs = {"dir": str(tmp_path), "settings": settings, **options.pop("init_kwargs", {})}
        return WandBLogger(project="tests", init_kwargs=init_kwargs, **options)

    return make


def contents(path):
    """Return the records of a .wandb file: after a header of 7 bytes it is a LevelDB log, in blocks of 32 KiB."""
    content, place, parts, complete = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        if place + 7 + length > len(content):
            break  # it is still being written
        parts += content[place + 7 : place + 7 + length]
        if kind in {1, 4}:  # a complete record, or the last part of one
            complete.append(parts)
            parts = b""
        place += 7 + length
    return complete


def records(folder):
    """Return all records of the runs in a folder in order of their start, after their processes have ended."""
    until = time.monotonic() + 240
    of_runs = []
    for path in folder.glob("wandb/*run-*/*.wandb"):
        while True:
            of_run = [wandb_internal_pb2.Record.FromString(content) for content in contents(path)]
            if of_run and of_run[-1].WhichOneof("record_type") == "exit":
                break
            assert time.monotonic() < until, f"{path} was never finished"
            time.sleep(0.05)
        of_runs.append(of_run)
    # The time of a file's last change is not that order: an earlier run's process may be the last to write.
    of_runs.sort(
        key=lambda of_run: next(record.run.start_time.ToNanoseconds() for record in of_run if record.run.run_id)
    )
    return [record for of_run in of_runs for record in of_run]


def history(folder):
    """Return the rows of the history as nested dictionaries."""
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            rows.append({})
            for item in record.history.item:
                place = rows[-1]
                *outer, last = item.nested_key or [item.key]
                for name in outer:
                    place = place.setdefault(name, {})
                place[last] = json.loads(item.value_json)
    return rows


def runs(folder):
    """Return the run records."""
    return [record.run for record in records(folder) if record.WhichOneof("record_type") == "run"]


def config(folder):
    """Return the last written configuration."""
    values = {}
    for record in records(folder):
        updates = record.config.update if record.WhichOneof("record_type") == "config" else record.run.config.update
        values |= {update.key or update.nested_key[0]: json.loads(update.value_json) for update in updates}
    return values


def train(*loggers, **options):
    """Train for two epochs of five batches with metrics, and close."""
    settings = {"eval_dataloader": make_loader(), "train_metrics": None, "seed": 3, "run_name": "the-run"}
    trained(max_duration="2ep", loggers=loggers, **settings | options)


class TestRun:
    def test_every_loss_metric_and_setting(self, make_logger, tmp_path):
        """The file has the same values and steps as InMemoryLogger, the settings and the run's name."""
        memory = InMemoryLogger()

        train(make_logger(tags=["a"], group="g"), memory)

        rows = history(tmp_path)
        for name in ["loss/train/total", "metrics/eval/MulticlassAccuracy"]:
            expected = [(int(clock.batch), pytest.approx(value)) for clock, value in memory.data[name]]
            assert [(row["_step"], row[name]) for row in rows if name in row] == expected
        assert config(tmp_path)["rank_zero_seed"] == 3
        (run,) = {(run.display_name, run.project, run.run_group, *run.tags) for run in runs(tmp_path)}
        assert run == ("the-run", "tests", "g", "a")

    def test_existing_run(self, make_logger, make_loop, tmp_path):
        """A run started by wandb.init is used and not finished."""
        with wandb.init(project="mine", dir=str(tmp_path), settings=wandb.Settings(console="off")) as own:
            loop = make_loop(make_logger())
            loop.fit()
            loop.engine.close()

            assert wandb.run is own
        assert {run.project for run in runs(tmp_path)} == {"mine"}
        assert any("loss/train/total" in row for row in history(tmp_path))

    def test_exit_code(self, make_logger, make_loop, tmp_path):
        """A run that raises is marked as failed."""
        loop = make_loop(make_logger())

        def fail():
            try:
                raise OSError("failed")
            finally:
                loop.engine.close()

        with pytest.raises(OSError, match="failed"):
            fail()

        (code,) = {record.exit.exit_code for record in records(tmp_path) if record.WhichOneof("record_type") == "exit"}
        assert code == 1


class TestOtherThings:
    def test_matrix(self, make_logger, tmp_path):
        """The numbers of a confusion matrix are a table, and its picture has another name."""
        data = DataLoader(TensorDataset(torch.rand(12, 4), torch.arange(12) % 3), 6)
        model = make_classifier(val_metrics=[MulticlassConfusionMatrix(3)])
        options = {
            "loggers": make_logger(),
            "callbacks": MatrixVisualizer(),
            "train_dataloader": None,
            "optimizers": None,
        }
        with small_run(model=model, eval_dataloader=data, **options) as trainer:
            trainer.eval()

        found = {name: value["path"] for row in history(tmp_path) for name, value in row.items() if "Confusion" in name}
        assert sorted(found) == [f"{kind}/eval/MulticlassConfusionMatrix" for kind in ("Images", "metrics")]
        pictures, numbers = (tmp_path.glob(f"wandb/*run-*/files/{path}") for _, path in sorted(found.items()))
        assert json.loads(next(pictures).read_text())["columns"] == ["Image"]
        assert len(json.loads(next(numbers).read_text())["data"]) == 3

    def test_images_and_tables(self, make_logger, make_loop, tmp_path):
        """Images are files with their masks; tables are JSON."""
        loop = make_loop(make_logger())
        images, masks = torch.rand(2, 3, 6, 5), torch.ones(2, 6, 5, dtype=torch.int64)
        loop.logger.log_images(
            images, name="pictures", use_table=False, step=1, masks={"truth": masks}, mask_class_labels={1: "cat"}
        )
        loop.logger.log_images(images, name="in a table", step=2)
        loop.logger.log_table(["id", "x"], [[1, 0.5], [2, "text"]], name="best", step=3)
        loop.engine.close()

        rows = {name: (row["_step"], row[name]) for row in history(tmp_path) for name in row}
        step, output = rows["pictures"]
        assert (step, output["_type"], output["count"], output["height"], output["width"]) == (
            1,
            "images/separated",
            2,
            6,
            5,
        )
        assert output["all_masks"][0]["truth"]["_type"] == "mask"
        assert (rows["in a table"][0], rows["in a table"][1]["_type"]) == (2, "table-file")
        (file,) = tmp_path.glob("wandb/*run-*/files/media/table/best_*.json")
        assert json.loads(file.read_text()) == {"columns": ["id", "x"], "data": [[1, 0.5], [2, "text"]]}
        assert len(list(tmp_path.glob("wandb/*run-*/files/media/images/pictures*.png"))) == 2

    def test_files_are_artifacts(self, make_logger, make_loop, tmp_path):
        """With log_artifacts a file or a folder becomes an artifact."""
        loop = make_loop(make_logger(log_artifacts=True))
        folder = tmp_path / "ep1"
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        loop.logger.upload_file("checkpoints/ep1", folder)
        loop.logger.upload_file("notes.txt", folder / "model.safetensors")
        loop.engine.close()

        assert loop.logger.has_file_upload_destination()
        preserved = [record.artifact for record in records(tmp_path) if record.WhichOneof("record_type") == "artifact"]
        assert [(artifact.name, artifact.type) for artifact in preserved] == [
            ("checkpoints-ep1", "folder"),
            ("notes.txt", "file"),
        ]
        assert [entry.path for artifact in preserved for entry in artifact.manifest.contents] == [
            "model.safetensors"
        ] * 2


class TestResuming:
    def test_resume(self, make_logger, make_loop, tmp_path):
        """A logger with an earlier state of its name and project uses the same run."""
        first = make_logger()
        make_loop(first).engine.close()
        later = make_logger()
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))

        make_loop(later).fit().engine.close()

        assert {run.run_id for run in runs(tmp_path)} == {first.state_dict()["run_id"]}
        assert later.state_dict() == first.state_dict()

    def test_a_checkpoint_does_not_choose_the_run(self, make_logger, make_loop, tmp_path):
        """An id of a run with another name, or of another user, is not used."""
        first = make_logger()
        make_loop(first, run_name="a").engine.close()
        written = {first.run_id}
        for name, saved in [("b", first.run_id), ("a", "victim"), ("a", f"{first.run_id}/x")]:
            later = make_logger()
            later.load_state_dict({"run_id": saved})
            make_loop(later, run_name=name).engine.close()
            written.add(later.run_id)

        assert len(written) == 4
        assert {run.run_id for run in runs(tmp_path)} == written
