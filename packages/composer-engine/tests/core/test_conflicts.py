"""Resources that two algorithms cannot share."""

import copy
import pickle

import pytest

from composer.core import AlgorithmConflictError, Event, Stage, explain
from composer.core.conflicts import ExclusiveResource, check_conflicts, find_conflicts

WEIGHTS = ExclusiveResource("the weights used for evaluation", remedy="Both average: keep the one whose span you want.")


@pytest.fixture
def owner(make):
    """Return a function that creates algorithms with exclusive resources."""
    return lambda name, *owns: make.algorithm(name, {Event.BATCH_END: Stage.WEIGHTS}, owns={*owns})


class TestConflictError:
    def test_two_owners_raise(self, owner):
        """The error states both names, the resource and the remedy."""
        ema, swa = owner("EMA", WEIGHTS), owner("SWA", WEIGHTS, "the learning rate")

        with pytest.raises(AlgorithmConflictError) as caught:
            explain([ema, swa])

        assert str(caught.value) == (
            "EMA and SWA cannot run together: each must have the weights used for evaluation to itself. "
            f"Remove one: {ema!r} or {swa!r}. Both average: keep the one whose span you want."
        )

    def test_two_instances_of_one_class_raise(self, owner):
        """Two owners of one class conflict."""
        blurpool = owner("BlurPool", "strided layers")

        with pytest.raises(AlgorithmConflictError, match=r"^Two BlurPool cannot run together"):
            explain([blurpool, copy.copy(blurpool)])

    def test_owners_of_different_resources(self, owner):
        """Algorithms that share no resource do not conflict."""
        check_conflicts([owner("A", "a"), owner("B", "b"), owner("C")])

        assert find_conflicts([owner("A", "a"), owner("B", "b"), owner("C")]) == ()

    def test_all_pairs_are_reported_together(self, owner):
        """All conflicts are reported together, one line per pair, and as data."""
        a, b, c = owner("A", "x"), owner("B", "x", "y"), owner("C", "y")

        with pytest.raises(AlgorithmConflictError) as caught:
            check_conflicts([a, b, c])

        assert [(one.first, one.second, one.owned) for one in caught.value.conflicts] == [
            (a, b, ("x",)),
            (b, c, ("y",)),
        ]
        assert [line.split(" cannot")[0] for line in str(caught.value).splitlines()] == ["A and B", "B and C"]

    def test_error_can_be_pickled(self, owner):
        """The error is pickled with its data."""
        error = AlgorithmConflictError(())

        assert pickle.loads(pickle.dumps(error)).conflicts == ()


class TestOwned:
    @pytest.mark.parametrize("place", [0, 1])
    def test_remedy_of_either_side_is_used(self, owner, place):
        """A string and an ExclusiveResource of the same name are equal; the remedy of either is used."""
        words = [str(WEIGHTS), str(WEIGHTS)]
        words[place] = WEIGHTS

        (conflict,) = find_conflicts([owner("EMA", words[0]), owner("Mine", words[1])])

        assert conflict.owned == ("the weights used for evaluation",)
        assert conflict.remedies == (WEIGHTS.remedy,)

    def test_unshared_resources_are_not_mentioned(self, owner):
        """A resource of only one algorithm is not mentioned."""
        (conflict,) = find_conflicts([owner("A", WEIGHTS, "x"), owner("B", "x")])

        assert conflict.remedies == ()

    def test_equal_remedies_are_shown_once(self, owner):
        """A remedy that both have is shown once."""
        (conflict,) = find_conflicts([owner("EMA", WEIGHTS), owner("SWA", WEIGHTS)])

        assert str(conflict).count(WEIGHTS.remedy) == 1

    def test_several_shared_resources(self, owner):
        """All shared resources are listed, in an order independent of set order."""
        (conflict,) = find_conflicts([owner("A", "y", WEIGHTS, "x"), owner("B", "x", "y")])

        assert conflict.owned == ("x", "y")
        assert "each must have x and y to itself" in str(conflict)

    @pytest.mark.parametrize("through", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_copies_preserve_the_remedy(self, through):
        """Copies are strings with the remedy."""
        again = through(WEIGHTS)

        assert (again, again.remedy, hash(again)) == (WEIGHTS, WEIGHTS.remedy, hash(str(WEIGHTS)))
