"""System metrics by psutil, and GPU metrics of several processes."""

import _thread
import math
import sys
import threading
import time

import pytest
import torch

from composer.callbacks import SystemMetricsMonitor, system_metrics_monitor
from composer.callbacks.system_metrics_monitor import _of_gpus
from composer.loggers import InMemoryLogger
from fixtures import make_network, small_run, vector_batches

psutil = pytest.importorskip("psutil")


def fit(callbacks, network=None, device="cpu"):
    history = InMemoryLogger()
    data = vector_batches(6)
    options = {"train_dataloader": data, "max_duration": "1ep", "callbacks": callbacks, "loggers": history}
    with small_run(network=network, device=device, **options) as trainer:
        sampler = next((one._sampler for one in trainer.state.callbacks), None)
        if sampler is not None:
            while not sampler._latest:  # the first look takes a tenth of a second
                threading.Event().wait(0.01)
        trainer.fit()
    return history


@pytest.fixture
def only_threads_of_before():
    """Return a function that checks that all new threads end soon."""
    before = _thread._count()

    def are_over():
        deadline = time.monotonic() + 5
        while _thread._count() > before and time.monotonic() < deadline:
            time.sleep(0.001)
        return _thread._count() <= before

    return are_over


class TestSystemMetricsMonitor:
    def test_values_match_psutil(self, only_threads_of_before):
        """Memory and disk usage match this machine's, and the thread ends with the run."""
        history = fit(SystemMetricsMonitor(every="2ba"))

        latest = history.most_recent_values
        assert latest["cpu_memory_total"] == psutil.virtual_memory().total
        assert latest["disk_memory_total"] == psutil.disk_usage(".").total
        assert 0 < latest["process_memory_rss"] < latest["cpu_memory_total"]
        assert 0 <= latest["cpu_percentage"] <= 100
        assert latest["network_bytes_sent"] <= psutil.net_io_counters().bytes_sent
        assert history.get_timeseries("cpu_percentage")["batch"] == [1, 3, 5]
        assert only_threads_of_before()

    def test_thread_ends_after_an_error(self, only_threads_of_before):
        """A failed run leaves no thread."""
        network = make_network()
        network.register_forward_pre_hook(lambda *_: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            fit(SystemMetricsMonitor(), network)

        assert only_threads_of_before()

    def test_minimum_and_maximum(self):
        """The extremes over several processes' GPUs are logged with their ranks."""
        rows = [[10.0, 1.0, 60.0, 200.0], [30.0, 1.0, math.nan, 300.0], [20.0, 1.0, 70.0, 100.0]]

        metrics = _of_gpus(rows, log_all_data=False)

        assert metrics["min_gpu_percentage_rank_0"] == 10.0
        assert metrics["max_gpu_percentage_rank_1"] == 30.0
        assert metrics["min_gpu_temperature_C_rank_0"] == 60.0
        assert metrics["max_gpu_temperature_C_rank_2"] == 70.0
        assert metrics["min_gpu_power_usage_W_rank_2"] == 100.0
        assert len(metrics) == 8

    def test_values_of_all_processes(self, monkeypatch):
        """In a process group every process receives the others' values, of the previous interval."""
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            monkeypatch.setattr(
                system_metrics_monitor,
                "_read_gpu",
                lambda device: dict.fromkeys(system_metrics_monitor._GPU_METRICS, 7.0),
            )
            history = fit(SystemMetricsMonitor(every="1ba", log_all_data=True))
        finally:
            torch.distributed.destroy_process_group()

        assert history.get_timeseries("gpu_percentage_rank_0")["batch"] == [1, 2, 3, 4, 5]
        assert history.most_recent_values["gpu_percentage_rank_0"] == 7.0

    def test_needs_psutil(self, monkeypatch):
        """Without psutil the error states how to install it."""
        monkeypatch.setitem(sys.modules, "psutil", None)

        with pytest.raises(ModuleNotFoundError, match=r'pip install "composer-trainer\[system\]"'):
            SystemMetricsMonitor()

    @pytest.mark.gpu
    def test_on_a_gpu(self):
        """Utilization, temperature and power are plausible."""
        pytest.importorskip("pynvml", reason="nvidia-ml-py is in the test group")
        latest = fit(SystemMetricsMonitor(every="1ba", log_all_data=True), device="gpu").most_recent_values

        assert 0 <= latest["gpu_percentage_rank_0"] <= 100
        assert 10 < latest["gpu_temperature_C_rank_0"] < 120
        assert 5 < latest["gpu_power_usage_W_rank_0"] < 2000
