"""The rows of a study, and its table and page as text, in Markdown and in HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from composer.ablation.results import EVALUATION_DIGEST, Settings, label
from composer.ablation.statistics import Difference, seeds_needed
from composer.core.files import write_atomically
from composer.loggers.values import aligned, html_table, markdown_table

if TYPE_CHECKING:
    from composer.ablation.study import Study

_SIGNIFICANT = 0.05
_EMPTY = {"", "None", "{}", "[]", "()"}


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


def to_string(rows: Sequence[Row], settings: Settings, below: Sequence[str]) -> str:
    """Return the table with aligned columns, and the sentences below it."""
    lines = aligned(_cells(rows, settings), left=1)
    return "\n".join([_title(settings), "", *lines, "", *below]).rstrip()


def to_markdown(rows: Sequence[Row], settings: Settings, below: Sequence[str]) -> str:
    """Return the table and its sentences in Markdown."""
    points = [f"- {one}" for one in below]
    return (
        "\n".join([_title(settings), "", markdown_table(_cells(rows, settings), left=1), "", *points]).rstrip() + "\n"
    )


def to_html(rows: Sequence[Row], settings: Settings, below: Sequence[str]) -> str:
    """Return the table and its sentences for notebooks."""
    head, *others = _cells(rows, settings)
    points = "".join(f"<li>{escape(one)}</li>" for one in below)
    return f"{html_table(others, head, _title(settings))}<ul>{points}</ul>"


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


def write_report(study: Study, path: Path, question: str, data: str) -> None:
    """Write the page and its picture; see :meth:`.Study.report`."""
    picture = path.with_suffix(".png")
    study.plot(picture)
    settings = study.settings
    methods = {
        name: f"`{text}`" for name, text in settings.algorithms.items() if any(name in row.arm for row in study.rows)
    }
    given = {} if study.start is None else study.start.settings
    start = {
        name: value
        for name, value in given.items()
        if name != EVALUATION_DIGEST and not (name.startswith("optimizers/") and value == "False")
    }
    facts = {name: value for part in settings.environment.values() for name, value in part.items()}
    sections = [
        f"# {question}",
        _answer(study.held_out or study),
        data,
        f"![{settings.metric} and the time of training of each arm]({picture.name})",
        study.to_markdown(),
        *_section("Methods", "method", methods),
        *_section("The baseline", "setting", start),
        *_section("Machine and versions", "name", facts),
    ]
    text = "\n\n".join(section.strip() for section in sections if section) + "\n"
    write_atomically(lambda unfinished: unfinished.write_text(text), path)


def _answer(study: Study) -> str:
    """Return what the results show: the best arm and its time, or that there is none; nothing without a comparison."""
    settings, rows = study.settings, {row.arm: row for row in study.rows}
    if not any(row.difference for row in rows.values()):
        return ""
    best = study.best_recipe()
    if not best:
        return "**No arm is clearly better than the baseline.**"
    gain, ratio = rows[best].difference, rows[best].time_ratio
    assert gain is not None
    difference = interval(gain, "{:+.3g}") + (", of one seed" if gain.low is None else "")
    text = (
        f"**{rows[best].label} is better than the baseline: {settings.metric} is {rows[best].metric:.4g}, and the "
        f"baseline's {rows[()].metric:.4g}** (difference {difference})."
    )
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return text
    return f"{text} Its training takes {'~' if settings.is_rough else ''}{ratio.mean:.2f} times as long."


def _section(title: str, head: str, values: Mapping[str, Any]) -> list[str]:
    """Return the title and a table of the values that are not empty; nothing if all are."""
    rows = [(name, str(value)) for name, value in values.items() if str(value) not in _EMPTY]
    return [f"## {title}", markdown_table([(head, "value"), *rows])] if rows else []


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
        interval(row.difference, "{:+.3g}"),
        _number(row.adjusted_p, "{:.2g}"),
        _number(row.seconds, rough + "{:.3g} s"),
        interval(row.time_ratio, "{:.2f}", rough),
        "not reached" + share if to_quality == math.inf else _number(to_quality, rough + "{:.3g} s" + share),
        _number(row.speed_up or None, rough + "{:.2f}x"),
        _number(row.memory and row.memory / 2**20, "{:.0f} MiB"),
        str(len(row.failures)),
    ]


def _number(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def interval(difference: Difference | None, form: str, prefix: str = "") -> str:
    """Return the mean of a difference with its interval, if it has one."""
    if difference is None:
        return "-"
    mean = prefix + form.format(difference.mean)
    if difference.low is None:
        return mean
    return f"{mean} [{form.format(difference.low)}, {form.format(difference.high)}]"
