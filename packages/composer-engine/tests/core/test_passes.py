"""The passes that order algorithms."""

import warnings

import pytest

from composer.core import Event, Stage
from composer.core.passes import (
    default_passes,
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
        """Who only has a match runs last; at INIT it may replace blocks, so norms and layout still come later."""
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
        """A single one is nobody's concern."""
        algorithms = [make.algorithm("MixUp", interpolate_loss=True), make.algorithm("CutMix", interpolate_loss=False)]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert warn_if_multiple_loss_interpolation(algorithms, Event.BEFORE_BACKWARD) == algorithms
