"""What two algorithms of a run cannot both have to themselves."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import attrs
from typing_extensions import deprecated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from composer.core.algorithm import Algorithm

__all__ = ["AlgorithmConflictError", "Conflict", "ExclusiveResource", "check_conflicts", "find_conflicts"]


class ExclusiveResource(str):
    """What only one algorithm of a run may have to itself, in words, with what to do about a second.

    It equals its words, so one algorithm may declare an ``ExclusiveResource`` and the other a plain text.

    Args:
        words: What it is, as it is said after "must have": ``"the layer norms"``.
        remedy: What to do where two algorithms want it, in a sentence.

    Example:
        >>> norms = ExclusiveResource("the layer norms", remedy="Each makes them faster in its own way: keep one.")
        >>> norms == "the layer norms", norms.remedy
        (True, 'Each makes them faster in its own way: keep one.')
    """

    __slots__ = ("remedy",)
    remedy: str

    def __new__(cls, words: str, remedy: str = "") -> ExclusiveResource:
        """Return the words with their remedy."""
        owned = super().__new__(cls, words)
        owned.remedy = remedy
        return owned

    def __reduce__(self) -> tuple[type[ExclusiveResource], tuple[str, str]]:
        return type(self), (str(self), self.remedy)


@deprecated("composer.core.Owned is called ExclusiveResource now.")
class Owned(ExclusiveResource):
    """:class:`ExclusiveResource` under its former name."""


@attrs.frozen
class Conflict:
    """Two algorithms that cannot run together.

    Args:
        first, second: The algorithms, in the order of the list.
        owned: What both must have to themselves.
        remedies: What to do, for each of these that says it.
    """

    first: Algorithm
    second: Algorithm
    owned: tuple[str, ...]
    remedies: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = [type(self.first).__name__, type(self.second).__name__]
        who = f"Two {names[0]}" if names[0] == names[1] else " and ".join(names)
        text = (
            f"{who} cannot run together: each must have {' and '.join(self.owned)} to itself. "
            f"Remove one: {self.first!r} or {self.second!r}."
        )
        return " ".join([text, *self.remedies])


class AlgorithmConflictError(ValueError):
    """Algorithms of a run cannot work together; ``conflicts`` says which, a line each in the text.

    Example:
        >>> AlgorithmConflictError(()).conflicts
        ()
    """

    def __init__(self, conflicts: Iterable[Conflict]) -> None:
        self.conflicts = tuple(conflicts)
        super().__init__("\n".join(map(str, self.conflicts)))

    def __reduce__(self) -> tuple[type[AlgorithmConflictError], tuple[tuple[Conflict, ...]]]:
        return type(self), (self.conflicts,)


def find_conflicts(algorithms: Sequence[Algorithm]) -> tuple[Conflict, ...]:
    """Return which two of the algorithms own the same thing.

    Example:
        >>> find_conflicts([])
        ()
    """
    return tuple(
        Conflict(first, second, tuple(sorted(map(str, shared))), _remedies(shared, first, second))
        for first, second in combinations(algorithms, 2)
        if (shared := {*first.owns} & {*second.owns})
    )


def check_conflicts(algorithms: Sequence[Algorithm]) -> None:
    """Refuse algorithms that own the same thing.

    Raises:
        AlgorithmConflictError: For all pairs, with both names, what both own, and the remedy.
    """
    conflicts = find_conflicts(algorithms)
    if conflicts:
        raise AlgorithmConflictError(conflicts)


def _remedies(shared: set[str], *algorithms: Algorithm) -> tuple[str, ...]:
    # Either of the two may be the one that says what to do.
    declared = [one for algorithm in algorithms for one in sorted(algorithm.owns) if one in shared]
    texts = [one.remedy for one in declared if isinstance(one, ExclusiveResource) and one.remedy]
    return tuple(dict.fromkeys(texts))
