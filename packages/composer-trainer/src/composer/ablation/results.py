"""The results of a study's runs, and the file of JSON lines that stores them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.serialization import from_data

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Result", "ResultsFile", "Settings", "label"]


@attrs.frozen
class Settings:
    """What a study measures, stored as a line of its results.

    Args:
        metric: The name of the metric.
        mode: ``"max"`` or ``"min"``.
        seeds: The seeds that each arm is to run with.
        algorithms: The class and the settings of each algorithm by its name in the study, as text.
        target: The quality to reach; None is the baseline's final one.
        budget: The time for all runs, in seconds; None is unlimited.
        is_rough: Whether runs were executed beside each other, which makes their times rough.
        environment: Versions and hardware.
    """

    metric: str
    mode: str
    seeds: tuple[int, ...]
    algorithms: dict[str, str]
    target: float | None = None
    budget: float | None = None
    is_rough: bool = False
    environment: dict[str, Any] = attrs.field(factory=dict)

    @property
    def sign(self) -> int:
        """1 if larger values are better, else -1."""
        return 1 if self.mode == "max" else -1


@attrs.frozen
class Result:
    """One run: an arm with a seed.

    Args:
        arm: The names of its algorithms; empty for the baseline.
        seed: The seed.
        curve: The seconds of training and the metric's value at each evaluation. Evaluation is not counted.
        seconds: The time of training; None if the run failed.
        memory: The peak memory in bytes: on a GPU as its allocator counts it, else of the process; None if unknown.
        wall_seconds: The time of the process, with start-up and evaluation.
        failure: Why the run failed; None if it succeeded.
        batches: A digest of the first batches, as they were loaded.
        weights: A digest of the initial weights; None if an algorithm may have changed them already.
    """

    arm: tuple[str, ...]
    seed: int
    curve: tuple[tuple[float, float], ...] = ()
    seconds: float | None = None
    memory: int | None = None
    wall_seconds: float = 0.0
    failure: str | None = None
    batches: str | None = None
    weights: str | None = None


def label(arm: tuple[str, ...]) -> str:
    """Return the name of an arm in tables.

    Example:
        >>> label(()), label(("blurpool", "ema"))
        ('baseline', 'blurpool + ema')
    """
    return " + ".join(arm) or "baseline"


class ResultsFile:
    """The JSON lines of a study: settings and results, each ``{"settings": {…}}`` or ``{"result": {…}}``.

    A line is appended by one write. The rest of a line that a killed process did not finish is removed.

    Args:
        path: The file; it may not exist yet.

    Raises:
        ValueError: A line is not valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: Settings | None = None
        self.results: list[Result] = []
        written = path.read_bytes() if path.exists() else b""
        self._length = written.rfind(b"\n") + 1
        for number, line in enumerate(written[: self._length].splitlines(), start=1):
            place = f"{path.name}, line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: must be JSON, got {line[:80]!r}: {error}") from None
            if not isinstance(entry, dict) or len(entry) != 1 or next(iter(entry)) not in {"settings", "result"}:
                raise ValueError(f"{place}: must have the key 'settings' or 'result', got {line[:80]!r}.")
            if "settings" in entry:
                self.settings = from_data(entry["settings"], Settings, place)
            else:
                self.results.append(from_data(entry["result"], Result, place))

    def write_settings(self, settings: Settings) -> None:
        """Append the settings if they differ from the last ones."""
        if settings != self.settings:
            self._append({"settings": attrs.asdict(settings)})
            self.settings = settings

    def append(self, result: Result) -> None:
        """Append a result."""
        self._append({"result": attrs.asdict(result)})
        self.results.append(result)

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, self._length)
            os.pwrite(descriptor, line, self._length)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._length += len(line)
