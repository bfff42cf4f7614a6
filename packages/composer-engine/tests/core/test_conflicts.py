"""What two algorithms cannot both have."""

import copy
import pickle

import pytest

from composer.core import AlgorithmConflictError, Event, Stage, explain
from composer.core.conflicts import ExclusiveResource, check_conflicts, find_conflicts

WEIGHTS = ExclusiveResource("the weights used for evaluation", remedy="Both average: keep the one whose span you want.")


@pytest.fixture
def owner(make):
    """Return a maker of algorithms that own something."""
    return lambda name, *owns: make.algorithm(name, {Event.BATCH_END: Stage.WEIGHTS}, owns={*owns})


class TestRefusal:
    def test_two_owners_are_refused(self, owner):
        """The sentence has both names, what both want, and what to do."""
        ema, swa = owner("EMA", WEIGHTS), owner("SWA", WEIGHTS, "the learning rate")

        with pytest.raises(AlgorithmConflictError) as caught:
            explain([ema, swa])

        assert str(caught.value) == (
            "EMA and SWA cannot run together: each must have the weights used for evaluation to itself. "
            f"Remove one: {ema!r} or {swa!r}. Both average: keep the one whose span you want."
        )

    def test_twice_the_same_class(self, owner):
        """The second of two owners of one class would find nothing to do."""
        blurpool = owner("BlurPool", "strided layers")

        with pytest.raises(AlgorithmConflictError, match=r"^Two BlurPool cannot run together"):
            explain([blurpool, copy.copy(blurpool)])

    def test_owners_of_different_things(self, owner):
        """Algorithms that share nothing have no conflict."""
        check_conflicts([owner("A", "a"), owner("B", "b"), owner("C")])

        assert find_conflicts([owner("A", "a"), owner("B", "b"), owner("C")]) == ()

    def test_all_pairs_are_told_at_once(self, owner):
        """All conflicts are reported at once: one line for each pair, and the same as data."""
        a, b, c = owner("A", "x"), owner("B", "x", "y"), owner("C", "y")

        with pytest.raises(AlgorithmConflictError) as caught:
            check_conflicts([a, b, c])

        assert [(one.first, one.second, one.owned) for one in caught.value.conflicts] == [
            (a, b, ("x",)),
            (b, c, ("y",)),
        ]
        assert [line.split(" cannot")[0] for line in str(caught.value).splitlines()] == ["A and B", "B and C"]

    def test_error_can_be_pickled(self, owner):
        """It comes through between processes, with its data."""
        error = AlgorithmConflictError(())

        assert pickle.loads(pickle.dumps(error)).conflicts == ()


class TestOwned:
    @pytest.mark.parametrize("place", [0, 1])
    def test_one_that_knows_the_remedy_is_enough(self, owner, place):
        """A plain string and an ExclusiveResource of the same name are equal; the remedy comes from either."""
        words = [str(WEIGHTS), str(WEIGHTS)]
        words[place] = WEIGHTS

        (conflict,) = find_conflicts([owner("EMA", words[0]), owner("Mine", words[1])])

        assert conflict.owned == ("the weights used for evaluation",)
        assert conflict.remedies == (WEIGHTS.remedy,)

    def test_remedies_of_what_is_not_shared(self, owner):
        """A resource of only one algorithm is not mentioned."""
        (conflict,) = find_conflicts([owner("A", WEIGHTS, "x"), owner("B", "x")])

        assert conflict.remedies == ()

    def test_same_remedy_is_said_once(self, owner):
        """Also where both have it."""
        (conflict,) = find_conflicts([owner("EMA", WEIGHTS), owner("SWA", WEIGHTS)])

        assert str(conflict).count(WEIGHTS.remedy) == 1

    def test_several_shared_things(self, owner):
        """All are named, in an order that does not depend on the sets."""
        (conflict,) = find_conflicts([owner("A", "y", WEIGHTS, "x"), owner("B", "x", "y")])

        assert conflict.owned == ("x", "y")
        assert "each must have x and y to itself" in str(conflict)

    @pytest.mark.parametrize("through", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_copies_keep_the_remedy(self, through):
        """It is a text with an attribute, and stays one."""
        again = through(WEIGHTS)

        assert (again, again.remedy, hash(again)) == (WEIGHTS, WEIGHTS.remedy, hash(str(WEIGHTS)))
