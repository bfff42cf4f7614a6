"""The state: its fields, its lists and its keyed randomness."""

import re

import attrs
import pytest
import torch

from composer.core import Engine, Event, Precision, Stage, State, SupportsTraining, Time, Timestamp


def draw(state, owner):
    return torch.rand(3, generator=state.generator(owner)).tolist()


@pytest.fixture
def pair(make):
    """Two algorithms of one class."""
    first = make.algorithm("CutOut", {Event.AFTER_DATALOADER: Stage.AUGMENT})
    return [first, type(first)()]


def state_with(algorithms, **settings):
    return State(model=None, algorithms=algorithms, **settings)


class TestGenerator:
    def test_stream_continues_within_a_microbatch(self, pair):
        """Two draws in one microbatch are consecutive in one stream."""
        state = state_with(pair)
        stream = torch.rand(6, generator=state_with(pair).generator(pair[0])).tolist()

        assert draw(state, pair[0]) + draw(state, pair[0]) == stream

    @pytest.mark.parametrize("drawn_before", [0, 1, 5])
    def test_stream_restarts_with_the_next_batch(self, pair, drawn_before):
        """Draws of a batch do not depend on earlier ones, so that a resumed run draws the same."""
        state, resumed = state_with(pair), state_with(pair)
        for _ in range(drawn_before):
            draw(state, pair[0])

        state.timestamp = resumed.timestamp = Timestamp(batch=7)

        assert draw(state, pair[0]) == draw(resumed, pair[0])

    def test_stream_restarts_with_the_next_microbatch(self, pair):
        """Draws of a microbatch do not depend on earlier ones."""
        state, fresh = state_with(pair), state_with(pair)
        draw(state, pair[0])

        state.microbatch = fresh.microbatch = 1

        assert draw(state, pair[0]) == draw(fresh, pair[0])

    def test_streams_differ_by_key(self, pair):
        """Seed, rank, owner, batch and microbatch each give another stream."""
        draws = [
            draw(state, owner)
            for owner in [*pair, "CutOut.2", "MixUp"]
            for state in [
                state_with(pair, rank_zero_seed=seed, rank=rank)
                for seed, rank in [(0, 0), (1, 0), (0, 1), (1, 10), (11, 0)]
            ]
            for state.microbatch in (-1, 0, 1)
            for state.timestamp in (Timestamp(), Timestamp(batch=1), Timestamp(batch=11))
        ]

        assert len(set(map(tuple, draws))) == len(draws) == 4 * 5 * 3 * 3

    def test_adding_another_algorithm_changes_no_draw(self, pair, make):
        """Draws do not depend on other algorithms, before or after it in the list."""
        alone = state_with(pair)
        among = state_with([make.algorithm("A"), pair[0], make.algorithm("B"), pair[1]], callbacks=make.callback("C"))

        assert [draw(alone, one) for one in pair] == [draw(among, one) for one in pair]

    def test_removing_another_algorithm_changes_no_draw(self, pair, make):
        """A run resumed without one of its algorithms draws the same for the others."""
        state, without = state_with([make.algorithm("A"), *pair]), state_with([make.algorithm("A"), *pair])
        del without.algorithms[0]

        assert [draw(state, one) for one in pair] == [draw(without, one) for one in pair]

    @pytest.mark.parametrize("batch", [0, 1, 1000])
    def test_restarted_run_draws_the_same(self, pair, batch):
        """A new state with another seed draws the same after loading."""
        state = state_with(pair, rank_zero_seed=17)
        state.timestamp = Timestamp(batch=batch)
        resumed = state_with([type(one)() for one in pair], rank_zero_seed=3)
        draw(resumed, resumed.algorithms[1])

        resumed.load_state_dict(state.state_dict())

        assert [draw(resumed, one) for one in resumed.algorithms] == [draw(state, one) for one in pair]

    def test_drawing_does_not_advance_the_global_generator(self, pair):
        """Dropout's draws do not change."""
        before = torch.get_rng_state()

        draw(state_with(pair), pair[0])

        assert torch.equal(torch.get_rng_state(), before)


class TestComponents:
    def test_keys_match_the_plan(self, pair, make):
        """Plan, draws and checkpoints use the same keys."""
        state = state_with(pair, callbacks=[make.callback("C", "batch_end"), make.callback("C", "batch_end")])

        entries = [entry for entries in Engine(state).explain().entries.values() for entry in entries]

        assert {entry.key: state.component_key(entry.component) for entry in entries} == {
            entry.key: entry.key for entry in entries
        }

    @pytest.mark.parametrize("field", ["algorithms", "callbacks"])
    def test_class_instead_of_instance_raises(self, field, make):
        """The error shows the correct code."""
        kind = type({"algorithms": make.algorithm, "callbacks": make.callback}[field]("Thing"))

        with pytest.raises(TypeError, match=rf"{field} must be objects, got the class Thing; write Thing\(\)"):
            State(model=None, **{field: [kind]})


class TestFields:
    def test_setting_a_field_is_not_intercepted(self):
        """A step sets a dozen fields; an on_setattr hook on any field would slow down all."""
        assert State.__setattr__ is object.__setattr__

    def test_every_field_has_a_lifetime(self):
        """Each field has a lifetime, which determines the content of a checkpoint."""
        assert {field.metadata["lifetime"] for field in attrs.fields(State)} == {"saved", "live", "step", "cache"}

    def test_optimizers_and_schedulers_are_tuples(self, model):
        """One or several are stored as tuples."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        state = State(model=model, optimizers=optimizer, schedulers=[scheduler])

        assert (state.optimizers, state.schedulers) == ((optimizer,), (scheduler,))

        state.optimizers, state.schedulers = [optimizer, optimizer], scheduler

        assert (state.optimizers, state.schedulers) == ((optimizer, optimizer), (scheduler,))

    @pytest.mark.parametrize("value", ["10ep", 10, Time(10, "epoch")])
    def test_max_duration(self, value):
        """A Time, a string or a number of epochs, at construction and later."""
        state = State(model=None, max_duration=value)
        later = State(model=None)
        later.max_duration = value

        assert state.max_duration == later.max_duration == Time(10, "ep")

    def test_precision(self):
        """Precisions are accepted by value; others raise."""
        state = State(model=None, precision="amp_bf16")

        assert state.precision is Precision.AMP_BF16
        with pytest.raises(ValueError, match="fp99"):
            state.precision = "fp99"

    def test_loaders_are_wrapped(self):
        """The training loader and the evaluators are wrapped; the property returns the loader."""
        state = State(model=None, train_dataloader=[1, 2], evaluators=iter([3]))

        assert (state.train_dataloader, state.train_data_spec.length) == ([1, 2], 2)
        assert [evaluator.label for evaluator in state.evaluators] == ["eval"]

    def test_rank_seed(self):
        """Each process has its own seed."""
        assert State(model=None, rank_zero_seed=5, rank=2).seed == 7

    def test_unknown_fields_raise(self):
        """A misspelled attribute raises, at construction and later."""
        with pytest.raises(TypeError, match="max_epochs"):
            State(model=None, max_epochs=3)
        with pytest.raises(AttributeError, match="inputs"):
            State(model=None).inputs = 3

    def test_batch_items(self):
        """Items are read and replaced by their key."""
        state = State(model=None)
        state.batch = ("i", "l")

        state.batch_set_item(1, "new")

        assert (state.batch, state.batch_get_item(0)) == (("i", "new"), "i")

    def test_protocol_of_models(self, model):
        """A module with a loss fulfils the protocol."""
        model.loss = lambda outputs, batch: outputs.sum()

        assert isinstance(model, SupportsTraining)


class TestProgress:
    @pytest.mark.parametrize(
        ("duration", "clock", "elapsed"),
        [("10ep", {"epoch": 5}, 0.5), ("8ba", {"batch": 2, "epoch": 7}, 0.25), ("0ba", {}, 1.0)],
    )
    def test_elapsed_duration(self, duration, clock, elapsed):
        """The completed fraction, in the unit of max_duration; 1 for a training of length 0."""
        state = State(model=None, max_duration=duration)
        state.timestamp = Timestamp(**clock)

        assert state.get_elapsed_duration() == Time(elapsed, "dur")

    def test_reached(self):
        """A time in any unit, or a fraction of the training."""
        state = State(model=None, max_duration="10ba")
        state.timestamp = Timestamp(batch=5)

        assert [state.has_reached(Time.from_input(t)) for t in ("5ba", "6ba", "0.5dur", "0.6dur")] == [True, False] * 2

    def test_stop_training(self):
        """max_duration becomes the current time, and the reason is by default the function that calls."""
        state = State(model=None, max_duration="10ep")
        state.timestamp = Timestamp(batch=7)

        state.stop_training()

        assert state.max_duration == Time(7, "ba")
        place = r"TestProgress\.test_stop_training \(test_state\.py:\d+\)"
        assert re.fullmatch(rf"state\.stop_training\(\) called by {place}", state.stop_reason)
        state.stop_training("no disk space")
        assert state.stop_reason == "no disk space"

    @pytest.mark.parametrize(("loader", "length"), [([1, 2, 3], 3), (iter([1]), None)])
    def test_length_of_a_dataloader(self, loader, length):
        """It is the loader's length unless one is passed."""
        state = State(model=None)

        state.set_dataloader(loader, "train")

        assert state.dataloader_len == length
        assert State(model=None, dataloader=loader).dataloader_len == length


@pytest.mark.parametrize("length", ["0ep", "-1ep", "10ba", "0.5dur"])
def test_invalid_iteration_length_raises(length):
    """An iteration length in another unit, or of zero epochs, raises when it is set."""
    state = State(model=None)

    with pytest.raises(ValueError, match="iteration_length must be a number of epochs, at least 1"):
        state.iteration_length = length


def test_serialized_attributes():
    """The names of what is saved are attributes of the state, and keys of what is saved."""
    state = State(model=torch.nn.Linear(2, 2), max_duration="10ep")

    names = state.serialized_attributes

    assert set(names) == {"model", "optimizers"} | state.state_dict().keys() - {"version", "metadata"}
    assert all(hasattr(state, name) for name in names)
