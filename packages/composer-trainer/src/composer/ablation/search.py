"""A greedy forward search for the set of algorithms with the best mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Arm = tuple[str, ...]


def next_round(
    names: Sequence[str], mean_of: Callable[[Arm], float | None], is_missing: Callable[[Arm], bool]
) -> tuple[Arm, list[Arm]]:
    """Return the best set until now, and the arms of the next round.

    Each round adds to the set the algorithm that improves the mean most, and the search ends if none improves it.

    Args:
        names: The algorithms; of equal means that of the first one counts.
        mean_of: Returns the mean of an arm, larger if it is better; None if the arm cannot be chosen, as a run failed.
        is_missing: Returns whether an arm has not all of its results yet.

    Returns:
        The set, and the arms of the next round, of which results are missing; none if the search is complete.

    Example:
        >>> means = {(): 0.5, ("a",): 0.7, ("b",): 0.6, ("a", "b"): 0.65}
        >>> next_round(["a", "b"], means.get, lambda arm: False)
        (('a',), [])
    """
    chosen: Arm = ()
    while True:
        arms = [tuple(one for one in names if one in {*chosen, name}) for name in names if name not in chosen]
        if any(map(is_missing, [(), *arms])):
            return chosen, arms
        best = mean_of(chosen)
        means = {arm: mean for arm in arms if (mean := mean_of(arm)) is not None and (best is None or mean > best)}
        if not means:
            return chosen, []
        chosen = max(means, key=means.__getitem__)
