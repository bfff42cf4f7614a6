"""Modules whose class is derived from their own at run time."""

import copy
import pickle

from torch import nn

from composer.functional.layers.derived import DerivedModule, plain_class


class Doubled(DerivedModule):
    prefix = "Doubled"

    def forward(self, input):
        return self.factor * super().forward(input)


class Shifted(DerivedModule):
    prefix = "Shifted"

    def forward(self, input):
        return super().forward(input) + 1


def test_attributes_are_taken_over():
    """The new module has the parameters under their names, the further attributes, and the plain class as its base."""
    layer = nn.Linear(2, 3)

    derived = Doubled.take_over(layer, factor=2)

    assert dict(derived.named_parameters()).keys() == {"weight", "bias"}
    assert derived.weight is layer.weight
    assert isinstance(derived, nn.Linear)
    assert type(derived).__name__ == "DoubledLinear"
    assert type(Doubled.take_over(nn.Linear(2, 3))) is type(derived)


def test_several_layers():
    """Derived classes can be derived again, run from the last to the first, and can be copied and pickled."""
    derived = Shifted.take_over(Doubled.take_over(nn.Identity(), factor=3))

    copies = copy.deepcopy(derived), pickle.loads(pickle.dumps(derived))

    assert derived(1) == 4
    assert derived.made_of == (nn.Identity, Doubled, Shifted)
    assert [type(one) is type(derived) and one(1) for one in copies] == [4, 4]


def test_plain_class():
    """The plain class of any module is the one before all changes."""
    derived = Shifted.take_over(Doubled.take_over(nn.Identity(), factor=3))

    assert plain_class(derived) is plain_class(nn.Identity()) is nn.Identity
