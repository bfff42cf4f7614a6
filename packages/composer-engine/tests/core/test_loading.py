"""Loading: all or nothing, by keys, with reconstructed algorithms."""

import copy
import json
from typing import ClassVar

import attrs
import pytest
import torch
from torch import nn

from composer.core import (
    Algorithm,
    Callback,
    Engine,
    Event,
    NoEffectWarning,
    Stage,
    State,
    StateMismatchError,
    Time,
    Timestamp,
    join_tensors,
    saved,
    split_tensors,
)
from fixtures import same_bits


@attrs.define(eq=False)
class LoadCount(Algorithm):
    """Counts, and draws a number per batch."""

    _count: int = saved(default=0)
    draws: list[float] = attrs.field(factory=list, init=False)
    runs_at: ClassVar = {Event.BATCH_END: Stage.WEIGHTS}

    def apply(self, event, state, logger):
        self._count += 1
        self.draws.append(torch.rand(1, generator=state.generator(self)).item())


@attrs.define(eq=False)
class LoadWiden(Algorithm):
    """Surgery that wraps each linear layer in a layer with its own weight."""

    start: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads = writes = frozenset({"model", "optimizers"})

    @staticmethod
    def required_on_load():
        return True

    def apply(self, event, state, logger):
        import warnings

        if isinstance(state.model[0], nn.Sequential):
            warnings.warn("LoadWiden found nothing", NoEffectWarning, stacklevel=1)
            return
        gate = nn.Linear(2, 2)
        state.model[0] = nn.Sequential(state.model[0], gate)
        for optimizer in state.optimizers:
            optimizer.param_groups[0]["params"] += list(gate.parameters())
        logger.log_hyperparameters({"LoadWiden/start": self.start})


@attrs.define(eq=False)
class LoadOwningCount(LoadCount):
    """Conflicts with :class:`LoadOwningWiden`."""

    owns = frozenset({"the first layer"})


@attrs.define(eq=False)
class LoadOwningWiden(LoadWiden):
    """Conflicts with :class:`LoadOwningCount`."""

    owns = frozenset({"the first layer"})


class LoadFail(Callback):
    def load_state_dict(self, state):
        if state:
            raise RuntimeError("not today")

    def state_dict(self):
        return {"x": 1}


class SGD(torch.optim.SGD):
    """Does not load a state."""

    def load_state_dict(self, state_dict):
        raise KeyError("momentum")


def make(*algorithms, callbacks=(), init=True, optimizer=torch.optim.SGD, **options):
    """Return the state of a small run after INIT."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    optimizers = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, optimizers=optimizers, algorithms=list(algorithms), callbacks=callbacks, **options)
    if init:
        Engine(state).run_event("init")
    return state


def train(state, steps):
    for _ in range(steps):
        batch = int(state.timestamp.batch)
        inputs = torch.rand(3, 4, generator=torch.Generator().manual_seed(batch))
        state.optimizers[0].zero_grad()
        state.model(inputs).square().mean().backward()
        state.optimizers[0].step()
        state.timestamp = state.timestamp.to_next_batch(samples=3)
        for algorithm in state.algorithms:
            if Event.BATCH_END in algorithm.runs_at:
                algorithm.apply(Event.BATCH_END, state, None)
    return state


def state_and_weights(state):
    """Return the complete state of a run after a JSON round trip."""
    saved_state = {
        **state.state_dict(),
        "model": state.get_model_state_dict(),
        "optimizers": state.get_optim_state_dict(),
    }
    data, tensors = split_tensors(saved_state)
    return join_tensors(json.loads(json.dumps(data, allow_nan=False)), copy.deepcopy(tensors))


class TestContinueTraining:
    def test_resume_is_bit_identical(self):
        """Weights, momentum, counts and draws equal those of the uninterrupted run."""
        straight = train(make(LoadCount(), LoadCount(), rank_zero_seed=3), 5)

        stopped = train(make(LoadCount(), LoadCount(), rank_zero_seed=3), 2)
        resumed = train(make(LoadCount(), LoadCount(), rank_zero_seed=8), 1)
        for algorithm in resumed.algorithms:
            algorithm.draws.clear()
        resumed.load_state_dict(state_and_weights(stopped), strict=True)
        train(resumed, 3)

        assert same_bits(resumed.model.state_dict(), straight.model.state_dict())
        assert resumed.timestamp.batch == straight.timestamp.batch
        for own, other in zip(resumed.algorithms, straight.algorithms, strict=True):
            assert own.draws == other.draws[2:]
            assert own._count == other._count == 5

    def test_components_are_matched_by_key(self):
        """Two instances of a class each load their own state, also if others precede them."""
        first = State(model=None, algorithms=[LoadCount(), LoadCount()], callbacks=LoadFail())
        first.algorithms[0]._count, first.algorithms[1]._count = 1, 2
        first.callbacks.clear()
        second = State(model=None, algorithms=[LoadCount(), LoadWiden(), LoadCount()])

        with pytest.warns(UserWarning, match=r"algorithms\.LoadWiden is not saved, and starts from its initial state"):
            second.load_state_dict(first.state_dict())

        assert [one._count for one in second.algorithms if isinstance(one, LoadCount)] == [1, 2]

    def test_explicit_settings_take_precedence(self):
        """The duration and run name of the new program are used; the seed is loaded."""
        first = State(model=None, run_name="a", max_duration="2ep", rank_zero_seed=3)
        second = State(model=None, run_name="b", max_duration="4ep", rank_zero_seed=5)

        report = second.load_state_dict(first.state_dict(), strict=True)

        assert (second.run_name, second.max_duration, second.rank_zero_seed) == ("b", Time(4, "ep"), 3)
        assert report.overridden == ("run_name: b stays, a was saved.", "max_duration: 4ep stays, 2ep was saved.")

    def test_unset_max_duration_is_loaded(self):
        """An unset max_duration is loaded from the checkpoint."""
        second = State(model=None)

        second.load_state_dict(State(model=None, max_duration="2ep").state_dict())

        assert second.max_duration == Time(2, "ep")

    def test_generators_are_reset(self):
        """Generators are reset, also if the same batch has been drawn for before."""
        state = State(model=None, algorithms=LoadCount())
        saved_state = state.state_dict()
        before = torch.rand(2, generator=state.generator(state.algorithms[0]))

        state.load_state_dict(saved_state)

        assert torch.equal(torch.rand(2, generator=state.generator(state.algorithms[0])), before)

    def test_differences_give_one_warning(self):
        """One warning has a line for each difference."""
        first = State(model=None, algorithms=[LoadCount()], callbacks=[LoadFail()])
        second = State(model=None, algorithms=[LoadWiden()])

        with pytest.warns(UserWarning, match="this run differs from it:\n- .*\n- .*\n- ") as caught:
            report = second.load_state_dict(first.state_dict())

        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert len(report.differences) == 3

    def test_component_that_fails_while_loading(self):
        """The error names the component, and the run is loaded in part."""
        state = State(model=None, algorithms=LoadCount(), callbacks=LoadFail())

        with pytest.raises(RuntimeError, match="not today") as caught:
            state.load_state_dict(state.state_dict())

        (note,) = caught.value.__notes__
        assert "callbacks.LoadFail raised an error on" in note
        assert "loaded in part" in note

    def test_mismatched_weights_change_nothing(self):
        """Clock, components, weights and momentum do not change."""
        saved_state = state_and_weights(train(make(LoadCount()), 2))
        saved_state["model"]["1.bias"] = torch.zeros(9)
        state = make(LoadCount())
        before = state_and_weights(state)

        with pytest.raises(StateMismatchError, match=r"model\.1\.bias: must be a tensor of shape \(2,\)"):
            state.load_state_dict(saved_state)

        assert repr(state_and_weights(state)) == repr(before)


class TestMissingAlgorithms:
    @pytest.fixture
    def taken(self):
        """What a run with surgery saved after two steps."""
        return state_and_weights(train(make(LoadWiden(start=2.0), LoadCount()), 2))

    def test_required_algorithm_is_reconstructed(self, taken):
        """It is constructed from name and settings at its position, with its weights and their momentum."""
        state = make(LoadCount())

        report = state.load_state_dict(taken, strict=True)

        assert repr(state.algorithms[0]) == "LoadWiden(start=2.0)"
        assert isinstance(state.algorithms[1], LoadCount)
        assert repr(state_and_weights(state)) == repr(taken)
        assert "algorithms.LoadWiden" in report.restored

    def test_nothing_is_loaded_if_an_optimizer_raises(self, taken):
        """The layers are those of the algorithm then, with the values of the run."""
        state = make(LoadCount(), optimizer=SGD)

        with pytest.raises(StateMismatchError, match=r"optimizers\.SGD cannot load .* \(KeyError: 'momentum'\)"):
            state.load_state_dict(taken)

        assert state.timestamp == Timestamp()
        assert state.algorithms[-1]._count == 0

    def test_present_algorithm_is_not_reconstructed(self, taken):
        """The run's own object is used."""
        widen = LoadWiden(start=2.0)
        state = make(widen, LoadCount())

        state.load_state_dict(taken, strict=True)

        assert state.algorithms[0] is widen
        assert len(state.algorithms) == 2

    @pytest.mark.parametrize("excluded", ["LoadWiden", "LoadWiden.1"])
    def test_excluded_algorithms_are_not_reconstructed(self, taken, excluded):
        """Exclusion by class or key leads to mismatched weights."""
        state = make(LoadCount())
        taken["algorithms"][0]["key"] = "LoadWiden.1"

        with pytest.raises(StateMismatchError, match=r"model\.0\.weight is not saved"):
            state.load_state_dict(taken, strict=True, exclude_algorithms=[excluded])
        with pytest.raises(StateMismatchError, match=r"model\.0\.weight is not saved"):
            state.load_state_dict(taken, strict=True, exclude_algorithms=excluded)

    @pytest.mark.parametrize(
        ("record", "text"),
        [
            ({"name": "LoadWidden"}, r"No algorithm is named 'LoadWidden'; did you mean 'LoadWiden'\?"),
            ({"settings": {"start": {"unsaved": "function m.f"}}}, r"start was not data but function m\.f"),
            ({"settings": {"start": -1.0}}, "'start' must be >= 0"),
            ({"settings": 3}, r"algorithms\[0\]\.settings: must be dict\[Any, Any\], got 3"),
        ],
    )
    def test_failed_reconstruction_raises(self, taken, record, text):
        """An unknown name or invalid settings raise, and the model does not change."""
        state = make(LoadCount())
        before = state_and_weights(state)
        taken["algorithms"][0] |= record

        with pytest.raises(StateMismatchError, match=text):
            state.load_state_dict(taken)

        assert repr(state_and_weights(state)) == repr(before)

    def test_mismatched_weights_after_surgery(self, taken):
        """They are compared after the surgery, and nothing of them is loaded."""
        state = make(LoadCount())
        del taken["model"]["0.1.bias"]

        with pytest.raises(StateMismatchError, match=r"model\.0\.1\.bias is not saved"):
            state.load_state_dict(taken, strict=True)

        assert state.timestamp == Timestamp()

    def test_manually_applied_surgery(self, taken):
        """If the model has already been changed, the algorithm warns that it has no effect."""
        state = make(LoadWiden(start=2.0), LoadCount())
        del state.algorithms[0]

        with pytest.warns(NoEffectWarning, match="found nothing"):
            state.load_state_dict(taken, strict=True)

        assert len(state.algorithms) == 2
