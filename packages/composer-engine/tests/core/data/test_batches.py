"""Batches of any type: items, counts, parts."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from composer.core import DataSpec, batch_get, batch_set
from composer.core.data.batches import count_samples, count_tokens, describe_batch, move_batch, split_batch

Pair = namedtuple("Pair", ["input", "target"])


class TokenizerBatch(UserDict):
    """A dictionary with additional attributes, like the batches of tokenizers."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


def batches(size):
    """Return batches of ``size`` samples: tensors and lists, in any nesting of containers."""
    tensors = st.sampled_from([(), (2,), (3, 1)]).map(lambda shape: torch.rand(size, *shape))
    texts = st.just([f"text {index}" for index in range(size)])
    shared = st.sampled_from([7, "all", None, torch.tensor(3.0)])
    leaves = st.one_of(tensors, texts, shared)
    nested = st.recursive(
        leaves,
        lambda parts: st.one_of(
            st.tuples(tensors, parts),
            st.tuples(tensors, parts).map(list),
            st.builds(Pair, tensors, parts),
            st.fixed_dictionaries({"x": tensors, "y": parts}),
            st.fixed_dictionaries({"x": tensors, "y": parts}).map(lambda data: TokenizerBatch(data, "kept")),
        ),
        max_leaves=5,
    )
    return st.tuples(tensors, nested).flatmap(lambda pair: st.sampled_from([pair, [*pair], Pair(*pair), pair[0]]))


def concatenate(parts):
    """Concatenate the parts of a batch."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, (dict, UserDict)):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, list) and isinstance(first[0], str):
        return [item for part in parts for item in part]
    if isinstance(first, (list, tuple)):
        return [concatenate([*items]) for items in zip(*parts, strict=True)]
    return first


def same(one, other):
    """Return whether two batches have equal contents in any containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (dict, UserDict)):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


def types(batch):
    """Return the types of a batch's nested containers."""
    if isinstance(batch, (dict, UserDict)):
        return type(batch), {key: types(part) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch), [types(part) for part in batch if not isinstance(part, str)]
    return type(batch)


class TestSplitBatch:
    def test_arrays_are_split(self):
        """A NumPy array with one row per sample is split with the samples."""
        parts = split_batch({"x": torch.arange(5), "name": np.array(list("abcde"))}, 2)

        assert [part["name"].tolist() for part in parts] == [["a", "b"], ["c", "d"], ["e"]]

    @given(st.data(), st.integers(1, 9), st.integers(1, 10))
    def test_parts_concatenate_to_the_batch(self, data, size, microbatch_size):
        """The concatenated parts equal the batch, in any nesting."""
        batch = data.draw(batches(size))

        parts = split_batch(batch, microbatch_size)

        assert same(batch, concatenate(parts))

    @pytest.mark.parametrize("num_samples", [2, 3, 4])
    def test_lists_of_samples(self, num_samples):
        """A list with a list of numbers or a dictionary for each sample is split with the samples."""
        numbers = [[index, index, index] for index in range(num_samples)]
        boxes = [{"corners": [0, 1] * index, "index": index} for index in range(num_samples)]
        batch = {"x": torch.arange(num_samples), "meta": {"numbers": numbers}, "boxes": tuple(boxes), "all": "text"}

        first, *rest = split_batch(batch, 1)

        assert len(rest) == num_samples - 1
        assert [part["meta"]["numbers"] for part in rest] == [[[i, i, i]] for i in range(1, num_samples)]
        assert [part["boxes"] for part in (first, *rest)] == [(one,) for one in boxes]
        assert first["all"] == "text"

    @pytest.mark.parametrize("kind", [tuple, list])
    @pytest.mark.parametrize("boxes", [[0, 1, 2], [3, 3, 3], [2, 2, 2]])
    @pytest.mark.parametrize("empty", [torch.zeros(0, 4), torch.tensor([])], ids=["(0, 4)", "(0,)"])
    def test_images_with_boxes(self, kind, boxes, empty):
        """Images and targets of ``tuple(zip(*samples))`` are counted and split by images, whatever their lengths."""
        images = kind(torch.full((3, 8, 8 + size), size) for size in boxes)
        targets = kind(
            {"boxes": torch.zeros(size, 4) if size else empty, "labels": torch.zeros(size)} for size in boxes
        )

        first, second = split_batch((images, targets), 2)

        assert count_samples((images, targets)) == 3
        assert (len(first[0]), len(first[1]), len(second[0]), len(second[1])) == (2, 2, 1, 1)
        assert second[0][0] is images[2]
        assert second[1][0] is targets[2]
        stacked = split_batch({"image": torch.zeros(3, 3, 8, 8), "objects": targets}, 2)[1]
        assert (stacked["image"].shape[0], stacked["objects"][0]) == (1, targets[2])

    def test_collated_text(self):
        """Several fields of text, which torch collates to a list for each field, are split within each."""
        batch = [torch.zeros(2), [("first", "second"), ("erster", "zweiter")]]

        assert split_batch(batch, 1)[1][1] == [("second",), ("zweiter",)]

    def test_attributes_of_subclasses_are_preserved(self):
        """Attributes of a tokenizer's batch are in every part."""
        batch = TokenizerBatch({"input_ids": torch.zeros(4, 2)}, encodings="kept")

        assert [part.encodings for part in split_batch(batch, 3)] == ["kept", "kept"]

    @pytest.mark.parametrize("size", [0, -1])
    def test_nonpositive_size_raises(self, size):
        """A size below 1 raises."""
        with pytest.raises(ValueError, match=f"microbatch_size must be at least 1, got {size}"):
            split_batch(torch.zeros(3), size)


class TestCountSamples:
    @given(st.data(), st.integers(1, 9))
    def test_uses_the_first_dimension(self, data, size):
        """In any nesting the samples are counted along the first dimension."""
        assert count_samples(data.draw(batches(size))) == size

    def test_lists_of_strings(self):
        """A batch without tensors has as many samples as items."""
        assert count_samples(["one", "two", "three"]) == 3

    @pytest.mark.parametrize(
        ("batch", "result"),
        [
            ((torch.zeros(3), torch.zeros(4)), r"lengths \[3, 4\]"),
            (torch.tensor(1.0), "no tensor and no list"),
            ({}, "no tensor and no list"),
            (object(), "no tensor and no list"),
            (Pair(1, 2), "no tensor and no list"),
            ((torch.zeros(3), [[1, 2], [3]]), r"lengths \[1, 2, 3\]"),
            ((torch.zeros(3), ["one", "two"]), r"lengths \[2, 3\]"),
            (([torch.zeros(3, 8), torch.zeros(3, 9)], [torch.zeros(4), torch.zeros(2)]), r"lengths \[2, 3, 4\]"),
        ],
    )
    def test_ambiguous_batches_raise(self, batch, result):
        """The error describes the batch and the remedy."""
        with pytest.raises(ValueError, match=rf"has {result}.*get_num_samples_in_batch="):
            count_samples(batch)


class TestItems:
    """Batches of a loader with ``collate_fn=list``: items of the data set that were not collated."""

    @pytest.mark.parametrize(
        "item",
        [
            (torch.rand(4), 2),
            [torch.rand(4), torch.tensor(2)],
            (torch.rand(4, 3, 3), "cat.png"),
            {"image": torch.rand(4, 3), "label": 2},
            (2, torch.rand(6), torch.rand(4)),
        ],
    )
    def test_each_is_a_sample(self, item):
        """They are counted and split, whatever the lengths of their tensors."""
        [batch] = DataLoader([item] * 6, batch_size=6, collate_fn=list)

        assert DataSpec([]).get_num_samples_in_batch(batch) == 6
        assert [len(part) for part in split_batch(batch, 4)] == [4, 2]
        assert same(split_batch(batch, 4)[1], batch[4:])

    @pytest.mark.parametrize(
        "batch",
        [
            [{"x": torch.rand(4, 2)}, {"x": torch.rand(4, 2)}],
            ({"x": torch.rand(4, 2), "mode": "a"}, {"y": torch.rand(4), "mode": "b"}),
            [(torch.rand(4), torch.rand(4)), (torch.rand(4), torch.rand(4))],
            [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
            [torch.rand(4), ("a", "b", "c", "d")],
        ],
    )
    def test_fields_are_not_items(self, batch):
        """Nested fields of four samples are no items."""
        assert count_samples(batch) == 4


class TestCountTokens:
    def test_counts_ids_with_padding(self):
        """Every id is counted, including padding."""
        assert count_tokens(TokenizerBatch({"input_ids": torch.zeros(4, 16, dtype=torch.long)})) == 64

    @pytest.mark.parametrize(
        "batch", [torch.zeros(3), (torch.zeros(3),), {"image": torch.zeros(3)}, {"input_ids": [1]}]
    )
    def test_other_batches_have_none(self, batch):
        """Images have no tokens."""
        assert count_tokens(batch) == 0


class TestMoveBatch:
    def test_moves_tensors_in_any_nesting(self):
        """Every tensor is moved, containers keep their types, and everything else stays."""
        batch = [torch.zeros(2), {"x": Pair(torch.ones(2), "text")}]

        moved = move_batch(batch, torch.device("meta"))

        assert (moved[0].device.type, moved[1]["x"].input.device.type, moved[1]["x"].target) == ("meta", "meta", "text")
        assert types(moved) == types(batch)
        assert batch[0].device.type == "cpu"

    def test_objects_with_to_are_moved_by_it(self):
        """A PackedSequence is moved by its own ``to``: its lengths stay on the CPU."""
        packed = pack_sequence([torch.zeros(3), torch.zeros(2)])

        moved = move_batch((packed,), torch.device("meta"))[0]

        assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


@dataclass
class Record:
    image: object
    label: object


Image = namedtuple("Image", ["image", "label"])

BATCHES = [
    (("i", "l"), 1),
    (["i", "l"], -1),
    ({"image": "i", "label": "l"}, "label"),
    (UserDict(image="i", label="l"), "label"),
    (Image("i", "l"), 1),
    (Image("i", "l"), "label"),
    (Record("i", "l"), "label"),
    (SimpleNamespace(image="i", label="l"), "label"),
]


@pytest.mark.parametrize(("batch", "key"), BATCHES)
def test_get_item(batch, key):
    """An index, a key or an attribute name selects the item."""
    assert batch_get(batch, key) == "l"


@pytest.mark.parametrize(("batch", "key"), BATCHES)
def test_set_item_returns_a_copy(batch, key):
    """The copy has the new item and the same type; the original batch does not change."""
    changed = batch_set(batch, key, "new")

    assert type(changed) is type(batch)
    assert (batch_get(changed, key), batch_get(batch, key)) == ("new", "l")
    assert batch_get(changed, "image" if isinstance(key, str) else 0) == "i"


def test_getter_and_setter():
    """A pair of functions reads and writes any batch."""
    key = (lambda batch: batch[1]["label"], lambda batch, value: [batch[0], {"label": value}])

    assert batch_get(["i", {"label": "l"}], key) == "l"
    assert batch_set(["i", {"label": "l"}], key, "new") == ["i", {"label": "new"}]


@pytest.mark.parametrize(
    ("batch", "key", "content"),
    [
        (("i", "l"), 2, "a tuple of 2 items"),
        (("i", "l"), "label", "a tuple of 2 items"),
        ({"image": 1}, "label", "a dict with the keys .*image"),
        (Record(1, 2), "target", "a Record"),
        ((), (), "a tuple of 0 items"),
    ],
)
@pytest.mark.parametrize("access", [batch_get, lambda batch, key: batch_set(batch, key, 0)])
def test_missing_item_raises(batch, key, content, access):
    """The error describes the batch and names the settings that select the item."""
    with pytest.raises(KeyError, match=rf"it is {content}.*input_key= and target_key="):
        access(batch, key)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3), "float32[2, 3]"),
        ((torch.zeros(2).long(), "x", 5), "(int64[2], str, int)"),
        ({"a": [torch.zeros(1).bool()]}, "{'a': [bool[1]]}"),
        ([0] * 100, "[int, int, int, int, int, int, int, int, ... 100 in all]"),
        (SimpleNamespace(image="i"), "SimpleNamespace"),
        ((), "()"),
    ],
)
def test_describe_batch(batch, text):
    """Batches are described by dtypes, shapes and types; long descriptions are truncated."""
    assert describe_batch(batch) == text


class TestUsualNames:
    """In a dictionary, 0 and 1 are the samples and the targets under their usual names."""

    @pytest.mark.parametrize(("input", "target"), [("input_ids", "labels"), ("pixel_values", "label"), ("x", "y")])
    def test_get_and_set(self, input, target):
        """The item is read and replaced, and the original batch keeps it."""
        batch = {"attention_mask": 0, input: 1, target: 2}
        assert (batch_get(batch, 0), batch_get(batch, 1)) == (1, 2)
        assert batch_set(batch, 1, 3) == {"attention_mask": 0, input: 1, target: 3}
        assert batch[target] == 2


class TestSeveralItems:
    """Slices, and lists of keys, select several items."""

    @pytest.mark.parametrize(
        ("batch", "keys", "items", "changed"),
        [
            ([1, 2, 3], [0, 2], (1, 3), [7, 2, 8]),
            ((1, 2, 3), (0, 2), (1, 3), (7, 2, 8)),
            ({"a": 1, "b": 2, "c": 3}, ["c", "a"], (3, 1), {"a": 8, "b": 2, "c": 7}),
            (Image(1, 2), ["label", "image"], (2, 1), Image(8, 7)),
            (Record(1, 2), ["image", "label"], (1, 2), Record(7, 8)),
            ({"input_ids": 1, "labels": 2}, [0, 1], (1, 2), {"input_ids": 7, "labels": 8}),
        ],
    )
    def test_keys(self, batch, keys, items, changed):
        """Several keys read a tuple of items, and replace each."""
        assert batch_get(batch, keys) == items
        assert batch_set(batch, keys, [7, 8]) == changed
        assert batch_get(batch, keys) == items

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_slices(self, kind):
        """A slice of a list or tuple is one of the same type."""
        batch = kind([1, 2, 3, 4])

        assert batch_get(batch, slice(1, 3)) == kind([2, 3])
        assert batch_set(batch, slice(1, 3), [7, 8]) == kind([1, 7, 8, 4])
        assert batch == kind([1, 2, 3, 4])

    def test_one_function(self):
        """A function reads, or sets and returns, the batch."""

        def set_last(batch, value):
            return [*batch[:-1], value]

        assert batch_get([{"a": 1}, {"c": 5}], lambda batch: batch[1]["c"]) == 5
        assert batch_set([1, 2], set_last, 3) == [1, 3]
