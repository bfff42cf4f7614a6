"""GPUs that are not equally busy are reported."""

import http.server
import json
import logging
import threading

import pytest

from composer.compat import health
from composer.compat.health import GPU_AVAILABLE_FLOPS, HealthChecker
from fixtures import small_run

NOW = {"sample_freq": 0, "window_size": 0, "wait": 0}


@pytest.fixture
def slack():
    """Return the URL of a server, and the texts that it gets."""
    texts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", texts
    server.shutdown()
    server.server_close()


def reports(checker, caplog, duration="1ba"):
    """Return the errors of a run."""
    with (
        caplog.at_level(logging.ERROR, "composer.compat.health"),
        small_run(max_duration=duration, callbacks=checker, run_name="mine") as trainer,
    ):
        trainer.fit()
    return [record.message for record in caplog.records]


@pytest.fixture
def set_loads(monkeypatch):
    """Return a function that sets the utilization of the GPUs at each reading."""
    return lambda *readings: monkeypatch.setattr(health, "_gpu_utilizations", iter(readings).__next__)


@pytest.mark.parametrize(("loads", "count"), [([90.0, 95.0], 0), ([90.0, 79.0], 1), ([], 0), ([50.0], 0)])
def test_differences(set_loads, caplog, loads, count):
    """A difference above the threshold is an error; without GPUs there is none."""
    set_loads(loads)

    assert len(reports(HealthChecker(**NOW), caplog)) == count


def test_a_test_is_sent_to_slack(caplog, slack):
    """In test mode the first window is reported, also to Slack."""
    url, texts = slack

    found = reports(HealthChecker(**NOW, slack_webhook_url=url, test_mode=True), caplog, "3ba")

    assert found == texts == ["mine: the utilization of the GPUs of this machine differs, [] percent."]


@pytest.mark.parametrize(
    ("gpu", "precision", "peak"),
    [("h100-sxm", "amp_bf16", 989.5e12), ("a100", "fp32", 19.5e12), ("a100", "tf32", 156e12), ("t4", "fp16", 65e12)],
)
def test_the_table_of_speeds(gpu, precision, peak):
    """The manufacturers' figures are found by Composer's names."""
    assert GPU_AVAILABLE_FLOPS[gpu][precision] == peak
    assert "amp_fp32" not in GPU_AVAILABLE_FLOPS[gpu]
