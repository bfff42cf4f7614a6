"""InfoBatch in custom loops: which samples an epoch has, the weighted loss, and errors."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import InfoBatch, InfoBatchDataset
from composer.core import Adapter, Engine, Event, NoEffectWarning, State, served_fields


def loss(outputs, batch, **options):
    return cross_entropy(outputs, batch[1], **options)


def make_state(count=40, **options):
    """Return a state with a linear model, and an engine."""
    torch.manual_seed(0)
    data, model = InfoBatchDataset(TensorDataset(torch.rand(count, 4), torch.arange(count) % 3)), nn.Linear(4, 3)
    settings = {
        "train_dataloader": DataLoader(data, 8, sampler=data.sampler),
        "max_duration": "4ep",
        "forward": lambda batch: model(batch[0]),
        "loss_function": loss,
    }
    return State(model, **{"rank_zero_seed": 5} | settings | options)


def train(state, engine, epochs=4):
    """Train with SGD, and return the indices of each epoch."""
    optimizer, seen = torch.optim.SGD(state.model.parameters(), lr=0.1), []
    engine.run_event("fit_start")
    for _ in range(epochs):
        engine.run_event("epoch_start")
        seen.append(list(state.train_dataloader.sampler))
        for batch in state.train_dataloader:
            state.batch = batch
            engine.run_event("after_dataloader")
            engine.run_event("before_forward")
            state.outputs = state.compute_outputs(state.batch)
            state.loss = state.compute_loss(state.outputs, state.batch)
            engine.run_event("after_loss")
            optimizer.zero_grad()
            state.loss.backward()
            optimizer.step()
            state.timestamp = state.timestamp.to_next_batch()
        state.timestamp = state.timestamp.to_next_epoch()
        engine.run_event("epoch_end")
    return seen


class TestOrder:
    def test_depends_on_seed_and_epoch(self):
        """Equal runs have the same orders, other seeds others; no two epochs have the same. The plan has the count."""
        runs = []
        for seed in (5, 5, 6):
            state = make_state(rank_zero_seed=seed)
            engine = Engine(state, algorithms=InfoBatch(annealing=0.25))
            runs.append(train(state, engine))
            assert engine.explain().acted == {"InfoBatch": (sum(40 - len(epoch) for epoch in runs[-1]), "samples")}

        assert runs[0] == runs[1]
        assert runs[0][0] != runs[2][0]
        assert sorted(runs[0][0]) == sorted(runs[0][3]) == [*range(40)]
        assert runs[0][0] != runs[0][3]
        assert all(20 < len(epoch) < 40 for epoch in runs[0][1:3])

    @pytest.mark.parametrize(("annealing", "complete"), [(0.0, 1), (0.3, 3), (0.7, 7)])
    def test_the_last_part_is_complete(self, annealing, complete):
        """Of ten epochs, those that start in the last part have all samples, and the first one."""
        state = make_state(max_duration="10ep")

        seen = train(state, Engine(state, algorithms=InfoBatch(annealing=annealing)), epochs=10)

        is_complete = [len(epoch) == 40 for epoch in seen]
        assert is_complete[0]
        assert is_complete[10 - complete :] == [True] * complete if annealing else not any(is_complete[1:])
        assert not any(is_complete[1 : 10 - complete])

    def test_processes_have_disjoint_parts(self):
        """The parts of three processes are those of one order, with the length of the longest."""
        parts = []
        for rank in range(3):
            state = make_state(data_rank=rank, gather=lambda value: [value] * 3)
            Engine(state, algorithms=InfoBatch()).run_event("fit_start")
            state.algorithms[0].apply(Event.EPOCH_START, state, None)
            parts.append(list(state.train_dataloader.sampler))
            assert len(state.train_dataloader.sampler) == 14
        state = make_state()
        order = train(state, Engine(state, algorithms=InfoBatch()), epochs=1)[0]

        assert parts == [order[0::3], order[1::3], order[2::3]]


def test_without_pruned_samples():
    """A training that prunes no sample is reported at its end, with the reason."""
    state = make_state()
    engine = Engine(state, algorithms=InfoBatch(ratio=1e-6))
    train(state, engine)

    with pytest.warns(NoEffectWarning, match="It has pruned no sample"):
        engine.run_event("fit_end")


class TestDataset:
    def test_restores_the_order(self):
        """The state of the sampler is the order and the part of the process."""
        data, other = InfoBatchDataset(range(5)), InfoBatchDataset(range(5))
        data.order, data.part = torch.tensor([3, 0, 4]), (1, 2)

        other.sampler.load_state_dict(data.sampler.state_dict())

        assert list(other.sampler) == [0]
        assert len(other.sampler) == 2


class TestErrors:
    def start(self, **options):
        state = make_state(**options)
        Engine(state, algorithms=InfoBatch()).run_event("fit_start")

    @pytest.mark.parametrize("make", [lambda: DataLoader(range(8)), lambda: [1, 2], lambda: None])
    def test_other_data(self, make):
        """The data must be those that it can choose."""
        with pytest.raises(ValueError, match="must be a DataLoader of an InfoBatchDataset with its sampler"):
            self.start(train_dataloader=make())

    def test_other_sampler(self):
        """A loader that shuffles all samples is an error."""
        with pytest.raises(ValueError, match="with its sampler"):
            self.start(train_dataloader=DataLoader(InfoBatchDataset(range(8)), shuffle=True))

    def test_batches_without_indices(self):
        """A collate_fn that loses the indices is an error."""
        state = make_state()
        engine = Engine(state, algorithms=InfoBatch())
        engine.run_event("fit_start")
        engine.run_event("epoch_start")
        state.batch = {"x": torch.rand(3)}

        with pytest.raises(TypeError, match="must be a pair of the indices"):
            engine.run_event("after_dataloader")

    def test_a_loss_without_reduction(self):
        """The loss must be able to return the loss of each sample."""
        with pytest.raises(TypeError, match="InfoBatch needs the loss of each sample"):
            self.start(loss_function=lambda outputs, batch: outputs.sum())

    def test_other_number_of_samples_or_processes(self):
        """An epoch continues only with as many samples and processes."""
        saved = make_state()
        train(saved, Engine(saved, algorithms=InfoBatch()), epochs=1)
        saved.algorithms[0].apply(Event.EPOCH_START, saved, None)
        saved.timestamp = saved.timestamp.to_next_batch()
        found = [
            (make_state(count=8), "40 samples and 1 processes with 8 samples and 1"),
            (make_state(gather=lambda value: [value] * 2), "40 samples and 1 processes with 40 samples and 2"),
        ]

        for state, message in found:
            engine = Engine(state, algorithms=InfoBatch())
            state.load_state_dict(saved.state_dict())
            with pytest.raises(ValueError, match=message):
                engine.run_event("fit_start")

    def test_several_processes_of_another_loop(self):
        """A loop that does not weigh processes by their samples is an error."""
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            with pytest.raises(ValueError, match="use the Trainer"):
                self.start()
        finally:
            torch.distributed.destroy_process_group()

    def test_a_host_that_keeps_its_loader(self):
        """Hosts that do not serve changes of their loader are rejected."""
        served = served_fields("MyLoop", not_writable={"train_dataloader"})

        with pytest.raises(ValueError, match="InfoBatch cannot run in MyLoop: it writes 'train_dataloader'"):
            Adapter(served, nn.Linear(2, 2), InfoBatch())
