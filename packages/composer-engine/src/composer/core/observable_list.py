"""A list that reports its changes: the algorithms, callbacks and loggers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class ObservableList(MutableSequence[T]):
    """A list that calls the functions in ``on_change`` after each change, so that a plan is compiled only when needed.

    Args:
        items: The initial items.
        check: Raises if an item must not be in the list.

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
        """Insert an item before ``index``."""
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
        # All are checked before any is inserted, so that an error leaves the list as it was.
        for item in value if isinstance(index, slice) else [value]:
            self._check(item)
        self._items[index] = value
        self._changed()

    def extend(self, values: Iterable[T]) -> None:
        """Append all items, or none of them if the check raises for one."""
        # MutableSequence appends one by one, and each change makes the engine discard its plan.
        self[len(self) :] = values

    def sort(self, *, key: Callable[[T], Any], reverse: bool = False) -> None:
        """Sort the items in place."""
        self[:] = sorted(self._items, key=key, reverse=reverse)

    def copy(self) -> list[T]:
        """Return the items as a new list."""
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
