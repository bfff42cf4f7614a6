"""Algorithms, callbacks and loggers of a run: observable lists, their keys, and whether they keep optimizers valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

__all__ = ["ObservableList", "Ownership", "by_key", "numbered"]

T = TypeVar("T")

_REMEDY = "Pass optimizers=state.optimizers to the surgery, so that it moves them over."


def numbered(names: Iterable[str]) -> list[str]:
    """Return unique keys for names, some of which may be equal.

    Example:
        >>> numbered(["SGD", "Adam", "SGD"])
        ['SGD', 'Adam', 'SGD.1']
    """
    counts: dict[str, int] = {}
    keys = []
    for name in names:
        place = counts[name] = counts.get(name, -1) + 1
        keys.append(f"{name}.{place}" if place else name)
    return keys


def by_key(components: Iterable[T]) -> dict[str, T]:
    """Return components by their keys: the names of their classes, numbered from the second of a class on.

    Example:
        >>> by_key([1.5, 2, 2.5])
        {'float': 1.5, 'int': 2, 'float.1': 2.5}
    """
    components = list(components)
    return dict(zip(numbered(type(component).__name__ for component in components), components, strict=True))


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
        for item in value if isinstance(index, slice) else [value]:
            self._check(item)
        self._items[index] = value
        self._changed()

    def extend(self, values: Iterable[T]) -> None:
        """Append all items, or none of them if the check refuses one."""
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


class HasOptimizers(Protocol):
    """A state with a model and its optimizers."""

    model: Any

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers."""


class Ownership:
    """Checks that the optimizers hold the parameters of the model after each change to the model.

    Call :meth:`begin` first, and :meth:`check` after each component that may change the model.

    Example:
        >>> import torch
        >>> from composer.core import State
        >>> model = nn.Linear(2, 2)
        >>> state = State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> ownership = Ownership(state)
        >>> ownership.begin()
        >>> model.bias = nn.Parameter(torch.zeros(2))
        >>> ownership.check("MyAlgorithm")
        Traceback (most recent call last):
        RuntimeError: MyAlgorithm replaced parameters of the model, but an optimizer still holds the former 'bias', ...
    """

    def __init__(self, state: HasOptimizers) -> None:
        self._state = state
        self._before: Mapping[str, nn.Parameter] = {}
        self._owned_before: set[str] = set()

    def begin(self) -> None:
        """Store which parameters the model has and which of them the optimizers hold."""
        self._before = self._parameters()
        self._owned_before = {name for name, parameter in self._before.items() if id(parameter) in self._owned()}

    def check(self, component: str) -> None:
        """Compare with the stored parameters, and store the present ones.

        Parameters that no optimizer held before are the user's choice: new parameters must be in an optimizer only if
        those that they replace were, or if all trainable parameters were.

        Raises:
            RuntimeError: An optimizer holds a parameter that has left the model, or no optimizer holds a new one.
        """
        now, owned = self._parameters(), self._owned()
        if owned:
            present, former = _ids(now), _ids(self._before)
            stale = [n for n, old in self._before.items() if id(old) in owned and id(old) not in present]
            if stale:
                raise RuntimeError(
                    f"{component} replaced parameters of the model, but an optimizer still holds the former "
                    f"{_names(stale)}, so the new ones would never learn. {_REMEDY}"
                )
            owned_all = all(name in self._owned_before for name, old in self._before.items() if old.requires_grad)
            expected = now if owned_all else self._owned_before
            missing = [
                name
                for name, parameter in now.items()
                if parameter.requires_grad and id(parameter) not in owned | former and name in expected
            ]
            if missing:
                raise RuntimeError(
                    f"{component} gave the model new parameters that no optimizer holds, {_names(missing)}, "
                    f"so they would never learn. {_REMEDY}"
                )
        self.begin()

    def end(self) -> None:
        """Release the stored parameters."""
        self._before, self._owned_before = {}, set()

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        model = self._state.model
        return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}

    def _owned(self) -> set[int]:
        groups = (group for optimizer in self._state.optimizers for group in optimizer.param_groups)
        return {id(parameter) for group in groups for parameter in group["params"]}


def _ids(parameters: Mapping[str, nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters.values()}


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
