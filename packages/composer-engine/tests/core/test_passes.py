"""Passes order algorithms and are recorded as reasons."""

import pytest

from composer.core import Event, Stage
from composer.core.passes import (
    apply_passes,
    default_passes,
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


def apply_all_passes(algorithms, event):
    for one_pass in default_passes():
        algorithms = one_pass(algorithms, event)
    return names(algorithms)


@pytest.mark.parametrize(("sort", "expected"), [(sort_to_front, ["b", "d", 1, 3]), (sort_to_back, [1, 3, "b", "d"])])
def test_sort_to_front_and_back_are_stable(sort, expected):
    """One class moves to an end; the order of the others does not change."""
    assert sort([1, "b", 3, "d"], str) == expected


@pytest.mark.parametrize("event", Event)
def test_set_filo_order(event):
    """A, B, C, D become D, C, B, A on AFTER_* events, and do not change on others."""
    assert [*set_filo_order("ABCD", event)] == [*("DCBA" if "AFTER_" in event.name else "ABCD")]


class TestOrderOfStages:
    @pytest.mark.parametrize("event", Event)
    def test_stages_are_reversed_at_closing_events(self, event, make):
        """Lower stages run first; at AFTER_FORWARD, AFTER_LOSS and AFTER_BACKWARD they run last."""
        late, early = (make.algorithm(s.name, everywhere(s)) for s in (Stage.LABEL, Stage.MIX))

        assert apply_all_passes([late, early], event) == (["LABEL", "MIX"] if event in CLOSING else ["MIX", "LABEL"])

    @pytest.mark.parametrize("event", Event)
    def test_list_order_is_reversed_at_all_after_events(self, event, make):
        """Within a stage list order applies, reversed at every AFTER_* event."""
        algorithms = [make.algorithm(name, everywhere(Stage.AUGMENT)) for name in "ABC"]

        assert apply_all_passes(algorithms, event) == [*("CBA" if "AFTER_" in event.name else "ABC")]

    def test_selective_backprop_is_first_after_the_dataloader(self, make):
        """SELECT precedes the other stages although the list is reversed there."""
        select = make.algorithm("Select", {Event.AFTER_DATALOADER: Stage.SELECT})
        cutout = make.algorithm("CutOut", {Event.AFTER_DATALOADER: Stage.AUGMENT})

        for algorithms in ([select, cutout], [cutout, select]):
            assert apply_all_passes(algorithms, Event.AFTER_DATALOADER) == ["Select", "CutOut"]

    def test_norms_and_layout_come_last_in_surgery(self, make):
        """Fused norms run after other surgery; the memory format is set last."""
        layout = make.algorithm("ChannelsLast", {Event.INIT: Stage.LAYOUT})
        fused = make.algorithm("FusedLayerNorm", {Event.INIT: Stage.PRECISION})
        blocks = make.algorithm("GatedLinearUnits", {Event.INIT: Stage.ARCHITECTURE})

        assert apply_all_passes([layout, fused, blocks], Event.INIT) == [
            "GatedLinearUnits",
            "FusedLayerNorm",
            "ChannelsLast",
        ]

    def test_algorithms_without_a_stage_run_last(self, make):
        """An algorithm without a stage runs last; at INIT it counts as architecture."""
        matching = make.algorithm("Matching", match=lambda *_: True)
        weights = make.algorithm("Weights", everywhere(Stage.WEIGHTS))
        layout = make.algorithm("Layout", everywhere(Stage.LAYOUT))

        assert apply_all_passes([matching, weights], Event.BATCH_END) == ["Weights", "Matching"]
        assert apply_all_passes([layout, matching], Event.INIT) == ["Matching", "Layout"]

    def test_stage_of(self, make):
        """The declared stage, or the default for undeclared algorithms."""
        algorithm = make.algorithm("A", {Event.BATCH_END: Stage.WEIGHTS})

        assert [stage_of(algorithm, event) for event in (Event.BATCH_END, Event.INIT, Event.EPOCH_END)] == [
            Stage.WEIGHTS,
            Stage.ARCHITECTURE,
            Stage.UNDECLARED,
        ]


class TestSinglePasses:
    def test_passes_of_composer_keep_the_order_by_stage(self, make):
        """The passes that only Composer needs are available, and put SELECT first and PRECISION last."""
        stages = [Stage.PRECISION, Stage.MIX, Stage.SELECT]
        algorithms = [make.algorithm(one.name, everywhere(one)) for one in stages]

        for one_pass in (sort_selective_backprop_first, sort_fused_layernorm_last, sort_low_precision_layernorm_last):
            assert names(one_pass(algorithms, Event.INIT)) == ["SELECT", "MIX", "PRECISION"]

    @pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START])
    def test_norms_precede_optimizer_wrappers(self, event, make):
        """Stages decide alone: norms are replaced before an optimizer is wrapped, and UNDECLARED runs last."""
        algorithms = [make.algorithm(one.name, everywhere(one)) for one in Stage]

        assert apply_all_passes(algorithms, event) == [one.name for one in Stage]
        assert apply_all_passes(algorithms[::-1], event) == [one.name for one in Stage]

    def test_two_loss_interpolations_warn(self, make):
        """The warning has both names and the remedy, and the order does not change."""
        both = [make.algorithm(name, interpolate_loss=True) for name in ("MixUp", "CutMix")]

        with pytest.warns(UserWarning, match="CutMix and MixUp all interpolate the loss.*interpolate_loss=False"):
            assert warn_if_multiple_loss_interpolation(both, Event.BEFORE_BACKWARD) == both


def reverse(algorithms, event):
    return algorithms[::-1]


@pytest.fixture
def abcd(make):
    return [make.algorithm(name, dict.fromkeys(Event, Stage.AUGMENT)) for name in "ABCD"]


def last(algorithm):
    """Return a pass that moves one algorithm to the end."""

    def run_last(algorithms, event):
        return sort_to_back(algorithms, type(algorithm))

    return run_last


class TestChangedBy:
    def test_passes_that_change_the_order_are_named(self, abcd):
        """Passes of the user that leave it as it is, and the default ones, are not named."""

        def as_it_is(algorithms, event):
            return algorithms

        order, changed_by = apply_passes(abcd, Event.AFTER_LOSS, [*default_passes(), as_it_is, reverse, last(abcd[2])])

        assert [type(one).__name__ for one in order] == ["A", "B", "D", "C"]
        assert changed_by == ["reverse", "run_last"]


class TestWhatPassesReturn:
    def test_none_raises(self, abcd):
        """The specification's example returns nothing; the error names the pass and the event."""

        def run_last(algorithms, event):
            sort_to_back(algorithms, object)

        with pytest.raises(TypeError, match="The pass run_last returned nothing at 'batch_end'; it must return"):
            apply_passes(abcd, Event.BATCH_END, [run_last])

    @pytest.mark.parametrize(
        "other", [lambda value: [*value, value[0]], lambda value: [*value[1:], object()], lambda value: value[1:]]
    )
    def test_other_algorithms_raise(self, abcd, other):
        """Algorithms that were not passed in, are returned twice, or are left out, raise."""
        with pytest.raises(ValueError, match="returned other algorithms at 'batch_end' than it was given"):
            apply_passes(abcd, Event.BATCH_END, [lambda algorithms, event: other(algorithms)])
