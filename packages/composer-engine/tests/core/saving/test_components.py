"""Saved fields, and the states of components; each algorithm has a round trip through files."""

import inspect
import json
import types
import typing
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import composer.algorithms
from composer.core import (
    Algorithm,
    NotSerializableError,
    State,
    Time,
    join_tensors,
    rebuild_algorithm,
    saved,
    split_tensors,
)
from composer.core.saving.components import is_unsaved, settings_to_save, transient
from composer.core.saving.records import field_types


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


class TestSavedFields:
    def test_saved_fields_define_the_state(self):
        """Marked fields are saved without the leading underscore; settings and other fields are not."""
        state = Remember().state_dict()

        assert state == {"best": 0.0, "when": "0ba", "means": {}, "count": 0, "half": 1, "mode": "min"}

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
            ({"when": "soon"}, "Remember.when: must be Time, got 'soon'."),
            ({"count": -1}, "Remember.count: '_count' must be >= 0: -1"),
            ({"half": 0}, "Remember.half: half must not be 0"),
            ({"mode": "best"}, "Remember.mode: 'mode' must be in ['min', 'max'] (got 'best')"),
            ({"means": {"a": 3}}, "Remember.means.a: must be Tensor, got 3."),
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

    def test_unserializable_field_raises_on_save(self):
        """The error states the class and the field."""
        one = Remember()
        one.means = {"a": print}

        with pytest.raises(NotSerializableError, match=r"Remember\.means\.a: function builtins\.print cannot be saved"):
            one.state_dict()

    def test_transient_fields_are_neither_settings_nor_saved(self):
        """What an algorithm keeps within a step is not in its settings, its state or its text; it is set unchecked."""

        @attrs.define(eq=False)
        class Keeps(Remember):
            kept: int = transient(default=1, validator=attrs.validators.gt(0))

        one = Keeps()
        one.kept = -1

        assert "kept" not in {*settings_to_save(one), *one.state_dict()}
        assert "kept" not in repr(one)


KINDS = [
    kind
    for kind in (getattr(composer.algorithms, name) for name in composer.algorithms.__all__)
    if inspect.isclass(kind) and issubclass(kind, Algorithm)
]


WORDS = ["norm", "value", "adaptive", "block", "sample", "linear", "uniform", "resize", "crop", "auto", "all", "Linear"]


TIMES = st.builds(Time, st.integers(1, 99), st.sampled_from(["ep", "ba", "sp"])) | st.builds(
    Time, st.floats(0, 1), st.just("dur")
)


SCALARS = {
    bool: st.booleans(),
    int: st.integers(1, 64),
    float: st.floats(0.01, 0.99) | st.integers(1, 3),
    str: st.sampled_from(WORDS),
    Time: TIMES,
    type(None): st.none(),
    nn.Module: st.builds(nn.Dropout, st.floats(0, 1)),
}


pytestmark = pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")  # a drawn setting may be 0 or 1


each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


# Their modules, an augmentation and a teacher, are described in a checkpoint; they cannot be constructed from that.
WITH_MODULE = {composer.algorithms.Augment, composer.algorithms.Distillation}


each_of_data = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in WITH_MODULE], ids=lambda kind: kind.__name__
)


def values_of(kind):
    """Return a strategy for the plain values of a type."""
    if kind in SCALARS:
        return SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, str):
        return st.sampled_from(list(kind))
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        return st.one_of([values_of(member) for member in typing.get_args(kind)])
    if kind in {typing.Any, object}:
        return st.integers(0, 5) | st.text(max_size=4) | st.tuples(st.integers(), st.text(max_size=2))
    return st.nothing()


@st.composite
def objects_of(draw, kind):
    """Return a strategy for algorithms of a class: some settings are drawn from their types, others are defaults."""
    kinds, values = field_types(kind), {}
    for field in attrs.fields(kind):
        strategy = values_of(kinds[field.name])
        is_needed = field.default is attrs.NOTHING
        if field.init and not strategy.is_empty and (is_needed or draw(st.integers(0, 3)) == 0):
            values[field.alias] = draw(strategy)
    try:
        return kind(**values)
    except (TypeError, ValueError):
        assume(False)  # these settings do not go together


def through_files(state):
    data, tensors = split_tensors(state)
    return join_tensors(json.loads(json.dumps(data, allow_nan=False)), tensors)


@each
def test_setting_annotations_resolve(kind):
    """Annotations of settings resolve at run time; only ``Any`` is read as anything."""
    kinds = field_types(kind)

    unread = [
        (field.alias, field.type)
        for field in attrs.fields(kind)
        if field.init and kinds[field.name] is typing.Any and field.type not in {"Any", typing.Any}
    ]

    assert unread == []


@each_of_data
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_reconstructs_from_settings(kind, data):
    """Name and settings are sufficient to reconstruct each algorithm."""
    algorithm = data.draw(objects_of(kind))

    record = through_files({"name": kind.__name__, "settings": settings_to_save(algorithm)})
    again = rebuild_algorithm(record)

    assert [name for name, saved in record["settings"].items() if is_unsaved(saved)] == []
    assert type(again) is kind
    assert again.settings() == algorithm.settings()
    assert repr(again) == repr(algorithm)


@each
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_state_round_trip(kind, data):
    """A new run with the same settings loads the saved state without differences."""
    algorithm = data.draw(objects_of(kind))
    state = State(model=None, algorithms=algorithm)
    later = State(model=None, algorithms=kind(**algorithm.settings()))

    report = later.load_state_dict(through_files(state.state_dict()), strict=True)

    assert report.differences == ()
    assert repr(later.state_dict()) == repr(state.state_dict())
