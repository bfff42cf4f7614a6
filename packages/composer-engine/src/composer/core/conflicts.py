"""Exclusive resources: what only one algorithm of a run may own."""

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
    """A resource that only one algorithm of a run may own, with a remedy for conflicts.

    It is a string, so one algorithm may declare an ``ExclusiveResource`` and another the same plain string.

    Args:
        words: The name of the resource, as it follows "must have": ``"the layer norms"``.
        remedy: What to do if two algorithms own it, in a sentence.

    Example:
        >>> norms = ExclusiveResource("the layer norms", remedy="Each makes them faster in its own way: keep one.")
        >>> norms == "the layer norms", norms.remedy
        (True, 'Each makes them faster in its own way: keep one.')
    """

    __slots__ = ("remedy",)
    remedy: str

    def __new__(cls, words: str, remedy: str = "") -> ExclusiveResource:
        """Return the name with its remedy."""
        resource = super().__new__(cls, words)
        resource.remedy = remedy
        return resource

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
        owned: The resources that both own.
        remedies: The remedies of those resources that have one.
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
    """Algorithms of a run cannot work together; ``conflicts`` lists the pairs, and the message has a line for each.

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
    """Return the pairs of algorithms that own the same resource.

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
    """Refuse algorithms that own the same resource.

    Raises:
        AlgorithmConflictError: For all pairs, with both names, the resource and the remedy.
    """
    conflicts = find_conflicts(algorithms)
    if conflicts:
        raise AlgorithmConflictError(conflicts)


def _remedies(shared: set[str], *algorithms: Algorithm) -> tuple[str, ...]:
    # Only one of the two may have declared a remedy.
    declared = [one for algorithm in algorithms for one in sorted(algorithm.owns) if one in shared]
    texts = [one.remedy for one in declared if isinstance(one, ExclusiveResource) and one.remedy]
    return tuple(dict.fromkeys(texts))
