"""Whether the engine says which events a loop has left out."""

import copy
import gc
import warnings

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from composer.algorithms import SAM
from composer.core import Engine, Event, Stage, State
from composer.core.event import PLACES, STEP_EVENTS
from composer.functional import SAMOptimizer

PREPARE = ("init", "before_load", "after_load", "fit_start")


@pytest.fixture
def told():
    """Return what runs events and collects the warnings, as (text, file)."""

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
    """Return a maker of engines with one algorithm that runs at some events."""
    return lambda *events, **more: Engine(
        state, algorithms=make.algorithm("A", dict.fromkeys(events, Stage.WEIGHTS), **more)
    )


class TestEpoch:
    @pytest.mark.parametrize("event", [Event.EPOCH_START, *STEP_EVENTS])
    def test_event_that_never_ran_is_told_at_the_end_of_the_epoch(self, engine_for, told, event):
        """Who needs it, what it is, and where it goes into the loop."""
        engine = engine_for(event)
        epoch = [*PREPARE, *(one for one in ("epoch_start", *STEP_EVENTS) if one != event)]

        assert told(engine, *epoch) == []
        (text,) = told(engine, "epoch_end")
        assert text == (
            f"A runs at {event.value!r}, but a whole epoch passed without that event, so nothing is done there. "
            f'Add engine.run_event("{event.value}") to the loop: {PLACES[event]}.'
        )

    def test_once(self, engine_for, told):
        """The second epoch is as the first, and nobody wants to read it again, also after a new plan."""
        engine = engine_for(Event.BEFORE_LOSS)
        told(engine, *PREPARE, "after_dataloader", "epoch_end")

        engine.register_pass(lambda algorithms, event: algorithms)

        assert told(engine, "after_dataloader", "epoch_end", "fit_end") == []

    def test_all_who_need_it_are_in_one_sentence(self, state, make, told):
        """An event is missing once, however many need it."""
        algorithm = make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL})
        engine = Engine(state, algorithms=[algorithm, *(copy.copy(algorithm) for _ in range(4))])

        (text,) = told(engine, "after_dataloader", "epoch_end")

        assert text.startswith("A, A.1, A.2 and 2 more run at 'before_loss', but")

    def test_events_that_ran_are_fine(self, engine_for, told):
        """A loop with all events hears nothing."""
        engine = engine_for(*Event)

        assert told(engine, *PREPARE, "epoch_start", *STEP_EVENTS, "epoch_end", "epoch_checkpoint", "fit_end") == []

    @pytest.mark.parametrize(
        "event",
        [event for event in Event if event not in {*PREPARE, Event.EPOCH_START, *STEP_EVENTS}],
    )
    def test_events_that_need_not_come_with_every_epoch(self, engine_for, told, event):
        """Evaluations, predictions, iterations and the end may never be."""
        engine = engine_for(event)

        assert told(engine, "epoch_start", "batch_end", "epoch_end") == []

    def test_epoch_without_batches_says_nothing(self, engine_for, told):
        """What ran in it is not the loop; the next one is looked at again."""
        engine = engine_for(Event.BEFORE_LOSS)

        assert told(engine, "epoch_start", "epoch_end") == []
        assert len(told(engine, "epoch_start", "batch_end", "epoch_end")) == 1

    def test_algorithm_that_is_asked_everywhere_needs_no_event(self, engine_for, told):
        """Nobody knows where one with a match alone wants to run."""
        assert told(engine_for(match=lambda *_: True), "batch_end", "epoch_end", "fit_end") == []

    def test_callbacks_only_watch(self, state, make, told):
        """Who wants to see an event that is not there has nothing to see."""
        state.callbacks = make.callback("C", "before_loss", "init")

        assert told(Engine(state), "batch_end", "epoch_end") == []

    def test_what_a_pass_left_out_needs_nothing(self, state, make, told):
        """An algorithm that a pass took out of an event is not missed there."""
        algorithm = make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL})

        engine = Engine(state, algorithms=algorithm, algorithm_passes=lambda algorithms, event: [])

        assert told(engine, "batch_end", "epoch_end") == []

    def test_algorithm_that_is_added_later_is_looked_after_as_well(self, state, make, told):
        """At the end of the epoch in which it came."""
        engine = Engine(state)
        told(engine, "batch_end", "epoch_end")

        state.algorithms.append(make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL, Event.BATCH_END: Stage.LABEL}))

        assert [text[:24] for text in told(engine, "after_loss", "epoch_end")] == ["A runs at 'before_loss',"]


class TestEnd:
    def test_training_without_epoch_ends(self, engine_for, state, told):
        """A loop that counts epochs and tells nobody is found out when the training ends."""
        engine = engine_for(Event.EPOCH_END, Event.EPOCH_START, Event.BEFORE_LOSS)
        told(engine, "batch_end")
        state.timestamp = state.timestamp.to_next_epoch()

        texts = told(engine, "fit_end")

        assert [text.split(",")[0] for text in texts] == [
            "A runs at 'before_loss'",
            "A runs at 'epoch_start'",
            "A runs at 'epoch_end'",
        ]
        assert all("but the training ended without that event" in text for text in texts)

    def test_training_of_less_than_an_epoch(self, engine_for, told):
        """Has no end of an epoch, but has all events of a batch."""
        engine = engine_for(Event.EPOCH_END, Event.EPOCH_START, Event.BEFORE_LOSS)

        assert [text.split(",")[0] for text in told(engine, "batch_end", "fit_end")] == ["A runs at 'before_loss'"]

    def test_training_that_goes_on_in_a_later_epoch(self, engine_for, state, told):
        """Epochs that were over when it began are not its own."""
        engine = engine_for(Event.EPOCH_END)
        state.timestamp = state.timestamp.to_next_epoch().to_next_epoch()

        assert told(engine, "batch_end", "fit_end") == []

    def test_training_without_a_batch(self, engine_for, told):
        """There was nothing to do."""
        assert told(engine_for(*STEP_EVENTS), "fit_end") == []


class TestBeforeTraining:
    @pytest.mark.parametrize("event", PREPARE)
    @pytest.mark.parametrize("first", ["iteration_start", "epoch_start", *STEP_EVENTS])
    def test_event_that_was_left_out_is_told_with_the_first_step(self, engine_for, told, event, first):
        """Not after an epoch: missed surgery cannot be applied later."""
        engine = engine_for(event)
        told(engine, *(one for one in PREPARE if one != event))

        (text,) = told(engine, first)

        assert text.startswith(f"A runs at {event!r}, but training begins without that event, so nothing is done there")
        assert f'engine.run_event("{event}")' in text

    def test_evaluation_is_no_training(self, engine_for, told):
        """A model may be evaluated without ever being trained."""
        assert told(engine_for(*PREPARE), "eval_start", "eval_end", "predict_start") == []

    def test_too_late(self, state, make, told):
        """Who was added after the event had run is told that it did nothing, once."""
        engine = Engine(state)
        told(engine, *PREPARE)
        state.algorithms.append(make.algorithm("A", {Event.INIT: Stage.ARCHITECTURE}))

        (text,) = told(engine, "epoch_start", "batch_end")
        assert text == (
            "A runs at 'init', but was added after it. Pass algorithms to the engine or trainer at construction."
        )

    def test_added_before_the_event_runs_again(self, state, make, told):
        """A second training has a second FIT_START, at which those run that were added in between."""
        engine = Engine(state)
        told(engine, *PREPARE, "batch_end")
        state.algorithms.append(make.algorithm("A", {Event.FIT_START: Stage.ARCHITECTURE}))

        assert told(engine, "fit_start", "batch_end") == []

    def test_one_that_was_there_and_others_that_came(self, state, make, told):
        """Changing the list does not make those forget that had run."""
        engine = Engine(state, algorithms=make.algorithm("A", {Event.INIT: Stage.ARCHITECTURE}))
        told(engine, *PREPARE)
        state.callbacks.append(make.callback("C", "batch_end"))

        assert told(engine, "batch_end") == []


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, and never calls Optimizer.__init__, so that torch does not see its steps."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)


@pytest.fixture
def loop(told):
    """Return what runs a batch of a loop, in which ``step`` is called, and collects the warnings."""

    def run(engine, step):
        warned = told(engine, "batch_start")
        step()
        return warned + told(engine, "batch_end")

    return run


@pytest.fixture
def sgd():
    """Return a maker of optimizers of a state's model."""
    return lambda state, **more: torch.optim.SGD(state.model.parameters(), lr=0.1, **more)


class TestOptimizers:
    def test_one_that_an_algorithm_has_replaced(self, state, loop):
        """The loop that steps with what it had before is told so with its first batch, and once."""
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

    def test_one_that_never_was_in_the_state(self, state, sgd, loop):
        """A second optimizer of the same parameters is not what algorithms have prepared either."""
        (text,) = loop(Engine(state), sgd(state, momentum=0.9).step)

        assert text.startswith("SGD is in state.optimizers and has not stepped, but SGD, which is not, has stepped")

    def test_after_batches_without_a_step(self, state, sgd, loop):
        """Where gradients are accumulated, the first batch with a step counts."""
        engine, other = Engine(state), sgd(state)

        assert [loop(engine, lambda: None) for _ in range(3)] == [[]] * 3
        assert len(loop(engine, other.step)) == 1

    def test_loop_without_batch_ends(self, state, sgd, told):
        """It is told at the end of the epoch."""
        engine = Engine(state)
        told(engine, "batch_start")
        sgd(state).step()

        assert len(told(engine, "epoch_end")) == 1

    def test_right_loops(self, state, sgd, loop):
        """Closures, accumulated gradients, steps that are skipped or seen by nobody, and other trainings are fine."""
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

    def test_nothing_is_left_behind(self, state, sgd, loop, told):
        """Steps are watched until the first batch_end after one, or until the engine is closed or gone."""
        (own,), engines = state.optimizers, [Engine(state) for _ in range(2)]
        gc.collect()
        before = dict(_global_optimizer_post_hooks)

        loop(engines[0], own.step)
        after_batch = dict(_global_optimizer_post_hooks)
        told(engines[1], "batch_start")
        engines[1].close()
        after_close = dict(_global_optimizer_post_hooks)
        told(Engine(State(model=None)), "batch_start")
        gc.collect()

        assert before == after_batch == after_close == dict(_global_optimizer_post_hooks)


def test_every_event_has_its_place_in_words():
    """What the warnings and the guide say of an event is there for each of them, and each its own."""
    assert [*PLACES] == [*Event]
    assert len(set(PLACES.values())) >= len(Event) - 1


def test_state_is_asked_for_no_more_than_the_clock(make, told):
    """It works without model, data or length."""
    engine = Engine(State(model=None), algorithms=make.algorithm("A", {Event.BEFORE_LOSS: Stage.LABEL}))

    assert len(told(engine, "batch_end", "epoch_end")) == 1
