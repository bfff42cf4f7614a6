"""SelectiveBackprop: the samples with the highest losses, with all their data."""

import dataclasses
import warnings

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer.algorithms import MixUp, SelectiveBackprop
from composer.core import Engine, Event, NoEffectWarning, State, explain


class Model(nn.Module):
    """A linear layer after a batch norm and dropout; called with pairs or dictionaries."""

    def __init__(self, keys=(0, 1)):
        super().__init__()
        self.keys = keys
        self.norm, self.drop, self.layer = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, batch):
        return self.layer(self.drop(self.norm(batch[self.keys[0]])))

    def loss(self, outputs, batch, reduction="mean"):
        return cross_entropy(outputs, batch[self.keys[1]], reduction=reduction)


def select(model, batch, batch_in_epoch=0, epochs=6, microbatch_size=None, **settings):
    """Return the batch after AFTER_DATALOADER of a batch at six tenths of the training."""
    state = State(model=model, max_duration="10ep", device_train_microbatch_size=microbatch_size)
    engine = Engine(state, algorithms=SelectiveBackprop(**settings))
    for _ in range(epochs):
        state.timestamp = state.timestamp.to_next_batch(samples=8).to_next_epoch()
    for _ in range(batch_in_epoch):
        state.timestamp = state.timestamp.to_next_batch(samples=8)
    state.batch = batch
    engine.run_event("after_dataloader")
    return state.batch


@pytest.fixture
def samples():
    """Eight samples and labels."""
    return torch.randn(8, 8), torch.arange(8) % 3


def hardest(model, samples, count):
    """Return the indices with the highest loss in evaluation mode, in order."""
    model.eval()
    losses = cross_entropy(model(samples), samples[1], reduction="none")
    model.train()
    return losses.topk(count).indices.sort().values


def test_selects_the_highest_losses(samples):
    """The half of the samples with the highest losses is selected, in the batch's order."""
    model = Model()
    expected = hardest(model, samples, 4)

    inputs, targets = select(model, samples)

    assert torch.equal(inputs, samples[0][expected])
    assert torch.equal(targets, samples[1][expected])


@pytest.mark.parametrize(("epochs", "batch_in_epoch", "count"), [(4, 0, 8), (5, 0, 4), (5, 1, 8), (8, 2, 4), (9, 0, 8)])
def test_runs_between_start_and_end(samples, epochs, batch_in_epoch, count):
    """Samples are selected between start and end, except in every second batch."""
    inputs, _ = select(Model(), samples, epochs=epochs, batch_in_epoch=batch_in_epoch)

    assert len(inputs) == count


@pytest.mark.parametrize(("start", "end", "batches"), [(0.5, 0.9, 1), (0.35, 0.45, 4), (0.95, 1.0, 4)])
def test_warns_if_nothing_was_selected(samples, start, end, batches):
    """If no batch lies between start and end, a warning is given at the end of the training."""
    state = State(model=Model(), max_duration=f"{batches}ba")
    engine = Engine(state, algorithms=SelectiveBackprop(start, end))
    for _ in range(batches):
        state.batch = samples
        engine.run_event("after_dataloader")
        state.timestamp = state.timestamp.to_next_batch(samples=8)

    with pytest.warns(NoEffectWarning, match=rf"SelectiveBackprop.* has chosen no samples: .* ended at {batches}ba"):
        engine.run_event("fit_end")


@pytest.mark.parametrize("resumed_at", [0, 3, 4])
def test_does_not_warn_if_samples_were_selected(samples, resumed_at):
    """There is no warning if samples were selected, or if a resumed run starts after `end`."""
    state = State(model=Model(), max_duration="4ba")
    engine = Engine(state, algorithms=SelectiveBackprop(0.5, 0.7))
    for number in range(4):
        if number >= resumed_at:
            state.batch = samples
            engine.run_event("after_dataloader")
        state.timestamp = state.timestamp.to_next_batch(samples=8)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run_event("fit_end")

    assert caught == []


def test_loss_without_reduction_argument_raises(samples):
    """A model whose loss has no per-sample form raises an error with the remedy."""

    class Mean(Model):
        def loss(self, outputs, batch):
            return cross_entropy(outputs, batch[1])

    with pytest.raises(TypeError, match="reduction='none'"):
        select(Mean(), samples)


@pytest.mark.parametrize("size", [None, 3, 8, 20])
def test_extra_passes_have_the_size_of_microbatches(samples, size):
    """The samples are the same, and no forward pass has more of them than the training has; all is split."""

    class Counting(Model):
        def __init__(self):
            super().__init__()
            self.sizes = []

        def forward(self, batch):
            assert len(batch[0]) == len(batch[1]) == len(batch[2])
            self.sizes.append(len(batch[0]))
            return super().forward(batch)

    model, batch = Counting(), (*samples, torch.arange(8))
    expected = hardest(model, batch, 4)
    model.sizes.clear()
    chosen = select(model, batch, microbatch_size=size)

    assert model.sizes == ([3, 3, 2] if size == 3 else [8])
    assert torch.equal(chosen[2], expected)


def test_equally_many_passes_in_all_processes():
    """A process with fewer samples repeats one, whose loss is left out, as processes may communicate in each pass."""
    passes = []

    class Counting(Given):
        def forward(self, batch):
            passes.append(len(batch[0]))
            return super().forward(batch)

    gather = lambda own: [own, 5]  # noqa: E731
    state = State(model=Counting(), max_duration="1ep", device_train_microbatch_size=2, gather=gather)
    state.batch = (torch.tensor([1.0, 3.0, 2.0]), torch.arange(3))

    assert select_in(state, keep=0.4) == [1]
    assert passes == [1] * 5


def test_precedes_augmentation():
    """Samples are selected by the loss of unaugmented data, independent of list order."""
    plan = explain([MixUp(), SelectiveBackprop()])

    assert [entry.key for entry in plan.entries[Event.AFTER_DATALOADER]] == ["SelectiveBackprop"]


@pytest.mark.parametrize("kind", ["BatchEncoding", "dataclass"])
def test_batch_types(samples, kind):
    """Tokenizer batches and objects with attributes are selected from and keep their types."""

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor
        weight: torch.Tensor

        def __getitem__(self, key):
            return getattr(self, key)

    model, weight = Model(keys=("x", "y")), torch.arange(8)
    make = Batch if kind == "dataclass" else lambda **items: transformers.BatchEncoding(items)
    batch = make(x=samples[0], y=samples[1], weight=weight)
    expected = hardest(model, {"x": samples[0], 1: samples[1]}, 4)

    chosen = select(model, batch, input_key="x", target_key="y")

    assert type(chosen) is type(batch)
    assert torch.equal(chosen["weight"], expected)
    assert torch.equal(chosen["x"], samples[0][expected])
    assert len(batch["x"]) == len(batch["weight"]) == 8


def test_input_of_several_tensors(samples):
    """The input may be a dictionary of tensors, whose samples are selected together."""

    class Two(Model):
        def forward(self, batch):
            return super().forward((batch[0]["a"] + batch[0]["b"],))

    model, (input, labels) = Two(), samples
    batch = select(model, ({"a": input, "b": torch.zeros_like(input)}, labels), keep=0.5, interrupt=0)

    model.eval()
    losses = cross_entropy(Model.forward(model, samples), labels, reduction="none")
    chosen = losses.topk(4).indices.sort().values
    assert batch[0]["a"].equal(input[chosen])
    assert batch[1].equal(labels[chosen])


class Given(nn.Module):
    """A model whose losses are its inputs."""

    def forward(self, batch):
        return batch[0]

    def loss(self, outputs, batch, reduction="mean"):
        return outputs if reduction == "none" else outputs.mean()


def select_in(state, **settings):
    """Run a selection in a state with a batch, and return the selected targets."""
    engine = Engine(state, algorithms=SelectiveBackprop(start=0, end=1, interrupt=0, **settings))
    engine.run_event("after_dataloader")
    return state.batch[1].tolist()


class TestGlobalScope:
    @given(
        losses=st.lists(st.integers(0, 5), min_size=1, max_size=12),
        world_size=st.integers(1, 4),
        keep=st.sampled_from([0.1, 0.5, 0.75]),
    )
    def test_selects_as_one_process(self, losses, world_size, keep):
        """All processes together select the samples of one process with the global batch, also among equal losses."""
        inputs, targets = torch.tensor(losses, dtype=torch.float64), torch.arange(len(losses))
        alone = State(model=Given(), max_duration="1ep")
        alone.batch = (inputs, targets)
        parts = [inputs[rank::world_size].tolist() for rank in range(world_size)]

        chosen = []
        for rank in range(world_size):
            state = State(model=Given(), max_duration="1ep", data_rank=rank, gather=lambda _: parts)
            # A process without samples has a repeated batch.
            state.batch_counts = bool(parts[rank])
            state.batch = (inputs[rank::world_size], targets[rank::world_size]) if parts[rank] else alone.batch
            found = select_in(state, keep=keep, scope="global")
            chosen += found if state.batch_counts else []

        assert sorted(chosen) == select_in(alone, keep=keep, scope="global")

    def test_process_without_selected_samples(self):
        """Its batch does not change, and does not count."""
        state = State(model=Given(), max_duration="1ep", data_rank=1, gather=lambda own: [[5.0, 6.0], own])
        state.batch = (torch.tensor([1.0, 2.0]), torch.arange(2))

        assert select_in(state, keep=0.5, scope="global") == [0, 1]
        assert not state.batch_counts

    def test_repeated_samples_are_not_gathered(self):
        """A process whose batch does not count gathers no losses."""
        gathered = []
        state = State(model=Given(), max_duration="1ep", data_rank=1)
        state.gather = lambda own: gathered.append(own) or [[5.0, 6.0], own]
        state.batch, state.batch_counts = (torch.tensor([9.0, 9.0]), torch.arange(2)), False

        select_in(state, keep=0.9, scope="global")

        assert (gathered, state.batch_counts) == ([[]], False)

    @pytest.fixture
    def first_of_two(self):
        """Let this process be the first of two; nothing is exchanged."""
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.usefixtures("first_of_two")
    def test_other_loops_raise(self):
        """A loop of several processes that counts all of them the same raises an error."""
        state = State(model=Given(), max_duration="1ep")
        state.batch = (torch.ones(2), torch.arange(2))

        with pytest.raises(ValueError, match=r"this training loop counts all processes the same: use scope='local'"):
            select_in(state, scope="global")
