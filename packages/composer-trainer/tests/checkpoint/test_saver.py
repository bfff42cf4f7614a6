"""Checkpoints saved during a run."""

import contextlib
import errno
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from composer.algorithms import EMA
from composer.callbacks import CheckpointSaver, SpeedMonitor
from composer.checkpoint import (
    CheckpointSaveError,
    FolderInUseError,
    KeepBest,
    find_checkpoints,
    folders,
    load_checkpoint,
    newest_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.errors import LaterCheckpointError
from composer.checkpoint.folders import open_folder
from composer.checkpoint.saver import DueSaves
from composer.compat.stores import RemoteUploaderDownloader
from composer.core import Callback, Event, NotSerializableError
from fixtures import make_classifier, make_loader, record, small_run, weights

METRIC = "metrics/eval/MulticlassAccuracy"


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def make_trainer():
    """Return a function that creates a trainer with 5 batches per epoch."""

    def make(saver, *, weights=0, evaluates=False, callbacks=(), **options):
        torch.manual_seed(weights)
        model = make_classifier(nn.Linear(4, 3), train_metrics=[])
        training = {"model": model, "optimizers": torch.optim.Adam(model.parameters(), lr=0.05), "max_duration": "3ep"}
        settings = {**training, "seed": 3, "run_name": "blur"} | options
        if evaluates:
            settings["eval_dataloader"] = make_loader()
        callbacks = [*([saver] if saver else []), *callbacks]
        return small_run(callbacks=callbacks, **settings)

    return make


class TestWhen:
    @pytest.mark.parametrize(
        ("interval", "max_duration", "expected"),
        [
            ("1ep", "3ep", ["ep1-ba5", "ep2-ba10", "ep3-ba15"]),
            (2, "3ep", ["ep2-ba10", "ep3-ba15"]),
            ("4ba", "3ep", ["ep0-ba4", "ep1-ba8", "ep2-ba12", "ep3-ba15"]),
            ("5ba", "2ep", ["ep0-ba5", "ep2-ba10"]),
            ("5ba", "7ba", ["ep0-ba5", "ep1-ba7"]),
            ("24sp", "2ep", ["ep1-ba6", "ep2-ba10"]),
            ("0.5dur", "3ep", ["ep1-ba8", "ep3-ba15"]),
            ("2iter", "3ep", ["ep2-ba10", "ep3-ba15"]),
            ("0ba", "3ep", []),
        ],
    )
    def test_intervals(self, make_trainer, tmp_path, interval, max_duration, expected):
        """It saves at multiples of the interval in any unit, and at the end of the training."""
        saver = CheckpointSaver(tmp_path, save_interval=interval, latest_filename=None)

        make_trainer(saver, max_duration=max_duration).fit()

        assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == sorted(expected)
        assert saver.saved_checkpoints == [str(tmp_path / name) for name in expected]

    @pytest.mark.filterwarnings("ignore:A run that is resumed:UserWarning")  # of what is_due() records
    def test_function(self, make_trainer, tmp_path):
        """A function is called after each batch, epoch and iteration, and at the end."""
        calls = []

        def is_due(state, event):
            calls.append((event, int(state.timestamp.batch)))
            return int(state.timestamp.batch) == 3

        saver = CheckpointSaver(tmp_path, save_interval=is_due)
        make_trainer(saver, max_duration="1ep").fit()

        assert [Path(path).name for path in saver.saved_checkpoints] == ["ep0-ba3"]
        assert calls[-4:] == [
            (Event.BATCH_CHECKPOINT, 5),
            (Event.EPOCH_CHECKPOINT, 5),
            (Event.ITERATION_CHECKPOINT, 5),
            (Event.FIT_END, 5),
        ]

    def test_continued_training(self, make_trainer, tmp_path):
        """Further training adds checkpoints; the current time is not saved again."""
        saver = CheckpointSaver(tmp_path)
        trainer = make_trainer(saver, max_duration="1ep")

        trainer.fit()
        before = (tmp_path / "ep1-ba5" / "manifest.json").stat().st_mtime_ns
        trainer.fit()
        trainer.fit(duration="1ep")

        assert names_in(tmp_path) == [".lock", "ep1-ba5", "ep2-ba10", "latest"]
        assert (tmp_path / "ep1-ba5" / "manifest.json").stat().st_mtime_ns == before

    def test_last_checkpoint_has_the_final_evaluation(self, make_trainer, tmp_path):
        """The last checkpoint contains the metrics of the final evaluation."""
        saver = CheckpointSaver(tmp_path, save_interval="1ep")
        trainer = make_trainer(saver, max_duration="7ba", evaluates=True)

        trainer.fit()

        values = [verify_checkpoint(path).metrics[METRIC] for path in saver.saved_checkpoints]
        assert values[-1] == float(trainer.state.eval_metric_values["MulticlassAccuracy"])
        assert len(values) == 2


class Unsaved(torch.optim.SGD):
    """Has an object in its groups, or creates one in the first step."""

    def __init__(self, model, *, at_once):
        super().__init__([{"params": list(model.parameters()), **({"rule": object()} if at_once else {})}], lr=0.1)

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["rule"] = object()


class TestWhat:
    @pytest.mark.parametrize(("at_once", "batches"), [(True, 0), (False, 1)])
    def test_optimizer_that_cannot_be_saved(self, make_trainer, tmp_path, at_once, batches):
        """The error is raised before the training, or after the step that creates what cannot be saved."""
        model = make_classifier()
        settings = {"model": model, "optimizers": Unsaved(model, at_once=at_once)}
        trainer = make_trainer(CheckpointSaver(str(tmp_path), save_interval="3ep"), **settings)

        with pytest.raises(NotSerializableError, match=r"optimizers\.Unsaved\..*rule: object .* cannot be saved"):
            trainer.fit()

        assert trainer.state.timestamp.batch == batches
        without = CheckpointSaver(str(tmp_path / "weights"), weights_only=True)
        model = make_classifier()
        make_trainer(without, model=model, optimizers=Unsaved(model, at_once=at_once)).fit()

    def test_resume(self, make_trainer, tmp_path):
        """A new program that loads a checkpoint produces bit-identical results."""
        saver = CheckpointSaver(tmp_path, save_interval="1ep")
        parts = {"algorithms": EMA(half_life="2ba"), "callbacks": [SpeedMonitor()]}
        first = make_trainer(saver, **parts)
        first.fit()

        later = make_trainer(None, weights=9, algorithms=EMA(half_life="2ba"), callbacks=[SpeedMonitor()])
        load_checkpoint(tmp_path / "ep2-ba10", later.state)
        later.fit()

        one, other = first.state, later.state
        assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in one.model.state_dict().items())
        averages = [state.algorithms[0].state_dict()["averaged_weights"] for state in (one, other)]
        assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())
        assert one.timestamp.batch == other.timestamp.batch

    def test_weights_only(self, make_trainer, tmp_path):
        """Weights-only checkpoints are smaller and cannot resume a run."""
        make_trainer(CheckpointSaver(tmp_path, weights_only=True), max_duration="1ep").fit()

        assert newest_checkpoint(tmp_path) is None
        assert not (tmp_path / "latest" / "optimizers.safetensors").exists()

    def test_ignored_keys(self, make_trainer, tmp_path):
        """Ignored keys are not saved."""
        make_trainer(CheckpointSaver(tmp_path, ignore_keys="optimizers"), max_duration="1ep").fit()

        assert not (tmp_path / "latest" / "optimizers.safetensors").exists()

    def test_background_save(self, make_trainer, tmp_path, before_each_file):
        """A checkpoint has the weights at its time, although it is written after later steps."""
        go, written, waited = threading.Event(), [], []

        class Watch(Callback):
            def batch_end(self, state, logger):
                if int(state.timestamp.batch) == 1:
                    written.append(state.model.state_dict()["module.weight"].clone())
                if int(state.timestamp.batch) == 3:
                    written.append(names_in(tmp_path))
                    go.set()

        before_each_file(lambda: waited.append(go.wait(20)))
        saver = CheckpointSaver(tmp_path, save_interval=lambda state, event: int(state.timestamp.batch) == 1)
        make_trainer(saver, max_duration="4ba", callbacks=[Watch()]).fit()

        weight, during = written
        assert waited[0]
        assert not any(name.startswith("ep") for name in during)
        assert torch.equal(load_file(tmp_path / "ep0-ba1" / "model.safetensors")["module.weight"], weight)


class TestKeeping:
    def test_keep_none(self, make_trainer, tmp_path):
        """0 raises an error that names what keeps all checkpoints, or the last one."""
        for make in (
            lambda: make_trainer(None, save_folder=tmp_path, save_num_checkpoints_to_keep=0),
            lambda: CheckpointSaver("memory://runs/none", num_checkpoints_to_keep=0),
        ):
            with pytest.raises(ValueError, match=r"num_checkpoints_to_keep.* must be -1 \(all\) or at least 1, .* 0"):
                make()

    def test_remote_file_names(self, make_trainer, tmp_path):
        """A URL as Composer's name of uploaded files gets copies that are never deleted, and the link to the last."""
        url = f"memory://copies{tmp_path}"
        name = url + "/{run_name}/epoch-{epoch}.pt"
        savers = [
            CheckpointSaver(tmp_path / "local", "ba{batch}", name, num_checkpoints_to_keep=1),
            CheckpointSaver(f"{url}/own", remote_file_name=name),
            CheckpointSaver(tmp_path / "other", remote_file_name="ep{epoch}.pt", num_concurrent_uploads=4),
        ]
        trainer = make_trainer(savers[0], callbacks=savers[1:], max_duration="2ep", run_name="mine")
        trainer.fit()

        copies = open_folder(f"{url}/mine")
        assert names_in(tmp_path / "local") == [".lock", "ba10", "latest"]
        assert copies.names() == ["epoch-1.pt", "epoch-2.pt"]
        assert copies.get_latest("latest") == "epoch-2.pt"
        assert verify_checkpoint(f"{url}/mine/epoch-2.pt").timestamp.epoch == 2
        later = make_trainer(None, load_path=f"{url}/mine/latest", max_duration="2ep")
        assert torch.equal(weights(trainer), weights(later))

    @pytest.mark.parametrize("by_uploader", [False, True])
    def test_copies_of_the_same_run(self, make_trainer, tmp_path, by_uploader):
        """A run that begins again in an empty folder fails before it trains, and continues from the copies."""
        url = f"memory://again{tmp_path}{by_uploader}"

        def start(folder, **options):
            name = "{run_name}/ep{epoch}-ba{batch}"
            saver = CheckpointSaver(tmp_path / folder, remote_file_name=name if by_uploader else f"{url}/{name}")
            loggers = [RemoteUploaderDownloader(url)] if by_uploader else []
            return make_trainer(saver, loggers=loggers, **options)

        start("a", max_duration="2ep").fit()
        again, steps = start("b"), []
        again.engine.on("batch_end", lambda *_: steps.append(1))

        with pytest.raises(CheckpointSaveError, match=f"has ep2-ba10 of run 'blur'.*load_path='{url}/blur/latest'"):
            again.fit()

        assert not steps
        start("c", run_name="other", max_duration="1ep").fit()
        start("d", load_path=f"{url}/blur/latest").fit()
        assert verify_checkpoint(f"{url}/blur/latest").timestamp.batch == 15

    def test_keep_last(self, make_trainer, tmp_path):
        """Only the last checkpoints are kept, and the link points to the newest."""
        saver = CheckpointSaver(tmp_path, save_interval="2ba", num_checkpoints_to_keep=2)

        make_trainer(saver, max_duration="10ba").fit()

        assert names_in(tmp_path) == [".lock", "ep1-ba8", "ep2-ba10", "latest"]
        assert (tmp_path / "latest").resolve() == tmp_path / "ep2-ba10"
        assert [Path(path).name for path in saver.saved_checkpoints] == ["ep1-ba8", "ep2-ba10"]

    def test_later_damaged_one(self, make_trainer, tmp_path):
        """A run that resumes before a damaged checkpoint keeps its new ones, of which the newest is found after."""
        options = {"save_folder": str(tmp_path), "autoresume": True, "max_duration": "20ba"}
        with make_trainer(None, **options, save_interval="10ba") as first:
            first.fit()
        file = tmp_path / "ep4-ba20" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        options |= {"save_interval": "3ba", "save_num_checkpoints_to_keep": 1}

        def fail(state):
            if int(state.timestamp.batch) == 18:
                raise OSError("the device failed")

        with pytest.warns(UserWarning, match="Skipped a checkpoint .*ep4-ba20"):
            second = make_trainer(None, **options, callbacks=[record("batch_start", fail)])
        with pytest.raises(OSError, match="the device failed"):
            second.fit()

        [aside] = tmp_path.glob(".ep4-ba20.aside-*")
        assert (aside / "model.safetensors").read_bytes() == content
        assert names_in(tmp_path) == [aside.name, ".lock", "ep3-ba18", "latest"]
        assert (tmp_path / "latest").resolve() == tmp_path / "ep3-ba18"
        assert newest_checkpoint(tmp_path).name == "ep3-ba18"

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_clock_that_was_reset(self, make_trainer, tmp_path, overwrite):
        """Later checkpoints without damage are not set aside: they are an error, or replaced if that is allowed."""
        options = {"save_folder": str(tmp_path), "autoresume": True, "save_overwrite": overwrite}
        options |= {"save_interval": "10ba", "max_duration": "20ba"}
        with make_trainer(None, **options) as first:
            first.fit()
        before = (tmp_path / "ep4-ba20").stat().st_ino
        trainer = make_trainer(None, **options)

        with contextlib.nullcontext() if overwrite else pytest.raises(LaterCheckpointError, match="ep1-ba10"):
            trainer.fit(reset_time=True)

        assert names_in(tmp_path) == [".lock", "ep1-ba10", "ep4-ba20", "latest"]
        assert ((tmp_path / "ep4-ba20").stat().st_ino == before) is not overwrite

    def test_keep_best_without_data(self, make_trainer, tmp_path):
        """A metric of data that are not evaluated raises when training starts."""
        trainer = make_trainer(CheckpointSaver(tmp_path, keep_best=KeepBest(METRIC)))

        with pytest.raises(ValueError, match=rf"eval_dataloader adds metrics\) must be one of \[\], got '{METRIC}'"):
            trainer.fit()

    def test_keep_best_by_a_metric_of_a_callback(self, make_trainer, tmp_path):
        """A callback may add a metric to those of an evaluation, of which a warning lists those that the model has."""

        def add(state):
            state.eval_metric_values["eval"]["Batches"] = -abs(float(state.timestamp.batch) - 10)

        saver = CheckpointSaver(tmp_path, keep_best=KeepBest("metrics/eval/Batches"))
        trainer = make_trainer(saver, evaluates=True, callbacks=[record("eval_end", add)])
        with pytest.warns(UserWarning, match=rf"'{METRIC}'\].*got 'metrics/eval/Batches'.* unless a callback adds"):
            trainer.fit()

        assert Path(saver.best_checkpoint).name == "ep2-ba10"

    @pytest.mark.parametrize("metric", ["metrics/evaluation/MulticlassAccuracy", "MulticlassAccuracy"])
    def test_keep_best_by_a_metric_that_does_not_exist(self, make_trainer, tmp_path, metric):
        """It raises when training starts, with those that exist, instead of keeping none."""
        saver = CheckpointSaver(tmp_path, keep_best=KeepBest(metric))
        trainer = make_trainer(saver, eval_dataloader=[(torch.ones(2, 4), torch.tensor([0, 1]))])

        with pytest.raises(ValueError, match=re.escape(f"{METRIC!r}], got {metric!r}; did you mean {METRIC!r}?")):
            trainer.fit()

    def test_one_name_for_all(self, make_trainer, tmp_path):
        """The earlier checkpoint of a run is replaced, also after a resume, but not where it may be the best one."""
        make_trainer(CheckpointSaver(tmp_path / "one", "model"), max_duration="1ep").fit()
        make_trainer(CheckpointSaver(tmp_path / "one", "model"), load_path=tmp_path / "one" / "model").fit()

        [only] = find_checkpoints(tmp_path / "one")
        assert only.manifest.timestamp.batch == 15
        with pytest.raises(CheckpointSaveError, match=r"run 'blur' at batch 5\. .* names with \{batch\} differ"):
            make_trainer(
                CheckpointSaver(tmp_path / "best", "model", keep_best=KeepBest(METRIC, 1)), evaluates=True
            ).fit()

    def test_values_of_other_data_do_not_count(self, make_trainer, tmp_path):
        """An evaluation of given data does not change by which value a checkpoint is the best."""
        saver = CheckpointSaver(tmp_path, keep_best=KeepBest(METRIC, 1))
        trainer = make_trainer(saver, max_duration="2ep", evaluates=True)
        trainer.fit()
        before = trainer.state.eval_metric_values["eval"]["MulticlassAccuracy"]
        found = trainer.eval(make_loader(40, seed=5))["eval"]["MulticlassAccuracy"]

        assert trainer.state.eval_metric_values["eval"]["MulticlassAccuracy"] == before != found

    def test_keep_best(self, make_trainer, tmp_path):
        """The best checkpoint by a metric is kept next to the last."""
        values = iter([0.5, 0.9, 0.2, 0.3])

        class Claim(Callback):
            def eval_after_all(self, state, logger):
                state.eval_metric_values["MulticlassAccuracy"] = torch.tensor(next(values))

        saver = CheckpointSaver(tmp_path, num_checkpoints_to_keep=1, keep_best=KeepBest(METRIC, 1))
        make_trainer(saver, max_duration="4ep", evaluates=True, callbacks=[Claim()]).fit()

        assert [one.name for one in find_checkpoints(tmp_path)] == ["ep2-ba10", "ep4-ba20"]

    @pytest.mark.parametrize(("mode", "best"), [("max", "ep2-ba10"), ("min", "ep3-ba15")])
    def test_link_to_the_best(self, make_trainer, tmp_path, mode, best):
        """A link points to the best checkpoint, also where all are kept."""
        values = iter([0.5, 0.9, 0.2, 0.3])

        class Claim(Callback):
            def eval_after_all(self, state, logger):
                state.eval_metric_values["MulticlassAccuracy"] = torch.tensor(next(values))

        saver = CheckpointSaver(tmp_path, keep_best=KeepBest(METRIC, 1, mode))
        make_trainer(saver, max_duration="4ep", evaluates=True, callbacks=[Claim()]).fit()

        assert len(find_checkpoints(tmp_path)) == 4
        assert (tmp_path / "best").resolve() == tmp_path / best
        assert saver.best_checkpoint == str(tmp_path / best)


class TestFolders:
    def test_folder_name(self, make_trainer, tmp_path, monkeypatch):
        """By default checkpoints are in a folder with the run's name."""
        monkeypatch.chdir(tmp_path)

        make_trainer(CheckpointSaver(), max_duration="1ep").fit()

        assert names_in(tmp_path / "blur" / "checkpoints") == [".lock", "ep1-ba5", "latest"]

    def test_invalid_run_name(self, make_trainer, tmp_path):
        """A run name that gives nested folders raises before the first batch."""
        trainer = make_trainer(CheckpointSaver(tmp_path, filename="{run_name}-ba{batch}"), run_name="team/first")

        with pytest.raises(ValueError, match=r"filename \(save_filename\) must be .* got 'team/first-ba0'"):
            trainer.fit()

        assert int(trainer.state.timestamp.batch) == 0

    def test_folder_with_later_checkpoints(self, make_trainer, tmp_path):
        """A new run in a folder with later checkpoints raises before training, unless it may overwrite them."""
        first = make_trainer(CheckpointSaver(tmp_path), max_duration="2ep")
        first.fit()
        first.close()
        second = make_trainer(CheckpointSaver(tmp_path), max_duration="1ep")

        with pytest.raises(CheckpointSaveError, match=r"has ep2-ba10 of run 'blur'.*overwrite=True"):
            second.fit()
        third = make_trainer(CheckpointSaver(tmp_path, overwrite=True), max_duration="1ep", run_name="other")
        third.fit()

        assert int(second.state.timestamp.batch) == 0
        assert verify_checkpoint(tmp_path / "ep1-ba5").run_name == "other"

    def test_resuming_does_not_need_overwrite(self, make_trainer, tmp_path):
        """A run that resumes from its newest checkpoint saves to the same folder."""
        first = make_trainer(CheckpointSaver(tmp_path), max_duration="1ep")
        first.fit()
        first.close()
        later = make_trainer(CheckpointSaver(tmp_path), max_duration="2ep")

        load_checkpoint(tmp_path / "latest", later.state)
        later.fit()

        assert names_in(tmp_path) == [".lock", "ep1-ba5", "ep2-ba10", "latest"]

    def test_folder_in_use(self, make_trainer, tmp_path):
        """A folder that another running process saves to raises before training."""
        program = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        program += "file.write('process 17 on host'); file.flush(); print('locked', flush=True); input()"
        command = [sys.executable, "-c", program, str(tmp_path / ".lock")]
        trainer = make_trainer(CheckpointSaver(tmp_path))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            other.stdout.readline()

            with pytest.raises(FolderInUseError, match="process 17 on host"):
                trainer.fit()

            other.communicate("end\n")
        assert int(trainer.state.timestamp.batch) == 0

    def test_remote(self, make_trainer):
        """A URL works like a folder, with a file that names the latest checkpoint."""
        fsspec.filesystem("memory").store.clear()
        saver = CheckpointSaver("memory://runs/{run_name}", num_checkpoints_to_keep=1)

        make_trainer(saver, max_duration="2ep").fit()

        assert saver.saved_checkpoints == ["memory://runs/blur/ep2-ba10"]
        assert int(verify_checkpoint("memory://runs/blur/latest").timestamp.batch) == 10


def test_arguments_of_lightning():
    """The error names the argument that chooses the best checkpoints."""
    with pytest.raises(TypeError, match=r"'monitor': use keep_best. It has no argument 'save_top_k': use keep_best"):
        CheckpointSaver("folder", monitor="eval/Accuracy", save_top_k=1)


class TestFailures:
    def test_failure_is_raised_at_the_next_batch(self, make_trainer, tmp_path, break_call, monkeypatch):
        """A failed save ends the run at the next batch, and preserves earlier checkpoints."""
        saver = CheckpointSaver(
            tmp_path,
            save_interval=lambda state, event: event == "batch_checkpoint" and int(state.timestamp.batch) in {2, 4},
        )

        class FillDisk(Callback):
            def batch_start(self, state, logger):
                while saver._saving.is_busy:
                    time.sleep(0.001)
                if int(state.timestamp.batch) == 3:
                    break_call("fsync", errno.ENOSPC)

        trainer = make_trainer(saver, callbacks=[FillDisk()])
        with pytest.raises(CheckpointSaveError, match="ep0-ba4 was not saved: the disk is full"):
            trainer.fit()
        monkeypatch.undo()

        assert int(trainer.state.timestamp.batch) == 5
        assert [one.name for one in find_checkpoints(tmp_path)] == ["ep0-ba2"]
        assert find_checkpoints(tmp_path)[0].is_complete

    @pytest.mark.parametrize("when", ["fit", "close"])
    def test_failure_is_raised_at_the_end(self, make_trainer, tmp_path, monkeypatch, when):
        """The last save's failure is raised at the end of the training, or by close."""
        saver = CheckpointSaver(tmp_path, save_interval="1ep")
        trainer = make_trainer(saver, max_duration="1ep")

        def fail(*args):
            raise CheckpointSaveError("ep1-ba5", "the disk is full.")

        monkeypatch.setattr(folders.LocalFolder, "begin", fail)
        if when == "fit":
            with pytest.raises(CheckpointSaveError, match="the disk is full"):
                trainer.fit()
        else:
            saver.save(trainer.state)
            with pytest.raises(CheckpointSaveError, match="the disk is full"):
                trainer.close()
        monkeypatch.undo()

        assert not any(one.is_complete for one in find_checkpoints(tmp_path))

    def test_failure_of_another_callback_at_the_end(self, make_trainer, tmp_path):
        """The last checkpoint is saved nevertheless, with the weights at the end, and its error is raised."""
        trainer = make_trainer(None, save_folder=str(tmp_path), callbacks=[record("fit_end", lambda _: 1 / 0)])

        with pytest.raises(ZeroDivisionError):
            trainer.fit()

        assert int(trainer.state.timestamp.epoch) == 3
        verify_checkpoint(trainer.saved_checkpoints[-1])
        resumed = make_trainer(None, load_path=f"{tmp_path}/ep3-ba15", weights=1)
        assert torch.equal(weights(resumed), weights(trainer))

    def test_failing_link(self, make_trainer, tmp_path):
        """An error after a checkpoint is complete names what is not up to date, and does not report it as not saved."""
        (tmp_path / "latest").mkdir()
        trainer = make_trainer(CheckpointSaver(tmp_path), max_duration="1ep")

        expected = r"ep1-ba5 is complete, and a link to it was not updated.*latest: a folder has the name of this link"
        with pytest.raises(CheckpointSaveError, match=expected):
            trainer.fit()

        assert newest_checkpoint(tmp_path).name == "ep1-ba5"


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "error", "named"),
        [
            ({"num_checkpoints_to_keep": False}, ValueError, "num_checkpoints_to_keep"),
            ({"num_checkpoints_to_keep": -2}, ValueError, "num_checkpoints_to_keep"),
            ({"num_checkpoints_to_keep": True}, ValueError, "num_checkpoints_to_keep"),
            ({"keep_best": METRIC, "num_checkpoints_to_keep": 1}, TypeError, "KeepBest"),
            ({"folder": "runs/ep{epoch}"}, ValueError, r"save_folder\) may have {run_name} and {rank} in it"),
            ({"save_interval": "often"}, ValueError, "often"),
            ({"save_interval": "-1ep"}, ValueError, "0 .never. or more"),
            ({"filename": "ep{epochs}"}, ValueError, "epochs"),
            ({"filename": "a/b"}, ValueError, "without '/'"),
            ({"latest_filename": "../latest"}, ValueError, "without '/'"),
            ({"folder": "{nothing}"}, ValueError, "nothing"),
            ({"folder": ""}, ValueError, r"folder \(save_folder\) must be the name of a .*'\.' is the current one"),
            ({"folder": "runs\0"}, ValueError, r"folder \(save_folder\) must be the name of a"),
            ({"filename": "{what}"}, ValueError, r"filename \(save_filename\) may have \{run_name\}, "),
            ({"filename": ""}, ValueError, r"filename \(save_filename\) must be the name of a"),
            ({"latest_filename": ""}, ValueError, r"latest_filename \(save_latest_filename\) must be the name of a"),
            ({"latest_filename": "late\0st"}, ValueError, r"latest_filename \(save_latest_filename\) must be the"),
            ({"ignore_keys": 5}, TypeError, r"ignore_keys \(save_ignore_keys\) must be strings .* got 5"),
            ({"ignore_keys": ["model", None]}, TypeError, r"must be strings .* got \['model', None\]"),
        ],
    )
    def test_invalid_settings_raise(self, settings, error, named):
        """Invalid settings raise at construction."""
        with pytest.raises(error, match=named):
            CheckpointSaver(**settings)


def test_label_in_a_custom_loop(runs):
    """Without a label, the training data is named as in the manifest."""
    saver, state = CheckpointSaver(), runs.make()
    state.dataloader_label = None

    saver.epoch_end(state, None)

    assert {*saver._due.measured} == {"train"}


def test_function(runs):
    """A function decides instead of an interval."""
    due = DueSaves(lambda state, event: event is Event.EPOCH_CHECKPOINT, None)

    assert due.is_due(runs.make(), Event.EPOCH_CHECKPOINT)
    assert not due.is_due(runs.make(), Event.BATCH_CHECKPOINT)
