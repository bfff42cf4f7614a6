"""Nested batches: rebuild, iterate and measure."""

from __future__ import annotations

import collections

import pytest
import torch

from composer.functional.nested import join, leaves, rebuild, sizes

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


class TestJoin:
    """The results of batches as one."""

    def test_structures(self):
        """Tensors in mappings and tuples are joined each with each, and attributes of classes are kept."""
        parts = [collections.OrderedDict(a=(torch.full((n, 2), float(n)), None), b=[torch.ones(n)] * 3) for n in (3, 2)]

        joined = join(parts, [3, 2])

        assert type(joined) is collections.OrderedDict
        assert torch.equal(joined["a"][0], torch.cat([torch.full((3, 2), 3.0), torch.full((2, 2), 2.0)]))
        assert joined["a"][1] is None
        assert [len(one) for one in joined["b"]] == [5, 5, 5]

    def test_lists_of_samples(self):
        """Lists with an item for each sample, as detectors return, are joined to one list."""
        parts = [[{"boxes": torch.zeros(boxes, 4)} for boxes in number] for number in ([2, 0], [1])]

        joined = join(parts, [2, 1])

        assert [len(one["boxes"]) for one in joined] == [2, 0, 1]

    def test_boxes_of_miscounted_images(self):
        """Boxes of images stay apart if lists of images were counted by their channels."""
        parts = [[{"boxes": torch.full((1, 4), index)} for index in (first, first + 1)] for first in (0, 2)]

        joined = join(parts, [3, 3])

        assert [one["boxes"][0, 0].item() for one in joined] == [0, 1, 2, 3]

    def test_ragged(self):
        """Tensors of different lengths become a list with that of each sample, in order."""
        joined = join([torch.zeros(2, 5, 3), torch.ones(1, 4, 3)], [2, 1])

        assert [tuple(one.shape) for one in joined] == [(5, 3), (5, 3), (4, 3)]
        assert [one.unique().item() for one in joined] == [0, 0, 1]

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1.0, 2.0])),
            ([torch.zeros(1, dtype=torch.bfloat16)] * 2, torch.zeros(2, dtype=torch.bfloat16)),
            ([torch.zeros(2)], torch.zeros(2)),
        ],
    )
    def test_dtypes(self, parts, expected):
        """Numbers are stacked, and dtypes are kept."""
        joined = join(parts, [1] * len(parts))

        assert torch.equal(joined, expected)
        assert joined.dtype == expected.dtype

    def test_other_results(self):
        """What is not the same kind in all batches, and other objects, are in a list with one for each batch."""
        assert join(["a", "b"], [1, 1]) == ["a", "b"]
        assert join([None, 3], [1, 1]) == [None, 3]
        assert join([{"a": 1}, {"b": 1}], [1, 1]) == [{"a": 1}, {"b": 1}]
