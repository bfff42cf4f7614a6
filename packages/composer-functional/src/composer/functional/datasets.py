"""Data sets that consist of others."""

from __future__ import annotations

from collections.abc import Mapping
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
    inner = several if isinstance(several, (list, tuple)) else [getattr(outer, "dataset", None)]
    return [one for one in inner if one is not None and one is not outer]


def by_epoch(outer: Any, depth: int = 64) -> list[Any]:
    """Return the outermost data sets with a method ``set_epoch``, which they call for those that they consist of.

    At most ``depth`` data sets are checked, each within the one before: those of a proxy, such as a mock, never end.

    Example:
        >>> from torch.utils.data import Subset
        >>> from composer.functional import AlternatingFlip
        >>> [type(one).__name__ for one in by_epoch(Subset(AlternatingFlip([]), []))]
        ['AlternatingFlip']
    """
    if callable(getattr(outer, "set_epoch", None)):
        return [outer]
    return [found for one in inner_datasets(outer) for found in by_epoch(one, depth - 1)] if depth else []
