"""Running passes over the algorithms of an event, and saying which pass put what where."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer.core.algorithm import Algorithm
    from composer.core.event import Event
    from composer.core.passes import AlgorithmPass

__all__ = ["Ordered", "apply_passes", "moved_items", "pass_name"]

T = TypeVar("T")


@attrs.frozen
class Ordered:
    """The algorithms of an event after all passes.

    Args:
        algorithms: In the order in which they run.
        placed_by: For each of them the passes to which it owes a place out of the list's order.
        left_out: What passes did not return, with the pass that did not.
    """

    algorithms: tuple[Algorithm, ...]
    placed_by: tuple[tuple[str, ...], ...]
    left_out: tuple[tuple[Algorithm, str], ...]


def apply_passes(algorithms: Sequence[Algorithm], event: Event, passes: Sequence[AlgorithmPass]) -> Ordered:
    """Return the algorithms of an event as the passes order them, from first to last.

    Raises:
        TypeError: A pass returns nothing.
        ValueError: A pass returns what it was not given, or one algorithm twice.
    """
    history = [("", list(algorithms))]
    left_out: list[tuple[Algorithm, str]] = []
    for one_pass in passes:
        before, name = history[-1][1], pass_name(one_pass)
        if not before:
            break
        after = _checked(one_pass(list(before), event), before, event, name)
        kept = {id(algorithm) for algorithm in after}
        left_out += [(algorithm, name) for algorithm in before if id(algorithm) not in kept]
        history.append((name, after))
    final = history[-1][1]
    moved = {id(algorithm) for algorithm in moved_items(algorithms, final)}
    placed_by = [_placers(algorithm, history) if id(algorithm) in moved else () for algorithm in final]
    return Ordered(tuple(final), tuple(placed_by), tuple(left_out))


def pass_name(one_pass: AlgorithmPass) -> str:
    """Return what a pass is called in a plan."""
    return getattr(one_pass, "__name__", None) or repr(one_pass)


def moved_items(before: Sequence[T], after: Sequence[T]) -> list[T]:
    """Return which items of ``after`` have moved: those that do not stay in every shortest account of the change.

    Where one item went to the end, that one has moved and not all that it passed; where two changed places, both have.

    Example:
        >>> moved_items("abcd", "bcda"), moved_items("ab", "ba")
        (['a'], ['b', 'a'])
    """
    place = {id(item): index for index, item in enumerate(before)}
    places = [place[id(item)] for item in after]
    # An item stays in every longest run of unmoved items if no other could take its place in it.
    ending = _longest_runs(places)
    beginning = [*reversed(_longest_runs([-index for index in reversed(places)]))]
    longest = max(ending, default=0)
    fitting = [e if e + b - 1 == longest else 0 for e, b in zip(ending, beginning, strict=True)]
    return [item for item, position in zip(after, fitting, strict=True) if not position or fitting.count(position) > 1]


def _longest_runs(numbers: Sequence[int]) -> list[int]:
    """Return for each number the length of the longest increasing subsequence that ends with it."""
    lengths: list[int] = []
    for place, number in enumerate(numbers):
        before = (length for length, earlier in zip(lengths, numbers[:place], strict=True) if earlier < number)
        lengths.append(1 + max(before, default=0))
    return lengths


def _placers(algorithm: Algorithm, history: Sequence[tuple[str, Sequence[Algorithm]]]) -> tuple[str, ...]:
    """Return the passes that, for good, brought it to the other side of another algorithm."""
    placers: set[int] = set()
    for other in history[-1][1]:
        if other is algorithm:
            continue
        is_first = [_index(order, algorithm) < _index(order, other) for _, order in history]
        if is_first[-1] is not is_first[0]:
            placers.add(max(step for step in range(1, len(history)) if is_first[step] is not is_first[step - 1]))
    return tuple(history[step][0] for step in sorted(placers))


def _index(order: Sequence[Algorithm], algorithm: Algorithm) -> int:
    return next(place for place, one in enumerate(order) if one is algorithm)


def _checked(returned: object, given: Sequence[Algorithm], event: Event, name: str) -> list[Algorithm]:
    if not isinstance(returned, (list, tuple)):
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise TypeError(
            f"The pass {name} returned {what} at {event.value!r}; it must return the algorithms, as a list or tuple."
        )
    unused = {id(algorithm) for algorithm in given}
    for algorithm in returned:
        if id(algorithm) not in unused:
            raise ValueError(
                f"The pass {name} returned {algorithm!r} at {event.value!r}, which it was not given (or not twice); "
                "a pass may change the order and leave algorithms out."
            )
        unused.remove(id(algorithm))
    return list(returned)
