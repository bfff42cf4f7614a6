"""Typed values become plain data and come back the same."""

import contextlib
import datetime as dt
import json
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
    to_data,
)
from composer.core.conversion import field_types


@attrs.define
class Inner:
    every: Time
    names: tuple[str, ...] = ()


@attrs.define(eq=False)
class Outer:
    inner: Inner
    _hidden: int = 3


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


class TestRoundTrip:
    @pytest.mark.parametrize(("value", "kind", "data"), PAIRS, ids=str)
    def test_each_kind(self, value, kind, data):
        """The data is what the docstring says, and gives the same value back."""
        written = to_data(value, kind)
        again = from_data(written, kind)

        assert repr(written) == repr(data)
        assert type(again) is type(value)
        assert repr(again) == repr(value)

    @given(st.floats(), st.floats(allow_nan=False))
    @settings(deadline=None)
    def test_floats(self, any_float, number):
        """Every float is a float, also where another kind could be meant."""
        assert repr(from_data(to_data(any_float, float), float)) == repr(any_float)
        assert from_data(to_data(number, Time | float | None), Time | float | None) == number

    @given(st.timedeltas(dt.timedelta(), dt.timedelta(days=36500)))
    @settings(deadline=None)
    def test_durations_through_json(self, duration):
        """Up to a century, to the microsecond."""
        data = json.loads(json.dumps(to_data(duration, dt.timedelta)))

        assert from_data(data, dt.timedelta) == duration

    @given(st.dictionaries(st.text(), st.lists(st.sampled_from(Event))), st.sets(st.integers() | st.text()))
    @settings(deadline=None)
    def test_nested_types(self, table, mixed):
        """Types within types, and sets of what cannot be sorted."""
        kind = dict[str, list[Event]]

        assert from_data(json.loads(json.dumps(to_data(table, kind))), kind) == table
        assert from_data(to_data(mixed, set[int | str]), set[int | str]) == mixed

    def test_fields_in_any_order(self):
        """A file whose keys another program has sorted says the same."""

        @attrs.define
        class Place:
            epoch: int
            batch: int

        assert from_data({"batch": 2, "epoch": 1}, Place) == Place(1, 2)

    def test_sets_are_written_in_one_order(self):
        """Two runs write the same file."""
        assert to_data({"b", "c", "a"}, set[str]) == to_data({"a", "c", "b"}, set[str]) == ["a", "b", "c"]

    def test_a_number_of_another_library(self):
        """What acts as a float is written as one."""

        class Float64(float):
            pass

        assert type(to_data(Float64(0.5), float)) is float
        assert type(to_data(Float64(0.5), float | None)) is float

    def test_a_text_that_says_a_time(self):
        """Where both would do, the text is read as the time that it is equal to."""
        assert from_data(to_data("3ep", Time | str), Time | str) == "3ep"


class TestRefused:
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
            (3, str, "p: 3 cannot be saved: it would not be the same when read as str"),
            ((1,), list[int], "p: .* would not be the same when read as list"),
            (None, Time, "p: None cannot be saved as Time"),
            (Interval("1ba"), Inner, "p: object of composer.core.interval.Interval cannot be saved"),
            (pathlib.Path("a"), str | pathlib.Path, "p: .*PosixPath|WindowsPath.* would not be the same"),
            (torch.empty(1, device="meta"), torch.Tensor, "p: a meta tensor"),
        ],
        ids=str,
    )
    def test_when_saving(self, value, kind, text):
        """Nothing is written that would not be the same when it is read."""
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
            ({"every": "x"}, Interval, "p.every: must be Time: A time must be a number"),
            ([], Interval, r"p: must be Interval, got \[\]"),
            (3, torch.Tensor, "p: must be Tensor, got 3"),
            ({"batch": 1}, Timestamp, "p: must be Timestamp.*missing"),
            (["3ep", 4], list[Time | None], r"p\[1\]: must be .*Time \| None: got 4"),
        ],
        ids=str,
    )
    def test_when_loading(self, data, kind, text):
        """A sentence says where, what was expected and what came."""
        with pytest.raises(ValueError, match=text):
            from_data(data, kind, "p")

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )

    @given(JSON, st.sampled_from([kind for _, kind, _ in PAIRS]))
    @settings(deadline=None)
    def test_any_data_for_any_type(self, data, kind):
        """Whatever stands in a file, it is a value or a ValueError."""
        with contextlib.suppress(ValueError):
            value = from_data(data, kind)
            assert repr(to_data(value, kind)) == repr(data) or to_data(value, kind) == data


class TestFieldTypes:
    def test_texts_are_resolved_where_the_class_was_written(self):
        """Annotations of a base are read in the base's module."""

        @attrs.define
        class Far(Interval):
            near: "int" = 3

        assert field_types(Far) == {"every": Time, "near": int}

    def test_what_cannot_be_read_is_anything(self):
        """A name that only a type checker knows is no reason to fail."""

        @attrs.define
        class Loose:
            known: "int"
            unknown: "Nowhere | None"  # noqa: F821

        assert field_types(Loose) == {"known": int, "unknown": Any}
        assert field_types(attrs.make_class("Bare", ["x"])) == {"x": Any}

    def test_a_name_that_comes_later(self, monkeypatch):
        """What could not be read is read once it can: a class of a notebook's later cell."""

        @attrs.define
        class Early:
            later: "Later | None" = None  # noqa: F821

        before = field_types(Early)
        monkeypatch.setitem(globals(), "Later", Interval)

        assert before == {"later": Any}
        assert field_types(Early) == {"later": Interval | None}
