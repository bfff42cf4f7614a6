"""What loading a saved state does, or why it cannot be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from composer.core.checks import abridged

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Findings", "LoadReport", "StateMismatchError"]


class StateMismatchError(ValueError):
    """What was saved does not fit; nothing has been changed. ``problems`` has a sentence for each difference."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(map(abridged, problems))
        title = "The saved state does not fit this run, and nothing has been changed:"
        super().__init__("\n- ".join([title, *self.problems]))


@attrs.frozen
class LoadReport:
    """What loading a saved state does, or would do; each line is a sentence or a path.

    Args:
        restored: What is taken over, by path.
        overridden: Where this run's own value stays.
        missing: What this run has and the saved state lacks; it begins anew.
        unexpected: What was saved and this run lacks; it is left aside.
        changed: Settings that differ.

    Example:
        >>> print(LoadReport(restored=("timestamp",), changed=("algorithms.MixUp.alpha: 0.2 was saved, 0.4 is set.",)))
        restored: timestamp
        changed: algorithms.MixUp.alpha: 0.2 was saved, 0.4 is set.
    """

    restored: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """What is not as it was saved, and may make the run another one."""
        return (*self.missing, *self.unexpected, *self.changed)

    def __str__(self) -> str:
        held = attrs.asdict(self)
        return "\n".join(
            f"{name}: {', '.join(lines)}" if name == "restored" else f"{name}: {' '.join(lines)}"
            for name, lines in held.items()
            if lines
        )


@attrs.define
class Findings:
    """A report that is being written, and ``problems``: what makes loading impossible.

    Example:
        >>> Findings(missing=["callbacks.SpeedMonitor is not saved."]).report(strict=False).missing
        ('callbacks.SpeedMonitor is not saved.',)
    """

    restored: list[str] = attrs.field(factory=list)
    overridden: list[str] = attrs.field(factory=list)
    missing: list[str] = attrs.field(factory=list)
    unexpected: list[str] = attrs.field(factory=list)
    changed: list[str] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)

    def report(self, *, strict: bool) -> LoadReport:
        """Return the report.

        Raises:
            StateMismatchError: Something cannot be loaded, or differs where nothing may.
        """
        report = LoadReport(*(tuple(map(abridged, getattr(self, field.name))) for field in attrs.fields(LoadReport)))
        problems = [*self.problems, *(report.differences if strict else ())]
        if problems:
            raise StateMismatchError(problems)
        return report
