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
def test_get(batch, key):
    """An index, a key or an attribute's name finds the item."""
    assert batch_get(batch, key) == "l"


@pytest.mark.parametrize(("batch", "key"), BATCHES)
def test_set_replaces_in_a_copy(batch, key):
    """The new batch has the new item, the type and all other items; the old batch keeps its own."""
    changed = batch_set(batch, key, "new")

    assert type(changed) is type(batch)
    assert (batch_get(changed, key), batch_get(batch, key)) == ("new", "l")
    assert batch_get(changed, "image" if isinstance(key, str) else 0) == "i"


def test_pair_of_functions():
    """Any batch can be read and changed by functions of one's own."""
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
def test_missing_items_are_refused(batch, key, content, access):
    """The sentence says what the batch is, and by which settings the item is found."""
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
def test_description(batch, text):
    """A batch is described by number formats, shapes and types, and a long one is cut off."""
    assert describe_batch(batch) == text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_description_of_nested_tensors():
    """A nested tensor, which has no shape, does not hide the error that its batch is described for."""
    assert describe_batch([torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])]) == "[nested float32]"
