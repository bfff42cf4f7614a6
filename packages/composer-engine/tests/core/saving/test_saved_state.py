"""Saving and checking a state."""

import copy
import dataclasses
import json
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import (
    Algorithm,
    Callback,
    LoadReport,
    NotSerializableError,
    State,
    StateMismatchError,
    Time,
    Timestamp,
    join_tensors,
    saved,
    split_tensors,
)


@attrs.define(eq=False)
class SavedMix(Algorithm):
    alpha: float = 0.2
    input_key: Any = 0
    _drawn: int = saved(default=0)
    _held: torch.Tensor | None = saved(default=None)

    def apply(self, event, state, logger):
        """Do nothing."""


@attrs.define(eq=False)
class SavedWatch(Callback):
    window: int = 3
    seen: list[float] = saved(factory=list)
    last: Time | None = saved(default=None)


class OwnWatch(Callback):
    def __init__(self, state=None):
        self.held = {"n": 1} if state is None else state

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state


def state_with(**options):
    return State(model=None, **options)


def through_files(state):
    """Return the state after a round trip through JSON and tensors."""
    data, tensors = split_tensors(state)
    return join_tensors(json.loads(json.dumps(data, allow_nan=False)), tensors)


@pytest.fixture
def run():
    """A run with two algorithms of one class, a callback, and an advanced clock."""
    state = state_with(
        rank_zero_seed=17,
        run_name="first",
        max_duration="10ep",
        algorithms=[SavedMix(), SavedMix(alpha=0.5)],
        callbacks=SavedWatch(),
    )
    state.timestamp = Timestamp(batch=7, epoch=1)
    state.train_metric_values = {"Accuracy": torch.tensor(0.5)}
    state.algorithms[1]._drawn = 3
    return state


class TestWriting:
    def test_saved_fields_and_components(self, run):
        """The saved fields by name, the components with key, name, settings and state."""
        state, clock = run.state_dict(), run.timestamp.state_dict()
        assert state.pop("metadata").keys() >= {"torch_version", "world_size"}
        assert state == {
            "version": 1,
            "rank_zero_seed": 17,
            "run_name": "first",
            "max_duration": {"$time": "10ep"},
            "timestamp": {**clock, "Timestamp": clock},
            "train_metric_values": {"Accuracy": torch.tensor(0.5)},
            "eval_metric_values": {},
            "algorithms": [
                {
                    "key": "SavedMix",
                    "name": "SavedMix",
                    "settings": {"alpha": 0.2, "input_key": 0},
                    "state": {"drawn": 0, "held": None},
                    "required_on_load": False,
                },
                {
                    "key": "SavedMix.1",
                    "name": "SavedMix",
                    "settings": {"alpha": 0.5, "input_key": 0},
                    "state": {"drawn": 3, "held": None},
                    "required_on_load": False,
                },
            ],
            "callbacks": [
                {
                    "key": "SavedWatch",
                    "name": "SavedWatch",
                    "settings": {"window": 3},
                    "state": {"seen": [], "last": None},
                }
            ],
            "schedulers": [],
            "scaler": None,
        }

    def test_every_saved_field_is_included(self):
        """The content follows from the fields' lifetimes."""
        fields = {field.alias for field in attrs.fields(State) if field.metadata["lifetime"] == "saved"}

        assert fields < set(state_with().state_dict())

    def test_saved_state_is_independent(self, run):
        """A saved state does not change while the run continues."""
        run.callbacks.append(OwnWatch())
        saved_state = run.state_dict()
        before = copy.deepcopy(saved_state)

        run.callbacks[0].seen.append(1.0)
        run.callbacks[1].held["n"] = 2
        run.train_metric_values["Accuracy"] = 3
        run.timestamp = run.timestamp.to_next_batch()

        assert repr(saved_state) == repr(before)

    def test_functions_in_settings_are_described(self):
        """A run whose algorithm has functions as keys can be saved."""
        state = state_with(algorithms=SavedMix(input_key=(print, len)))

        (record,) = state.state_dict()["algorithms"]

        assert record["settings"]["input_key"] == {"unsaved": "(function builtins.print, function builtins.len)"}

    @pytest.mark.parametrize(
        ("spoil", "path"),
        [
            (lambda state: state.callbacks[0].seen.append(print), "callbacks.SavedWatch.seen[0]"),
            (lambda state: state.callbacks.append(OwnWatch({"a": [print]})), "callbacks.OwnWatch.state.a[0]"),
            (lambda state: state.train_metric_values.update(Mine=print), "train_metric_values.Mine"),
        ],
    )
    def test_unserializable_state_raises(self, run, spoil, path):
        """The error states the component and the field."""
        spoil(run)

        with pytest.raises(NotSerializableError) as caught:
            run.state_dict()

        assert caught.value.path == path
        assert str(caught.value).startswith(f"{path}: ")

    # SequentialLR itself calls its schedulers in the way that torch 2.7 warns of.
    @pytest.mark.filterwarnings("ignore:The epoch parameter")
    @pytest.mark.parametrize(
        "make",
        [
            lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
            lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
            lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                    torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
                ],
                milestones=[2],
            ),
        ],
    )
    def test_schedulers_resume(self, make):
        """Through files, torch's schedulers give the same rates, including nested schedulers."""

        def start():
            weight = torch.nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            return State(model=None, optimizers=optimizer, schedulers=make(optimizer))

        def rates(state, steps):
            result = []
            for _ in range(steps):
                state.optimizers[0].step()
                state.schedulers[0].step()
                result.append(state.optimizers[0].param_groups[0]["lr"])
            return result

        first, second = start(), start()
        rates(first, 2)
        state = first.state_dict() | {"optimizers": first.get_optim_state_dict()}

        second.load_state_dict(through_files(state), strict=True)

        assert rates(second, 5) == rates(first, 5)
        assert repr(second.schedulers[0].state_dict()) == repr(first.schedulers[0].state_dict())

    def test_plateau(self):
        """A scheduler with infinite values."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        state = State(model=None, optimizers=optimizer, schedulers=scheduler)

        state.load_state_dict(through_files(state.state_dict()), strict=True)

        assert scheduler.best == math.inf

    def test_scaler(self):
        """The loss scale is restored."""
        first, second = (State(model=None, scaler=torch.amp.GradScaler("cpu", init_scale=s)) for s in (8.0, 2.0))

        second.load_state_dict(through_files(first.state_dict()), strict=True)

        assert second.scaler.get_scale() == 8.0


class TestCheck:
    def test_check_changes_nothing(self, run):
        """The report states what would be loaded and what not."""
        other = state_with(
            run_name="second", max_duration="20ep", algorithms=SavedMix(alpha=0.7), callbacks=[SavedWatch(), OwnWatch()]
        )
        before = repr(other.state_dict())

        report = other.check_state_dict(run.state_dict())

        assert repr(other.state_dict()) == before
        assert report == LoadReport(
            restored=(
                "rank_zero_seed",
                "timestamp",
                "train_metric_values",
                "eval_metric_values",
                "algorithms.SavedMix",
                "callbacks.SavedWatch",
            ),
            overridden=("run_name: second stays, first was saved.", "max_duration: 20ep stays, 10ep was saved."),
            missing=("callbacks.OwnWatch is not saved, and starts from its initial state.",),
            unexpected=("algorithms.SavedMix.1 is saved, and this run has none.",),
            changed=("algorithms.SavedMix.alpha: 0.2 was saved, 0.7 is set.",),
        )

    def test_strict(self, run):
        """Every difference is an error, except for values that the program sets."""
        other = state_with(max_duration="20ep", algorithms=[SavedMix(), SavedMix()], callbacks=SavedWatch())

        with pytest.raises(StateMismatchError) as caught:
            other.check_state_dict(run.state_dict(), strict=True)

        assert caught.value.problems == ("algorithms.SavedMix.1.alpha: 0.5 was saved, 0.2 is set.",)

    @pytest.mark.parametrize(
        ("saved_key", "own_key", "warned"),
        [
            ((print, len), (print, len), ()),
            ((print, len), (print, abs), ("(function builtins.print, function builtins.len) was saved",)),
            (print, 0, ("function builtins.print was saved, 0 is set",)),
            (0, print, ("0 was saved, function builtins.print is set",)),
            (math.nan, math.nan, ()),
            (torch.ones(2), torch.ones(2), ()),
            (torch.ones(2), torch.zeros(2), ("tensor([1., 1.]) was saved, tensor([0., 0.]) is set",)),
            ([1, (2,)], [1, (2,)], ()),
            ({"a": 1}, {"a": 2}, ("{'a': 1} was saved, {'a': 2} is set",)),
            (1, True, ("1 was saved, True is set",)),
        ],
    )
    def test_settings_are_compared(self, saved_key, own_key, warned):
        """Data are compared by value, other settings by their description."""
        state = state_with(algorithms=SavedMix(input_key=saved_key)).state_dict()

        changed = state_with(algorithms=SavedMix(input_key=own_key)).check_state_dict(state).changed

        assert len(changed) == len(warned)
        assert all(
            text in line and line.startswith("algorithms.SavedMix.input_key: ")
            for text, line in zip(warned, changed, strict=True)
        )

    def test_settings_on_one_side_only(self):
        """Settings of another release are reported."""
        state = state_with(algorithms=SavedMix()).state_dict()
        settings_saved = state["algorithms"][0]["settings"]
        settings_saved["former"] = 3
        del settings_saved["alpha"]

        changed = state_with(algorithms=SavedMix()).check_state_dict(state).changed

        assert changed == (
            "algorithms.SavedMix.alpha: nothing was saved, 0.2 is set.",
            "algorithms.SavedMix.former: 3 was saved, nothing is set.",
        )


def changed(state, *path, to):
    """Return a copy with one item replaced, or removed."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if to == "removed":
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return state


class TestErrors:
    @pytest.mark.parametrize(
        "foreign", [None, 3, [], {}, {"model": {}}, {"version": "1"}, {"version": 0}, {"version": True}]
    )
    def test_invalid_state_raises(self, run, foreign):
        """Data of another kind raise."""
        with pytest.raises(StateMismatchError, match=r"not what State\.state_dict\(\) returns"):
            run.load_state_dict(foreign)

    def test_later_version_raises(self, run):
        """An unknown schema version raises."""
        with pytest.raises(StateMismatchError, match=r"version: 2 is of a later release.*update composer-engine"):
            run.load_state_dict({"version": 2, "anything": 1})

    @pytest.mark.parametrize(
        ("path", "to", "text"),
        [
            (["timestamp"], "removed", "'timestamp' is missing."),
            (["max_duratoin"], "3ep", "'max_duratoin' is unknown; did you mean 'max_duration'?"),
            (["rank_zero_seed"], "17", "rank_zero_seed: must be int, got '17'."),
            (["max_duration"], {"$time": "-3ep"}, "max_duration: max_duration must be a length of time"),
            (["max_duration"], "soon", "max_duration: must be"),
            (["timestamp", "batch"], "removed", "missing: ['batch']"),
            (["timestamp", "batch"], 1.5, "and the same under 'Timestamp'"),
            (["algorithms"], {}, "algorithms: must be list[composer.core.saving.saved_state.AlgorithmRecord], got {}."),
            (
                ["algorithms", 0],
                3,
                "algorithms[0]: must be AlgorithmRecord, got 3.",
            ),
            (
                ["algorithms", 0, "state"],
                "removed",
                "algorithms[0]: field 'state' is missing.",
            ),
            (["algorithms", 0, "key"], 3, "algorithms[0].key: must be str, got 3."),
            (["algorithms", 0, "stat"], {}, "algorithms[0]: unknown field 'stat'; did you mean 'state'?"),
            (["algorithms", 0, "key"], "SavedMix.1", "algorithms.SavedMix.1 is there 2 times."),
            (["algorithms", 0, "name"], "Other", "algorithms.SavedMix: is a SavedMix, and a Other was saved."),
            (
                ["algorithms", 0, "state", "darwn"],
                1,
                "SavedMix: SavedMix saves no 'darwn'; did you mean 'drawn'?",
            ),
            (["algorithms", 0, "state", "drawn"], "x", "algorithms.SavedMix: SavedMix.drawn: must be int, got 'x'."),
            (["callbacks", 0, "state", "seen"], [1, None], "callbacks.SavedWatch: SavedWatch.seen[1]: must be float"),
            (["schedulers"], [{"key": "LambdaLR"}], "schedulers[0]: field 'state' is missing."),
            (["scaler"], [], "scaler: must be a dictionary or None, got list."),
            (["optimizers"], [], "optimizers: must be a dictionary, got list."),
        ],
    )
    def test_single_error(self, run, path, to, text):
        """The error states the component, the field and what was expected; nothing changes."""
        bad = changed(run.state_dict(), *path, to=to)
        before = repr(run.state_dict())
        bad["run_name"] = "other"

        with pytest.raises(StateMismatchError) as caught:
            run.load_state_dict(bad)

        assert any(text in problem for problem in caught.value.problems), caught.value.problems
        assert "nothing of it has been loaded" in str(caught.value)
        assert repr(run.state_dict()) == before

    @pytest.mark.parametrize(("own", "other"), [(True, False), (False, True)])
    def test_scaler_on_one_side_only(self, own, other):
        """A missing or unexpected loss scale gives a warning."""
        states = [State(model=None, scaler=torch.amp.GradScaler("cpu") if has else None) for has in (own, other)]

        report = states[0].check_state_dict(states[1].state_dict())

        assert len(report.differences) == 1
        assert report.differences[0].startswith("scaler: ")

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )
    PLACES = [
        ["version"],
        ["timestamp"],
        ["timestamp", "total_wct"],
        ["max_duration"],
        ["algorithms"],
        ["algorithms", 0],
        ["algorithms", 0, "settings"],
        ["algorithms", 0, "settings", "alpha"],
        ["algorithms", 0, "state"],
        ["algorithms", 0, "state", "held"],
        ["callbacks", 0, "state", "last"],
        ["schedulers"],
        ["scaler"],
        ["optimizers"],
        ["model"],
        ["new"],
    ]

    @given(JSON, st.sampled_from(PLACES))
    @settings(max_examples=100, deadline=None)
    def test_arbitrary_data(self, junk, path):
        """Arbitrary data are loaded or raise a ValueError."""
        state = State(model=torch.nn.Linear(1, 1), algorithms=SavedMix(), callbacks=SavedWatch())
        spoilt = changed(state.state_dict(), *path, to=junk)

        try:
            state.check_state_dict(spoilt)
        except StateMismatchError as error:
            refused = error
        else:
            refused = None

        assert refused is None or all(refused.problems)


TIMES = st.builds(Time, st.integers(0, 10**6), st.sampled_from(["iter", "ep", "ba", "sp", "tok"]))
METRICS = st.dictionaries(st.text(max_size=5), st.floats() | st.integers() | st.just(torch.tensor(0.25)), max_size=3)


class TestRoundTrip:
    @given(
        seed=st.integers(0, 2**63),
        name=st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\."), min_size=1, max_size=8),
        duration=st.none() | TIMES,
        counts=st.dictionaries(st.sampled_from(["epoch", "batch", "sample", "token_in_epoch"]), st.integers(0, 2**60)),
        metrics=METRICS,
        drawn=st.integers(),
        seen=st.lists(st.floats()),
        last=st.none() | TIMES,
    )
    @settings(deadline=None)
    def test_state(self, seed, name, duration, counts, metrics, drawn, seen, last):
        """Through JSON and tensors, every saved field is restored."""
        first = state_with(rank_zero_seed=seed, run_name=name, max_duration=duration)
        first.algorithms, first.callbacks = SavedMix(), SavedWatch()
        first.timestamp = Timestamp(**counts)
        first.train_metric_values = metrics
        first.algorithms[0]._drawn, first.callbacks[0].seen, first.callbacks[0].last = drawn, seen, last
        second = state_with(algorithms=SavedMix(), callbacks=SavedWatch())

        second.load_state_dict(through_files(first.state_dict()), strict=True)

        written, again = first.state_dict(), second.state_dict()
        assert again.pop("run_name") == "run"
        assert written.pop("run_name") == name
        assert repr(again) == repr(written)
        assert second.timestamp == first.timestamp
        assert second.callbacks[0].last == last
        assert type(second.algorithms[0]._drawn) is int


def test_state_that_exists_only_in_a_run():
    """A callback whose state_dict() fails before it has run is loaded all the same."""

    class Counting(Callback):
        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state_dict):
            self.count = state_dict["count"]

    ran, new = Counting(), Counting()
    ran.count = 3

    State(model=None, callbacks=[new]).load_state_dict(State(model=None, callbacks=[ran]).state_dict())

    assert new.count == 3


def test_dataclass_callback():
    """A callback that is not an attrs class has no saved settings; its state can be saved and loaded."""

    @dataclasses.dataclass(eq=False)
    class Counting(Callback):
        count: int = 3

    saved = State(model=None, callbacks=[Counting()]).state_dict()

    assert State(model=None, callbacks=[Counting()]).load_state_dict(saved).changed == ()
