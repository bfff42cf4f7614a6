"""The results of a study as a table, a picture and data."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from composer.ablation.results import Result, ResultsFile, Settings, label
from composer.ablation.statistics import Difference, adjusted_p_values, paired_difference, seeds_needed, time_to
from composer.core.files import write_atomically

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

__all__ = ["Row", "Study"]

_SIGNIFICANT = 0.05


@attrs.frozen
class Row:
    """An arm of a study.

    Args:
        arm: The names of its algorithms; empty for the baseline.
        runs: The number of seeds with a result.
        metric: The mean of the metric's final values; None without a result.
        spread: Their standard deviation; None below two.
        difference: The metric's difference to the baseline, paired by seed; None for the baseline.
        adjusted_p: The p-value of the difference, adjusted for the number of arms (Holm); None without one.
        seconds: The mean time of training.
        time_ratio: The geometric mean of the ratio to the baseline's time, with its interval.
        seconds_to_quality: The median time to the quality: the baseline's final one with the same seed, or the study's
            target. Infinite if most runs did not reach it.
        speed_up: The median ratio of the baseline's time to the quality and this arm's; 0 if most did not reach it.
        reached: The number of runs that reached the quality.
        memory: The highest peak memory, in bytes.
        failures: Seeds and reasons of runs that failed.
        note: What else a reader must know, such as that the arm was stopped early.
    """

    arm: tuple[str, ...]
    runs: int
    metric: float | None = None
    spread: float | None = None
    difference: Difference | None = None
    adjusted_p: float | None = None
    seconds: float | None = None
    time_ratio: Difference | None = None
    seconds_to_quality: float | None = None
    speed_up: float | None = None
    reached: int = 0
    memory: int | None = None
    failures: tuple[tuple[int, str], ...] = ()
    note: str = ""

    @property
    def label(self) -> str:
        """The arm's name."""
        return label(self.arm)


class Study:
    """The results of :func:`~composer.ablation.ablate`; ``print(study)`` shows a table.

    Args:
        settings: What was measured.
        results: The results of the runs.

    Example:
        >>> runs = [Result((), seed, ((2.0, 0.8 + seed / 100),), 2.0) for seed in range(3)]
        >>> runs += [Result(("ema",), seed, ((2.0, 0.85 + seed / 90),), 2.0) for seed in range(3)]
        >>> settings = Settings("eval/Accuracy", "max", (0, 1, 2), {"ema": "EMA()"})
        >>> Study(settings, runs).best_recipe()
        ('ema',)
    """

    def __init__(self, settings: Settings, results: Sequence[Result]) -> None:
        self.settings = settings
        # A result of a seed that is not wanted any more is kept in the file.
        self.results = [result for result in results if result.seed in settings.seeds]
        self._by_arm: dict[tuple[str, ...], dict[int, Result]] = {(): {}}
        for result in self.results:
            self._by_arm.setdefault(result.arm, {})[result.seed] = result

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Study:
        """Load the study that :func:`~composer.ablation.ablate` has written to a folder, also while it is running.

        Raises:
            FileNotFoundError: The folder has no results.
            ValueError: The results are damaged.
        """
        file = ResultsFile(Path(folder) / "results.jsonl")
        if file.settings is None:
            raise FileNotFoundError(f"folder must have been written by ablate(), and {file.path} has no results.")
        return cls(file.settings, file.results)

    def final_values(self, arm: tuple[str, ...]) -> dict[int, float]:
        """Return the metric's final value by seed, of the runs that did not fail."""
        return {seed: result.curve[-1][1] for seed, result in self._successful(arm).items()}

    def improvement(self, arm: tuple[str, ...], other: tuple[str, ...] = ()) -> Difference | None:
        """Return the paired difference of the metric between two arms; None if no seed has both."""
        return _paired(self.final_values(arm), self.final_values(other))

    @property
    def rows(self) -> list[Row]:
        """The arms, the baseline first."""
        rows = [self._row(arm) for arm in self._by_arm]
        tested = [row for row in rows if row.difference is not None and row.difference.p_value is not None]
        p_values = adjusted_p_values([row.difference.p_value for row in tested])  # type: ignore[union-attr, misc]
        adjusted = dict(zip((row.arm for row in tested), p_values, strict=True))
        return [attrs.evolve(row, adjusted_p=adjusted.get(row.arm)) for row in rows]

    def best_recipe(self) -> tuple[str, ...]:
        """Return the names of the algorithms of the best arm.

        It is the arm with the best mean among those that are better than the baseline with an interval that excludes 0
        (with one seed: that are better), ran with as many seeds as the baseline and never failed. The tuple is empty if
        there is none. Choosing the best of many arms favours lucky ones: confirm it with other seeds.
        """
        sign, baseline = self.settings.sign, self._successful(())
        candidates = []
        for arm in self._by_arm:
            gain = self.improvement(arm) if arm else None
            complete = len(self._successful(arm)) == len(baseline) == len(self._by_arm[arm])
            if gain is not None and complete and sign * gain.mean > 0 and (gain.pairs == 1 or gain.is_clear):
                candidates.append((sign * gain.mean, -len(arm), arm))  # of equal ones, that with fewest algorithms
        return max(candidates)[-1] if candidates else ()

    def sentences(self) -> list[str]:
        """Return what a reader of the table must know, one sentence each."""
        rows, settings = self.rows, self.settings
        differences = {row.label: row.difference for row in rows if row.difference is not None}
        found = []
        if len(settings.seeds) == 1:
            found.append("One seed: there are no intervals, and a difference may be chance.")
        else:
            # A difference of exactly 0 is no effect, for any number of seeds.
            open_ = {name: one for name, one in differences.items() if not one.is_clear and one.mean and one.pairs > 1}
            if open_:
                needed = [(seeds_needed(one), name) for name, one in open_.items()]
                listed = ", ".join(f"{name} ({'over 1000' if n is None else f'about {n}'})" for n, name in needed)
                found.append(
                    f"{len(settings.seeds)} seeds are too few to distinguish these from no effect; in parentheses, the "
                    f"number of seeds if the difference is as measured: {listed}."
                )
        chance = [row.label for row in rows if row.difference and row.difference.is_clear and not _is_significant(row)]
        if chance:
            found.append(
                f"{len(differences)} arms are compared with the baseline; with p-values adjusted for that, these "
                f"differences may be chance: {', '.join(chance)}."
            )
        if settings.is_rough:
            found.append("Times are rough (~): runs were executed beside each other or on different machines.")
        found += [f"{row.label}: {row.note}." for row in rows if row.note]
        for row in rows:
            for reason in dict.fromkeys(reason for _, reason in row.failures):
                seeds = ", ".join(str(seed) for seed, one in row.failures if one == reason)
                found.append(f"{row.label} failed with seed {seeds}: {reason}")
        return found

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self._title(), "", *lines, "", *self.sentences()]).rstrip()

    def to_markdown(self) -> str:
        """Return the table and its sentences in Markdown."""
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in self._cells())
        rule = ["---", *(["---:"] * (len(head) - 1))]
        lines = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
        return "\n".join([self._title(), "", *lines, "", *(f"- {one}" for one in self.sentences())]).rstrip() + "\n"

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return settings, rows and results as JSON, and write them to ``path`` if it is given.

        Numbers that are infinite become None: a quality that was not reached has no time.
        """
        data = {
            "settings": attrs.asdict(self.settings),
            "rows": [{"label": row.label, **attrs.asdict(row)} for row in self.rows],
            "results": [attrs.asdict(result) for result in self.results],
            "best_recipe": self.best_recipe(),
            "sentences": self.sentences(),
        }
        text = json.dumps(_finite(data), indent=2, allow_nan=False)
        if path is not None:
            write_atomically(lambda unfinished: unfinished.write_text(text), Path(path))
        return text

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot quality against time with intervals, and the front of best trade-offs.

        Args:
            path: The picture to write, if any; its suffix selects the format.

        Returns:
            The figure.

        Raises:
            ValueError: No arm has a result.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from composer.ablation.plot import plot_study  # noqa: PLC0415  (this module is imported there for its types)

        return plot_study(self, path)

    def _successful(self, arm: tuple[str, ...]) -> dict[int, Result]:
        return {seed: result for seed, result in sorted(self._by_arm.get(arm, {}).items()) if result.failure is None}

    def _row(self, arm: tuple[str, ...]) -> Row:
        runs, baseline = self._successful(arm), self._successful(())
        failures = tuple((one.seed, one.failure) for one in self._by_arm[arm].values() if one.failure is not None)
        note, planned = "", len(self.settings.seeds)
        if len(self._by_arm[arm]) < planned:
            why = "not complete" if self.settings.budget is None else "stopped early to stay within the budget"
            note = f"{why}, after {len(self._by_arm[arm])} of {planned} seeds"
        if not runs:
            return Row(arm, 0, failures=failures, note=note)
        values = list(self.final_values(arm).values())
        seconds = {seed: one.seconds for seed, one in runs.items() if one.seconds is not None}
        of_baseline = {seed: one.seconds for seed, one in baseline.items() if one.seconds is not None}
        to_quality = self._times_to_quality(runs)
        speed_ups = [
            0.0 if math.isinf(to_quality[seed]) else theirs / to_quality[seed]
            for seed, theirs in self._times_to_quality(baseline).items()
            if seed in to_quality
        ]
        return Row(
            arm,
            len(runs),
            statistics.fmean(values),
            statistics.stdev(values) if len(values) > 1 else None,
            self.improvement(arm) if arm else None,
            seconds=statistics.fmean(seconds.values()) if seconds else None,
            time_ratio=_paired(seconds, of_baseline, math.log, math.exp) if arm else None,
            seconds_to_quality=statistics.median(to_quality.values()) if to_quality else None,
            speed_up=statistics.median(speed_ups) if arm and speed_ups else None,
            reached=sum(map(math.isfinite, to_quality.values())),
            memory=max((one.memory for one in runs.values() if one.memory is not None), default=None),
            failures=failures,
            note=note,
        )

    def _times_to_quality(self, runs: dict[int, Result]) -> dict[int, float]:
        """Return the seconds to the quality by seed, for the seeds that have one."""
        target, finals = self.settings.target, self.final_values(())
        goals = {seed: finals.get(seed) if target is None else target for seed in runs}
        sign = self.settings.sign
        return {seed: time_to(goal, runs[seed].curve, sign) for seed, goal in goals.items() if goal is not None}

    def _title(self) -> str:
        settings = self.settings
        better = "higher" if settings.mode == "max" else "lower"
        count = f"{len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}"
        return f"{settings.metric} ({better} is better), {count}, paired by seed; intervals are of 95 %."

    def _cells(self) -> list[list[str]]:
        goal = "baseline's final quality" if self.settings.target is None else f"{self.settings.target:g}"
        head = ["arm", "seeds", "metric", "difference", "p (Holm)", "time", "time ratio", f"time to {goal}", "speed-up"]
        return [[*head, "peak memory", "failed"], *(self._cells_of(row) for row in self.rows)]

    def _cells_of(self, row: Row) -> list[str]:
        rough = "~" if self.settings.is_rough else ""
        share = "" if row.reached == row.runs else f" ({row.reached}/{row.runs} runs)"
        to_quality = row.seconds_to_quality
        return [
            row.label,
            str(row.runs),
            _text(row.metric, "{:.4g}"),
            _interval(row.difference, "{:+.3g}"),
            _text(row.adjusted_p, "{:.2g}"),
            _text(row.seconds, rough + "{:.3g} s"),
            _interval(row.time_ratio, "{:.2f}", rough),
            "never" + share if to_quality == math.inf else _text(to_quality, rough + "{:.3g} s" + share),
            "-" if not row.speed_up else f"{rough}{row.speed_up:.2f}x",
            _text(row.memory and row.memory / 2**20, "{:.0f} MiB"),
            str(len(row.failures)),
        ]


def _is_significant(row: Row) -> bool:
    return row.adjusted_p is not None and row.adjusted_p < _SIGNIFICANT


def _paired(
    values: dict[int, float],
    others: dict[int, float],
    forward: Callable[[float], float] = float,
    back: Callable[[float], float] = float,
) -> Difference | None:
    """Return the paired difference of what two arms have for the same seeds, computed on another scale."""
    seeds = [seed for seed in values if seed in others]
    if not seeds:
        return None
    one = paired_difference([forward(values[seed]) for seed in seeds], [forward(others[seed]) for seed in seeds])
    low, high = (None if end is None else back(end) for end in (one.low, one.high))
    return Difference(back(one.mean), low, high, one.p_value, one.pairs)


def _text(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def _interval(difference: Difference | None, form: str, prefix: str = "") -> str:
    if difference is None:
        return "-"
    mean = prefix + form.format(difference.mean)
    if difference.low is None:
        return mean
    return f"{mean} [{form.format(difference.low)}, {form.format(difference.high)}]"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
