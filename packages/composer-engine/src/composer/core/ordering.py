"""Running passes over the algorithms of an event, and saying which of the user's passes put what where."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

import attrs

from composer.core.passes import default_passes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer.core.algorithm import Algorithm
    from composer.core.event import Event
    from composer.core.passes import AlgorithmPass

__all__ = ["Ordered", "apply_passes", "moved_items", "pass_name"]

T = TypeVar("T")
_RULES = default_passes()


_Step: TypeAlias = "tuple[str, Sequence[Algorithm], Sequence[Algorithm]]"
"""A pass that is none of the default ones, and the order before and after it."""


@attrs.frozen
class Ordered:
    """The algorithms of an event after all passes.

    Args:
        algorithms: In the order in which they run.
        placed_by: For each of them the passes, other than the default ones, that moved it from where these put it.
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
    order = list(algorithms)
    left_out: list[tuple[Algorithm, str]] = []
    steps: list[_Step] = []
    for one_pass in passes:
        if not order:
            break
        name = pass_name(one_pass)
        before, order = order, _checked(one_pass(list(order), event), order, event, name)
        kept = {id(algorithm) for algorithm in order}
        left_out += [(algorithm, name) for algorithm in before if id(algorithm) not in kept]
        if not _is_rule(one_pass):
            steps.append((name, before, order))
    placed_by = _placed_by(order, _by_rules(algorithms, event, passes), steps) if steps else [()] * len(order)
    return Ordered(tuple(order), tuple(placed_by), tuple(left_out))


def _is_rule(one_pass: AlgorithmPass) -> bool:
    return any(one_pass is rule for rule in _RULES)


def _by_rules(algorithms: Sequence[Algorithm], event: Event, passes: Sequence[AlgorithmPass]) -> Sequence[Algorithm]:
    """Return the order that the default passes alone would have given."""
    for one_pass in passes:
        algorithms = one_pass(algorithms, event) if _is_rule(one_pass) else algorithms
    return algorithms


def _placed_by(
    final: Sequence[Algorithm], by_rules: Sequence[Algorithm], steps: Sequence[_Step]
) -> list[tuple[str, ...]]:
    moved = {id(algorithm) for algorithm in moved_items(by_rules, final)}
    return [_placers(algorithm, final, by_rules, steps) if id(algorithm) in moved else () for algorithm in final]


def _placers(
    algorithm: Algorithm, final: Sequence[Algorithm], by_rules: Sequence[Algorithm], steps: Sequence[_Step]
) -> tuple[str, ...]:
    """Return the passes that, as the last to do so, brought it to the other side of another algorithm."""
    placers: set[int] = set()
    for other in final:
        if other is not algorithm and _is_first(algorithm, other, final) is not _is_first(algorithm, other, by_rules):
            turned = [
                number
                for number, (_, before, after) in enumerate(steps)
                if _is_first(algorithm, other, before) is not _is_first(algorithm, other, after)
            ]
            placers.update(turned[-1:])
    return tuple(steps[number][0] for number in sorted(placers))


def _is_first(one: Algorithm, other: Algorithm, order: Sequence[Algorithm]) -> bool:
    return next(algorithm is one for algorithm in order if algorithm is one or algorithm is other)


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
