"""Data sets that consist of others."""

import pytest
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, StackDataset, Subset

from composer.functional.datasets import by_epoch, inner_datasets


class ByEpoch(list):
    """A data set of epochs."""

    def set_epoch(self, epoch):
        """Do nothing."""


class Named(Subset):
    """A data set that names those that it was made of."""

    datasets = ("web", "books")

    def __init__(self, dataset):
        super().__init__(dataset, [0])


A, B = ByEpoch([1]), ByEpoch([2])


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (DataLoader(A), [A]),
        (Subset(A, [0]), [A]),
        (ConcatDataset([A, B]), [A, B]),
        (ChainDataset([A, B]), [A, B]),
        (StackDataset(A, B), [A, B]),
        (StackDataset(one=A, two=B), [A, B]),
        (Named(A), [A]),
        ([1, 2], []),
    ],
)
def test_inner_data_sets(outer, inner):
    """Those of torch's loader and data sets are found, by identity."""
    assert [*map(id, inner_datasets(outer))] == [*map(id, inner)]


def test_by_epoch():
    """The outermost data sets with the method are found at any depth, and the endless chain of a proxy is left."""

    class Proxy:
        def __getattr__(self, name):
            if name == "dataset":
                return Proxy()
            raise AttributeError(name)

    outer = ConcatDataset([Subset(Subset(A, [0]), [0]), [3], B])

    assert [*map(id, by_epoch(outer))] == [id(A), id(B)]
    assert by_epoch(Proxy()) == []
