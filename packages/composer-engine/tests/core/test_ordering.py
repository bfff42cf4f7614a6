"""Which pass put what where."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Event, Stage
from composer.core.ordering import apply_passes, moved_items
from composer.core.passes import default_passes, sort_to_back


def reverse(algorithms, event):
    return algorithms[::-1]


@pytest.fixture
def abcd(make):
    return [make.algorithm(name, dict.fromkeys(Event, Stage.AUGMENT)) for name in "ABCD"]


def last(algorithm):
    """Return a pass that puts one algorithm last."""

    def run_last(algorithms, event):
        return sort_to_back(algorithms, type(algorithm))

    return run_last


def placed(ordered):
    """Return what was ordered, as {name: passes}."""
    named = [type(algorithm).__name__ for algorithm in ordered.algorithms]
    return dict(zip(named, ordered.placed_by, strict=True))


class TestMovedItems:
    @pytest.mark.parametrize(
        ("before", "after", "moved"),
        [
            ("", "", ""),
            ("abcd", "abcd", ""),
            ("abcd", "bcda", "a"),
            ("abcd", "dabc", "d"),
            ("abcd", "acbd", "cb"),
            ("ab", "ba", "ba"),
            ("abc", "cba", "cba"),
            ("abcde", "adbce", "d"),
        ],
    )
    def test_examples(self, before, after, moved):
        """The fewest moves that explain the change; where two are as good, both items have moved."""
        assert moved_items(before, after) == [*moved]

    @given(st.permutations("abcdef"))
    def test_is_what_trying_all_subsets_says(self, after):
        """An item stayed if it is in each largest set of items that kept their order."""
        ordered = [
            kept
            for size in range(len(after) + 1)
            for kept in itertools.combinations(after, size)
            if [*kept] == sorted(kept)
        ]
        largest = [set(kept) for kept in ordered if len(kept) == max(map(len, ordered))]

        assert moved_items("abcdef", after) == [item for item in after if not all(item in kept for kept in largest)]


class TestPlacedBy:
    def test_only_who_was_moved_is_said_to_be_moved(self, abcd):
        """A goes last; B, C and D have only moved up, and no pass is named for them."""
        ordered = apply_passes(abcd, Event.BATCH_END, [*default_passes(), last(abcd[0])])

        assert placed(ordered) == {"B": (), "C": (), "D": (), "A": ("run_last",)}

    def test_pass_that_changed_nothing_is_not_named(self, abcd):
        """D is last already."""
        ordered = apply_passes(abcd, Event.BATCH_END, [*default_passes(), last(abcd[3])])

        assert placed(ordered) == dict.fromkeys("ABCD", ())

    def test_pass_that_was_undone_is_not_named(self, abcd):
        """Two reversals are none."""
        assert placed(apply_passes(abcd, Event.BATCH_END, [reverse, reverse])) == dict.fromkeys("ABCD", ())

    @pytest.mark.parametrize("stages", [(Stage.AUGMENT, Stage.MIX), (Stage.MIX, Stage.AUGMENT)])
    @pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.AFTER_LOSS, Event.BATCH_END])
    def test_stages_and_list_are_no_pass_of_the_user(self, make, stages, event):
        """What the default passes do is the rule, and no entry names them."""
        algorithms = [make.algorithm(s.name, {event: s}) for s in stages]

        ordered = apply_passes(algorithms, event, default_passes())

        assert placed(ordered) == {"AUGMENT": (), "MIX": ()}

    def test_pass_that_restores_the_list_s_order_against_the_stages_is_named(self, make):
        """Moved is what is not where the rules had put it, also where that is the order of the list."""
        mix, augment = (make.algorithm(s.name, {Event.BATCH_END: s}) for s in (Stage.MIX, Stage.AUGMENT))

        ordered = apply_passes([mix, augment], Event.BATCH_END, [*default_passes(), last(augment)])

        assert placed(ordered) == {"MIX": ("run_last",), "AUGMENT": ("run_last",)}

    @pytest.mark.parametrize("event", [Event.AFTER_LOAD, Event.BATCH_END])
    def test_early_pass_is_named_if_it_lasts(self, abcd, event):
        """A pass before the default ones that exchanges two of one stage is what decided their order."""

        def swap(algorithms, event):
            return [algorithms[1], algorithms[0], *algorithms[2:]]

        ordered = apply_passes(abcd, event, [swap, *default_passes()])

        assert placed(ordered) == {"A": ("swap",), "B": ("swap",), "C": (), "D": ()}

    def test_last_pass_to_do_it_is_named(self, abcd):
        """Who put it where it is now: not those whose work was overruled."""

        def again(algorithms, event):
            return sort_to_back(algorithms, type(abcd[0]))

        ordered = apply_passes(abcd, Event.BATCH_END, [last(abcd[0]), reverse, reverse, again])

        assert placed(ordered)["A"] == ("reverse",)

    def test_both_passes_are_named_where_both_had_a_part(self, abcd):
        """A was brought behind B by one pass, and behind C and D by another."""

        def swap(algorithms, event):
            return [algorithms[1], algorithms[0], *algorithms[2:]]

        assert placed(apply_passes(abcd, Event.BATCH_END, [swap, last(abcd[0])]))["A"] == ("swap", "run_last")


class TestWhatPassesReturn:
    def test_nothing(self, abcd):
        """The specification's example forgets to return; the sentence says which pass and where."""

        def run_last(algorithms, event):
            sort_to_back(algorithms, object)

        with pytest.raises(TypeError, match="The pass run_last returned nothing at 'batch_end'; it must return"):
            apply_passes(abcd, Event.BATCH_END, [run_last])

    @pytest.mark.parametrize("returned", [iter(()), 3, "AB"])
    def test_no_list(self, abcd, returned):
        """An iterator or a number is no list of algorithms."""
        with pytest.raises(TypeError, match="it must return the algorithms, as a list or tuple"):
            apply_passes(abcd, Event.BATCH_END, [lambda algorithms, event: returned])

    def test_fewer(self, abcd):
        """A pass may leave algorithms out, and that is recorded with its name."""

        def without_b(algorithms, event):
            return [one for one in algorithms if one is not abcd[1]]

        ordered = apply_passes(abcd, Event.BATCH_END, [without_b, reverse])

        assert [type(one).__name__ for one in ordered.algorithms] == ["D", "C", "A"]
        assert ordered.left_out == ((abcd[1], "without_b"),)

    def test_none_left(self, abcd):
        """After a pass that leaves out everything the others have nothing to do."""
        assert apply_passes(abcd, Event.BATCH_END, [lambda *_: [], reverse]).algorithms == ()

    @pytest.mark.parametrize("more", [lambda given: [*given, given[0]], lambda given: [*given, object()]])
    def test_more(self, abcd, more):
        """What was not given, or is returned twice, is refused."""
        with pytest.raises(ValueError, match="which it was not given"):
            apply_passes(abcd, Event.BATCH_END, [lambda algorithms, event: more(algorithms)])

    def test_sorting_in_place(self, abcd):
        """A pass gets a list of its own, which it may sort and return; it is still seen to have done it."""

        def in_place(algorithms, event):
            algorithms.append(algorithms.pop(0))
            return algorithms

        ordered = apply_passes(abcd, Event.BATCH_END, [in_place])

        assert [type(one).__name__ for one in abcd] == [*"ABCD"]
        assert placed(ordered) == {"B": (), "C": (), "D": (), "A": ("in_place",)}

    def test_callable_objects_are_named_by_their_repr(self, abcd):
        """A pass without a name is still told."""

        class Pass:
            def __call__(self, algorithms, event):
                return algorithms[1:] + algorithms[:1]

            def __repr__(self):
                return "Pass()"

        assert placed(apply_passes(abcd, Event.BATCH_END, [Pass()]))["A"] == ("Pass()",)
