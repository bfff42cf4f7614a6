"""The page of a study: what was asked, what was measured, with which settings and on which machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.core.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.ablation.study import Study

__all__ = ["write_report"]


def write_report(study: Study, path: Path, question: str, data: str) -> None:
    """Write the page and its picture; see :meth:`.Study.report`."""
    picture = path.with_suffix(".png")
    study.plot(picture)
    settings = study.settings
    methods = {
        name: f"`{text}`" for name, text in settings.algorithms.items() if any(name in row.arm for row in study.rows)
    }
    facts = {name: value for part in settings.environment.values() for name, value in part.items() if value is not None}
    sections = [
        f"# {question}",
        data,
        f"![{settings.metric} and the time of training of each arm]({picture.name})",
        study.to_markdown(),
        "## Methods",
        _table(("method", "settings"), methods),
    ]
    if study.start is not None:
        sections += ["## The baseline", _table(("setting", "value"), study.start.settings)]
    sections += ["## Machine and versions", _table(("", ""), facts)]
    text = "\n\n".join(section.strip() for section in sections if section) + "\n"
    write_atomically(lambda unfinished: unfinished.write_text(text), path)


def _table(head: tuple[str, str], rows: Mapping[str, Any]) -> str:
    cells = [head, ("---", "---"), *((name.replace("_", " "), str(value)) for name, value in rows.items())]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells
    )
