"""Typed values and plain data, and plain data as JSON and tensors."""

import collections
import contextlib
import datetime as dt
import enum
import fractions
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import (
    BatchKey,
    Event,
    Interval,
    NotSerializableError,
    Precision,
    Stage,
    Time,
    Timestamp,
    TimeUnit,
    from_data,
    join_tensors,
    split_tensors,
    to_data,
)
from composer.core.serialization import field_types, plain


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


@attrs.define
class Inner:
    every: Time
    names: tuple[str, ...] = ()


@attrs.define(eq=False)
class Outer:
    inner: Inner
    _hidden: int = 3


@attrs.frozen
class Choice:
    mode: str = attrs.field(validator=attrs.validators.in_(["min", "max"]))


@attrs.frozen
class Near(Interval):
    """A subclass, which would not be restored as one."""


TENSOR = torch.ones(2)


PAIRS = [
    (3, int, 3),
    (3, float, 3),
    (0.5, float, 0.5),
    (1.5, int | float, 1.5),
    (True, bool, True),
    ("x", str, "x"),
    (None, int | None, None),
    (3, int | str | None, 3),
    ("x", int | str | None, "x"),
    (Time(3, "ep"), Time | None, "3ep"),
    (Time(1.5, "dur"), Time | str, "1.5dur"),
    ("x", Time | str, "x"),
    ([Time(1, "ba"), None], list[Time | None], ["1ba", None]),
    (TimeUnit.EPOCH, TimeUnit, "ep"),
    (Event.INIT, Event, "init"),
    (Precision.AMP_BF16, Precision, "amp_bf16"),
    (Stage.MIX, Stage, 40),
    (dt.timedelta(days=3, microseconds=7), dt.timedelta, 259200.000007),
    (torch.bfloat16, torch.dtype, "bfloat16"),
    (torch.float16, torch.dtype | str | None, "float16"),
    (torch.device("cuda:1"), torch.device, "cuda:1"),
    (pathlib.Path("a/b"), pathlib.Path, "a/b"),
    ((0.9, 0.99), tuple[float, float], [0.9, 0.99]),
    ((1, 2, 3), tuple[int, ...], [1, 2, 3]),
    ({3, 1, 2}, set[int], [1, 2, 3]),
    (frozenset("b"), frozenset[str], ["b"]),
    ((1, 2), Sequence[int], (1, 2)),
    ([1, 2], Sequence[int], [1, 2]),
    ({"a": 1}, Mapping[str, int], {"a": 1}),
    ({Event.INIT: Time(1, "ep")}, dict[Event, Time], {"init": "1ep"}),
    ({1: [2]}, dict[int, list[int]], {1: [2]}),
    ([1, (2,)], list, [1, (2,)]),
    ({"a": (1,)}, dict, {"a": (1,)}),
    ((1,), tuple, (1,)),
    ("a", Literal["a", "b"], "a"),
    (Interval("3ba"), Interval, {"every": "3ba"}),
    (Outer(Inner(Time(3, "ep"), ("x",))), Outer, {"inner": {"every": "3ep", "names": ["x"]}, "_hidden": 3}),
    (1, BatchKey, 1),
    ("x", BatchKey, "x"),
    ((1, "a"), BatchKey, (1, "a")),
    ({"a": [0.5, None]}, Any, {"a": [0.5, None]}),
    ({"a": 1}, object, {"a": 1}),
    (None, Callable[[int], int] | None, None),
    (TENSOR, torch.Tensor | None, TENSOR),
    ({"a": TENSOR}, dict[str, torch.Tensor], {"a": TENSOR}),
    (Timestamp(batch=3), Timestamp, Timestamp(batch=3).state_dict()),
]


class TestTypes:
    @pytest.mark.parametrize(("value", "kind", "data"), PAIRS, ids=str)
    def test_each_type(self, value, kind, data):
        """The data have the documented form, and give an equal value."""
        written = to_data(value, kind)
        again = from_data(written, kind)

        assert repr(written) == repr(data)
        assert type(again) is type(value)
        assert repr(again) == repr(value)

    @given(st.floats(), st.floats(allow_nan=False))
    @settings(deadline=None)
    def test_floats(self, any_float, number):
        """Every float is a float, also in a union with other types."""
        assert repr(from_data(to_data(any_float, float), float)) == repr(any_float)
        assert from_data(to_data(number, Time | float | None), Time | float | None) == number

    @given(st.timedeltas(dt.timedelta(), dt.timedelta(days=36500)))
    @settings(deadline=None)
    def test_durations_through_json(self, duration):
        """Durations of up to a century are exact to the microsecond."""
        data = json.loads(json.dumps(to_data(duration, dt.timedelta)))

        assert from_data(data, dt.timedelta) == duration

    @given(st.dictionaries(st.text(), st.lists(st.sampled_from(Event))), st.sets(st.integers() | st.text()))
    @settings(deadline=None)
    def test_nested_types(self, table, mixed):
        """Types within types, and sets of unsortable values."""
        kind = dict[str, list[Event]]

        assert from_data(json.loads(json.dumps(to_data(table, kind))), kind) == table
        assert from_data(to_data(mixed, set[int | str]), set[int | str]) == mixed

    def test_fields_in_any_order(self):
        """The order of keys in a file does not matter."""

        @attrs.define
        class Place:
            epoch: int
            batch: int

        assert from_data({"batch": 2, "epoch": 1}, Place) == Place(1, 2)

    def test_sets_are_written_deterministically(self):
        """Two runs write the same file."""
        assert to_data({"b", "c", "a"}, set[str]) == to_data({"a", "c", "b"}, set[str]) == ["a", "b", "c"]

    def test_number_of_another_library(self):
        """A value that acts as a float is written as one."""

        class Float64(float):
            pass

        assert type(to_data(Float64(0.5), float)) is float
        assert type(to_data(Float64(0.5), float | None)) is float

    def test_string_that_is_a_time(self):
        """In a union, a string is read as the equal Time."""
        assert from_data(to_data("3ep", Time | str), Time | str) == "3ep"


class TestTypeErrors:
    @pytest.mark.parametrize(
        ("value", "kind", "text"),
        [
            (print, Any, "p: function builtins.print cannot be saved"),
            (print, Callable, "p: function builtins.print cannot be saved"),
            ((print, len), BatchKey, r"p\[0\]: function builtins.print cannot be saved"),
            (Time(1, "ep"), Any, "p: object of composer.core.time.Time cannot be saved.*annotate the field"),
            ({1}, Any, "p: object of builtins.set cannot be saved"),
            ("3", int, "p: '3' cannot be saved as int"),
            (True, int, "p: True cannot be saved as int"),
            (3, str, "p: 3 cannot be saved as str"),
            ((1,), list[int], r"p: \(1\) cannot be saved as list\[int\]"),
            ([1], tuple[int, ...], r"p: \(1\) cannot be saved as tuple\[int, \.\.\.\]"),
            ((1,), tuple[int, int], r"p: \(1\) cannot be saved as tuple\[int, int\]"),
            ([0.5, "x"], list[float], r"p\[1\]: 'x' cannot be saved as float"),
            (collections.OrderedDict(a=1), dict[str, int], "p: object of collections.OrderedDict cannot be saved"),
            (Near("3ba"), Interval, "p: object of .*Near cannot be saved"),
            (Stage.MIX, Event, "p: <Stage.MIX: 40> cannot be saved.*; save its value"),
            (None, Time, "p: None cannot be saved as Time"),
            (Interval("1ba"), Inner, "p: object of composer.core.interval.Interval cannot be saved"),
            (pathlib.Path("a"), str | pathlib.Path, "p: .*PosixPath|WindowsPath.* would not be the same"),
            (torch.empty(1, device="meta"), torch.Tensor, "p: a meta tensor"),
        ],
        ids=str,
    )
    def test_invalid_values_raise_on_save(self, value, kind, text):
        """A value that would not be read back equal raises."""
        with pytest.raises(NotSerializableError, match=text):
            to_data(value, kind, "p")

    @pytest.mark.parametrize(
        ("data", "kind", "text"),
        [
            ("abc", list[str], r"p: must be list\[str\], got 'abc'"),
            ("3", int, "p: must be int, got '3'"),
            (True, int, "p: must be int, got True"),
            (1, bool, "p: must be bool, got 1"),
            (3, str, "p: must be str, got 3"),
            (None, int, "p: must be int, got None"),
            (float("nan"), int, "p: must be int, got nan"),
            (3, Time, "p: must be Time, got 3"),
            ("epochs", TimeUnit, "p: must be TimeUnit, got 'epochs'"),
            ("x", Event, "p: must be Event, got 'x'"),
            ("x", Literal["a"], "p: must be Literal"),
            ("Tensor", torch.dtype, "p: must be dtype, got 'Tensor': torch has no dtype"),
            (float("nan"), dt.timedelta, "p: must be timedelta, got nan"),
            ([1, "a"], list[int], r"p\[1\]: must be int: got 'a'"),
            ({"a": ["x"]}, dict[str, list[int]], r"p\['a'\]\[0\]: must be int: got 'x'"),
            ("x", dict[str, int], "p: must be dict"),
            ([1, 2, 3], tuple[int, int], "p: .*"),
            ("ab", Sequence[str], "p: must be .*Sequence.*, got 'ab'"),
            ("x", list, "p: must be list, got 'x'"),
            ({"evry": "1ba"}, Interval, "field 'every' is missing.*unknown field 'evry'; did you mean 'every'"),
            ({"every": "1ba", 3: 1, "b": 1}, Interval, "unknown field 3; unknown field 'b'"),
            ([{"mode": "best"}], list[Choice], r"^p\[0\]: 'mode' must be in \['min', 'max'\] \(got 'best'\)\.$"),
            ({"every": "x"}, Interval, "p.every: must be Time: A time must be a number"),
            ([], Interval, r"p: must be Interval, got \[\]"),
            (3, torch.Tensor, "p: must be Tensor, got 3"),
            ({"batch": 1}, Timestamp, "p: must be Timestamp.*missing"),
            (["3ep", 4], list[Time | None], r"p\[1\]: must be .*Time \| None: got 4"),
        ],
        ids=str,
    )
    def test_invalid_values_raise_on_load(self, data, kind, text):
        """The error states the path, what was expected and the value."""
        with pytest.raises(ValueError, match=text):
            from_data(data, kind, "p")

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )

    @given(JSON, st.sampled_from([kind for _, kind, _ in PAIRS]))
    @settings(deadline=None)
    def test_arbitrary_data(self, data, kind):
        """Arbitrary data give a value or a ValueError."""
        with contextlib.suppress(ValueError):
            value = from_data(data, kind)
            assert repr(to_data(value, kind)) == repr(data) or to_data(value, kind) == data


class TestFieldTypes:
    def test_annotations_resolve_in_their_module(self):
        """Annotations of a base class are resolved in its module."""

        @attrs.define
        class Far(Interval):
            near: "int" = 3

        assert field_types(Far) == {"every": Time, "near": int}

    def test_unresolvable_annotation_is_any(self):
        """A name that is only defined for type checkers is read as Any."""

        @attrs.define
        class Loose:
            known: "int"
            unknown: "Nowhere | None"  # noqa: F821

        assert field_types(Loose) == {"known": int, "unknown": Any}
        assert field_types(attrs.make_class("Bare", ["x"])) == {"x": Any}

    def test_forward_reference(self, monkeypatch):
        """An annotation is resolved as soon as its name is defined."""

        @attrs.define
        class Early:
            later: "Later | None" = None  # noqa: F821

        before = field_types(Early)
        monkeypatch.setitem(globals(), "Later", Interval)

        assert before == {"later": Any}
        assert field_types(Early) == {"later": Interval | None}


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
