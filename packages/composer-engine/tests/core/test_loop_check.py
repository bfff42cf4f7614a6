"""Warnings about events that a loop does not run, and optimizers that it does not step."""

import copy
import gc
import warnings

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from composer.algorithms import SAM
from composer.core import Engine, Event, Stage, State, Timestamp
from composer.core.event import STEP_EVENTS
from composer.functional import SAMOptimizer

PREPARE = ("init", "before_load", "after_load", "fit_start")


@pytest.fixture
def run_events():
    """Return a function that runs events and returns the texts of the warnings."""

    def run(engine, *events):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for event in events:
                engine.run_event(event)
        assert all(one.category is UserWarning and one.filename == __file__ for one in caught)
        return [str(one.message) for one in caught]

    return run


@pytest.fixture
def engine_for(state, make):
    """Return a function that creates an engine with one algorithm that runs at some events."""
    return lambda *events, **more: Engine(
        state, algorithms=make.algorithm("A", dict.fromkeys(events, Stage.WEIGHTS), **more)
    )


class TestEpoch:
    @pytest.mark.parametrize("event", [Event.EPOCH_START, *STEP_EVENTS])
    def test_missing_event_warns_at_the_end_of_the_epoch(self, engine_for, run_events, event):
        """The warning states the algorithm, the event and its position in the loop."""
        engine = engine_for(event)
        epoch = [*PREPARE, *(one for one in ("epoch_start", *STEP_EVENTS) if one != event)]

        assert run_events(engine, *epoch) == []
        (text,) = run_events(engine, "epoch_end")
        assert text == (
            f"A runs at {event.value!r}, but a whole epoch passed without that event, so nothing is done there. "
            f'Add engine.run_event("{event.value}") to the loop: {event.place}.'
        )

    def test_warning_is_given_once(self, engine_for, run_events):
        """The warning is given once, also after a new plan."""
        engine = engine_for(Event.BEFORE_LOSS)
        run_events(engine, *PREPARE, "after_dataloader", "epoch_end")

        engine.register_pass(lambda algorithms, event: algorithms)

        assert run_events(engine, "after_dataloader", "epoch_end", "fit_end") == []

    def test_one_warning_lists_all_algorithms(self, state, make, run_events):
        """One warning lists all algorithms that need an event."""
        algorithm = make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL})
        engine = Engine(state, algorithms=[algorithm, *(copy.copy(algorithm) for _ in range(4))])

        (text,) = run_events(engine, "after_dataloader", "epoch_end")

        assert text.startswith("A, A.1, A.2 and 2 more run at 'before_loss', but")

    def test_complete_loop_does_not_warn(self, engine_for, run_events):
        """A loop with all events gives no warning."""
        engine = engine_for(*Event)

        assert (
            run_events(engine, *PREPARE, "epoch_start", *STEP_EVENTS, "epoch_end", "epoch_checkpoint", "fit_end") == []
        )

    @pytest.mark.parametrize(
        "event",
        [event for event in Event if event not in {*PREPARE, Event.EPOCH_START, *STEP_EVENTS}],
    )
    def test_optional_events_do_not_warn(self, engine_for, run_events, event):
        """Evaluations, predictions, iterations and the end are optional in an epoch."""
        engine = engine_for(event)

        assert run_events(engine, "epoch_start", "batch_end", "epoch_end") == []

    def test_epoch_without_batches_is_not_checked(self, engine_for, run_events):
        """An epoch without batches is not checked; the next one is."""
        engine = engine_for(Event.BEFORE_LOSS)

        assert run_events(engine, "epoch_start", "epoch_end") == []
        assert len(run_events(engine, "epoch_start", "batch_end", "epoch_end")) == 1

    def test_end_of_a_loader_is_no_batch(self, engine_for, run_events):
        """An epoch that is resumed after its last batch runs only the event before the loader shows its end."""
        engine = engine_for(*STEP_EVENTS)

        assert run_events(engine, "before_dataloader", "epoch_end") == []
        assert len(run_events(engine, "before_dataloader", "after_dataloader", "epoch_end")) == len(STEP_EVENTS) - 2

    def test_resumed_epoch_has_begun(self, state, engine_for, run_events):
        """An epoch that is resumed in its middle does not begin again."""
        engine = engine_for(Event.EPOCH_START)
        state.timestamp = Timestamp(batch=3, batch_in_epoch=3)

        assert run_events(engine, *STEP_EVENTS, "epoch_end", "fit_end") == []

    def test_algorithm_without_declared_events_is_not_checked(self, engine_for, run_events):
        """An algorithm without declared events requires none."""
        assert run_events(engine_for(match=lambda *_: True), "batch_end", "epoch_end", "fit_end") == []

    def test_callbacks_are_not_checked(self, state, make, run_events):
        """Callbacks for missing events give no warning."""
        state.callbacks = make.callback("C", "before_loss", "init")

        assert run_events(Engine(state), "batch_end", "epoch_end") == []

    def test_algorithms_removed_by_a_pass_are_not_checked(self, state, make, run_events):
        """An algorithm that a pass removed from an event does not require it."""
        algorithm = make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL})

        engine = Engine(state, algorithms=algorithm, algorithm_passes=lambda algorithms, event: [])

        assert run_events(engine, "batch_end", "epoch_end") == []

    def test_algorithm_added_later_is_checked(self, state, make, run_events):
        """An algorithm that is added later is checked at the end of its first epoch."""
        engine = Engine(state)
        run_events(engine, "batch_end", "epoch_end")

        state.algorithms.append(make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL, Event.BATCH_END: Stage.LABEL}))

        assert [text[:24] for text in run_events(engine, "after_loss", "epoch_end")] == ["A runs at 'before_loss',"]


class TestEnd:
    def test_training_without_epoch_ends(self, engine_for, state, run_events):
        """A loop that counts epochs without their events is detected at the end of the training."""
        engine = engine_for(Event.EPOCH_END, Event.EPOCH_START, Event.BEFORE_LOSS)
        run_events(engine, "batch_end")
        state.timestamp = state.timestamp.to_next_epoch()

        texts = run_events(engine, "fit_end")

        assert [text.split(",")[0] for text in texts] == [
            "A runs at 'before_loss'",
            "A runs at 'epoch_start'",
            "A runs at 'epoch_end'",
        ]
        assert all("but the training ended without that event" in text for text in texts)

    def test_training_of_less_than_an_epoch(self, engine_for, run_events):
        """A training of less than an epoch needs the events of a batch only."""
        engine = engine_for(Event.EPOCH_END, Event.EPOCH_START, Event.BEFORE_LOSS)

        assert [text.split(",")[0] for text in run_events(engine, "batch_end", "fit_end")] == [
            "A runs at 'before_loss'"
        ]

    def test_continued_training(self, engine_for, state, run_events):
        """Epochs before the start of the training are not counted."""
        engine = engine_for(Event.EPOCH_END)
        state.timestamp = state.timestamp.to_next_epoch().to_next_epoch()

        assert run_events(engine, "batch_end", "fit_end") == []

    def test_training_without_a_batch(self, engine_for, run_events):
        """A training without a batch gives no warning."""
        assert run_events(engine_for(*STEP_EVENTS), "fit_end") == []


class TestBeforeTraining:
    @pytest.mark.parametrize("event", PREPARE)
    @pytest.mark.parametrize("first", ["iteration_start", "epoch_start", *STEP_EVENTS])
    def test_missing_event_before_training_warns_at_the_first_step(self, engine_for, run_events, event, first):
        """The warning is given at the first step, as surgery cannot be applied later."""
        engine = engine_for(event)
        run_events(engine, *(one for one in PREPARE if one != event))

        (text,) = run_events(engine, first)

        assert text.startswith(f"A runs at {event!r}, but training begins without that event, so nothing is done there")
        assert f'engine.run_event("{event}")' in text

    def test_evaluation_is_not_checked(self, engine_for, run_events):
        """A model may be evaluated without being trained."""
        assert run_events(engine_for(*PREPARE), "eval_start", "eval_end", "predict_start") == []

    def test_algorithm_added_after_its_event_warns(self, state, make, run_events):
        """An algorithm that was added after its event gives one warning."""
        engine = Engine(state)
        run_events(engine, *PREPARE)
        state.algorithms.append(make.algorithm("A", {Event.INIT: Stage.ARCHITECTURE}))

        (text,) = run_events(engine, "epoch_start", "batch_end")
        assert text == (
            "A runs at 'init', but was added after it. Pass algorithms to the engine or trainer at construction."
        )

    def test_added_before_the_event_runs_again(self, state, make, run_events):
        """FIT_START of a second training runs algorithms that were added in between."""
        engine = Engine(state)
        run_events(engine, *PREPARE, "batch_end")
        state.algorithms.append(make.algorithm("A", {Event.FIT_START: Stage.ARCHITECTURE}))

        assert run_events(engine, "fit_start", "batch_end") == []

    def test_list_changes_do_not_affect_earlier_algorithms(self, state, make, run_events):
        """Changing the list does not affect algorithms that have run."""
        engine = Engine(state, algorithms=make.algorithm("A", {Event.INIT: Stage.ARCHITECTURE}))
        run_events(engine, *PREPARE)
        state.callbacks.append(make.callback("C", "batch_end"))

        assert run_events(engine, "batch_end") == []


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, and never calls Optimizer.__init__, so that its steps run no hooks."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)


@pytest.fixture
def loop(run_events):
    """Return a function that runs a batch with a call of ``step`` and returns the warnings."""

    def run(engine, step):
        warned = run_events(engine, "batch_start")
        step()
        return warned + run_events(engine, "batch_end")

    return run


@pytest.fixture
def sgd():
    """Return a function that creates an optimizer of a state's model."""
    return lambda state, **more: torch.optim.SGD(state.model.parameters(), lr=0.1, **more)


class TestOptimizers:
    def test_replaced_optimizer_warns(self, state, loop):
        """A loop that steps a replaced optimizer gives one warning, at its first batch."""
        (before,) = state.optimizers
        engine = Engine(state, algorithms=SAM())
        engine.run_event("after_load")

        (text,) = loop(engine, before.step)

        assert text == (
            "SAMOptimizer is in state.optimizers and has not stepped, but SGD, which is not, has stepped with its "
            "parameters. Algorithms may replace the optimizers before training: take them from state.optimizers after "
            "the events 'init' to 'fit_start'."
        )
        assert loop(engine, before.step) == []

    def test_optimizer_outside_the_state_warns(self, state, sgd, loop):
        """A second optimizer of the same parameters gives the warning too."""
        (text,) = loop(Engine(state), sgd(state, momentum=0.9).step)

        assert text.startswith("SGD is in state.optimizers and has not stepped, but SGD, which is not, has stepped")

    def test_warns_after_gradient_accumulation(self, state, sgd, loop):
        """With accumulated gradients the warning is given after the first batch with a step."""
        engine, other = Engine(state), sgd(state)

        assert [loop(engine, lambda: None) for _ in range(3)] == [[]] * 3
        assert len(loop(engine, other.step)) == 1

    def test_loop_without_batch_end(self, state, sgd, run_events):
        """Without batch_end the warning is given at the end of the epoch."""
        engine = Engine(state)
        run_events(engine, "batch_start")
        sgd(state).step()

        assert len(run_events(engine, "epoch_end")) == 1

    def test_correct_loops_do_not_warn(self, state, sgd, loop):
        """Closures, accumulated gradients, skipped steps, steps without hooks and other trainings give no warning."""
        (own,), (first, *others) = state.optimizers, state.model.parameters()
        loss, nothing = (lambda: state.model(torch.ones(1, 4)).sum()), lambda: None
        scaler, lbfgs = torch.amp.GradScaler("cpu"), torch.optim.LBFGS(state.model.parameters())
        two = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
        stranger, wrapper = torch.optim.SGD([torch.zeros(1)], lr=0.1), Wrapper(own)

        def with_infinite_gradients():
            scaler.scale(loss() * float("inf")).backward()
            scaler.step(own)
            scaler.update()

        loops = [
            ([own], [own.step] * 2),
            ([own], [nothing, nothing, own.step]),
            ([own], [with_infinite_gradients, own.step]),
            ([SAMOptimizer(own)], [lambda: state.optimizers[0].step(loss)]),
            ([lbfgs], [lambda: lbfgs.step(loss)]),
            (two, [two[0].step, two[1].step]),
            ([own], [stranger.step, own.step]),
            ([wrapper], [wrapper.step]),
        ]
        for optimizers, steps in loops:
            state.optimizers = optimizers
            engine = Engine(state)

            assert [loop(engine, step) for step in steps] == [[]] * len(steps)

    def test_observers_are_removed(self, state, sgd, loop, run_events):
        """Steps are observed until the first batch_end after one, the engine is closed, or the next one begins."""
        (own,), engines = state.optimizers, [Engine(state) for _ in range(4)]

        def next_one(engine):
            gc.collect()
            run_events(engine, "batch_start")
            engine.close()
            return dict(_global_optimizer_post_hooks)

        before = next_one(engines[2])

        loop(engines[0], own.step)
        after_batch = dict(_global_optimizer_post_hooks)
        run_events(engines[1], "batch_start")
        engines[1].close()
        after_close = dict(_global_optimizer_post_hooks)
        run_events(Engine(State(model=None)), "batch_start")

        assert before == after_batch == after_close == next_one(engines[3])

    def test_engine_that_is_deleted_during_a_step(self, state, sgd, run_events):
        """An engine may be collected while an optimizer iterates over its hooks."""
        engines = [Engine(State(model=None))]
        run_events(engines[0], "batch_start")
        hooks = [lambda *_: (engines.clear(), gc.collect()), lambda *_: None]
        handles = [register_optimizer_step_post_hook(hook) for hook in hooks]
        try:
            state.optimizers[0].step()
        finally:
            for handle in handles:
                handle.remove()

        assert engines == []


def test_every_event_has_a_description():
    """Each event has a description for the warnings and the guide."""
    assert all(event.place for event in Event)
    assert len({event.place for event in Event}) >= len(Event) - 1


def test_only_the_clock_is_required(make, run_events):
    """The check works without model, data or length."""
    engine = Engine(State(model=None), algorithms=make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL}))

    assert len(run_events(engine, "batch_end", "epoch_end")) == 1
