import copy
import inspect
import re
from fractions import Fraction
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import composer.algorithms
from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.core import Callback, DataSpec, Evaluator, State
from composer.core.checks import (
    describe,
    integer,
    is_flag,
    is_string,
    is_subset,
    nearest,
    number,
    number_between,
    one_of,
    to_options,
    to_path,
    to_strings,
    whole_number_from,
)
from composer.core.files import fill_in


@attrs.define
class Settings:
    share: float = number(0.5, 0, 1, below=True, meaning="It is a share.")
    factor: float = attrs.field(default=1.0, validator=number_between(0, above=True, meaning="It is a factor."))
    count: int = attrs.field(default=1, validator=whole_number_from(1, meaning="It counts batches."))
    most: int | None = integer(None, 1, meaning="It is the limit.")
    mode: str = attrs.field(default="min", validator=one_of("min", "max"))
    overwrite: bool = attrs.field(default=False, validator=is_flag)
    label: str = attrs.field(default="train", validator=is_string)
    _subset: int = attrs.field(default=-1, validator=is_subset)
    """Errors name the argument, which has no underscore."""


class TestValidators:
    @pytest.mark.parametrize(
        "settings",
        [
            {"share": 0},
            {"share": np.float32(0.5)},
            {"factor": Fraction(1, 2)},
            {"count": np.int64(3)},
            {"most": None},
            {"mode": "max"},
        ],
        ids=str,
    )
    def test_valid_values(self, settings):
        """Each accepted number is returned unchanged."""
        ((name, value),) = settings.items()

        assert getattr(Settings(**settings), name) is value

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"share": "0.5"}, TypeError, "share must be a number, got '0.5'. It is a share."),
            ({"share": True}, TypeError, "share must be a number, got True. It is a share."),
            ({"share": 1}, ValueError, "share must lie in [0, 1), got 1. It is a share."),
            ({"factor": 0}, ValueError, "factor must be more than 0, got 0. It is a factor."),
            ({"factor": float("nan")}, ValueError, "factor must be more than 0, got nan. It is a factor."),
            ({"count": "10"}, TypeError, "count must be an int, got '10'. It counts batches."),
            ({"count": 1.0}, TypeError, "count must be an int, got 1.0. It counts batches."),
            ({"count": 0}, ValueError, "count must be at least 1, got 0. It counts batches."),
            ({"most": 0}, ValueError, "most must be at least 1, got 0. It is the limit."),
            ({"mode": "least"}, ValueError, "mode must be one of 'min', 'max', got 'least'."),
            ({"overwrite": "yes"}, TypeError, "overwrite must be True or False, got 'yes'."),
            ({"overwrite": 1}, TypeError, "overwrite must be True or False, got 1."),
            ({"label": 5}, TypeError, "label must be a string, got 5."),
            ({"label": ""}, ValueError, "label must not be empty, got ''."),
            ({"subset": 0}, ValueError, "subset must be a number of batches, or -1 for all, got 0."),
            ({"subset": True}, TypeError, "subset must be a number of batches, or -1 for all, got True."),
        ],
        ids=str,
    )
    def test_invalid_values_raise(self, settings, error, message):
        """The error states the field, what was expected and the value."""
        with pytest.raises(error) as caught:
            Settings(**settings)

        assert str(caught.value) == message


class TestConversions:
    def test_valid_conversions(self):
        """None, one and several become a list or a dictionary; a path becomes a string."""
        texts = [to_strings("tags", value) for value in (None, "a", ("a", "b"))]

        assert texts == [[], ["a"], ["a", "b"]]
        assert (to_options("options", None), to_options("options", {"a": 1})) == ({}, {"a": 1})
        assert (to_path("folder", "runs"), to_path("folder", Path("runs"))) == ("runs", "runs")

    @pytest.mark.parametrize(
        ("convert", "value", "message"),
        [
            (to_strings, 5, "it must be a string or a list of strings, got 5."),
            (to_strings, ["a", 5], "it must be a string or a list of strings, got ['a', 5]."),
            (to_options, 5, "it must be None or a dictionary whose keys are strings, got 5."),
            (to_options, "ab", "it must be None or a dictionary whose keys are strings, got 'ab'."),
            (to_options, {5: "a"}, "it must be None or a dictionary whose keys are strings, got {5: 'a'}."),
            (to_path, 5, "it must be a string or a path, got 5."),
            (to_path, None, "it must be a string or a path, got None."),
        ],
        ids=lambda one: getattr(one, "__name__", None) or str(one),
    )
    def test_wrong_types_raise(self, convert, value, message):
        """The error states the parameter, what was expected and the value."""
        with pytest.raises(TypeError) as caught:
            convert("it", value)

        assert str(caught.value) == message


def _flags():
    algorithms = [one for one in vars(composer.algorithms).values() if inspect.isclass(one) and attrs.has(one)]
    return [(one, field) for one in algorithms for field in attrs.fields(one) if field.init and field.type == "bool"]


@pytest.mark.parametrize(("algorithm", "field"), _flags(), ids=lambda one: getattr(one, "name", None) or one.__name__)
def test_flags_reject_strings(algorithm, field):
    """A string for a flag raises, as every non-empty string is truthy."""
    required = {"Alibi": {"max_sequence_length": 8}, "PostHocEMA": {"folder": "averages"}}

    with pytest.raises(TypeError, match=f"{field.name} must be True or False, got 'no'"):
        algorithm(**required.get(algorithm.__name__, {}), **{field.name: "no"})


class TestErrorText:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (print, "function builtins.print"),
            (lambda x: x, "function .*<lambda>"),
            (int, "class builtins.int"),
            (torch.relu, r"function .*relu"),
            (object(), "object of builtins.object"),
            ([1, "a"], r"\(1, 'a'\)"),
            (list(range(9)), r"\(0, 1, 2, 3, \.\.\.\)"),
            ("x" * 200, "'x{50,80}\\.\\.\\."),
        ],
    )
    def test_describe(self, value, text):
        """The description is short and deterministic, without addresses."""
        assert re.fullmatch(text, describe(value))

    def test_nearest(self):
        """A suggestion is appended if a similar name exists."""
        assert nearest("alpa", ["alpha", "beta"]) == "; did you mean 'alpha'?"
        assert nearest("x", ["alpha"]) == "."
        assert nearest(3, []) == "."


VALUES = {"run_name": "first", "batch": 7}


class TestFillIn:
    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            ("{run_name}-ba{batch}", "first-ba7"),
            ("ba{batch:05}", "ba00007"),
            ("{run_name!r:>{batch}}", "'first'"),
            ("{{batch}}", "{batch}"),
        ],
    )
    def test_fills_in_placeholders(self, template, expected):
        """Names, formats and conversions are filled in as by str.format."""
        assert fill_in(template, VALUES, "filename") == template.format(**VALUES) == expected

    @pytest.mark.parametrize(
        "template",
        ["{batch.size}", "{epoch}", "{0}", "{}", "{batch", "{batch:q}"],
    )
    def test_other_placeholders_raise(self, template):
        """Positions and unknown names and attributes raise, and the available names are listed."""
        with pytest.raises(ValueError, match=r"filename may have \{run_name\} and \{batch\} in it, nothing else"):
            fill_in(template, VALUES, "filename")


class TestRunName:
    @pytest.mark.parametrize("name", ["team/first", "lr=0.1, seed:2", "a..b", "läuft ✓", "c:d", 200 * "x", "ab/" * 90])
    def test_valid_names(self, name):
        """Names that stay within their folder are accepted."""
        assert State(model=None, run_name=name).run_name == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "../../x",
            "a/../../x",
            "..",
            "a\\..\\b",
            "/etc/x",
            "\\x",
            "C:\\x",
            "s3://bucket/x",
            "first\0",
            "red\x1b[31m",
            "two\nlines",
            "lone \ud800",
            300 * "x",
            "team/" + 101 * "ä",
            "simplecache::s3://bucket/x",
        ],
    )
    def test_invalid_names_raise(self, name):
        """Names that lead outside the folder or cannot be a folder raise."""
        with pytest.raises(ValueError, match="run_name must be a name that folders can have"):
            State(model=None, run_name=name)


class WithoutArguments(Callback):
    """A callback without a constructor."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EMA(decay=0.9),
            r"EMA has no argument 'decay': use smoothing\. Its arguments are half_life, smoothing,",
        ),
        (lambda: MixUp(apha=1.0), r"MixUp has no argument 'apha'; did you mean 'alpha'\? Its arguments are alpha"),
        (
            lambda: LabelSmoothing(epsilon=0.1, targets=1),
            r"'epsilon': use smoothing\. It has no argument 'targets'; did you mean 'target_key'\?",
        ),
        (lambda: DataSpec([], samples=3), "DataSpec has no argument 'samples'"),
        (lambda: Evaluator(name="eval", dataloader=[]), "Evaluator has no argument 'name'"),
        (lambda: Evaluator("eval", []), r"by name: write Evaluator\(label=\.\.\., dataloader=\.\.\.\)\."),
        (lambda: WithoutArguments(every=3), r"WithoutArguments takes no arguments, got \{'every': 3\}"),
        (lambda: WithoutArguments(3), r"WithoutArguments takes no arguments, got \(3,\)"),
        (lambda: EMA(1, 2, 3, 4, 5), "takes from 1 to 5 positional arguments but 6 were given"),
    ],
)
def test_unknown_arguments(make, message):
    """The error has the right name, if there is a similar or a known one, and the arguments."""
    with pytest.raises(TypeError, match=message):
        make()


def test_signature_is_that_of_the_constructor():
    """Editors and help() show the arguments."""
    assert list(inspect.signature(EMA).parameters) == ["half_life", "smoothing", "ema_start", "update_interval"]


def test_objects_are_not_of_an_attrs_class():
    """OmegaConf asks attrs about the object, and finds nothing; the functions of attrs still work on it."""

    @attrs.define(eq=False)
    class Own(LabelSmoothing):
        more: int = 3

    for one in (LabelSmoothing(0.2), Own(0.2), Evaluator(label="a", dataloader=[1])):
        assert not attrs.has(one)
        assert attrs.has(type(one))
        assert attrs.asdict(one, recurse=False)
        assert type(copy.copy(one)) is type(one)
    assert attrs.evolve(Own(0.2), more=4).smoothing == 0.2
    assert [field.name for field in attrs.fields(Own)][-1] == "more"
    with pytest.raises(AttributeError, match="'LabelSmoothing' object has no attribute '__attrs_attrs__'"):
        _ = LabelSmoothing(0.2).__attrs_attrs__
