"""The passes that order algorithms, and which pass moved what."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Event, Stage
from composer.core.passes import (
    apply_passes,
    default_passes,
    moved_items,
    order_by_stage,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_low_precision_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    stage_of,
    warn_if_multiple_loss_interpolation,
)

CLOSING = {Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD}


def everywhere(stage):
    return dict.fromkeys(Event, stage)


def names(algorithms):
    return [type(algorithm).__name__ for algorithm in algorithms]


def through_all(algorithms, event):
    for one_pass in default_passes():
        algorithms = one_pass(algorithms, event)
    return names(algorithms)


@pytest.mark.parametrize(("sort", "expected"), [(sort_to_front, ["b", "d", 1, 3]), (sort_to_back, [1, 3, "b", "d"])])
def test_sort_to_an_end_keeps_the_rest(sort, expected):
    """One class moves to an end; among themselves all stay as they were."""
    assert sort([1, "b", 3, "d"], str) == expected


@pytest.mark.parametrize("event", Event)
def test_set_filo_order(event):
    """A, B, C, D become D, C, B, A on AFTER_* events, and stay on all others."""
    assert [*set_filo_order("ABCD", event)] == [*("DCBA" if "AFTER_" in event.name else "ABCD")]


class TestOrderOfStages:
    @pytest.mark.parametrize("event", Event)
    def test_stages_are_reversed_only_where_something_is_undone(self, event, make):
        """Lower stages run first; at AFTER_FORWARD, AFTER_LOSS and AFTER_BACKWARD they run last."""
        late, early = (make.algorithm(s.name, everywhere(s)) for s in (Stage.LABEL, Stage.MIX))

        assert through_all([late, early], event) == (["LABEL", "MIX"] if event in CLOSING else ["MIX", "LABEL"])

    @pytest.mark.parametrize("event", Event)
    def test_list_order_is_reversed_at_all_after_events(self, event, make):
        """Within a stage the list decides; first in is last out wherever the event's name begins with AFTER_."""
        algorithms = [make.algorithm(name, everywhere(Stage.AUGMENT)) for name in "ABC"]

        assert through_all(algorithms, event) == [*("CBA" if "AFTER_" in event.name else "ABC")]

    def test_selective_backprop_is_first_after_the_dataloader(self, make):
        """Although the list is reversed there, what selects samples comes before what changes them."""
        select = make.algorithm("Select", {Event.AFTER_DATALOADER: Stage.SELECT})
        cutout = make.algorithm("CutOut", {Event.AFTER_DATALOADER: Stage.AUGMENT})

        for algorithms in ([select, cutout], [cutout, select]):
            assert through_all(algorithms, Event.AFTER_DATALOADER) == ["Select", "CutOut"]

    def test_norms_and_layout_come_last_in_surgery(self, make):
        """Fused norms see every norm that other surgery brought; the memory format concerns the finished model."""
        layout = make.algorithm("ChannelsLast", {Event.INIT: Stage.LAYOUT})
        fused = make.algorithm("FusedLayerNorm", {Event.INIT: Stage.PRECISION})
        blocks = make.algorithm("GatedLinearUnits", {Event.INIT: Stage.ARCHITECTURE})

        assert through_all([layout, fused, blocks], Event.INIT) == [
            "GatedLinearUnits",
            "FusedLayerNorm",
            "ChannelsLast",
        ]

    def test_undeclared_algorithms_come_after_all_others(self, make):
        """An algorithm without a stage runs last; at INIT it may replace blocks, so norms and layout come later."""
        matching = make.algorithm("Matching", match=lambda *_: True)
        weights = make.algorithm("Weights", everywhere(Stage.WEIGHTS))
        layout = make.algorithm("Layout", everywhere(Stage.LAYOUT))

        assert through_all([matching, weights], Event.BATCH_END) == ["Weights", "Matching"]
        assert through_all([layout, matching], Event.INIT) == ["Matching", "Layout"]

    def test_stage_of(self, make):
        """The declared stage, or what an undeclared algorithm counts as."""
        algorithm = make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS})

        assert [stage_of(algorithm, event) for event in (Event.BATCH_END, Event.INIT, Event.EPOCH_END)] == [
            Stage.WEIGHTS,
            Stage.ARCHITECTURE,
            Stage.UNDECLARED,
        ]


class TestSinglePasses:
    def test_selective_backprop_first(self, make):
        """The pass alone puts the stage SELECT first, and touches nothing where something is undone."""
        a, select = make.algorithm("A", everywhere(Stage.MIX)), make.algorithm("S", everywhere(Stage.SELECT))

        assert names(sort_selective_backprop_first([a, select], Event.AFTER_DATALOADER)) == ["S", "A"]
        assert names(sort_selective_backprop_first([a, select], Event.AFTER_LOSS)) == ["A", "S"]

    def test_fused_layernorm_last(self, make):
        """The pass alone puts the stage PRECISION behind the rest, at events that change the model."""
        fused, a = make.algorithm("F", everywhere(Stage.PRECISION)), make.algorithm("A", everywhere(Stage.MIX))

        assert names(sort_fused_layernorm_last([fused, a], Event.AFTER_LOAD)) == ["A", "F"]
        assert names(sort_fused_layernorm_last([fused, a], Event.BATCH_END)) == ["F", "A"]

    @pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START])
    def test_norms_are_not_put_behind_what_uses_the_finished_model(self, event, make):
        """Where norms are replaced and the optimizer is wrapped at one event, the wrapped one holds the new norms."""
        stages = [one for one in Stage if one is not Stage.UNDECLARED]
        algorithms = [make.algorithm(one.name, everywhere(one)) for one in stages]

        assert through_all(algorithms, event) == [one.name for one in stages]
        assert through_all(algorithms[::-1], event) == [one.name for one in stages]

    def test_fused_layernorm_has_both_names(self):
        """The specification and the reference call it differently."""
        assert sort_low_precision_layernorm_last is sort_fused_layernorm_last

    def test_order_by_stage_keeps_the_order_within_a_stage(self, make):
        """Sorting is stable, in both directions."""
        algorithms = [make.algorithm(name, everywhere(Stage.MIX)) for name in "ABC"]

        assert names(order_by_stage(algorithms, Event.BATCH_END)) == names(order_by_stage(algorithms, Event.AFTER_LOSS))

    def test_two_interpolations_of_the_loss_are_warned_about(self, make):
        """Both names and the remedy are in the warning, and the order stays."""
        both = [make.algorithm(name, interpolate_loss=True) for name in ("MixUp", "CutMix")]

        with pytest.warns(UserWarning, match="CutMix and MixUp all interpolate the loss.*interpolate_loss=False"):
            assert warn_if_multiple_loss_interpolation(both, Event.BEFORE_BACKWARD) == both

    def test_one_interpolation_of_the_loss_is_fine(self, make):
        """A single interpolation causes no warning."""
        algorithms = [make.algorithm("MixUp", interpolate_loss=True), make.algorithm("CutMix", interpolate_loss=False)]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert warn_if_multiple_loss_interpolation(algorithms, Event.BEFORE_BACKWARD) == algorithms


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
        """The items that moved relative to the others; if two neighbours changed places, both."""
        assert moved_items(before, after) == [*moved]

    @given(st.permutations("abcdef"))
    def test_the_other_items_kept_their_order(self, after):
        """Without the items that moved, before and after are the same."""
        moved = moved_items("abcdef", after)

        assert [item for item in "abcdef" if item not in moved] == [item for item in after if item not in moved]


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

    def test_all_passes_that_moved_it_are_named_once(self, abcd):
        """A is not where the default passes put it: the passes that moved it are named, in their order."""

        def again(algorithms, event):
            return sort_to_back(algorithms, type(abcd[0]))

        ordered = apply_passes(abcd, Event.BATCH_END, [last(abcd[0]), reverse, reverse, again])

        assert placed(ordered)["A"] == ("run_last", "reverse")

    def test_both_passes_are_named_where_both_had_a_part(self, abcd):
        """A was brought behind B by one pass, and behind C and D by another."""

        def swap(algorithms, event):
            return [algorithms[1], algorithms[0], *algorithms[2:]]

        assert placed(apply_passes(abcd, Event.BATCH_END, [swap, last(abcd[0])]))["A"] == ("swap", "run_last")


class TestWhatPassesReturn:
    def test_nothing(self, abcd):
        """The specification's example returns nothing; the error names the pass and the event."""

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
        """Algorithms that were not passed in, or are returned twice, are refused."""
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
        """A pass without a name is named by its repr."""

        class Pass:
            def __call__(self, algorithms, event):
                return algorithms[1:] + algorithms[:1]

            def __repr__(self):
                return "Pass()"

        assert placed(apply_passes(abcd, Event.BATCH_END, [Pass()]))["A"] == ("Pass()",)
