"""A greedy forward search for the best set of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Arm = tuple[str, ...]


def next_round(
    names: Sequence[str], gain_of: Callable[[Arm, Arm], float | None], is_missing: Callable[[Arm], bool]
) -> tuple[Arm, list[Arm]]:
    """Return the best set until now, and the arms of the next round.

    Each round adds to the set the algorithm that improves the mean most, and the search ends if none improves it.

    Args:
        names: The algorithms; of equal gains that of the first one counts.
        gain_of: Returns the gain of an arm over another, more than 0 if it is better; None if the arm cannot be chosen,
            as a run failed.
        is_missing: Returns whether an arm has not all of its results yet.

    Returns:
        The set, and the arms of the next round, of which results are missing; none if the search is complete.

    Example:
        >>> means = {(): 0.5, ("a",): 0.7, ("b",): 0.6, ("a", "b"): 0.65}
        >>> next_round(["a", "b"], lambda arm, other: means[arm] - means[other], lambda arm: False)
        (('a',), [])
    """
    chosen: Arm = ()
    while True:
        arms = [tuple(one for one in names if one in {*chosen, name}) for name in names if name not in chosen]
        if any(map(is_missing, [(), *arms])):
            return chosen, arms
        gains = {arm: gain for arm in arms if (gain := gain_of(arm, chosen)) is not None and gain > 0}
        if not gains:
            return chosen, []
        chosen = max(gains, key=gains.__getitem__)
