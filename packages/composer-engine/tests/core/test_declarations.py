"""Declared fields, hosts that serve them, and conflicts of exclusive resources."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.core import AlgorithmConflictError, Engine, Event, FieldsByEvent, ServedFields, Stage, State, explain
from composer.core.declarations import ExclusiveResource, check_conflicts, fields_at, find_conflicts

LOSS_EVENTS = (Event.BEFORE_LOSS, Event.AFTER_LOSS)
PLAIN_LOOP = ServedFields(
    "PlainLoop",
    readable=dict.fromkeys(LOSS_EVENTS, frozenset({"batch", "outputs", "loss"})),
    writable=dict.fromkeys(LOSS_EVENTS, frozenset({"outputs", "loss"})),
)


class Regression(nn.Linear):
    """A linear model with the mean squared error as its loss."""

    def forward(self, batch):
        return super().forward(batch[0])

    def loss(self, outputs, batch):
        return mse_loss(outputs, batch[1])


def train(*algorithms):
    """Return the losses of a training loop that only runs the two events of the loss."""
    state = State(Regression(2, 1))
    engine = Engine(state, algorithms=algorithms, serves=PLAIN_LOOP)
    losses = []
    for state.batch in [(torch.ones(4, 2), torch.ones(4, 1))] * 2:
        state.outputs = state.model(state.batch)
        engine.run_event("before_loss")
        state.loss = state.model.loss(state.outputs, state.batch)
        engine.run_event("after_loss")
        losses.append(state.loss.item())
    return losses


class TestServedFields:
    def test_algorithm_with_served_fields_runs(self, make, calls):
        """Two events suffice for an algorithm that needs the loss."""
        halve = make.algorithm("Halve", {Event.AFTER_LOSS: Stage.LOSS}, reads={"loss"}, writes={"loss"})

        train(halve)

        assert calls == [("Halve", "after_loss")] * 2

    def test_mixup_raises_in_one_sentence(self):
        """The error states the algorithm, the host, the events and the fields, before anything runs."""
        with pytest.raises(ValueError, match=r"^MixUp cannot run in PlainLoop") as caught:
            train(MixUp())

        assert str(caught.value) == (
            "MixUp cannot run in PlainLoop: it runs at 'before_forward' and reads 'model' at 'before_loss' and writes "
            "'batch.target' at 'before_loss', which PlainLoop does not serve. Remove MixUp, or serve this in PlainLoop."
        )

    def test_reading_a_write_only_field_raises(self, make):
        """A field must be served for reading to be read."""
        loop = ServedFields("Loop", readable={}, writable={Event.AFTER_LOSS: {"loss"}})

        with pytest.raises(ValueError, match=r"A cannot run in Loop: it reads 'loss' at 'after_loss', which"):
            Engine(
                State(None),
                algorithms=make.algorithm("A", {Event.AFTER_LOSS: Stage.LOSS}, reads={"loss"}, writes={"loss"}),
                serves=loop,
            )

    def test_algorithm_added_later_raises_at_the_next_event(self, make):
        """The check is part of building the plan."""
        state = State(None)
        engine = Engine(state, serves=PLAIN_LOOP)
        engine.run_event("after_loss")
        state.algorithms.append(make.algorithm("A", {Event.AFTER_LOSS: Stage.LOSS}, writes={"model"}))

        with pytest.raises(ValueError, match="A cannot run in PlainLoop: it writes 'model' at 'after_loss'"):
            engine.run_event("after_loss")

    def test_batch_includes_its_items(self, make):
        """A host that serves the complete batch serves the targets that LabelSmoothing needs."""
        loop = ServedFields(
            "Loop",
            readable=dict.fromkeys(LOSS_EVENTS, frozenset({"batch", "model", "outputs"})),
            writable=dict.fromkeys(LOSS_EVENTS, frozenset({"batch.target"})),
        )

        entries = Engine(State(None), algorithms=LabelSmoothing(), serves=loop).explain().entries

        assert [*entries] == [*LOSS_EVENTS]

    def test_events_of_an_evaluation_may_be_missing(self):
        """EMA runs around evaluations and predictions, which are optional."""
        fields = {"model", "timestamp", "max_duration", "dataloader_len"}
        events = dict.fromkeys((Event.FIT_START, Event.BATCH_END, Event.FIT_END), fields)

        loop = ServedFields("Loop", readable=events, writable=events)
        entries = Engine(State(None), algorithms=EMA(), serves=loop).explain().entries

        assert entries.keys() > events.keys()

    def test_constants_of_a_run_are_always_served(self, make):
        """The seed and similar fields need not be listed."""
        algorithm = make.algorithm("A", {Event.AFTER_LOSS: Stage.LOSS}, reads={"seed", "precision"})

        entries = Engine(State(None), algorithms=algorithm, serves=PLAIN_LOOP).explain().entries

        assert [entry.reads for entry in entries[Event.AFTER_LOSS]] == [("precision", "seed")]


class TestFieldsByEvent:
    FIELDS = FieldsByEvent({Event.BEFORE_FORWARD: {"batch.input"}, "after_loss": {"loss", "model"}})

    @pytest.mark.parametrize(
        ("event", "fields"),
        [
            (Event.BEFORE_FORWARD, {"batch.input"}),
            (Event.AFTER_LOSS, {"loss", "model"}),
            (Event.BATCH_END, set()),
        ],
    )
    def test_fields_at_an_event(self, event, fields):
        """Events without fields have an empty set."""
        assert fields_at(self.FIELDS, event) == fields

    def test_plan_has_the_fields_of_each_event(self, make):
        """An entry reads the fields that the algorithm declares for that event."""
        places = {Event.BEFORE_FORWARD: Stage.MIX, Event.AFTER_LOSS: Stage.LOSS}

        plan = Engine(State(None), algorithms=make.algorithm("A", places, reads=self.FIELDS)).explain()

        assert [plan.entries[event][0].reads for event in places] == [("batch.input",), ("loss", "model")]
        assert plan.algorithms[0].reads == ("batch.input", "loss", "model")


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


class TestOwned:
    @pytest.mark.parametrize("place", [0, 1])
    def test_remedy_of_either_side_is_used(self, owner, place):
        """A string and an ExclusiveResource of the same name are equal; the remedy of either is used."""
        words = [str(WEIGHTS), str(WEIGHTS)]
        words[place] = WEIGHTS

        (conflict,) = find_conflicts([owner("EMA", words[0]), owner("Mine", words[1])])

        assert conflict.owned == ("the weights used for evaluation",)
        assert conflict.remedies == (WEIGHTS.remedy,)
