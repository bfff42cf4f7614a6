"""The specification's pages on events, algorithms and passes, block for block, with the engine alone.

Where a page has a slip its meaning is tested. The blocks that need a trainer are tested beside it.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

from composer.core import Algorithm, Engine, Event, Logger, Stage, State, Time
from composer.core import passes as passes_module
from composer.core.passes import (
    set_filo_order,
    sort_fused_layernorm_last,
    sort_low_precision_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)
from composer.functional import mixup_batch
from fixtures.models import WithLoss, make_network


class TourMixUp(Algorithm):
    """The tour's MixUp, as it stands there."""

    def match(self, event: Event, state: State) -> bool:
        """Determines whether the algorithm should run on a given event."""
        return event in [Event.AFTER_DATALOADER, Event.AFTER_LOSS]

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Run the algorithm by modifying the State."""
        input, target = state.batch

        if event == Event.AFTER_DATALOADER:
            new_input, self.permuted_target, self.mixing = mixup_batch(input, target, alpha=0.2)
            state.batch = (new_input, target)

        if event == Event.AFTER_LOSS:
            modified_batch = (input, self.permuted_target)
            new_loss = state.model.loss(state.outputs, modified_batch)
            state.loss *= 1 - self.mixing
            state.loss += self.mixing * new_loss


class TestTour:
    def test_loop(self):
        """The tour's training loop: ten epochs, with its events, and the blended loss after each."""
        dataloader = [(torch.rand(6, 4), torch.randint(3, (6,))) for _ in range(3)]
        model, mixup, losses = WithLoss(make_network()), TourMixUp(), []
        state = State(model=model, max_duration=Time(10, "epoch"), rank_zero_seed=0, dataloader=dataloader)
        state.optimizers = torch.optim.SGD(model.parameters(), lr=0.1)

        engine = Engine(state=state, algorithms=[mixup])

        engine.run_event("init")
        engine.run_event("fit_start")
        for _ in range(10):
            engine.run_event("epoch_start")
            for state.batch in dataloader:
                _, targets = state.batch
                engine.run_event("after_dataloader")
                engine.run_event("batch_start")
                engine.run_event("before_forward")
                state.outputs = state.model.forward(state.batch)
                engine.run_event("after_forward")
                engine.run_event("before_loss")
                state.loss = state.model.loss(state.outputs, state.batch)
                engine.run_event("after_loss")
                own, partners = (cross_entropy(state.outputs, one) for one in (targets, mixup.permuted_target))
                losses.append((state.loss.detach(), torch.lerp(own, partners, mixup.mixing).detach()))
                engine.run_event("before_backward")
                state.loss.backward()
                engine.run_event("after_backward")
                for optimizer in state.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                engine.run_event("batch_end")
            engine.run_event("epoch_end")

        assert len(losses) == 30
        torch.testing.assert_close(*map(torch.stack, zip(*losses, strict=True)))


class TestAlgorithmPage:
    @pytest.mark.parametrize(("epoch", "runs"), [(30, False), (31, True)])
    def test_match(self, epoch, runs):
        """An algorithm matches by event or by the state."""

        class MyAlgorithm(Algorithm):
            def match(self, event, state):
                return state.timestamp.epoch > 30

            def apply(self, event, state, logger):
                pass

        state = State(model=None)
        state.timestamp = state.timestamp.copy(epoch=epoch)

        assert MyAlgorithm().match(Event.BEFORE_LOSS, state) is runs

    def test_defaults(self):
        """The base class declares nothing by default."""
        algorithm = TourMixUp()

        assert (algorithm.find_unused_parameters, algorithm.backwards_create_graph) == (False, False)
        assert TourMixUp.required_on_load() is False

    @pytest.mark.parametrize("method", ["match", "apply"])
    def test_interface(self, method):
        """Both methods can be overridden; without ``apply`` the class is abstract."""
        assert getattr(TourMixUp, method) is not getattr(Algorithm, method)
        assert Algorithm.__abstractmethods__ == {"apply"}


class TestPassesPage:
    def test_run_last(self, state, make, calls):
        """The page's pass, with the missing return added, puts an algorithm of some class last."""
        first, second = (make.algorithm(name, {Event.BATCH_END: Stage.WEIGHTS}) for name in ("MyAlgorithm", "Other"))

        def run_last(algorithms, event):
            return sorted(algorithms, key=lambda x: isinstance(x, type(first)))

        Engine(state, algorithms=[first, second], algorithm_passes=run_last).run_event("batch_end")

        assert [name for name, _ in calls] == ["Other", "MyAlgorithm"]

    def test_sort_to_back(self):
        """The example of the page."""
        assert sort_to_back([1, "b", 3], str) == [1, 3, "b"]

    def test_sort_to_front(self):
        """The example of the page."""
        assert sort_to_front([1, "b", 3], str) == ["b", 1, 3]

    @pytest.mark.parametrize("subject", ["FORWARD", "LOSS", "BACKWARD", "DATALOADER"])
    def test_set_filo_order(self, subject):
        """ABCD on the event before, DCBA on the event after."""
        assert "".join(set_filo_order("ABCD", Event[f"BEFORE_{subject}"])) == "ABCD"
        assert "".join(set_filo_order("ABCD", Event[f"AFTER_{subject}"])) == "DCBA"

    @pytest.mark.parametrize("event", [event for event in Event if event.endswith(("_start", "_end"))])
    def test_start_and_end_are_not_affected(self, event):
        """Events named ``_start`` or ``_end`` keep the order."""
        assert "".join(set_filo_order("ABCD", event)) == "ABCD"

    def test_selective_backprop_runs_before_augmentations(self, state, make, calls):
        """Its loss is that of the unaugmented samples, independent of list order."""
        mixup = make.algorithm("MixUp", {Event.AFTER_DATALOADER: Stage.MIX})
        select = make.algorithm("SelectiveBackprop", {Event.AFTER_DATALOADER: Stage.SELECT})

        for algorithms in ([mixup, select], [select, mixup]):
            Engine(state, algorithms=algorithms).run_event("after_dataloader")

        assert [name for name, _ in calls] == ["SelectiveBackprop", "MixUp"] * 2

    def test_fused_layernorm_runs_after_those_that_add_norms(self, state, make, calls):
        """All norms are replaced."""
        fused = make.algorithm("FusedLayerNorm", {Event.INIT: Stage.PRECISION})
        gated = make.algorithm("GatedLinearUnits", {Event.INIT: Stage.ARCHITECTURE})

        Engine(state, algorithms=[fused, gated]).run_event("init")

        assert [name for name, _ in calls] == ["GatedLinearUnits", "FusedLayerNorm"]

    def test_multiple_loss_interpolation(self, state, make):
        """A warning is given when the engine is built."""
        both = [
            make.algorithm(name, {Event.AFTER_LOSS: Stage.LOSS}, interpolate_loss=True) for name in ("MixUp", "CutMix")
        ]

        with pytest.warns(UserWarning, match="CutMix and MixUp all interpolate the loss"):
            Engine(state, algorithms=both)

    def test_names(self):
        """All of the page's passes are public, and the effect of each is that of a pass of each engine."""
        registered = [*Engine(State(model=None)).algorithm_passes]

        assert registered == [set_filo_order, sort_selective_backprop_first, warn_if_multiple_loss_interpolation]
        assert sort_selective_backprop_first is sort_low_precision_layernorm_last is sort_fused_layernorm_last
        assert {"sort_fused_layernorm_last", "sort_to_back", "sort_to_front"} <= set(passes_module.__all__)

    @pytest.mark.parametrize(("index", "place"), [(-1, -1), (0, 0), (2, 2)])
    def test_register_pass(self, state, index, place):
        """A pass is appended, or inserted at the index."""

        def run_last(algorithms, event):
            return algorithms

        engine = Engine(state)
        engine.register_pass(run_last, index)

        assert engine.algorithm_passes[place] is run_last
        assert len(engine.algorithm_passes) == len(Engine(State(model=None)).algorithm_passes) + 1
