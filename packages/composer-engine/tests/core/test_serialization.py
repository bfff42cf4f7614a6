"""Serialization: typed values, plain data, JSON with tensors, and saved fields of classes."""

import collections
import contextlib
import datetime as dt
import enum
import fractions
import json
import pathlib
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import (
    Algorithm,
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
    saved,
    to_data,
)
from composer.core.serializable import settings_to_data, transient
from composer.core.serialization import coded, field_types, like, plain


class Colour(enum.IntEnum):
    RED = 1


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


class FakeNumber(float):
    """A subclass of float, like NumPy's float64."""


def magnitude(number):
    if not number:
        raise ValueError("half must not be 0")
    return abs(number)


@attrs.define(eq=False)
class Remember(Algorithm):
    size: int = 3
    best: float = saved(default=0.0)
    when: Time = saved(default=Time(0, "ba"))
    means: dict[str, torch.Tensor] = saved(factory=dict)
    _count: int = saved(default=0, validator=attrs.validators.ge(0))
    _half: int = saved(default=1, converter=magnitude)
    mode: str = saved(default="min", validator=attrs.validators.in_(["min", "max"]))
    _scratch: Any = attrs.field(default=None, init=False)

    def apply(self, event, state, logger):
        """Do nothing."""


class Own(Callback):
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


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

        new.load_state_dict(like(new.state_dict(), {"held": former}, Named))
        with pytest.warns(UserWarning, match="a member of FormerColour was saved"):
            other.load_state_dict(like(other.state_dict(), {"held": removed}, Named))

        assert new.held == [TimeUnit.BATCH, Colour.RED]
        assert other.held == [TimeUnit.BATCH, 2]

    def test_a_class_of_an_unregistered_module(self):
        """The module of a class may be missing in sys.modules, as of one that a program executed from a string."""
        owner = type("Owner", (), {"__module__": "executed"})

        assert like(None, coded(TimeUnit.BATCH), owner) is TimeUnit.BATCH


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


class TestSavedFields:
    def test_saved_fields_define_the_state(self):
        """Marked fields are saved without the leading underscore; settings and other fields are not."""
        state = Remember().state_dict()

        assert state == {"best": 0.0, "when": "0ba", "means": {}, "count": 0, "half": 1, "mode": "min"}

    def test_saved_fields_are_not_settings(self):
        """They are neither arguments nor printed."""
        assert repr(Remember(size=2)) == "Remember(size=2, _scratch=None)"
        assert Remember().settings() == {"size": 3}

    def test_round_trip(self):
        """A second object continues where the first was."""
        first, second = Remember(), Remember()
        first.best, first.when, first.means, first._count = 0.5, Time(7, "ba"), {"a": torch.ones(2)}, 4

        second.load_state_dict(first.state_dict())

        assert (second.best, second.when, second._count) == (0.5, Time(7, "ba"), 4)
        assert second.means["a"] is first.means["a"]

    def test_converters_run(self):
        """A field's converter is applied on load."""
        one = Remember()

        one.load_state_dict(one.state_dict() | {"half": -3})

        assert one._half == 3

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"bst": 1}, "Remember saves no 'bst'; did you mean 'best'?"),
            ({"best": None}, "Remember.best: must be float, got None."),
            ({"when": "soon"}, "Remember.when: must be Time, got 'soon': A time must be"),
            ({"count": -1}, "Remember.count: '_count' must be >= 0: -1"),
            ({"half": 0}, "Remember.half: half must not be 0"),
            ({"mode": "best"}, "Remember.mode: 'mode' must be in ['min', 'max'] (got 'best')"),
            ({"means": {"a": 3}}, "Remember.means['a']: must be Tensor: got 3."),
        ],
    )
    @pytest.mark.parametrize("method", ["load_state_dict", "check_state_dict"])
    def test_invalid_state_changes_nothing(self, method, change, text):
        """Each field is checked before any is set."""
        one = Remember()

        with pytest.raises(ValueError) as caught:  # noqa: PT011
            getattr(one, method)(Remember().state_dict() | {"best": 0.7} | change)

        assert text in str(caught.value)
        assert one.best == 0.0

    def test_all_problems_are_reported_together(self):
        """Missing, unexpected and invalid fields are reported together."""
        with pytest.raises(ValueError, match=r"no 'x'.*'when' is missing.*'count' is missing"):
            Remember().load_state_dict({"best": 1.0, "means": {}, "half": 1, "mode": "min", "x": 3})

    def test_a_class_that_saves_nothing(self):
        """The error names what was saved, also with keys of several types."""
        with pytest.raises(ValueError, match=r"Callback saves nothing and cannot load \[3, 'a'\]"):
            Callback().check_state_dict({"a": 1, 3: 2})

    def test_unserializable_field_raises_on_save(self):
        """The error states the class and the field."""
        one = Remember()
        one.means = {"a": print}

        with pytest.raises(NotSerializableError, match=r"Remember\.means\.a: function builtins\.print cannot be saved"):
            one.state_dict()

    def test_check_changes_nothing(self):
        """Checking a valid state passes and loads nothing."""
        one = Remember()

        one.check_state_dict(one.state_dict() | {"best": 0.7})

        assert one.best == 0.0

    def test_custom_load_state_dict_is_not_checked(self):
        """A class with its own load_state_dict is not checked."""
        own = Own()

        own.check_state_dict({"seen": 3})
        own.load_state_dict({"seen": 3})

        assert own.state_dict() == {"seen": 3}
        assert own.settings() == {}

    def test_transient_fields_are_neither_settings_nor_saved(self):
        """What an algorithm keeps within a step is not in its settings, its state or its text; it is set unchecked."""

        @attrs.define(eq=False)
        class Keeps(Remember):
            kept: int = transient(default=1, validator=attrs.validators.gt(0))

        one = Keeps()
        one.kept = -1

        assert "kept" not in {*settings_to_data(one), *one.state_dict()}
        assert "kept" not in repr(one)

    def test_inherited_fields_are_saved(self):
        """Inherited fields are included."""

        @attrs.define(eq=False)
        class More(Remember):
            extra: str = saved(default="x")

        assert set(More().state_dict()) == {"best", "when", "means", "count", "half", "mode", "extra"}
