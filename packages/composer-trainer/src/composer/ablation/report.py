"""The page of a study: what was asked, what was measured, with which settings and on which machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    start = {} if study.start is None else study.start.settings
    facts = {name: value for part in settings.environment.values() for name, value in part.items()}
    sections = [
        f"# {question}",
        data,
        f"![{settings.metric} and the time of training of each arm]({picture.name})",
        study.to_markdown(),
        *_section("Methods", "method", methods),
        *_section("The baseline", "setting", start),
        *_section("Machine and versions", "name", facts),
    ]
    text = "\n\n".join(section.strip() for section in sections if section) + "\n"
    write_atomically(lambda unfinished: unfinished.write_text(text), path)


def _section(title: str, head: str, values: Mapping[str, Any]) -> list[str]:
    """Return the title and a table of the values that are not empty; nothing if all are."""
    rows = [(name, str(value)) for name, value in values.items() if str(value) not in _EMPTY]
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in ((head, "value"), ("---", "---"), *rows)
    ]
    return [f"## {title}", "\n".join(lines)] if rows else []
