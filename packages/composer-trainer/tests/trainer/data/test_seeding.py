"""The seeds of the data: one for each batch."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from composer import Trainer
from composer.diagnostics import check_exact_resume
from composer.models import ComposerClassifier
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
        """Six samples in batches of four have one seeding for the iterator, one per batch and one at the end."""
        order = make_order(DataLoader(NoisyStream(), batch_size=4), seed=17)

        list(order.begin(0))

        assert len(set(seeded)) == len(seeded) == 4


class Ordered(IterableDataset):
    """Samples in an order that all workers draw with their copies of one generator, and noise of others.

    Those of the noise are created when they are first used.
    """

    def __init__(self):
        self.order, self.noise = torch.Generator().manual_seed(3), None

    def __iter__(self):
        worker = get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in torch.randperm(24, generator=self.order)[first::workers].tolist():
            self.noise = self.noise or (random.Random(4), np.random.default_rng(5))
            yield {"inputs": torch.full((4,), index + self.noise[0].random() * self.noise[1].random()), "index": index}


class Masking:
    """A ``collate_fn`` that creates its generator when it is first used, as Transformers' for masked tokens."""

    generator = None

    def __call__(self, samples):
        self.generator = self.generator or torch.Generator().manual_seed(6)
        inputs = torch.stack([sample["inputs"] for sample in samples])
        mask = torch.rand(inputs.shape, generator=self.generator) < 0.3
        return inputs.masked_fill(mask, 0.0), torch.tensor([sample["index"] for sample in samples]) % 3


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")
class TestGeneratorsOfStreams:
    def test_a_resumed_run_is_exact(self, workers):
        """Stopped within and between epochs, streams and ``collate_fn`` draw the same from their own generators."""

        def make_trainer(**settings):
            torch.manual_seed(0)
            model = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3, train_metrics=[])
            return Trainer(
                model=model,
                optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
                train_dataloader=DataLoader(Ordered(), 4, collate_fn=Masking(), **workers),
                max_duration="3ep",
                seed=1,
                progress_bar=False,
                device="cpu",
                **settings,
            )

        check_exact_resume(make_trainer, stops=["2ba", "8ba"])

    def test_workers_draw_one_order(self, workers):
        """Each epoch has every sample once, in another order, as generators of a stream are seeded equally."""
        order = make_order(DataLoader(Ordered(), 4, collate_fn=list, **workers), seed=17)

        epochs = [[sample["index"] for batch in order.begin(epoch) for sample in batch] for epoch in range(3)]

        order.close()
        assert all(sorted(indices) == list(range(24)) for indices in epochs)
        assert len(set(map(tuple, epochs))) == 3
