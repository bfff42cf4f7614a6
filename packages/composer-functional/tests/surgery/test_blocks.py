"""The repeated blocks of a model."""

import pytest
from torch import nn

from composer import functional as cf
from composer.functional.surgery.blocks import chosen_modules, is_one_of, repeated_blocks


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.ReLU())


class Tower(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), Block())


def names(found):
    return [name for name, _ in found]


def test_outermost_repeated_blocks():
    """Blocks are the outermost repeated modules with children; containers, single ones and plain layers are not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ModuleList([Tower(), Tower()]), nn.Sequential(Block()))

    assert names(repeated_blocks(model)) == ["2.0", "2.1", "3.0"]
    assert names(repeated_blocks(nn.Sequential(Block(), nn.Linear(2, 2)))) == []


def test_named_blocks():
    """A model may name its blocks, as those of Transformers do; others are not blocks then."""
    model = nn.Sequential(Tower(), Tower(), nn.Linear(2, 2))
    model._no_split_modules = ["Linear"]

    assert names(repeated_blocks(model)) == ["0.0.0", "0.1.0", "1.0.0", "1.1.0", "2"]


@pytest.mark.parametrize("classes", [(Block,), ("Block",), ("StochasticBlock",)])
def test_derived_classes(classes):
    """A block that surgery has changed is found by its plain class, that class's name, and its own name."""
    model = nn.Sequential(Block(), nn.Linear(2, 2))
    cf.apply_stochastic_depth(model, Block)

    assert names(chosen_modules(model, is_one_of(classes))) == ["0"]
    assert names(repeated_blocks(nn.Sequential(Block(), *model))) == ["0", "1"]


def test_nested_modules():
    """Chosen modules may contain each other, or only the outermost are chosen; the model itself is not."""
    model = nn.Sequential(Tower(), Block())

    assert names(chosen_modules(model, is_one_of((Block, Tower)))) == ["0", "0.0", "0.1", "1"]
    assert names(chosen_modules(model, is_one_of((Block, Tower)), outermost=True)) == ["0", "1"]
    assert names(chosen_modules(model[1], is_one_of((Block,)))) == []
