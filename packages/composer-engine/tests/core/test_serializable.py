"""Every algorithm has a round trip through JSON and tensors; new ones are included automatically."""

import inspect
import json
import types
import typing

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import composer.algorithms
from composer.core import Algorithm, State, Time, join_tensors, rebuild_algorithm, split_tensors
from composer.core.serializable import is_unsaved, settings_to_data
from composer.core.serialization import field_types

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

    record = through_files({"name": kind.__name__, "settings": settings_to_data(algorithm)})
    again = rebuild_algorithm(record, classes=[kind])

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
