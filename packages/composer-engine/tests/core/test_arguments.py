"""Unknown arguments of constructors."""

import copy
import inspect
import pickle

import attrs
import pytest

from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.core import Algorithm, Callback, DataSpec, Evaluator
from composer.core.arguments import NamesArguments


class WithoutArguments(Callback):
    """A callback without a constructor."""


class WithAnyArguments(Callback):
    """A callback that accepts any argument."""

    def __init__(self, **options):
        self.options = options


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
        (lambda: WithoutArguments(every=3), "WithoutArguments has no argument 'every'. It has none."),
        (lambda: WithoutArguments(3), "WithoutArguments takes no arguments, got 1"),
        (lambda: EMA(1, 2, 3, 4, 5), "takes from 1 to 5 positional arguments but 6 were given"),
    ],
)
def test_unknown_arguments(make, message):
    """The error has the right name, if there is a similar or a known one, and the arguments."""
    with pytest.raises(TypeError, match=message):
        make()


def test_known_arguments():
    """Classes that accept any argument get them, and copies need none."""
    assert WithAnyArguments(every=3).options == {"every": 3}
    for one in (copy.deepcopy(EMA("10ba")), pickle.loads(pickle.dumps(EMA("10ba")))):
        assert one.settings() == EMA("10ba").settings()


def test_abstract_classes_raise():
    """A class without its abstract methods raises as before."""
    with pytest.raises(TypeError, match="abstract"):
        Algorithm()


def test_signature_is_that_of_the_constructor():
    """Editors and help() show the arguments."""
    assert list(inspect.signature(EMA).parameters) == ["half_life", "smoothing", "ema_start", "update_interval"]


def test_objects_have_no_dictionary():
    """The base adds no attributes to a class with slots."""

    class Small(NamesArguments):
        __slots__ = ("size",)

    assert not hasattr(Small(), "__dict__")


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
