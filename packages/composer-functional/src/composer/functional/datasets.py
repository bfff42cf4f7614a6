"""Data sets that consist of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def inner_datasets(outer: Any) -> list[Any]:
    """Return the data sets of a loader or of a data set such as ``Subset`` and ``ConcatDataset`` of torch.

    Example:
        >>> from torch.utils.data import ConcatDataset
        >>> inner_datasets(ConcatDataset([range(2), range(3)]))
        [range(0, 2), range(0, 3)]
    """
    several = getattr(outer, "datasets", None)
    if isinstance(several, Mapping):  # of a StackDataset
        several = [*several.values()]
    inner = [*several] if isinstance(several, (list, tuple)) else []
    inner.append(getattr(outer, "dataset", None))
    # Some data sets have the names of others in their place.
    return [one for one in inner if one is not None and one is not outer and not isinstance(one, str)]


def outermost(
    outer: Any, matches: Callable[[Any], bool], depth: int = 64, seen: dict[int, Any] | None = None
) -> list[Any]:
    """Return the outermost data sets that match, each once: ``outer`` itself, or some of those that it consists of.

    Args:
        outer: A loader or a data set.
        matches: Returns whether a data set is one of them.
        depth: The number of data sets within each other that are checked: those of a proxy, such as a mock, never end.
        seen: Those that have been checked, by their id; **changed in place**.

    Example:
        >>> from torch.utils.data import ConcatDataset
        >>> outermost(ConcatDataset([[1], "ab"]), lambda one: isinstance(one, list))
        [[1]]
    """
    seen = {} if seen is None else seen
    if id(outer) in seen:
        return []
    seen[id(outer)] = outer  # the object, which keeps its id
    if matches(outer):
        return [outer]
    return (
        [found for one in inner_datasets(outer) for found in outermost(one, matches, depth - 1, seen)] if depth else []
    )


def by_epoch(outer: Any) -> list[Any]:
    """Return the outermost data sets with a method ``set_epoch``, which they call for those that they consist of.

    Example:
        >>> from torch.utils.data import Subset
        >>> from composer.functional import AlternatingFlip
        >>> [type(one).__name__ for one in by_epoch(Subset(AlternatingFlip([]), []))]
        ['AlternatingFlip']
    """
    return outermost(outer, lambda one: callable(getattr(one, "set_epoch", None)))
