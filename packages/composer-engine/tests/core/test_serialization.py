"""Values of other types than plain data, by declared types and by the names of types."""

import collections
import contextlib
import datetime as dt
import enum
import json
import pathlib
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import (
    BatchKey,
    Callback,
    Event,
    Interval,
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
from composer.core.plain_data import ENCODED, MAX_DEPTH, plain
from composer.core.serialization import _CODECS, coded, decoded, field_types


class Colour(enum.IntEnum):
    RED = 1


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


def test_every_encoded_type_has_a_codec():
    """The types and their codecs have the same order."""
    assert (*ENCODED[:1], str, *ENCODED[1:]) == tuple(_CODECS)


def make_local_mode():
    class Mode(enum.Enum):
        FAST = "fast"

    return Mode.FAST


class Named(Callback):
    """Has a state whose values a new object lacks."""

    def __init__(self, held=None):
        self.held = held

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


class TestCoded:
    """Values of enumerations and other types in the state of a callback."""

    @pytest.mark.parametrize("own", [None, Colour.RED, TimeUnit.EPOCH, pathlib.Path("own"), Time(1, "ep")])
    @pytest.mark.parametrize(
        "value", [TimeUnit.BATCH, signal.SIGTERM, Colour.RED, Time(3, "ba"), pathlib.Path("saved"), uuid.SafeUUID.safe]
    )
    def test_the_saved_type_decides(self, own, value):
        """Whatever the new object has at that place, the loaded value has the type that was saved."""
        new = Named(own)

        State(model=None, callbacks=[new]).load_state_dict(State(model=None, callbacks=[Named(value)]).state_dict())

        assert new.held == value
        assert type(new.held) is type(value)

    def test_an_unknown_enumeration(self):
        """The value of an enumeration that is local to a function is loaded, with a warning that names the place."""
        new = Named()
        written = State(model=None, callbacks=[Named([make_local_mode()])]).state_dict()

        with pytest.warns(UserWarning, match=r"callbacks\.Named\.held\[0\]: a member of Mode was saved"):
            State(model=None, callbacks=[new]).load_state_dict(written)

        assert new.held == ["fast"]

    def test_a_renamed_enumeration(self):
        """The own value shows what an enumeration is called now; a value that this lacks is loaded with a warning."""
        new, other = Named([TimeUnit.EPOCH, Colour.RED]), Named([TimeUnit.EPOCH, Colour.RED])
        former = [{"$coded": ["FormerUnit", "ba"]}, {"$coded": ["FormerColour", 1]}]
        removed = [former[0], {"$coded": ["FormerColour", 2]}]

        new.load_state_dict(decoded(new.state_dict(), {"held": former}, Named))
        with pytest.warns(UserWarning, match="a member of FormerColour was saved"):
            other.load_state_dict(decoded(other.state_dict(), {"held": removed}, Named))

        assert new.held == [TimeUnit.BATCH, Colour.RED]
        assert other.held == [TimeUnit.BATCH, 2]

    @pytest.mark.parametrize(
        "held",
        [
            {"$coded": ["Time", "3ba"]},
            {"$coded": 5},
            {"$coded": {"$coded": TimeUnit.BATCH}, "more": 1},
            {("$coded", "Time", "3ba"): 1, TimeUnit.BATCH: 2},
            {("$coded",): [{"$coded": ["TimeUnit", "ba"]}]},
            {"$coded.1": 1, "$tensor": "name"},
            {("$coded", "$key", "x"): 1},
        ],
    )
    def test_keys_like_those_of_codes(self, held):
        """Dictionaries of a user that look like encoded values are loaded as they were saved."""
        new = Named()
        data, tensors = split_tensors(State(model=None, callbacks=[Named(held)]).state_dict())

        State(model=None, callbacks=[new]).load_state_dict(join_tensors(json.loads(json.dumps(data)), tensors))

        assert new.held == held
        assert [*map(type, new.held)] == [*map(type, held)]

    def test_a_counter(self):
        """A Counter of the new object is loaded as one, with its keys of other types."""
        new, held = Named(Counter()), Counter({TimeUnit.BATCH: 2, "a": 1})

        State(model=None, callbacks=[new]).load_state_dict(State(model=None, callbacks=[Named(held)]).state_dict())

        assert new.held == held
        assert type(new.held) is Counter

    def test_depth_is_that_of_plain_data(self):
        """What plain() accepts at the greatest depth is accepted, and one container more is not."""
        deepest = 3
        for _ in range(MAX_DEPTH + 1):
            deepest = [deepest]

        assert plain(coded(deepest)) == deepest
        with pytest.raises(NotSerializableError, match="is nested more than 64 deep"):
            coded([deepest])

    def test_a_state_that_contains_itself(self):
        """The error states the place."""
        held = []
        held.append(held)

        with pytest.raises(NotSerializableError, match=r"^callbacks\.Named\.state\.held\[0\].*or contains itself"):
            State(model=None, callbacks=[Named(held)]).state_dict()

    @pytest.mark.parametrize("data", [5, ["Time"], [3, "3ba"]])
    def test_a_code_of_another_form(self, data):
        """What is not written by this library, as by a former version for a user's dictionary, is no code."""
        assert decoded(None, {"$coded": data}) == {"$coded": data}
        assert decoded(None, {("$coded", 5): 1}) == {("$coded", 5): 1}

    def test_a_class_of_an_unregistered_module(self):
        """The module of a class may be missing in sys.modules, as of one that a program executed from a string."""
        owner = type("Owner", (), {"__module__": "executed"})

        assert decoded(None, coded(TimeUnit.BATCH), owner) is TimeUnit.BATCH
