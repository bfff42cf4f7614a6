"""Statistics of a GPU's allocator, and their conversion without a GPU."""

import pytest

from composer.callbacks import MemoryMonitor
from composer.callbacks.memory_monitor import in_gigabytes
from composer.core import Event, Time
from composer.loggers import InMemoryLogger
from fixtures import trained, vector_batches
from fixtures.processes import run_processes

NAMES = {
    *(
        f"memory/{when}_{what}_mem"
        for when in ("current", "peak")
        for what in ("allocated", "active", "inactive", "reserved")
    ),
    "memory/alloc_retries",
}
PROCESS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
from composer.callbacks.memory_monitor import over_processes
print({name: value.item() for name, value in over_processes({"a": 1.0 + rank, "b": 4.0}, torch.device("cpu")).items()})
"""


def fit(device, monitor):
    history = InMemoryLogger()
    trained(callbacks=monitor, loggers=history, device=device, train_dataloader=vector_batches(4))
    return history


class TestMemoryMonitor:
    def test_warns_without_gpu(self):
        """On a CPU it warns once and logs nothing."""
        with pytest.warns(UserWarning, match="reads CUDA's allocator, and the run is on cpu") as caught:
            history = fit("cpu", MemoryMonitor(dist_aggregate_batch_interval=1))

        assert len(caught) == 1
        assert not [name for name in history.data if name.startswith("memory/")]

    def test_names_and_units(self):
        """Bytes are converted to gigabytes of 1e9, other numbers are not; unknown ones are omitted."""
        stats = {"allocated_bytes.all.peak": 3_000_000_000, "num_alloc_retries": 2, "other": 5}

        usage = in_gigabytes(stats, MemoryMonitor().memory_keys)

        assert usage == {"peak_allocated_mem": 3.0, "alloc_retries": 2}
        assert {f"memory/{name}" for name in MemoryMonitor().memory_keys.values()} == NAMES

    def test_over_two_processes(self, tmp_path):
        """Every process has the mean, minimum and maximum."""
        program = tmp_path / "program.py"
        program.write_text(PROCESS)

        printed = [text.splitlines()[-1] for text in run_processes(program, 2)]

        expected = {"a_avg": 1.5, "a_min": 1.0, "a_max": 2.0, "b_avg": 4.0, "b_min": 4.0, "b_max": 4.0}
        assert printed == [str(expected)] * 2

    @pytest.mark.parametrize(("every", "expected"), [(None, Time(0, "ba")), (20, Time(20, "ba"))])
    def test_dist_aggregate_interval(self, every, expected):
        """Processes are compared at the interval, by default never."""
        assert MemoryMonitor(dist_aggregate_batch_interval=every).intervals() == {Event.BATCH_END: expected}

    @pytest.mark.gpu
    def test_on_a_gpu(self):
        """Every batch has all values, and the peak is at least the current usage."""
        history = fit("gpu", MemoryMonitor(dist_aggregate_batch_interval=2))

        latest = history.most_recent_values
        assert set(latest) >= NAMES
        assert history.get_timeseries("memory/current_allocated_mem")["batch"] == [0, 1, 2, 3]
        assert history.get_timeseries("memory/current_allocated_mem_avg")["batch"] == [1, 3]
        assert 0 < latest["memory/current_allocated_mem"] <= latest["memory/peak_allocated_mem"]
