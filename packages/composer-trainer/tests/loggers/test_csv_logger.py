"""CSVLogger in real trainings, read with the module csv."""

import csv

import pytest

from composer.callbacks import OptimizerMonitor
from composer.core import Callback
from composer.loggers import CSVLogger, InMemoryLogger
from fixtures import make_loader, small_run


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Late(Callback):
    """Logs a metric from batch 3 on, after rows have been written."""

    def batch_end(self, state, logger):
        if state.timestamp.batch >= 3:
            logger.log_metrics({"late": float(state.timestamp.batch)})


class TestRows:
    def test_values_are_those_logged(self, tmp_path):
        """Each number is in the row of its batch and the column of its name, also of one that begins later."""
        log = InMemoryLogger()
        logger = CSVLogger(str(tmp_path / "{run_name}/metrics.csv"), flush_interval=2)
        options = {"loggers": [logger, log], "callbacks": Late(), "max_duration": "2ep", "run_name": "a"}
        with small_run(**options) as trainer:
            trainer.fit()

        rows = rows_of(tmp_path / "a" / "metrics.csv")
        found = {}
        for row in rows:
            for name, value in row.items():
                if value and name not in {"epoch", "batch"}:
                    found.setdefault(name, {})[int(row["batch"])] = float(value)
        for name in ("loss/train/total", "late"):
            assert found[name] == pytest.approx({int(time.batch): float(value) for time, value in log.data[name]})
        assert list(rows[0])[:2] == ["epoch", "batch"]
        assert not list(tmp_path.glob("a/*.draft"))

    def test_resumed_run_continues(self, tmp_path):
        """A resumed run has the rows of an uninterrupted one, without those from the resumed batch on."""
        files = []
        for name, stops in (("once", []), ("twice", ["7ba"])):
            options = {
                "save_folder": str(tmp_path / name / "checkpoints"),
                "save_interval": "5ba",
                "autoresume": True,
                "run_name": name,
                "max_duration": "2ep",
            }
            path = str(tmp_path / name / "metrics.csv")
            for stop in [*stops, None]:
                with small_run(loggers=CSVLogger(path), **options) as trainer:
                    trainer.fit(duration=stop) if stop else trainer.fit()
                if stop:  # as if the run had been killed after another batch
                    *_, last = (tmp_path / name / "metrics.csv").read_text().splitlines()
                    with (tmp_path / name / "metrics.csv").open("a") as file:
                        file.write(last.replace("1,", "1,9", 1) + "\n")
            files.append(rows_of(tmp_path / name / "metrics.csv"))

        losses = [{row["batch"]: row["loss/train/total"] for row in rows if row["loss/train/total"]} for rows in files]
        assert losses[0] == losses[1]
        assert [len(one) for one in losses] == [10, 10]
        batches = [[row["batch"] for row in rows if row["loss/train/total"]] for rows in files]
        assert batches[0] == batches[1]

    def test_resume_from_the_end_of_an_epoch(self, tmp_path):
        """The metrics of that epoch remain, once, although the epoch is not evaluated again."""
        path = tmp_path / "metrics.csv"
        options = {"max_duration": "2ep", "save_folder": str(tmp_path / "checkpoints"), "run_name": "a"}
        options |= {"eval_dataloader": make_loader(), "train_metrics": None, "autoresume": True}
        for stop in ("1ep", None):
            monitor = OptimizerMonitor(batch_log_interval=5)
            with small_run(loggers=CSVLogger(str(path)), callbacks=monitor, **options) as trainer:
                trainer.fit(duration=stop) if stop else trainer.fit()
        rows = rows_of(path)

        for column in ("metrics/train/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy", "l2_norm/grad/global"):
            assert [int(row["batch"]) for row in rows if row[column]] == [5, 10]
        assert [int(row["batch"]) for row in rows if row["loss/train/total"]] == list(range(10))

    @pytest.mark.parametrize("every", [None, "2ep"])
    def test_epoch_of_an_evaluation(self, tmp_path, every):
        """It is the epoch whose training metrics it follows, also if values are delayed; batches have the next."""
        logger = CSVLogger(str(tmp_path / "metrics.csv"), every=every)
        options = {"eval_dataloader": make_loader(), "train_metrics": None, "max_duration": "4ep"}
        with small_run(loggers=logger, **options) as trainer:
            trainer.fit()
            trainer.eval()
        rows = rows_of(tmp_path / "metrics.csv")

        for name in ("metrics/train/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy"):
            places = [(int(row["epoch"]), int(row["batch"])) for row in rows if row[name]]
            assert len(places) >= 2
            assert all(epoch == batch // 5 - 1 for epoch, batch in places)
        batches = [(int(row["epoch"]), int(row["batch"])) for row in rows if row["loss/train/total"]]
        assert all(epoch == batch // 5 for epoch, batch in batches)

    def test_interrupted_line(self, tmp_path):
        """A line that a killed process left incomplete is removed."""
        path = tmp_path / "metrics.csv"
        logger = CSVLogger(str(path))
        with small_run(loggers=logger, max_duration="1ep") as trainer:
            trainer.fit()
            path.write_text(path.read_text() + "0,4")
            trainer.logger.log_metrics({"new": 1.0})
        rows = rows_of(path)

        assert all(None not in row.values() for row in rows)
        assert rows[-1]["new"] == "1.0"


class TestErrors:
    def test_existing_file(self, tmp_path):
        """A file of another run is not overwritten, unless requested."""
        path = tmp_path / "metrics.csv"
        path.write_text("mine\n")
        with pytest.raises(FileExistsError, match=r"Set overwrite=True"):
            small_run(loggers=CSVLogger(str(path)), max_duration="1ep").fit()
        assert path.read_text() == "mine\n"

        small_run(loggers=CSVLogger(str(path), overwrite=True), max_duration="1ep").fit()
        assert "loss/train/total" in path.read_text()

    def test_filename(self):
        """Unknown fields in braces raise."""
        with pytest.raises(ValueError, match="filename"):
            CSVLogger("{name}.csv")
