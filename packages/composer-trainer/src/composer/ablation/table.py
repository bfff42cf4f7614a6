"""The rows of a study, and its table as a string and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import attrs

from composer.ablation.results import Settings, label
from composer.ablation.statistics import Difference, seeds_needed
from composer.loggers.values import aligned, html_table

__all__ = ["Row", "sentences", "to_html", "to_markdown", "to_string"]

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
        warnings: The warnings of its runs that the baseline does not give.
        note: What else a reader must know, such as that the arm is not complete.
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
    warnings: tuple[str, ...] = ()
    note: str = ""

    @property
    def label(self) -> str:
        """The arm's name."""
        return label(self.arm)

    @property
    def is_significant(self) -> bool:
        """Whether the adjusted p-value is below 0.05."""
        return self.adjusted_p is not None and self.adjusted_p < _SIGNIFICANT


def to_string(rows: Sequence[Row], settings: Settings) -> str:
    """Return the table with aligned columns, and the sentences below it."""
    lines = aligned(_cells(rows, settings), left=1)
    return "\n".join([_title(settings), "", *lines, "", *sentences(rows, settings)]).rstrip()


def to_markdown(rows: Sequence[Row], settings: Settings) -> str:
    """Return the table and its sentences in Markdown."""
    head, *others = ([cell.replace("|", "\\|") for cell in row] for row in _cells(rows, settings))
    rule = ["---", *(["---:"] * (len(head) - 1))]
    lines = [f"| {' | '.join(row)} |" for row in (head, rule, *others)]
    points = [f"- {one}" for one in sentences(rows, settings)]
    return "\n".join([_title(settings), "", *lines, "", *points]).rstrip() + "\n"


def to_html(rows: Sequence[Row], settings: Settings) -> str:
    """Return the table and its sentences for notebooks."""
    head, *others = _cells(rows, settings)
    below = "".join(f"<li>{escape(one)}</li>" for one in sentences(rows, settings))
    return f"{html_table(others, head, _title(settings))}<ul>{below}</ul>"


def sentences(rows: Sequence[Row], settings: Settings) -> list[str]:
    """Return what a reader of the table must know, one sentence each."""
    differences = {row.label: row.difference for row in rows if row.difference is not None}
    found = []
    # A difference of exactly 0 is no effect, for any number of seeds.
    unclear = {name: one for name, one in differences.items() if not one.is_clear and one.mean and one.pairs > 1}
    if len(settings.seeds) == 1:
        found.append("One seed: there are no intervals, and a difference may be chance.")
    elif unclear:
        needed = [(name, seeds_needed(one)) for name, one in unclear.items()]
        listed = ", ".join(f"{name} ({'over 1000' if n is None else f'about {n}'})" for name, n in needed)
        found.append(
            f"{len(settings.seeds)} seeds are too few to distinguish these from no effect; in parentheses, the "
            f"number of seeds if the difference is as measured: {listed}."
        )
    for word, sign in {"better": settings.sign, "worse": -settings.sign}.items():
        names = [row.label for row in rows if row.is_significant and sign * differences[row.label].mean > 0]
        if names:
            found.append(f"Clearly {word} than the baseline, with p-values adjusted for all arms: {', '.join(names)}.")
    chance = [row.label for row in rows if row.difference and row.difference.is_clear and not row.is_significant]
    if chance:
        found.append(
            f"{len(differences)} arms are compared with the baseline; with p-values adjusted for that, these "
            f"differences may be chance: {', '.join(chance)}."
        )
    if settings.clock == "processor":
        found.append("Times are processor time, of all threads.")
    if settings.is_rough:
        found.append("Times are rough (~): runs were executed beside each other or on different machines.")
    found += [f"{row.label}: {row.note}." for row in rows if row.note]
    found += [f"{row.label} warned: {message}" for row in rows for message in row.warnings]
    for row in rows:
        for reason in dict.fromkeys(reason for _, reason in row.failures):
            seeds = ", ".join(str(seed) for seed, one in row.failures if one == reason)
            found.append(f"{row.label} failed with seed {seeds}: {reason}")
    return found


def _title(settings: Settings) -> str:
    better = "higher" if settings.mode == "max" else "lower"
    count = f"{len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}"
    return f"{settings.metric} ({better} is better), {count}, paired by seed; intervals are of 95 %."


def _cells(rows: Sequence[Row], settings: Settings) -> list[list[str]]:
    goal = "baseline's final quality" if settings.target is None else f"{settings.target:g}"
    head = ["arm", "seeds", "metric", "difference", "p (Holm)", "time", "time ratio", f"time to {goal}", "speed-up"]
    return [[*head, "peak memory", "failed"], *(_cells_of(row, "~" if settings.is_rough else "") for row in rows)]


def _cells_of(row: Row, rough: str) -> list[str]:
    share = "" if row.reached == row.runs else f" ({row.reached}/{row.runs} runs)"
    to_quality = row.seconds_to_quality
    return [
        row.label,
        str(row.runs),
        _number(row.metric, "{:.4g}"),
        _interval(row.difference, "{:+.3g}"),
        _number(row.adjusted_p, "{:.2g}"),
        _number(row.seconds, rough + "{:.3g} s"),
        _interval(row.time_ratio, "{:.2f}", rough),
        "not reached" + share if to_quality == math.inf else _number(to_quality, rough + "{:.3g} s" + share),
        _number(row.speed_up or None, rough + "{:.2f}x"),
        _number(row.memory and row.memory / 2**20, "{:.0f} MiB"),
        str(len(row.failures)),
    ]


def _number(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def _interval(difference: Difference | None, form: str, prefix: str = "") -> str:
    if difference is None:
        return "-"
    mean = prefix + form.format(difference.mean)
    if difference.low is None:
        return mean
    return f"{mean} [{form.format(difference.low)}, {form.format(difference.high)}]"
