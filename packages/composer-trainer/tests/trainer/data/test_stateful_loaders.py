"""Loaders that save their own position."""

import pytest
import torch
from torch.utils.data import (
    Dataset,
    RandomSampler,
)

from fixtures import record, small_run
from fixtures.data import vectors


class ByEpoch(Dataset):
    """Twenty samples that depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(4, generator=torch.Generator().manual_seed(100 * self.epoch + index)), index % 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's own
class TestStatefulDataLoader:
    """Loaders of torchdata, which save their own position."""

    def fit(self, options, **arguments):
        module = pytest.importorskip("torchdata.stateful_dataloader", reason="it is an optional loader")
        seen = record("batch_end", lambda state: state.batch[0].tolist())
        if "generator" in options:  # each loader has its own
            options = {**options, "generator": torch.Generator().manual_seed(options["generator"])}
        if "sampler" in options:
            options["sampler"] = options["sampler"](options["dataset"], generator=options["generator"])
        loader = module.StatefulDataLoader(batch_size=4, **options)
        small_run(train_dataloader=loader, max_duration="2ep", callbacks=seen, **arguments).fit()
        return seen.values

    def test_draws_in_workers_warn(self):
        """Data that may draw is named when the trainer is constructed; tensors draw nothing."""
        module = pytest.importorskip("torchdata.stateful_dataloader", reason="it is an optional loader")
        small_run(train_dataloader=module.StatefulDataLoader(vectors(20), 4, num_workers=1))
        small_run(train_dataloader=module.StatefulDataLoader(ByEpoch(), 4))

        with pytest.warns(UserWarning, match=r"a StatefulDataLoader, may not resume exactly: random numbers"):
            small_run(train_dataloader=module.StatefulDataLoader(ByEpoch(), 4, num_workers=1))

    def test_shuffled_streams_warn(self):
        """The buffer of a shuffled stream of Hugging Face is not saved; another stream has none."""
        module = pytest.importorskip("torchdata.stateful_dataloader", reason="it is an optional loader")
        datasets = pytest.importorskip("datasets", reason="the stream is of Hugging Face")
        rows = datasets.Dataset.from_dict({"number": list(range(12))}).to_iterable_dataset()
        small_run(train_dataloader=module.StatefulDataLoader(rows, 4))
        shuffled = rows.shuffle(seed=3, buffer_size=4).map(lambda row: row)

        with pytest.warns(UserWarning, match=r"may not resume exactly: the samples in the buffer of dataset\.shuffle"):
            small_run(train_dataloader=module.StatefulDataLoader(shuffled, 4))

    @pytest.mark.filterwarnings("ignore:train_dataloader, a StatefulDataLoader, may not:UserWarning")  # it does
    @pytest.mark.parametrize(
        ("options", "subset"),
        [
            ({"dataset": vectors(20), "shuffle": True, "num_workers": 2, "persistent_workers": True}, 3),
            ({"dataset": vectors(20), "shuffle": True, "generator": 5}, -1),
            ({"dataset": vectors(20), "shuffle": True, "generator": 5}, 3),
            ({"dataset": vectors(20), "sampler": RandomSampler, "generator": 5}, -1),
            ({"dataset": ByEpoch(), "num_workers": 1}, -1),
            ({"dataset": ByEpoch()}, -1),
        ],
    )
    def test_resumes_exactly(self, options, subset, tmp_path):
        """A run resumes after any batch, also after the last one of an epoch; epochs have different orders."""
        subset = {"train_subset_num_batches": subset}
        saving = {"save_folder": tmp_path, "save_interval": "1ba", "save_filename": "{batch}-{epoch}"}
        batches = self.fit(options, **saving, **subset)

        length = len(batches) // 2
        for place, epoch in ((1, 0), (length, 0), (length + 1, 1)):
            assert self.fit(options, load_path=str(tmp_path / f"{place}-{epoch}"), **subset) == batches[place:]
        assert batches[:length] != batches[length:]
