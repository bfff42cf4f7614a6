"""Plain data, also as JSON and tensors."""

import collections
import contextlib
import enum
import fractions
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import (
    NotSerializableError,
    Time,
    join_tensors,
    split_tensors,
)
from composer.core.plain_data import plain


class Colour(enum.IntEnum):
    RED = 1


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
            ({"a": {"b": {1, 2}}}, "a.b", r"object of builtins\.set cannot be saved.*sorted\("),
            ({("a", 1): object()}, "[('a', 1)]", r"object of builtins\.object cannot be saved"),
            ([Colour.RED], "[0]", "save its value"),
            ({"n": collections.Counter("aab")}, "n", r"dict\("),
            ({"t": Time(3, "ep")}, "t", "annotate the field with its type"),
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

    def test_other_mappings(self):
        """Other mappings are saved as dictionaries only on request."""
        counts = {"n": [collections.Counter("aab")]}

        assert repr(plain(counts, mappings=True)) == "{'n': [{'a': 2, 'b': 1}]}"

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

    def test_nan(self):
        """NaN is restored as NaN."""
        assert math.isnan(through_json(math.nan))

    def test_reserved_keys_as_data(self):
        """A dictionary that looks like the format's own is only data."""
        state = {"$tensor": "x", "$float": "nan", "deep": [{"$tuple": [1]}, {"$dict": [[1, 2]]}]}

        assert through_json(state) == state

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

    def test_conjugate_views(self):
        """A conjugate and a negative view are saved with their own values."""
        number = torch.tensor([1 + 2j])
        state = {"a": number, "b": number.conj(), "c": number.conj().imag, "d": number.imag}

        joined = through_json(state)

        assert {name: one.tolist() for name, one in joined.items()} == {
            name: one.tolist() for name, one in state.items()
        }

    def test_empty_tensors_are_separate(self):
        """Two tensors without elements are two."""
        assert len(split_tensors([torch.empty(0), torch.empty(0)])[1]) == 2


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

    def test_single_tensor(self):
        """A tensor without a path has a name."""
        assert list(split_tensors(torch.ones(1))[1]) == ["tensor"]

    def test_tensors_are_not_copied(self):
        """Nothing is copied, and no graph is kept alive."""
        weight = torch.nn.Parameter(torch.ones(2))

        (tensor,) = split_tensors([weight])[1].values()

        assert tensor.data_ptr() == weight.data_ptr()
        assert not tensor.requires_grad


class TestJsonErrors:
    @pytest.mark.parametrize("state", [{"a": print}, {"a": {1}}, {"a": [b"x"]}])
    def test_unserializable_value_raises(self, state):
        """The error states the path."""
        with pytest.raises(NotSerializableError, match=r"^a.*cannot be saved"):
            split_tensors(state)

    def test_tensor_key_raises(self):
        """Keys must be plain data."""
        with pytest.raises(NotSerializableError, match=r"^a: a tensor cannot be a dictionary's key"):
            split_tensors({"a": {torch.ones(1): 3}})

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
