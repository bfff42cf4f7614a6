"""What a checkpoint may hold, and what is refused with the place where it lies."""

import collections
import enum
import fractions
from typing import Any

import attrs
import pytest
import torch

from composer.core import Algorithm, Callback, NotSerializableError, Time, saved
from composer.core.serialization import describe, nearest, plain


class Colour(enum.IntEnum):
    RED = 1


class FakeNumber(float):
    """As NumPy's float64: a subclass of float."""


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
    def test_data_stays_as_it_is(self, value):
        """Numbers, text, lists, tuples and dictionaries are data."""
        assert repr(plain(value)) == repr(value)

    def test_containers_are_copied_and_tensors_are_not(self):
        """A state that was taken does not change with the run, but for its tensors."""
        tensor = torch.ones(2)
        state = {"items": [tensor]}

        taken = plain(state)
        state["items"].append(1)

        assert len(taken["items"]) == 1
        assert taken["items"][0] is tensor

    def test_numbers_of_other_libraries(self):
        """What is as good as a number becomes one of Python's."""
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
    def test_else_is_refused_with_its_place(self, value, path, text):
        """The error names the place, the thing and what to do."""
        with pytest.raises(NotSerializableError, match=text) as caught:
            plain(value, "top")

        assert caught.value.path == (f"top{path}" if path.startswith("[") else f"top.{path}")

    def test_a_list_that_holds_itself(self):
        """There is an end to it."""
        items = []
        items.append(items)

        with pytest.raises(NotSerializableError, match="nested more than 64 deep, or holds itself"):
            plain(items)


class TestWords:
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
        """The same in every run: without addresses, and short."""
        import re

        assert re.fullmatch(text, describe(value))

    def test_nearest(self):
        """A question where something is near, else the end of the sentence."""
        assert nearest("alpa", ["alpha", "beta"]) == "; did you mean 'alpha'?"
        assert nearest("x", ["alpha"]) == "."
        assert nearest(3, []) == "."

    def test_nearest_of_endless_names(self):
        """Texts that are no names, each as long as a file, are not compared: that would take hours."""
        name = "".join(chr(97 + place * place % 251) for place in range(300_000))

        assert nearest(name, [name[1:]]) == "."


class TestSavedFields:
    def test_saved_fields_are_the_state(self):
        """What is marked is saved, by its name without the underscore; settings and scratch are not."""
        state = Remember().state_dict()

        assert state == {"best": 0.0, "when": "0ba", "means": {}, "count": 0, "half": 1}

    def test_saved_fields_are_no_settings(self):
        """They are neither arguments nor printed."""
        assert repr(Remember(size=2)) == "Remember(size=2, _scratch=None)"
        assert Remember().settings() == {"size": 3}

    def test_round_trip(self):
        """A second object goes on where the first was."""
        first, second = Remember(), Remember()
        first.best, first.when, first.means, first._count = 0.5, Time(7, "ba"), {"a": torch.ones(2)}, 4

        second.load_state_dict(first.state_dict())

        assert (second.best, second.when, second._count) == (0.5, Time(7, "ba"), 4)
        assert second.means["a"] is first.means["a"]

    def test_converters_run(self):
        """A field's own converter sees what is loaded."""
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
            ({"means": {"a": 3}}, "Remember.means['a']: must be Tensor: got 3."),
        ],
    )
    @pytest.mark.parametrize("method", ["load_state_dict", "check_state_dict"])
    def test_what_does_not_fit_is_named_and_nothing_changes(self, method, change, text):
        """Each field is checked before any is set."""
        one = Remember()

        with pytest.raises(ValueError) as caught:  # noqa: PT011
            getattr(one, method)(Remember().state_dict() | {"best": 0.7} | change)

        assert text in str(caught.value)
        assert one.best == 0.0

    def test_all_problems_at_once(self):
        """What is missing, unknown and wrong is said together."""
        with pytest.raises(ValueError, match=r"no 'x'.*'when' is missing.*'count' is missing"):
            Remember().load_state_dict({"best": 1.0, "means": {}, "half": 1, "x": 3})

    def test_what_is_no_data_is_refused_when_saving(self):
        """The error names class and field."""
        one = Remember()
        one.means = {"a": print}

        with pytest.raises(NotSerializableError, match=r"Remember\.means\.a: function builtins\.print cannot be saved"):
            one.state_dict()

    def test_check_changes_nothing(self):
        """A check of a good state passes and loads nothing."""
        one = Remember()

        one.check_state_dict(one.state_dict() | {"best": 0.7})

        assert one.best == 0.0

    def test_own_methods_know_better(self):
        """A class with its own load_state_dict is not checked by rules that are not its own."""
        own = Own()

        own.check_state_dict({"seen": 3})
        own.load_state_dict({"seen": 3})

        assert own.state_dict() == {"seen": 3}
        assert own.settings() == {}

    def test_subclasses_save_what_their_bases_save(self):
        """Inherited fields count."""

        @attrs.define(eq=False)
        class More(Remember):
            extra: str = saved(default="x")

        assert set(More().state_dict()) == {"best", "when", "means", "count", "half", "extra"}
