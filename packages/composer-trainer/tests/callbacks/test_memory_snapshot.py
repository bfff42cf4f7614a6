"""Snapshots of a GPU's memory: recording periods and files."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from composer.callbacks import MemorySnapshot, OOMObserver, memory_snapshot
from fixtures import make_network, small_run, vector_batches


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


def make_run(callbacks, network=None, device="cpu"):
    options = {"train_dataloader": vector_batches(8), "max_duration": "1ep", "run_name": "run"}
    return small_run(network=network, callbacks=callbacks, device=device, **options)


@pytest.fixture
def history(monkeypatch):
    """Replace the recording of CUDA's allocator, and return its calls: the entries at the start, None at the end."""
    calls = []
    record = lambda enabled="all", max_entries=None: calls.append(enabled and max_entries)  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    monkeypatch.setattr(memory_snapshot, "is_recordable", lambda state, who: True)
    return calls


class TestMemorySnapshot:
    def test_warns_without_gpu(self):
        """On a CPU it warns and records nothing."""
        with make_run(MemorySnapshot()) as trainer:
            with pytest.warns(UserWarning, match="nothing to record") as caught:
                trainer.fit()

            assert len(caught) == 1

    @pytest.mark.parametrize(
        ("skip", "interval", "written"), [(1, "3ba", 4), (0, "1ba", 1), (2, "8sp", 4), (2, "9sp", 5), (6, "5ba", 8)]
    )
    def test_recording_period(self, history, tmp_path, skip, interval, written):
        """It skips batches, records the given number or to the end of the fit, and writes once."""
        with make_run(MemorySnapshot(skip, interval, max_entries=7, folder=str(tmp_path))) as trainer:
            trainer.fit()

        assert history == [7, None]
        assert [path.name for path in tmp_path.iterdir()] == [f"rank0.{written}.memory_snapshot.pickle"]

    def test_stops_after_an_error(self, history, tmp_path):
        """Recording stops after an error."""
        trainer = make_run(MemorySnapshot(skip_batches=1, interval="5ba", folder=str(tmp_path)), OutOfMemory())
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert history == [100000, None]
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"skip_batches": -1}, "skip_batches"),
            ({"interval": "0ba"}, "interval must be"),
            ({"interval": "0.1dur"}, "interval must be"),
            ({"max_entries": 0}, "max_entries"),
            ({"filename": "{epoch}"}, "nothing else in braces"),
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
        with make_run(monitor, device="gpu") as trainer:
            trainer.fit()

        (path,) = tmp_path.iterdir()
        assert path.name == "rank0.4.memory_snapshot.pickle"
        assert pickle.loads(path.read_bytes())["device_traces"][0]


class TestOOMObserver:
    def test_warns_without_gpu(self):
        """On a CPU it warns and records nothing."""
        with (
            pytest.warns(UserWarning, match="nothing to record"),
            make_run(OOMObserver()) as trainer,
        ):
            trainer.fit()

    def test_writes_on_out_of_memory(self, history, tmp_path):
        """A run that runs out of memory writes the file and stops recording."""
        trainer = make_run(OOMObserver(max_entries=9, folder=str(tmp_path)), OutOfMemory())
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert history == [9, None]
        assert (tmp_path / "rank0_oom.pickle").read_text() == "snapshot"

    def test_records_beside_a_snapshot(self, history, tmp_path):
        """The end of a snapshot does not end the recording of the observer, as the allocator has one history."""
        snapshot = MemorySnapshot(skip_batches=0, interval="1ba", max_entries=5, folder=str(tmp_path))
        observer = OOMObserver(max_entries=9, folder=str(tmp_path), remote_file_name=None)
        trainer = make_run([observer, snapshot], OutOfMemory())

        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert history == [9, 9, 9, None]
        assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.gpu
    def test_on_a_gpu(self, tmp_path):
        """Running out of memory writes a file with the allocations."""
        network = make_network()
        network.register_forward_pre_hook(lambda *_: torch.empty(1 << 50, device="cuda"))
        trainer = make_run(OOMObserver(folder=str(tmp_path), remote_file_name=None), network, device="gpu")
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit()

        assert pickle.loads((tmp_path / "rank0_oom.pickle").read_bytes())["device_traces"][0]
