"""Composer's callback that watches the load of GPUs, and its table of their speed."""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.request

import attrs
import torch

from composer.callbacks._flops import PEAKS
from composer.core import Callback, Logger, State
from composer.distributed import get_local_rank

_log = logging.getLogger(__name__)

_FORMER_NAMES = {"H200": "h200-sxm", "H100": "h100-sxm", "V100-SXM2": "v100-sxm"}
GPU_AVAILABLE_FLOPS = {
    _FORMER_NAMES.get(name, name.lower().replace(" ", "-")): {
        amp + kind: value * 1e12
        for kind, value in attrs.asdict(peak).items()
        if value is not None
        for amp in (("",) if kind.endswith("32") else ("", "amp_"))
    }
    for name, peak in PEAKS.items()
}
"""The peak operations per second of GPUs, by their names and precisions in Composer."""


def _gpu_utilizations() -> list[float]:
    """Return the percentage of time in which a kernel ran, of each GPU of this machine, without synchronizing."""
    return [float(torch.cuda.utilization(device)) for device in range(torch.cuda.device_count())]


class HealthChecker(Callback):
    """Log an error if the GPUs of a machine are not equally busy, which is a sign of a defect.

    The means over a window are compared by the first process of each machine.

    Args:
        threshold: The difference of the highest and lowest percentage above which the error is logged.
        sample_freq: Seconds between two samples, which are taken at the end of a batch.
        window_size: Seconds of a window.
        wait: Seconds before the first sample.
        slack_webhook_url: Where the error is also sent; the variable ``SLACK_WEBHOOK_URL`` if None.
        test_mode: Whether the error is logged for the first window in any case.

    Example:
        >>> HealthChecker(threshold=20).threshold
        20
    """

    def __init__(
        self,
        threshold: float = 10,
        sample_freq: float = 5,
        window_size: float = 120,
        wait: float = 120,
        slack_webhook_url: str | None = None,
        test_mode: bool = False,
    ) -> None:
        self.threshold, self.sample_freq, self.window_size, self.wait = threshold, sample_freq, window_size, wait
        self.slack_webhook_url = slack_webhook_url or os.environ.get("SLACK_WEBHOOK_URL")
        self.test_mode = test_mode
        self._samples: list[list[float]] = []
        self._next = self._end = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin the first window."""
        self._samples = []
        self._next = time.monotonic() + self.wait
        self._end = self._next + self.window_size

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take a sample, and compare the means at the end of a window."""
        now = time.monotonic()
        if now < self._next or get_local_rank() != 0:
            return
        self._next = now + self.sample_freq
        self._samples.append(_gpu_utilizations())
        if now >= self._end:
            means = [sum(one) / len(one) for one in zip(*self._samples, strict=True)]
            if self.test_mode or max(means, default=0.0) - min(means, default=0.0) > self.threshold:
                self._alert(f"{state.run_name}: the utilization of the GPUs of this machine differs, {means} percent.")
            self._samples, self._end, self.test_mode = [], now + self.window_size, False

    def _alert(self, message: str) -> None:
        _log.error(message)
        if self.slack_webhook_url:
            content, header = json.dumps({"text": message}).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(self.slack_webhook_url, content, header)  # noqa: S310  (the user's URL)
            try:
                urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
            except OSError as error:
                _log.warning("Slack was not reached: %s", error)
