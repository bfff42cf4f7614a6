"""Values of declared types are read from decoded data, with records constructed from dictionaries."""

import contextlib
import json
import pathlib
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
    Event,
    Stage,
    Time,
    Timestamp,
    join_tensors,
    split_tensors,
)
from composer.core.saving.codec import Record
from composer.core.saving.records import read


@attrs.frozen
class Inner(Record):
    every: Time
    names: tuple[str, ...] = ()


@attrs.define(eq=False)
class Outer(Record):
    inner: Inner
    _hidden: int = 3


@attrs.frozen
class Choice(Record):
    mode: str = attrs.field(validator=attrs.validators.in_(["min", "max"]))


def through_json(state):
    data, tensors = split_tensors(state)
    return join_tensors(json.loads(json.dumps(data, allow_nan=False)), tensors)


KINDS = [
    (3, int),
    (3, float),
    (1.5, int | float),
    (True, bool),
    ("x", str),
    (None, int | None),
    ("x", int | str | None),
    (Time(3, "ep"), Time | None),
    ([Time(1, "ba"), None], list[Time | None]),
    (Event.INIT, Event),
    (torch.float16, torch.dtype | str | None),
    (pathlib.Path("a/b"), pathlib.Path),
    ((0.9, 0.99), tuple[float, float]),
    ((), tuple[int, ...]),
    ({3, 1}, set[int]),
    ((1, 2), Sequence[int]),
    ([1, 2], Sequence[int]),
    ({"a": 1}, Mapping[str, int]),
    ({Event.INIT: [Time(1, "ep")]}, dict[Event, list[Time]]),
    (Counter("aab"), Counter[str]),
    ([1, (2,)], list),
    ("a", Literal["a", "b"]),
    ((1, "a"), BatchKey),
    ({"a": [0.5, None]}, Any),
    (None, Callable[[int], int] | None),
    (torch.ones(2), torch.Tensor | None),
    (Timestamp(batch=3), Timestamp),
]


class TestRead:
    @pytest.mark.parametrize(("value", "kind"), KINDS, ids=str)
    def test_each_type(self, value, kind):
        """A value of the declared type is returned equal, with its own type."""
        again = read(value, kind)

        assert type(again) is type(value)
        assert repr(again) == repr(value)

    def test_records(self):
        """A record is a dictionary in a file, in any order of its fields, and has its defaults."""
        again = read(through_json(Outer(Inner(Time(3, "ep"), ("x",)))), Outer, "it")

        assert (again.inner, again._hidden) == (Inner(Time(3, "ep"), ("x",)), 3)
        assert read({"inner": {"every": Time(1, "ba")}}, Outer).inner == Inner(Time(1, "ba"))

    def test_json_of_others(self):
        """A tuple is read from a list, and a clock from the dictionary that a state contains."""
        assert read([1, 2], tuple[int, ...]) == (1, 2)
        assert read(Timestamp(batch=3).state_dict(), Timestamp) == Timestamp(batch=3)

    @pytest.mark.parametrize(
        ("value", "kind", "text"),
        [
            ("abc", list[str], r"p: must be list\[str\], got 'abc'"),
            ("3", int, "p: must be int, got '3'"),
            (True, int, "p: must be int, got True"),
            (1, bool, "p: must be bool, got 1"),
            (3, str, "p: must be str, got 3"),
            (3, Time, "p: must be Time, got 3"),
            ("init", Event, "p: must be Event, got 'init'"),
            (Stage.MIX, int, "p: must be int"),
            ("x", Literal["a"], "p: must be Literal"),
            (3, Callable, "p: must be .*Callable"),
            ([1, "a"], list[int], r"p\[1\]: must be int, got 'a'"),
            ({"a": ["x"]}, dict[str, list[int]], r"p\.a\[0\]: must be int, got 'x'"),
            ([1, 2, 3], tuple[int, int], "p: must have 2 items"),
            ("ab", Sequence[str], "p: must be .*Sequence.*, got 'ab'"),
            ({"evry": Time(1, "ba")}, Inner, "p: unknown field 'evry'; did you mean 'every'.*field 'every' is missing"),
            ([{"mode": "best"}], list[Choice], r"p\[0\]: 'mode' must be in \['min', 'max'\] \(got 'best'\)"),
            ([], Inner, r"p: must be Inner, got \[\]"),
            ({"batch": 1}, Timestamp, "p: "),
        ],
        ids=str,
    )
    def test_other_values_raise(self, value, kind, text):
        """The error states the path, what was expected and the value."""
        with pytest.raises(ValueError, match=text):
            read(value, kind, "p")

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )

    @given(JSON, st.sampled_from([kind for _, kind in KINDS]))
    @settings(deadline=None)
    def test_arbitrary_data(self, data, kind):
        """Arbitrary data give an equal value or a ValueError."""
        with contextlib.suppress(ValueError):
            value = read(data, kind)
            assert repr(value) == repr(tuple(data) if isinstance(value, tuple) else data)
