"""The results of a study's runs, and the file of JSON lines that stores them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from composer.core.saving.codec import Record
from composer.core.saving.records import read

EVALUATION_DIGEST = "first evaluation batches"
FIRST_LOSS = "first training loss"
"""The name of the loss in :attr:`Result.settings`."""


@attrs.frozen
class Settings(Record):
    """What a study measures, stored as a line of its results.

    Args:
        metric: The name of the metric.
        mode: ``"max"`` or ``"min"``.
        seeds: The seeds that each arm is to run with.
        algorithms: The class and the settings of each algorithm by its name in the study, as strings.
        target: The quality to reach; None is the baseline's final one.
        is_rough: Whether runs were executed beside each other, which makes their times rough.
        environment: Versions and hardware.
        clock: ``"wall"`` or ``"processor"``: which time is measured.
        held_out: The seeds with which the proposal of a greedy search is measured; empty for other studies.
    """

    metric: str
    mode: str
    seeds: tuple[int, ...]
    algorithms: dict[str, str]
    target: float | None = None
    is_rough: bool = False
    environment: dict[str, Any] = attrs.field(factory=dict)
    clock: str = "wall"
    held_out: tuple[int, ...] = ()

    @property
    def sign(self) -> int:
        """1 if larger values are better, else -1."""
        return 1 if self.mode == "max" else -1

    def differences(self, other: Settings) -> list[str]:
        """Return the names of the settings with which the results of two studies cannot be compared."""
        changed = [name for name in ("metric", "clock") if getattr(self, name) != getattr(other, name)]
        common = sorted(self.algorithms.keys() & other.algorithms.keys())
        return changed + [f"algorithms[{name!r}]" for name in common if self.algorithms[name] != other.algorithms[name]]

    def is_rough_for(self, environment: Mapping[str, Any]) -> bool:
        """Return whether the times are rough where others are measured in an environment: also on other hardware."""
        return self.is_rough or self.environment.get("hardware") != environment["hardware"]


@attrs.frozen
class Result(Record):
    """One run, an arm with a seed; or its first batches, which identify it when its study is continued.

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
        settings: For the first batches only: settings of the trainer and its components by name, a digest of the first
            batches of the evaluation, and the first training loss, all as strings.
        warnings: The warnings of the run, each once.
        mode: For the first batches only: ``"max"`` or ``"min"``, which values are better.
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
    settings: dict[str, str] = attrs.field(factory=dict)
    warnings: tuple[str, ...] = ()
    mode: str = ""

    def check(self) -> None:
        """Check that a run that did not fail has numbers to compare.

        Raises:
            ValueError: It has no evaluation, no time, or values that are not finite.
        """
        numbers = [number for point in self.curve for number in point]
        is_measured = _LEAST_SECONDS < (self.seconds or 0.0) < _MOST_SECONDS
        if self.failure is None and not (self.curve and is_measured and all(map(math.isfinite, numbers))):
            raise ValueError(
                "a run that did not fail has a curve of finite values, and took some time: "
                f"{_LEAST_SECONDS:g} to {_MOST_SECONDS:g} seconds"
            )

    def differences(self, other: Result) -> list[str]:
        """Return in words what shows that two runs are not of the same training; a killed run has no digests."""
        found = []
        if self.settings and other.settings:
            for name in self.settings | other.settings:
                mine, theirs = (one.settings.get(name, "none") for one in (self, other))
                if not _is_same(name, mine, theirs):
                    found.append(f"{name} ({mine}, now {theirs})")
        digests = {
            "first training batches": (self.batches, other.batches),
            "initial weights": (self.weights, other.weights),
        }
        return found + [
            name for name, (mine, theirs) in digests.items() if None not in {mine, theirs} and mine != theirs
        ]


# Others are no measurements, and their ratios may overflow.
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e12


def _is_same(name: str, mine: str, theirs: str) -> bool:
    """Return whether two settings are equal; another number of threads may round a loss differently."""
    # Former results lack the class of the network.
    return (
        mine == theirs
        or name == "model/network"
        or (name == FIRST_LOSS and math.isclose(float(mine), float(theirs), rel_tol=1e-3))
    )


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
        self.start: Result | None = None
        self.results: list[Result] = []
        written = path.read_bytes() if path.exists() else b""
        self._length = written.rfind(b"\n") + 1
        kinds = {"settings": Settings, "start": Result, "result": Result}
        for number, line in enumerate(written[: self._length].splitlines(), start=1):
            place = f"{path.name}, line {number}"
            try:
                ((name, data),) = json.loads(line).items()
                if isinstance(data, dict):  # earlier files lack some of them
                    added = {"clock": "wall", "held_out": []} if name == "settings" else {"warnings": [], "mode": ""}
                    data = {**added, **data}
                value = read(data, kinds[name], place)
                if name == "result":
                    value.check()
                self._add(name, value)
            except (AttributeError, KeyError, ValueError) as error:
                raise ValueError(
                    f"{place}: must be JSON with the key {', '.join(kinds)}, got {line[:80]!r}: {error}"
                ) from None

    def _add(self, name: str, value: Any) -> None:
        if name == "result":
            self.results.append(value)
        else:
            setattr(self, name, value)

    def append(self, name: str, value: Settings | Result) -> None:
        """Append a line.

        Args:
            name: ``"settings"``, ``"start"`` or ``"result"``.
            value: What it contains.
        """
        line = json.dumps({name: attrs.asdict(value)}, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with self.path.open("r+b", buffering=0) as file:
            file.truncate(self._length)
            file.seek(self._length)
            file.write(line)
            os.fsync(file.fileno())
        self._length += len(line)
        self._add(name, value)
