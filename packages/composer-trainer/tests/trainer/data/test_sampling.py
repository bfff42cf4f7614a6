"""The orders of samplers, and their digests."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

from composer.trainer.data.order import make_order


class TestFingerprint:
    @pytest.mark.parametrize("batched", [True, False])
    @pytest.mark.parametrize("has_set_epoch", [True, False])
    def test_of_endless_samplers(self, has_set_epoch, batched):
        """For a sampler without a length, or one that takes the epoch, it is computed from the batches so far."""
        own = Endless()
        if has_set_epoch:
            own.set_epoch = lambda epoch: None
        options = {"sampler": own, "batch_size": 2} if batched else {"batch_sampler": BatchSampler(own, 2, False)}
        order = make_order(DataLoader(TensorDataset(torch.arange(12)), **options), seed=17)
        iterator = order.begin(0)

        digests = []
        for count in range(1, 4):
            next(iterator)
            digests.append(order.fingerprint(count))
            own.begin = 0

        assert len(set(digests)) == 3
        order.begin(0, 2)
        assert order.fingerprint(2) == digests[1]
        own.begin = 1
        order.begin(0, 2)
        assert order.fingerprint(2) != digests[1]

    def test_of_other_keys(self):
        """Keys of other types have fingerprints too."""
        keys = [torch.tensor(1), torch.tensor(2)]
        order = make_order(DataLoader(_ByTensor(), batch_sampler=_Unending(keys)), seed=17)
        iterator = order.begin(0)
        next(iterator)

        first = order.fingerprint(1)
        order.begin(0, 2)
        assert order.fingerprint(1) == first != order.fingerprint(2)


class Endless(Sampler):
    """A sampler that never ends."""

    begin = 0

    def __iter__(self):
        return ((self.begin + place) % 12 for place in itertools.count())


class _Unending:
    def __init__(self, keys):
        self.keys = keys

    def __iter__(self):
        return ([key] for key in itertools.cycle(self.keys))


class _ByTensor(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, key):
        return key
