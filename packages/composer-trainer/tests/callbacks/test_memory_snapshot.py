"""Snapshots of a GPU's memory: recording periods and files."""

import pickle

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.callbacks import MemorySnapshot, OOMObserver, memory_snapshot
from composer.callbacks.memory_snapshot import has_lasted, is_out_of_memory, write_snapshot
from composer.core import Engine, Logger, LoggerDestination, State, Time, Timestamp
from composer.models import ComposerClassifier


class Uploads(LoggerDestination):
    def __init__(self):
        self.files = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        self.files.append((remote_file_name, file_path.name, overwrite))


class OutOfMemory(nn.Module):
    """A layer that runs out of memory in its third forward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("no room")
        return self.layer(inputs)


def make_trainer(callbacks, network, device="cpu"):
    model = ComposerClassifier(network, num_classes=3, train_metrics=[])
    return Trainer(
        model=model,
        train_dataloader=[(torch.rand(4, 4), torch.tensor([0, 1, 2, 0]))] * 8,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="8ba",
        callbacks=callbacks,
        progress_bar=False,
        device=device,
        precision="fp32",
        run_name="run",
    )


@pytest.fixture
def recorder(monkeypatch):
    """Replace a GPU's allocator by a list of calls."""
    calls = []

    def write(folder, filename, remote_file_name, state, logger, *, overwrite):
        calls.append(("write", int(state.timestamp.batch)))

    monkeypatch.setattr(memory_snapshot, "is_recordable", lambda state, who: True)
    monkeypatch.setattr(memory_snapshot, "start_history", lambda entries: calls.append(("start", entries)))
    monkeypatch.setattr(memory_snapshot, "stop_history", lambda: calls.append("stop"))
    monkeypatch.setattr(memory_snapshot, "write_snapshot", write)
    return calls


class TestMemorySnapshot:
    def test_warns_without_gpu(self):
        """On a CPU it warns and records nothing."""
        with make_trainer(MemorySnapshot(), nn.Linear(4, 3)) as trainer:
            with pytest.warns(UserWarning, match="nothing to record") as caught:
                trainer.fit()

            assert len(caught) == 1

    @pytest.mark.parametrize(
        ("skip", "interval", "written"), [(1, "3ba", 4), (0, "1ba", 1), (2, "8sp", 4), (6, "5ba", 8)]
    )
    def test_recording_period(self, recorder, skip, interval, written):
        """It skips batches, records the given number or to the end of the fit, and writes once."""
        with make_trainer(MemorySnapshot(skip, interval, max_entries=7), nn.Linear(4, 3)) as trainer:
            trainer.fit()

        assert recorder == [("start", 7), ("write", written), "stop"]

    def test_stops_after_an_error(self, recorder):
        """Recording stops after an error."""
        trainer = make_trainer(MemorySnapshot(skip_batches=1, interval="5ba"), OutOfMemory())
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert recorder == [("start", 100000), "stop"]

    def test_once_in_each_fit(self, recorder):
        """Each fit is recorded."""
        with make_trainer(MemorySnapshot(skip_batches=1, interval="1ba"), nn.Linear(4, 3)) as trainer:
            trainer.fit(duration="3ba")
            trainer.fit(duration="3ba")

        assert [call for call in recorder if call != "stop"] == [
            ("start", 100000),
            ("write", 2),
            ("start", 100000),
            ("write", 5),
        ]

    def test_interval_is_over(self):
        """An interval is over after that many counts."""
        since = Timestamp(batch=5, sample=50)

        assert not has_lasted(Time(20, "sp"), since, Timestamp(batch=6, sample=69))
        assert has_lasted(Time(20, "sp"), since, Timestamp(batch=6, sample=70))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"skip_batches": -1}, "skip_batches"),
            ({"interval": "0ba"}, "interval must be"),
            ({"interval": "0.1dur"}, "interval must be"),
            ({"max_entries": 0}, "max_entries"),
            ({"filename": "{epoch}"}, "nothing else in braces"),
            ({"filename": "{batch.__class__}"}, "nothing else in braces"),
        ],
    )
    def test_bad_arguments(self, options, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            MemorySnapshot(**options)

    @pytest.mark.gpu
    def test_on_a_gpu(self, tmp_path):
        """The file has the allocations during the recording."""
        monitor = MemorySnapshot(folder=str(tmp_path), remote_file_name=None)
        with make_trainer(monitor, nn.Linear(4, 3), device="gpu") as trainer:
            trainer.fit()

        (path,) = tmp_path.iterdir()
        assert path.name == "rank0.4.memory_snapshot.pickle"
        assert pickle.loads(path.read_bytes())["device_traces"][0]


class TestOOMObserver:
    def test_warns_without_gpu(self):
        """On a CPU it warns and records nothing."""
        with (
            pytest.warns(UserWarning, match="nothing to record"),
            make_trainer(OOMObserver(), nn.Linear(4, 3)) as trainer,
        ):
            trainer.fit()

    def test_writes_on_out_of_memory(self, recorder):
        """A run that runs out of memory writes the file and stops recording."""
        trainer = make_trainer(OOMObserver(max_entries=9), OutOfMemory())
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert recorder == [("start", 9), ("write", 2), "stop"]

    @pytest.mark.parametrize("error", [None, ZeroDivisionError])
    def test_does_not_write_otherwise(self, recorder, error):
        """A run that succeeds or fails with another error writes no file."""
        network = nn.Linear(4, 3)
        trainer = make_trainer(OOMObserver(), network)
        if error is not None:
            network.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(error):
                trainer.fit()
        else:
            trainer.fit()
            trainer.close()

        assert recorder == [("start", 100000), "stop"]

    def test_causes_are_checked(self):
        """An error caused by an out-of-memory error is recognized."""
        wrapped = RuntimeError("step failed")
        wrapped.__cause__ = torch.OutOfMemoryError("no room")

        assert is_out_of_memory(wrapped)
        assert not is_out_of_memory(RuntimeError("other"))
        assert not is_out_of_memory(None)

    def test_bad_name(self):
        """An unknown placeholder raises at construction."""
        with pytest.raises(ValueError, match="nothing else in braces"):
            OOMObserver(folder="{place}")

    @pytest.mark.gpu
    def test_on_a_gpu(self, tmp_path):
        """Running out of memory writes a file with the allocations."""
        network = nn.Linear(4, 3)
        network.register_forward_pre_hook(lambda *_: torch.empty(1 << 50, device="cuda"))
        trainer = make_trainer(OOMObserver(folder=str(tmp_path), remote_file_name=None), network, device="gpu")
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert pickle.loads((tmp_path / "rank0_oom.pickle").read_bytes())["device_traces"][0]


class TestWriteSnapshot:
    @pytest.fixture
    def run(self, monkeypatch):
        """Return a state and a logger, with torch's snapshot replaced by text."""

        def dump(path):
            with open(path, "w") as file:  # noqa: PTH123  (as torch does)
                file.write("snapshot")

        monkeypatch.setattr(memory_snapshot.torch.cuda.memory, "_dump_snapshot", dump)
        state, uploads = State(model=None, run_name="run"), Uploads()
        state.timestamp = Timestamp(batch=12)
        return state, Engine(state, Logger(state, uploads)).logger, uploads

    def test_names_are_filled_in(self, run, tmp_path):
        """Folder, file and remote name contain run, process and batch."""
        state, logger, uploads = run

        path = write_snapshot(
            f"{tmp_path}/{{run_name}}", "rank{rank}.{batch}", "{run_name}/x", state, logger, overwrite=True
        )

        assert path == tmp_path / "run/rank0.12.pickle"
        assert path.read_text() == "snapshot"
        assert [one.name for one in path.parent.iterdir()] == ["rank0.12.pickle"]
        assert uploads.files == [("run/x.pickle", "rank0.12.pickle", True)]

    def test_no_remote_name(self, run, tmp_path):
        """Without a remote name, no file is uploaded."""
        state, logger, uploads = run

        write_snapshot(str(tmp_path), "file", None, state, logger, overwrite=False)

        assert uploads.files == []

    def test_existing_file(self, run, tmp_path):
        """It is overwritten only with overwrite=True."""
        state, logger, _ = run
        (tmp_path / "file.pickle").write_text("former")

        with pytest.raises(FileExistsError, match="overwrite=True"):
            write_snapshot(str(tmp_path), "file", None, state, logger, overwrite=False)
        former = (tmp_path / "file.pickle").read_text()
        write_snapshot(str(tmp_path), "file", None, state, logger, overwrite=True)

        assert (former, (tmp_path / "file.pickle").read_text()) == ("former", "snapshot")
