"""The folder of a run, and what is kept there; complete trainings are in ``test_saver.py``."""

import math
import sys
from pathlib import Path

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import given

from composer.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    FileRecord,
    FoundCheckpoint,
    KeepBest,
    Manifest,
    save_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.local import LocalFolder
from composer.checkpoint.run_folder import (
    Names,
    RunFolder,
    delete_old,
    expired,
    own_checkpoints,
    without_suffix,
)
from composer.core import Timestamp


def make_folder(*, overwrite=False):
    return RunFolder(overwrite, False, -1, None)


def names_at(path):
    return Names(str(path), "ba5", None, None, [])


def test_open_until_closed(runs, tmp_path):
    """A folder is opened once, and closing it lets another one open it."""
    folder = make_folder()

    opened = folder.open(names_at(tmp_path / "runs"), runs.make(), continues=False)
    assert folder.open(names_at(tmp_path / "runs"), runs.make(), continues=False) is opened

    folder.close()
    assert folder.opened is None


def test_later_checkpoints(runs, tmp_path):
    """Later checkpoints raise an error, unless they may be overwritten or the run continues."""
    save_checkpoint(runs.make(batch=9), tmp_path / "ba9")

    rejecting = make_folder()
    with pytest.raises(
        CheckpointSaveError, match=r"^Nothing more was trained: .* has ba9 of run 'blur', and .* batch 5"
    ):
        rejecting.open(names_at(tmp_path), runs.make(batch=5), continues=False)
    rejecting.close()
    for folder, continues in ((make_folder(overwrite=True), False), (make_folder(), True)):
        folder.open(names_at(tmp_path), runs.make(batch=5), continues=continues)
        folder.close()


class Unlisted(LocalFolder):
    """A folder that can be written to and not listed."""

    def names(self):
        """Fail as a folder without the permission to read it, which a superuser has."""
        raise CheckpointError(self, "cannot be read: Permission denied.")


def test_failing_list(runs, tmp_path):
    """A folder that cannot be listed after a save does not make it one that was not saved."""
    save_checkpoint(runs.make(batch=9), tmp_path / "ba9")
    unlisted, folder = Unlisted(tmp_path), RunFolder(False, False, 1, None)

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
    opened = folder.open(names_at(tmp_path), runs.make(), continues=False)

    with pytest.raises(CheckpointSaveError, match=f"ba5 is complete, and .*: {reason}") as raised:
        folder.finish(opened, Names(str(tmp_path), "ba5", "latest", None, [url]), verify_checkpoint(path))
    assert raised.value.path == path
    folder.close()


def test_copies_of_an_earlier_run(runs, tmp_path):
    """A copy is replaced by the same run; after it is forgotten, it is that of another run, and is kept."""
    path, url = save_checkpoint(runs.make(), tmp_path / "ba5"), "memory://earlier/ba5"
    folder = make_folder()
    opened = folder.open(names_at(tmp_path), runs.make(), continues=False)
    names, manifest = Names(str(tmp_path), "ba5", None, None, [url]), verify_checkpoint(path)
    folder.finish(opened, names, manifest)
    folder.finish(opened, names, manifest)

    folder.forget()

    with pytest.raises(CheckpointSaveError, match="memory://earlier/ba5: exists"):
        folder.finish(opened, names, manifest)
    folder.close()


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

    def test_earlier_of_equals(self):
        """The earlier one of equal values is the best."""
        assert kept([0.5, 0.5, 0.1], 1, KeepBest(METRIC, 1)) == [0, 2]

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

    def test_does_not_warn_before_the_first_evaluation(self, runs, tmp_path):
        """Before an evaluation a missing evaluation metric gives no warning."""
        for batch in (1, 2):
            state = runs.make(batch=batch)
            state.train_metric_values = {"Accuracy": batch / 4}
            save_checkpoint(state, tmp_path / f"ba{batch}")

        assert delete(tmp_path, 1, KeepBest(METRIC)) == ["ba1"]

    def test_known_metric(self, runs, tmp_path):
        """The best is kept next to the last, without a warning."""
        for batch, value in ((1, 0.5), (2, 0.25), (3, 0.25)):
            state = runs.make(batch=batch)
            state.eval_metric_values = {"Accuracy": value}
            save_checkpoint(state, tmp_path / f"ba{batch}")

        assert delete(tmp_path, 1, KeepBest(METRIC)) == ["ba2"]

    def test_metric_of_one_evaluator(self, runs, tmp_path):
        """The best checkpoint depends on the metric's evaluator."""
        for batch, easy, hard in ((1, 0.5, 0.1), (2, 0.4, 0.3), (3, 0.4, 0.2)):
            state = runs.make(batch=batch)
            state.eval_metric_values = {"easy": {"Accuracy": easy}, "hard": {"Accuracy": hard}}
            save_checkpoint(state, tmp_path / f"ba{batch}")

        assert delete(tmp_path, 1, KeepBest("metrics/hard/Accuracy")) == ["ba1"]


class TestKeepBest:
    @pytest.mark.parametrize("settings", [{"count": 0}, {"mode": "best"}, {"metric": ""}])
    def test_out_of_range(self, settings):
        """Invalid settings raise."""
        with pytest.raises(ValueError, match=next(iter(settings))):
            KeepBest(**{"metric": METRIC, **settings})

    def test_metrics_of_a_run(self, runs, tmp_path):
        """The manifest has the metrics by their logged names; non-finite values are never the best."""
        state = runs.make()
        state.eval_metric_values = {"Accuracy": math.nan, "Loss": 0.5}
        state.train_metric_values = {"Accuracy": 0.25}
        folder = LocalFolder(tmp_path)
        save_checkpoint(state, tmp_path / "one")

        manifest = folder.manifest("one")

        assert manifest.metrics == {
            "metrics/eval/Accuracy": None,
            "metrics/eval/Loss": 0.5,
            "metrics/train/Accuracy": 0.25,
        }
        assert KeepBest(METRIC).best([FoundCheckpoint("one", "one", manifest, None)]) == []


def test_suffix():
    """The ending of a file is removed with a warning."""
    with pytest.warns(DeprecationWarning, match=r"'ep1\.pt' is saved as 'ep1'"):
        assert without_suffix("ep1.pt") == "ep1"
