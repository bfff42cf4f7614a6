"""A list of algorithms, callbacks or loggers that tells when it has been changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any, TypeVar, overload

__all__ = ["ObservableList"]

T = TypeVar("T")


class ObservableList(MutableSequence[T]):
    """A list whose changes are seen, so that a plan is made anew when, and only when, it has to be.

    Args:
        items: What is in it.
        check: Raises if an item does not belong into the list.

    Example:
        >>> names = ObservableList(["a"], check=lambda name: None)
        >>> names.on_change.append(lambda: print("changed"))
        >>> names.append("b")
        changed
    """

    def __init__(self, items: Iterable[T], check: Callable[[Any], None]) -> None:
        self._items = list(items)
        self._check = check
        self.on_change: list[Callable[[], None]] = []
        for item in self._items:
            check(item)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def _changed(self) -> None:
        for call in self.on_change:
            call()

    def insert(self, index: int, value: T) -> None:
        """Put an item before ``index``."""
        self._check(value)
        self._items.insert(index, value)
        self._changed()

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        value = [*value] if isinstance(index, slice) else value
        for item in value if isinstance(index, slice) else [value]:
            self._check(item)
        self._items[index] = value
        self._changed()

    def extend(self, values: Iterable[T]) -> None:
        """Add all items at the end, or none of them if one does not belong into the list."""
        self[len(self) :] = values

    def sort(self, *, key: Callable[[T], Any], reverse: bool = False) -> None:
        """Sort the items in place."""
        self[:] = sorted(self._items, key=key, reverse=reverse)

    def copy(self) -> list[T]:
        """Return the items as a list of its own."""
        return list(self._items)

    def __add__(self, others: Iterable[T]) -> list[T]:
        return [*self._items, *others]

    def __radd__(self, others: Iterable[T]) -> list[T]:
        return [*others, *self._items]

    def __delitem__(self, index: int | slice) -> None:
        del self._items[index]
        self._changed()

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, ObservableList) else other)

    __hash__ = None  # type: ignore[assignment]  # as a list
