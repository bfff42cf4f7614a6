"""The folder of a run, and what is kept there; complete trainings are in ``test_saver.py``."""

import math
from pathlib import Path

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import given

from composer.checkpoint import (
    CheckpointSaveError,
    FileRecord,
    FoundCheckpoint,
    KeepBest,
    Manifest,
    save_checkpoint,
)
from composer.checkpoint.folders import LocalFolder, open_folder
from composer.checkpoint.reading import OpenCheckpoint
from composer.checkpoint.run_folder import (
    Names,
    RunFolder,
    delete_old,
    expired,
    own_checkpoints,
)
from composer.core import Timestamp


def make_folder(*, overwrite=False):
    return RunFolder(overwrite, False, -1, None)


def names_at(path):
    return Names(str(path), "ba5", None, None, [])


def test_open_until_closed(runs, tmp_path):
    """A folder is opened once, and closing it lets another one open it."""
    folder = make_folder()

    opened = folder.open(open_folder(tmp_path / "runs"), names_at(tmp_path / "runs"), runs.make(), continues=False)
    assert (
        folder.open(open_folder(tmp_path / "runs"), names_at(tmp_path / "runs"), runs.make(), continues=False) is opened
    )

    folder.close()
    assert folder.opened is None


@pytest.mark.parametrize("continues", [False, True])
def test_later_checkpoints(runs, tmp_path, continues):
    """Later checkpoints raise an error, unless they may be overwritten; a run that continues has found the newest."""
    save_checkpoint(runs.make(batch=9), tmp_path / "ba9")

    rejecting, accepting = make_folder(), make_folder(overwrite=True)
    with pytest.raises(
        CheckpointSaveError, match=r"^Nothing more was trained: .* has ba9 of run 'blur', and .* batch 5"
    ):
        rejecting.open(open_folder(tmp_path), names_at(tmp_path), runs.make(batch=5), continues=continues)
    rejecting.close()
    accepting.open(open_folder(tmp_path), names_at(tmp_path), runs.make(batch=5), continues=continues)
    accepting.close()

    assert names_in(tmp_path) == [".lock", "ba9"]


METRIC = "metrics/eval/Accuracy"
BASE = Manifest(files={"state.json": FileRecord(2, "0" * 32)}, timestamp=Timestamp())


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def delete(folder, *keeping, until=99, weights_only=False):
    opened, clock = LocalFolder(folder), Timestamp(epoch=1, batch=until)
    return delete_old(opened, own_checkpoints(opened, "blur", clock, weights_only=weights_only), *keeping)


def found(values):
    """Return checkpoints with metric values; None is without a value, ... is incomplete."""
    checkpoints = []
    for place, value in enumerate(values):
        metrics = {} if value in (None, ...) else {METRIC: value}
        manifest = None if value is ... else attrs.evolve(BASE, metrics=metrics)
        checkpoints.append(FoundCheckpoint(f"p{place}", f"p{place}", manifest, None))
    return checkpoints


def kept(values, *args):
    checkpoints = found(values)
    removed = expired(checkpoints, *args)
    return [place for place, one in enumerate(checkpoints) if one not in removed]


class TestExpired:
    @pytest.mark.parametrize(
        ("keep_last", "keep_best", "expected"),
        [
            (-1, None, [0, 1, 2, 3, 4]),
            (1, None, [4]),
            (2, None, [3, 4]),
            (9, None, [0, 1, 2, 3, 4]),
            (1, KeepBest(METRIC, 2), [1, 2, 4]),
            (1, KeepBest(METRIC, 1, mode="min"), [0, 4]),
            (1, KeepBest("metrics/eval/Other", 3), [4]),
        ],
    )
    def test_last_and_best(self, keep_last, keep_best, expected):
        """The last and the best checkpoints are kept, for minimized and maximized metrics."""
        assert kept([0.1, 0.9, 0.8, 0.3, 0.2], keep_last, keep_best) == expected

    @given(
        st.lists(st.one_of(st.none(), st.just(...), st.floats(0, 1)), max_size=8),
        st.integers(-1, 4),
        st.one_of(st.none(), st.builds(KeepBest, st.just(METRIC), st.integers(1, 4), st.sampled_from(["min", "max"]))),
    )
    def test_last_complete_one_is_kept(self, values, keep_last, keep_best):
        """For any settings the last complete one is kept, and incomplete ones do not change."""
        stays = kept(values, keep_last, keep_best)
        complete = [place for place, value in enumerate(values) if value is not ...]

        assert not complete or complete[-1] in stays
        assert {place for place, value in enumerate(values) if value is ...} <= set(stays)


class TestDeleteOld:
    def test_only_own_complete_ones_are_deleted(self, runs, tmp_path):
        """Other runs' checkpoints, damaged ones and other folders are kept."""
        for batch in (1, 2, 3, 4):
            save_checkpoint(runs.make(batch=batch), tmp_path / f"ba{batch}")
        save_checkpoint(runs.make(batch=1, run_name="other"), tmp_path / "other")
        (tmp_path / "ba2" / "state.json").unlink()
        (tmp_path / "notes").mkdir()

        deleted = delete(tmp_path, 1)

        assert deleted == ["ba1", "ba3"]
        assert sorted(names_in(tmp_path)) == ["ba2", "ba4", "notes", "other"]

    def test_later_ones(self, runs, tmp_path):
        """Checkpoints later than the clock neither count as the last or the best ones, nor are they deleted."""
        for batch in (1, 2, 3, 4):
            state = runs.make(batch=batch)
            state.eval_metric_values = {"Accuracy": batch / 4}
            save_checkpoint(state, tmp_path / f"ba{batch}")

        assert delete(tmp_path, 1, until=2) == ["ba1"]
        assert delete(tmp_path, 1, KeepBest(METRIC), until=3) == ["ba2"]
        assert names_in(tmp_path) == ["ba3", "ba4"]

    @pytest.mark.filterwarnings("ignore:.*they are ignored")
    def test_user_files(self, runs, tmp_path):
        """A checkpoint with user files is not deleted; files of the system do not prevent it."""
        for batch, name in ((1, "notes.txt"), (2, ".DS_Store"), (3, "state.json")):
            save_checkpoint(runs.make(batch=batch), tmp_path / f"ba{batch}")
            (tmp_path / f"ba{batch}" / name).touch()

        deleted = delete(tmp_path, 1)

        assert deleted == ["ba2"]
        assert sorted(names_in(tmp_path)) == ["ba1", "ba3"]

    def test_weights_only_checkpoints_are_counted_separately(self, runs, tmp_path):
        """Complete and weights-only checkpoints do not replace each other."""
        for batch in (1, 2):
            save_checkpoint(runs.make(batch=batch), tmp_path / f"ba{batch}")
            save_checkpoint(runs.make(batch=batch), tmp_path / f"weights{batch}", weights_only=True)

        deleted = delete(tmp_path, 1, weights_only=True)

        assert deleted == ["weights1"]
        assert sorted(names_in(tmp_path)) == ["ba1", "ba2", "weights2"]

    def test_unknown_metric_warns(self, runs, tmp_path):
        """A misspelled metric gives a warning with a suggestion."""
        for batch in (1, 2):
            state = runs.make(batch=batch)
            state.eval_metric_values = {"Accuracy": batch / 4}
            save_checkpoint(state, tmp_path / f"ba{batch}")

        with pytest.warns(UserWarning, match=r"keeps none, .*; did you mean 'metrics/eval/Accuracy'\?"):
            delete(tmp_path, 1, KeepBest("metrics/eval/Acuracy"))

    def test_metric_of_one_evaluator(self, runs, tmp_path):
        """The best checkpoint depends on the metric's evaluator."""
        for batch, easy, hard in ((1, 0.5, 0.1), (2, 0.4, 0.3), (3, 0.4, 0.2)):
            state = runs.make(batch=batch)
            state.eval_metric_values = {"easy": {"Accuracy": easy}, "hard": {"Accuracy": hard}}
            save_checkpoint(state, tmp_path / f"ba{batch}")

        assert delete(tmp_path, 1, KeepBest("metrics/hard/Accuracy")) == ["ba1"]


class TestKeepBest:
    def test_metrics_of_a_run(self, runs, tmp_path):
        """The manifest has the metrics by their logged names; non-finite values are never the best."""
        state = runs.make()
        state.eval_metric_values = {"Accuracy": math.nan, "Loss": 0.5}
        state.train_metric_values = {"Accuracy": 0.25}
        folder = LocalFolder(tmp_path)
        save_checkpoint(state, tmp_path / "one")

        manifest = OpenCheckpoint.of(folder, "one").manifest

        assert manifest.metrics == {
            "metrics/eval/Accuracy": None,
            "metrics/eval/Loss": 0.5,
            "metrics/train/Accuracy": 0.25,
        }
        assert KeepBest(METRIC).best([FoundCheckpoint("one", "one", manifest, None)]) == []
