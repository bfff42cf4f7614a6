"""The seeds of the data: one for each batch."""

import random

import pytest
from torch.utils.data import DataLoader, Subset

from composer.trainer.data.order import make_order
from fixtures.draws import Noisy, NoisyBatches, NoisyStream


class TestNumberOfSeedings:
    """Seeding is slower than loading many samples."""

    @pytest.fixture
    def seeded(self, monkeypatch):
        """Return a list that grows with each seeding of Python's generator."""
        calls, seed = [], random.seed
        monkeypatch.setattr(random, "seed", lambda key: (calls.append(key), seed(key)))
        return calls

    @pytest.mark.parametrize("data", [Noisy(), NoisyBatches(), Subset(Noisy(), range(12))])
    @pytest.mark.parametrize("make", [DataLoader, type("Loader", (DataLoader,), {})], ids=["torch's", "a subclass"])
    def test_map_style_dataset(self, seeded, data, make):
        """Three batches of four samples have three seedings."""
        order = make_order(make(data, batch_size=4, shuffle=True), seed=17)

        list(order.begin(0))

        assert len(set(seeded)) == len(seeded) == 3

    def test_stream(self, seeded):
        """Six samples in batches of four have one seeding for the iterator and one per batch."""
        order = make_order(DataLoader(NoisyStream(), batch_size=4), seed=17)

        list(order.begin(0))

        assert len(set(seeded)) == len(seeded) == 3
