"""The training of the contract equals a plain loop, and can be stopped anywhere."""

import random
from typing import ClassVar

import pytest
import torch

from composer.core import Algorithm, Event, Stage
from composer.core.testing import Case, Training, seeded
from fixtures import weights
from fixtures.noise import AddNoise, changed, make_state


class TestTraining:
    def test_events_in_the_order_of_the_diagram(self):
        """A training runs every event, in the order of Event's docstring."""

        class Everything(Algorithm):
            ran: ClassVar = []

            def match(self, event, state):
                return True

            def apply(self, event, state, logger):
                self.ran.append(event)

        training = Training(make_state(), [Everything()])
        training.run(3)
        training.finish()

        first = [*dict.fromkeys(Everything.ran)]
        evaluated = [event for event in first if not event.startswith(("eval", "predict"))]
        assert evaluated == [event for event in Event if not event.startswith(("eval", "predict"))]
        assert Everything.ran.count(Event.BATCH_END) == 3
        assert Everything.ran.count(Event.EPOCH_END) == 1

    def test_trains(self):
        """It takes the same steps as a plain loop."""
        state, expected = (Case(AddNoise, make_state).new_state() for _ in range(2))
        for module in (state.model, expected.model):
            module.network[2].p = 0.0
        optimizer = expected.optimizers[0]
        for batch in expected.train_dataloader:
            optimizer.zero_grad()
            expected.model.loss(expected.model(batch), batch).backward()
            optimizer.step()

        Training(state, []).run(3)

        assert torch.equal(weights(state.model), weights(expected.model))

    @pytest.mark.parametrize("parts", [1, 4])
    def test_stopping_does_not_change_results(self, parts):
        """Results do not depend on where the training is stopped."""
        training = Case(AddNoise, make_state).train(AddNoise())
        complete = Case(AddNoise, make_state).train(AddNoise())
        complete.run(4)

        for until in [4] if parts == 1 else range(1, 5):
            training.run(until)

        assert {**training.losses} == {**complete.losses}
        assert training.state.timestamp == complete.state.timestamp

    def test_optimizer_with_closure(self):
        """Each call of the closure has the same draws and batch."""
        recorded = []

        class Twice(torch.optim.SGD):
            def step(self, closure):
                with torch.enable_grad():
                    closure()
                return super().step(closure)

        def look(self, event, state, logger):
            if event is Event.BEFORE_FORWARD:
                state.batch_set_item(0, torch.rand(6, 4, generator=state.generator(self)))
                recorded.append(state.batch[0])

        state = make_state()
        state.optimizers = Twice(state.model.parameters(), lr=0.1)
        algorithm = changed(runs_at={Event.BEFORE_FORWARD: Stage.MIX}, apply=look).make()

        Training(state, [algorithm]).run(2)

        assert [torch.equal(recorded[0], one) for one in recorded] == [True, True, False, False]


class TestSeeded:
    def test_seeded_by_arguments(self):
        """The arguments determine the draws of torch and Python."""

        def draw(*words):
            with seeded(*words):
                return torch.rand(1).item(), random.random()

        assert draw("a", 1) == draw("a", 1)
        assert len({draw("a", 1), draw("a", 2), draw("b", 1)}) == 3
