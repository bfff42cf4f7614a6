"""The results of a study as a table, a picture and data."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from composer.ablation.plot import plot_study
from composer.ablation.results import Result, ResultsFile, Settings, label
from composer.ablation.search import next_round
from composer.ablation.statistics import Difference, adjusted_p_values, paired_difference, paired_ratio, time_to
from composer.ablation.table import Row, interval, sentences, to_html, to_markdown, to_string, write_report
from composer.core.files import write_atomically

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.figure import Figure


class Study:
    """The results of :func:`~composer.ablation.ablate`; ``print(study)`` shows a table.

    Args:
        settings: What was measured.
        results: The results of the runs.
        start: The first batches of the baseline, with what identifies the training.

    Example:
        >>> runs = [Result((), seed, ((2.0, 0.8 + seed / 100),), 2.0) for seed in range(3)]
        >>> runs += [Result(("ema",), seed, ((2.0, 0.85 + seed / 90),), 2.0) for seed in range(3)]
        >>> settings = Settings("eval/Accuracy", "max", (0, 1, 2), {"ema": "EMA()"})
        >>> Study(settings, runs).best_recipe()
        ('ema',)
    """

    def __init__(self, settings: Settings, results: Sequence[Result], start: Result | None = None) -> None:
        self.settings, self.start, self._given = settings, start, results
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
        return cls(file.settings, file.results, file.start)

    def final_values(self, arm: tuple[str, ...]) -> dict[int, float]:
        """Return the metric's final value by seed, of the runs that did not fail."""
        return {seed: result.curve[-1][1] for seed, result in self._successful(arm).items()}

    def improvement(self, arm: tuple[str, ...], other: tuple[str, ...] = ()) -> Difference | None:
        """Return the paired difference of the metric between two arms; None if no seed has both."""
        return paired_difference(self.final_values(arm), self.final_values(other))

    def compare(self, arm: tuple[str, ...], other: tuple[str, ...] = ()) -> tuple[bool, bool]:
        """Return whether an arm is clearly better than another, and whether it is clearly slower.

        Clearly: the 95 % interval of the difference paired by seed, or of the ratio of the times, excludes no effect.
        """
        gain, ratio = self.improvement(arm, other), paired_ratio(self._seconds(arm), self._seconds(other))
        is_better = gain is not None and gain.is_clear and self.settings.sign * gain.mean > 0
        return is_better, ratio is not None and ratio.low is not None and ratio.low > 1

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
        sign, count = self.settings.sign, len(self._by_arm[()])
        candidates = []
        for arm in self._by_arm:
            gain = self.improvement(arm) if arm else None
            complete = len(self._successful(arm)) == count == len(self._by_arm[arm])
            if gain is not None and complete and sign * gain.mean > 0 and (gain.pairs == 1 or gain.is_clear):
                candidates.append((sign * gain.mean, -len(arm), arm))  # of equal ones, that with fewest algorithms
        return max(candidates)[-1] if candidates else ()

    @property
    def proposal(self) -> tuple[str, ...]:
        """The names of the algorithms that a greedy search proposes, until now if it is not complete; empty for none.

        The search adds in each round the algorithm that improves the mean over ``settings.seeds`` most, without those
        with which the baseline failed, and ends when none improves it. Its own numbers favour lucky algorithms:
        :attr:`held_out` has those to report.
        """
        return self.next_round()[0] if self.settings.held_out else ()

    @property
    def held_out(self) -> Study | None:
        """The baseline and the proposal of a greedy search, with the seeds that it has not used; None without one."""
        proposal = self.proposal
        if not proposal:
            return None
        settings = attrs.evolve(self.settings, seeds=self.settings.held_out, held_out=())
        return Study(settings, [one for one in self._given if one.arm in {(), proposal}], self.start)

    def next_round(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the best set that a greedy search has found, and the arms that it needs next; none at its end."""
        count, sign = len(self.settings.seeds), self.settings.sign

        def gain_of(arm: tuple[str, ...], other: tuple[str, ...]) -> float | None:
            gain = self.improvement(arm, other)  # on the seeds with which the baseline did not fail
            return None if gain is None or len(self.final_values(arm)) < count else sign * gain.mean

        return next_round([*self.settings.algorithms], gain_of, lambda arm: len(self._by_arm.get(arm, ())) < count)

    def sentences(self) -> list[str]:
        """Return what a reader of the table must know, one sentence each."""
        return self._about_proposal() + sentences(self.rows, self.settings)

    def __str__(self) -> str:
        return to_string(self.rows, self.settings, self.sentences())

    def _repr_html_(self) -> str:  # the method that notebooks call
        return to_html(self.rows, self.settings, self.sentences())

    def to_markdown(self) -> str:
        """Return the table and its sentences in Markdown."""
        return to_markdown(self.rows, self.settings, self.sentences())

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
            "proposal": self.proposal,
            "held_out": None if (held_out := self.held_out) is None else json.loads(held_out.to_json()),
        }
        text = json.dumps(_finite(data), indent=2, allow_nan=False)
        if path is not None:
            write_atomically(lambda unfinished: unfinished.write_text(text), Path(path))
        return text

    def report(self, path: str | os.PathLike[str], question: str = "Which methods pay?", data: str = "") -> None:
        """Write a page in Markdown that shows the study to others, and its picture beside it.

        It has the question, the answer of the results, the data, the picture, the table with what a reader must know,
        the settings of the methods
        and of the baseline, and the machine and versions.

        Args:
            path: The page, such as ``"results/page.md"``; the picture is ``results/page.png``.
            question: The title.
            data: A paragraph in Markdown about the data, the task and how settings were selected.

        Raises:
            ValueError: No arm has a result.
            ModuleNotFoundError: matplotlib is not installed.
        """
        write_report(self, Path(path), question, data)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot quality against time with intervals.

        Arms that are clearly better or clearly faster than the baseline are blue. A dashed line connects those of them
        of which each takes clearly longer than the one before, and is clearly better.

        Args:
            path: The picture to write; its suffix selects the format. Without one, the figure is one of pyplot, which
                a notebook shows.

        Returns:
            The figure.

        Raises:
            ValueError: No arm has a result.
            ModuleNotFoundError: matplotlib is not installed.
        """
        return plot_study(self, path)

    def _about_proposal(self) -> list[str]:
        """Return what the greedy search proposes, and the estimate with the seeds held out."""
        if not self.settings.held_out:
            return []
        proposal, missing = self.next_round()
        progress = " until now" if missing else ""
        if not proposal:
            has_failed = self._by_arm[()] and not self.final_values(())
            reason = "the baseline failed with each seed" if has_failed else "none improves the mean of the baseline"
            return [f"The greedy search proposes no algorithm{progress}: {reason}."]
        compared, held_out = len(self._by_arm) - 1, self.held_out
        found = (
            f"The greedy search proposes {label(proposal)}{progress}. Its difference in the table is the best one of "
            f"{compared} arms, partly by luck: neither it nor its p-value is an estimate of the gain."
        )
        if held_out is None or (gain := held_out.improvement(proposal)) is None:
            return [found]
        finals = [held_out.final_values(arm) for arm in (proposal, ())]
        common = [seed for seed in finals[0] if seed in finals[1]]
        mine, theirs = (statistics.fmean(each[seed] for seed in common) for each in finals)
        seeds = ", ".join(map(str, common))
        estimate = (
            f"The estimate is that with the seeds that the search has not used ({seeds}): {mine:.4g} with "
            f"{label(proposal)}, {theirs:.4g} with the baseline, a difference of {interval(gain, '{:+.3g}')}."
        )
        return [found, estimate]

    def _successful(self, arm: tuple[str, ...]) -> dict[int, Result]:
        return {seed: result for seed, result in sorted(self._by_arm.get(arm, {}).items()) if result.failure is None}

    def _seconds(self, arm: tuple[str, ...]) -> dict[int, float]:
        return {seed: one.seconds for seed, one in self._successful(arm).items() if one.seconds is not None}

    def _warnings(self, arm: tuple[str, ...]) -> list[str]:
        return list(dict.fromkeys(message for one in self._by_arm[arm].values() for message in one.warnings))

    def _row(self, arm: tuple[str, ...]) -> Row:
        runs, baseline = self._successful(arm), self._successful(())
        failures = tuple((one.seed, one.failure) for one in self._by_arm[arm].values() if one.failure is not None)
        count, planned = len(self._by_arm[arm]), len(self.settings.seeds)
        warned = tuple(one for one in self._warnings(arm) if not arm or one not in self._warnings(()))
        note = f"not complete, after {count} of {planned} seeds" if count < planned else ""
        if not runs:
            return Row(arm, 0, failures=failures, warnings=warned, note=note)
        values = list(self.final_values(arm).values())
        seconds = self._seconds(arm)
        to_quality = self._times_to_quality(runs)
        median = statistics.median(to_quality.values()) if to_quality else None
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
            time_ratio=paired_ratio(seconds, self._seconds(())) if arm else None,
            seconds_to_quality=median,
            # of two seeds of which one does not reach the quality, the mean of 0 and a ratio means nothing
            speed_up=(0.0 if median == math.inf else statistics.median(speed_ups)) if arm and speed_ups else None,
            reached=sum(map(math.isfinite, to_quality.values())),
            memory=max((one.memory for one in runs.values() if one.memory is not None), default=None),
            failures=failures,
            warnings=warned,
            note=note,
        )

    def _times_to_quality(self, runs: dict[int, Result]) -> dict[int, float]:
        """Return the seconds to the quality by seed, for the seeds that have one."""
        target, finals = self.settings.target, self.final_values(())
        goals = {seed: finals.get(seed) if target is None else target for seed in runs}
        sign = self.settings.sign
        return {seed: time_to(goal, runs[seed].curve, sign) for seed, goal in goals.items() if goal is not None}


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
