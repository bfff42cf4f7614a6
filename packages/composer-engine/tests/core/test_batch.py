"""Reading and replacing items of a batch."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from composer.core import batch_get, batch_set
from composer.core.batch import describe_batch

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Record:
    image: object
    label: object


BATCHES = [
    (("i", "l"), 1),
    (["i", "l"], -1),
    ({"image": "i", "label": "l"}, "label"),
    (UserDict(image="i", label="l"), "label"),
    (Pair("i", "l"), 1),
    (Pair("i", "l"), "label"),
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_describe_nested_tensor():
    """A nested tensor, which has no shape, can be described."""
    assert describe_batch([torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])]) == "[nested float32]"


class TestUsualNames:
    """In a dictionary, 0 and 1 are the samples and the targets under their usual names."""

    @pytest.mark.parametrize(("input", "target"), [("input_ids", "labels"), ("pixel_values", "label"), ("x", "y")])
    def test_get_and_set(self, input, target):
        """The item is read and replaced, and the original batch keeps it."""
        batch = {"attention_mask": 0, input: 1, target: 2}
        assert (batch_get(batch, 0), batch_get(batch, 1)) == (1, 2)
        assert batch_set(batch, 1, 3) == {"attention_mask": 0, input: 1, target: 3}
        assert batch[target] == 2

    def test_own_keys_come_first(self):
        """A dictionary with the key 0 is not searched for a name."""
        assert batch_get({0: "own", "labels": 1, "x": 2}, 0) == "own"

    def test_no_usual_name(self):
        """The error lists the keys of the dictionary."""
        with pytest.raises(KeyError, match=r"no item 1.*'tokens'"):
            batch_get({"tokens": 1}, 1)


class TestSeveralItems:
    """Slices, and lists of keys, select several items."""

    @pytest.mark.parametrize(
        ("batch", "keys", "items", "changed"),
        [
            ([1, 2, 3], [0, 2], (1, 3), [7, 2, 8]),
            ((1, 2, 3), (0, 2), (1, 3), (7, 2, 8)),
            ({"a": 1, "b": 2, "c": 3}, ["c", "a"], (3, 1), {"a": 8, "b": 2, "c": 7}),
            (Pair(1, 2), ["label", "image"], (2, 1), Pair(8, 7)),
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

    @pytest.mark.parametrize(
        "batch", [torch.arange(12).reshape(4, 3), torch.arange(12).reshape(4, 3).numpy()], ids=["tensor", "array"]
    )
    @pytest.mark.parametrize("key", [1, slice(0, 2), [0, 2], (0, 2), (slice(None), [0, 1])])
    def test_tensors_and_arrays(self, batch, key):
        """A tensor or array is indexed, and a copy is changed."""
        before = batch[key]

        changed = batch_set(batch, key, -before)

        assert (batch_get(batch, key) == before).all()
        assert (changed[key] == -before).all()
        assert (changed != batch).sum() == (before != 0).sum()

    def test_a_tuple_may_be_one_key(self):
        """A tuple that is a key of a dictionary is not several keys."""
        batch = {("a", "b"): 1, "a": 2, "b": 3}

        assert batch_get(batch, ("a", "b")) == 1
        assert batch_set(batch, ("a", "b"), 4) == {("a", "b"): 4, "a": 2, "b": 3}

    def test_one_function(self):
        """A function reads, or sets and returns, the batch."""

        def set_last(batch, value):
            return [*batch[:-1], value]

        assert batch_get([{"a": 1}, {"c": 5}], lambda batch: batch[1]["c"]) == 5
        assert batch_set([1, 2], set_last, 3) == [1, 3]

    @pytest.mark.parametrize("values", [[7], [7, 8, 9]])
    def test_wrong_number_of_values_raises(self, values):
        """Each key needs a value."""
        with pytest.raises(ValueError, match=rf"one item for each of the 2 keys \['a', 'b'\], got {len(values)}"):
            batch_set({"a": 1, "b": 2}, ["a", "b"], values)

    def test_missing_key_raises(self):
        """If one of several keys is missing, the error names it."""
        with pytest.raises(KeyError, match=r"no item 'z'"):
            batch_get({"a": 1}, ["a", "z"])
