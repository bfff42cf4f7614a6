"""The page of a study: what was asked, what was measured, with which settings and on which machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.ablation.results import EVALUATION_DIGEST
from composer.core.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.ablation.study import Study

__all__ = ["write_report"]

_EMPTY = {"", "None", "{}", "[]", "()"}


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
        _answer(study),
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
    interval = ", of one seed" if gain.low is None else f" [{gain.low:+.3g}, {gain.high:+.3g}]"
    text = (
        f"**{rows[best].label} is better than the baseline: {settings.metric} is {rows[best].metric:.4g}, and the "
        f"baseline's {rows[()].metric:.4g}** (difference {gain.mean:+.3g}{interval})."
    )
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return text
    return f"{text} Its training takes {'~' if settings.is_rough else ''}{ratio.mean:.2f} times as long."


def _section(title: str, head: str, values: Mapping[str, Any]) -> list[str]:
    """Return the title and a table of the values that are not empty; nothing if all are."""
    rows = [(name, str(value)) for name, value in values.items() if str(value) not in _EMPTY]
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in ((head, "value"), ("---", "---"), *rows)
    ]
    return [f"## {title}", "\n".join(lines)] if rows else []
