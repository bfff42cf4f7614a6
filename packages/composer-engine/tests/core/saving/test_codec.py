"""The encoding of what is saved: copies, JSON and tensors."""

import contextlib
import datetime as dt
import enum
import fractions
import json
import math
import pathlib
import signal
from collections import Counter, OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import (
    Callback,
    Event,
    NotSerializableError,
    Precision,
    Stage,
    State,
    Time,
    Timestamp,
    TimeUnit,
    from_data,
    join_tensors,
    split_tensors,
    to_data,
)
from composer.core.saving.codec import MAX_DEPTH, plain


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


class FakeNumber(float):
    """A subclass of float, like NumPy's float64."""


class TestPlain:
    @pytest.mark.parametrize(
        "value", [None, True, 3, -(2**4000), 0.5, "text", [1, (2, [])], {"a": {}, 3: (None, ()), None: "x"}]
    )
    def test_plain_data_is_unchanged(self, value):
        """Numbers, strings, lists, tuples and dictionaries are plain data."""
        assert repr(plain(value)) == repr(value)

    def test_containers_are_copied_and_tensors_are_not(self):
        """Containers are copied, so that a saved state does not change with the run; tensors are shared."""
        tensor = torch.ones(2)
        state = {"items": [tensor]}

        saved_state = plain(state)
        state["items"].append(1)

        assert len(saved_state["items"]) == 1
        assert saved_state["items"][0] is tensor

    def test_numbers_of_other_libraries(self):
        """Numbers of other libraries are converted to Python's."""
        numbers = plain([FakeNumber(0.5), fractions.Fraction(1, 4)])

        assert [(type(number), number) for number in numbers] == [(float, 0.5), (float, 0.25)]

    @pytest.mark.parametrize(
        ("value", "path", "text"),
        [
            ({"a": [0, print]}, "a[1]", r"function builtins\.print cannot be saved\. A checkpoint holds numbers"),
            ({("a", 1): object()}, "[('a', 1)]", r"object of builtins\.object cannot be saved"),
            ({"p": Point(1, 2)}, "p", r"cannot be saved.*save a tuple"),
            ({"b": b"x"}, "b", "cannot be saved"),
            ({"n": 2**5000}, "n", "more than 4096 bits"),
            ({"m": torch.empty(2, device="meta")}, "m", "a meta tensor cannot be saved"),
            ({"s": torch.eye(2).to_sparse()}, "s", "a sparse tensor cannot be saved"),
        ],
    )
    def test_other_values_raise(self, value, path, text):
        """The error states the path, the value and the remedy."""
        with pytest.raises(NotSerializableError, match=text) as caught:
            plain(value, "top")

        assert caught.value.path == (f"top{path}" if path.startswith("[") else f"top.{path}")

    def test_self_referencing_list_raises(self):
        """The recursion is limited."""
        items = []
        items.append(items)

        with pytest.raises(NotSerializableError, match="nested more than 64 deep, or contains itself"):
            plain(items)


KEYS = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.sampled_from(["$", "$tensor", "$dict", "a.b"])
)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from([torch.ones(2, 3), torch.tensor(3), torch.empty(0), torch.zeros(2, dtype=torch.bfloat16)])
)


STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner, max_size=4)
    ),
    max_leaves=15,
)


def same(one, other):
    """Return whether two states are equal, including the type of each item."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return one == other


def through_json(state):
    data, tensors = split_tensors(state)
    return join_tensors(json.loads(json.dumps(data, allow_nan=False)), tensors)


class TestJson:
    @given(STATES)
    @settings(max_examples=200, deadline=None)
    def test_round_trip(self, state):
        """Tuples, non-string keys, empty containers and tensors of every size are restored."""
        assert same(through_json(state), state)

    @pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1, -0.0, 5e-324, 1.7976931348623157e308])
    def test_floats(self, number):
        """Floats that JSON cannot represent are restored too."""
        assert repr(through_json([number])) == repr([number])

    def test_shared_tensor(self):
        """A shared tensor is written once and restored as one tensor."""
        tensor = torch.ones(3)

        data, tensors = split_tensors({"a": tensor, "b": tensor, "view": tensor[:]})
        joined = join_tensors(data, tensors)

        assert list(tensors) == ["a"]
        assert joined["a"] is joined["b"] is joined["view"]

    def test_different_views_of_one_storage(self):
        """Rows, a transposed matrix or another dtype of the same memory are separate tensors."""
        matrix = torch.arange(4.0).reshape(2, 2)
        state = {"all": matrix, "row": matrix[0], "turned": matrix.t(), "bits": matrix.view(torch.int32)}

        assert same(through_json(state), state)
        assert len(split_tensors(state)[1]) == 4


class TestTensorNames:
    def test_names_are_paths(self):
        """Tensor names are paths."""
        _, tensors = split_tensors({"EMA": {"averages": {"0.weight": torch.ones(1)}}, "list": [torch.ones(1)]})

        assert list(tensors) == ["EMA.averages.0.weight", "list[0]"]

    def test_colliding_names_are_numbered(self):
        """Keys with dots do not merge two tensors."""
        state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}

        data, tensors = split_tensors(state)

        assert list(tensors) == ["a.b", "a.b#1"]
        assert same(join_tensors(data, tensors), state)


class TestJsonErrors:
    @pytest.mark.parametrize(
        ("data", "tensors", "text"),
        [
            ({"a": {"$tensor": "w"}}, {"w1": torch.ones(1)}, "a: there is no tensor 'w'; did you mean 'w1'?"),
            ({"a": {"$tensor": [1]}}, {}, r"a: there is no tensor \[1\]"),
            ({"a": 1}, {"w": torch.ones(1)}, "no place in the data: 'w'"),
            ({"a": {"$float": 3}}, {}, "a: must be as split_tensors"),
            ({"a": {"$float": []}}, {}, "a: must be as split_tensors"),
            ({"a": {"$tuple": "xy"}}, {}, "a: must be as split_tensors\\(\\) writes it, got {'\\$tuple': 'xy'}"),
            ({"a": {"$dict": {"b": 1}}}, {}, "a: must be as split_tensors"),
            ({"a": {"$dict": [[1]]}}, {}, "a: must be as split_tensors"),
            ({"a": {"$dict": [[[1], 2]]}}, {}, "a: must be as split_tensors"),
            ({"a": {"$code": "x"}}, {}, "a: must be as split_tensors"),
            ({"a": {"$tuple": [], "b": 1}}, {}, "a: must be as split_tensors"),
            ({3: 1}, {}, "must be as split_tensors.* got {3: 1}"),
            ({"a": object()}, {}, "a: must be as split_tensors.* got <object"),
        ],
    )
    def test_malformed_data_raises(self, data, tensors, text):
        """Data that the encoder never writes raise."""
        with pytest.raises(ValueError, match=text):
            join_tensors(data, tensors)

    def test_deep_nesting_raises(self):
        """A file cannot cause a stack overflow."""
        data = []
        for _ in range(5000):
            data = [data]

        with pytest.raises(ValueError, match="nested more than 128 deep"):
            join_tensors(data, {})

    @given(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$dict", "$float", "a"]), inner, max_size=2)
            ),
            max_leaves=8,
        )
    )
    @settings(deadline=None)
    def test_arbitrary_data(self, data):
        """Arbitrary data are loaded or raise a ValueError."""
        with contextlib.suppress(ValueError):
            assert same(through_json(join_tensors(data, {})), join_tensors(data, {}))


VALUES = [
    (Time(3, "ep"), {"$time": "3ep"}),
    (Timestamp(batch=3), {"$timestamp": Timestamp(batch=3).state_dict()}),
    (TimeUnit.EPOCH, {"$enum": ["composer.core.time:TimeUnit", "ep"]}),
    (Stage.MIX, {"$enum": ["composer.core.event:Stage", 40]}),
    (Precision.AMP_BF16, {"$enum": ["composer.core.precision:Precision", "amp_bf16"]}),
    (signal.SIGTERM, {"$enum": ["signal:Signals", 15]}),
    (dt.timedelta(days=3, microseconds=7), {"$timedelta": 259200.000007}),
    (torch.bfloat16, {"$dtype": "bfloat16"}),
    (torch.device("cuda:1"), {"$device": "cuda:1"}),
    (pathlib.Path("a/b"), {"$path": "a/b"}),
    ({3, 1, 2}, {"$set": [1, 2, 3]}),
    (frozenset("b"), {"$frozenset": ["b"]}),
    (Counter("aab"), {"$counter": [["a", 2], ["b", 1]]}),
    (OrderedDict(b=1, a=2), {"$ordered": [["b", 1], ["a", 2]]}),
    ({Event.INIT: 1}, {"$dict": [[{"$enum": ["composer.core.event:Event", "init"]}, 1]]}),
    ({(1, "a"): [(0.5,)]}, {"$dict": [[{"$tuple": [1, "a"]}, [{"$tuple": [0.5]}]]]}),
]


class TestTypes:
    @pytest.mark.parametrize(("value", "data"), VALUES, ids=str)
    def test_each_type(self, value, data):
        """The data have the documented form and give an equal value of the same type, in any place."""
        again = through_json({"held": [value]})["held"][0]

        assert split_tensors(value)[0] == to_data(value) == data
        assert type(again) is type(value)
        assert again == value == from_data(data) == plain(value)

    def test_other_mappings_are_dictionaries(self):
        """A mapping of another class is restored as a dictionary."""

        class Table(dict):
            pass

        assert type(through_json(Table(a=1))) is dict

    def test_sets_are_written_deterministically(self):
        """Two runs write the same file."""
        assert to_data({"b", "c", "a"}) == to_data({"a", "c", "b"}) == {"$set": ["a", "b", "c"]}
        assert from_data(to_data({"a", 1, (2,)})) == {"a", 1, (2,)}

    def test_tensors_stay_in_their_places(self):
        """to_data keeps tensors, as torch.save expects them."""
        weight = torch.ones(2)

        assert to_data((weight,))["$tuple"][0] is weight
        assert from_data(to_data((weight,)))[0] is weight

    @pytest.mark.parametrize(
        "data",
        [
            {"$time": "x"},
            {"$time": 3},
            {"$timestamp": {"batch": 1}},
            {"$dtype": "Tensor"},
            {"$dtype": "save"},
            {"$device": "moon"},
            {"$timedelta": "x"},
            {"$set": [[]]},
            {"$enum": ["TimeUnit"]},
            {"$enum": "ab"},
            {"$counter": [1]},
            {"$path": 3},
        ],
    )
    def test_malformed_values_raise(self, data):
        """The error states the place and the data."""
        with pytest.raises(ValueError, match=r"^a: must be as split_tensors\(\) writes it, got {'\$"):
            join_tensors({"a": data}, {})


class Holder(Callback):
    """Has a state of any kind."""

    def __init__(self, held=None):
        self.held = held

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


class TestEnumerations:
    def test_a_class_that_is_not_loaded(self):
        """The value is loaded, with a warning that names the place and the module; nothing is imported."""
        with pytest.warns(UserWarning, match=r"callbacks\[0\]: a member of Mode was saved.*import this"):
            value = join_tensors({"callbacks": [{"$enum": ["this:Mode", "fast"]}]}, {})

        assert value == {"callbacks": ["fast"]}

    @pytest.mark.parametrize("name", ["os:system", "builtins:print", "composer.core.time:Time", "os:environ.x", ":"])
    def test_only_enumerations_are_called(self, name):
        """Another object of a loaded module is no enumeration."""
        with pytest.warns(UserWarning, match="its value is loaded in its place"):
            assert join_tensors({"$enum": [name, "ls"]}, {}) == "ls"

    def test_members_in_the_state_of_a_callback(self):
        """Values of all types are loaded as they were saved, whatever the new object has."""
        new = Holder(3)
        held = {"at": [Time(3, "ba"), TimeUnit.BATCH], "$time": Colour.RED, ("$dict", 1): {1}}

        State(model=None, callbacks=[new]).load_state_dict(State(model=None, callbacks=[Holder(held)]).state_dict())

        assert new.held == held
        assert type(new.held["$time"]) is Colour


class TestDepth:
    def test_depth_is_limited(self):
        """64 containers around a value are accepted, and one more is not."""
        deepest = 3
        for _ in range(MAX_DEPTH + 1):
            deepest = (deepest,)

        assert through_json(deepest) == deepest
        with pytest.raises(NotSerializableError, match="is nested more than 64 deep"):
            plain([deepest])
