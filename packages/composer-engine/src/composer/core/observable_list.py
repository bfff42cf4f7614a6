"""A list that reports its changes: the algorithms, callbacks and loggers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partialmethod
from typing import Any, Self, TypeVar

T = TypeVar("T")


class ObservableList(list[T]):
    """A list that calls the functions in ``on_change`` after each change, so that a plan is compiled only when needed.

    Args:
        items: The initial items.
        check: Raises if an item must not be in the list, which then remains as it was.

    Example:
        >>> names = ObservableList(["a"], check=lambda name: None)
        >>> names.on_change.append(lambda: print("changed"))
        >>> names.append("b")
        changed
    """

    def __init__(self, items: Iterable[T], check: Callable[[Any], None]) -> None:
        super().__init__(items)
        self._check = check
        self.on_change: list[Callable[[], None]] = []
        for item in self:
            check(item)

    def _change(self, name: str, *args: Any, **options: Any) -> Any:
        """Call the method of a list, check what it gives, and report the change."""
        changed = [*self]
        result = getattr(changed, name)(*args, **options)
        for item in changed:
            self._check(item)
        list.__setitem__(self, slice(None), changed)
        for call in self.on_change:
            call()
        return result

    def __iadd__(self, items: Iterable[T]) -> Self:  # type: ignore[override, misc]
        self.extend(items)
        return self


for _name in ["append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "__setitem__", "__delitem__"]:
    setattr(ObservableList, _name, partialmethod(ObservableList._change, _name))  # noqa: SLF001
