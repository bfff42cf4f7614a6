"""The results of a study's runs, and the file of JSON lines that stores them."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.serialization import from_data

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Result", "ResultsFile", "Settings", "Start", "label"]

_KINDS = {"settings", "start", "result"}
FIRST_LOSS = "first training loss"
"""The name of the loss in :attr:`Start.settings`."""


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


@attrs.frozen
class Start:
    """The start of a training, which identifies it when its study is continued.

    Args:
        arm: The names of the algorithms.
        seed: The seed.
        batches: A digest of the first batches, as they were loaded.
        weights: A digest of the initial weights; None if an algorithm may have changed them already.
        settings: Settings of the trainer and its components by name, a digest of the first batches of the evaluation,
            and the first training loss, all as text.
    """

    arm: tuple[str, ...]
    seed: int
    batches: str
    weights: str | None
    settings: dict[str, str]

    def differences(self, other: Start) -> list[str]:
        """Return what differs between two starts, in words."""
        found = [f"{name} ({mine}, now {theirs})" for name, mine, theirs in self._different_settings(other)]
        if self.batches != other.batches:
            found.append("first training batches")
        if None not in (self.weights, other.weights) and self.weights != other.weights:
            found.append("initial weights")
        return found

    def _different_settings(self, other: Start) -> Iterator[tuple[str, str, str]]:
        for name in dict.fromkeys([*self.settings, *other.settings]):
            mine, theirs = (one.settings.get(name, "none") for one in (self, other))
            # Another number of threads may round a loss differently.
            is_loss = name == FIRST_LOSS and "none" not in (mine, theirs)
            if mine != theirs and not (is_loss and math.isclose(float(mine), float(theirs), rel_tol=1e-3)):
                yield name, mine, theirs


def label(arm: tuple[str, ...]) -> str:
    """Return the name of an arm in tables.

    Example:
        >>> label(()), label(("blurpool", "ema"))
        ('baseline', 'blurpool + ema')
    """
    return " + ".join(arm) or "baseline"


class ResultsFile:
    """The JSON lines of a study: ``{"settings": {…}}``, ``{"start": {…}}`` of its baseline and ``{"result": {…}}``.

    A line is appended by one write. The rest of a line that a killed process did not finish is removed.

    Args:
        path: The file; it may not exist yet.

    Raises:
        ValueError: A line is not valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: Settings | None = None
        self.start: Start | None = None
        self.results: list[Result] = []
        written = path.read_bytes() if path.exists() else b""
        self._length = written.rfind(b"\n") + 1
        for number, line in enumerate(written[: self._length].splitlines(), start=1):
            place = f"{path.name}, line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: must be JSON, got {line[:80]!r}: {error}") from None
            if (
                not isinstance(entry, dict)
                or len(entry) != 1
                or next(iter(entry)) not in {"settings", "start", "result"}
            ):
                raise ValueError(f"{place}: must have the key 'settings', 'start' or 'result', got {line[:80]!r}.")
            if "settings" in entry:
                self.settings = from_data(entry["settings"], Settings, place)
            elif "start" in entry:
                self.start = from_data(entry["start"], Start, place)
            else:
                self.results.append(from_data(entry["result"], Result, place))

    def write_settings(self, settings: Settings) -> None:
        """Append the settings if they differ from the last ones."""
        if settings != self.settings:
            self._append({"settings": attrs.asdict(settings)})
            self.settings = settings

    def write_start(self, start: Start) -> None:
        """Append the start of the baseline."""
        self._append({"start": attrs.asdict(start)})
        self.start = start

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
