"""Nested batches: rebuild, iterate and measure."""

from __future__ import annotations

import collections
from types import MappingProxyType

import pytest
import torch

from composer.functional.nested import leaves, rebuild, sizes

Pair = collections.namedtuple("Pair", "image label")


class TestRebuild:
    @pytest.mark.parametrize("container", [[1, 2], (1, 2), Pair(1, 2), torch.Size([1, 2])])
    def test_the_type_of_a_sequence_is_preserved(self, container):
        """The new items are in a sequence of the same type, and the original is unchanged."""
        rebuilt = rebuild(container, [3, 4])

        assert (type(rebuilt), [*rebuilt], [*container]) == (type(container), [3, 4], [1, 2])

    def test_attributes_of_a_mapping_are_preserved(self):
        """A subclass keeps what it has besides its items, such as the factory of a defaultdict."""
        original = collections.defaultdict(list, a=1)

        rebuilt = rebuild(original, [2])

        assert (rebuilt, rebuilt.default_factory, original["a"]) == ({"a": 2}, list, 1)

    def test_an_immutable_mapping_becomes_a_dictionary(self):
        """Its items cannot be replaced in a copy."""
        assert type(rebuild(MappingProxyType({"a": 1}), [2])) is dict

    def test_wrong_number_of_items_raises(self):
        """A mapping needs a new item for each of its keys."""
        with pytest.raises(ValueError, match="shorter"):
            rebuild({"a": 1, "b": 2}, [3])


class TestLeaves:
    def test_every_mapping_is_a_container(self):
        """Items of mappings other than dictionaries are included, in order."""
        nested = [collections.UserDict(a=1, b=[2, (3,)]), {}, None]

        assert [*leaves(nested)] == [1, 2, 3, None]


class TestSizes:
    def test_lists_with_tensors_are_containers(self):
        """A list counts by its own length only if it contains no tensor with dimensions."""
        batch = [torch.zeros(3, 2), ["a", "b"], [torch.zeros(4), torch.tensor(1)], Pair("c", "d")]

        assert sizes(batch) == [3, 2, 4]
