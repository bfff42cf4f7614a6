"""An adapter trains in a host's loop as our own loop does, and raises for what the host does not serve."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer.algorithms import (
    EMA,
    SAM,
    GyroDropout,
    LabelSmoothing,
    MixUp,
    NoOpModel,
    SelectiveBackprop,
    SeqLengthWarmup,
)
from composer.core import Adapter, Algorithm, Event, SplitStep, Stage, State, served_fields
from composer.core.testing import Training, seeded
from fixtures.models import WithLoss


def make_net():
    """Return a network with pooling, for batches."""
    with seeded("net"):
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.LazyLinear(5))
        layers(torch.zeros(1, 3, 8, 8))
    return WithLoss(layers)


def make_data(batches=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(6, 3, 8, 8, generator=generator), torch.randint(5, (6,), generator=generator))
        for _ in range(batches)
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def host(adapter, data, epochs, model, accumulate=1, loaded=None, until=None):
    """Train as a host that serves everything, and return the weights."""
    with seeded("preparation"):
        adapter.prepare(sgd(model))
        if loaded is not None:
            model.load_state_dict(loaded["model"])
            adapter.optimizers[0].load_state_dict(loaded["optimizer"])
            adapter.load_state_dict(loaded["algorithms"])
        adapter.begin_fit(max_duration=f"{epochs}ep", train_dataloader=data, dataloader_len=len(data) // accumulate)
    (optimizer,) = adapter.optimizers
    done = int(adapter.state.timestamp.batch)
    for _ in range(int(adapter.state.timestamp.epoch), epochs):
        adapter.begin_epoch()
        for place, batch in enumerate(data[int(adapter.state.timestamp.batch_in_epoch) :]):
            with seeded("batch", done):
                changed = adapter.begin_batch(batch)

                def closure(changed=changed, place=place):
                    if not place % accumulate:
                        optimizer.zero_grad()
                    loss = adapter.compute_loss(changed)
                    (loss / accumulate).backward()
                    adapter.end_backward()
                    return loss.detach()

                if accumulate > 1:
                    closure()
                    if place % accumulate == accumulate - 1:
                        adapter.end_gradients()
                        optimizer.step()
                        adapter.end_step()
                else:
                    optimizer.step(lambda closure=closure: (closure(), adapter.end_gradients())[0])
                    adapter.end_step()
                done += 1
                if done == until:
                    return model.state_dict()
        adapter.end_epoch()
    adapter.end_fit()
    return model.state_dict()


def our_loop(algorithms, data, epochs):
    """Train by the loop of the contract suite, and return the weights."""
    model = make_net()
    state = State(model, optimizers=sgd(model), max_duration=f"{epochs}ep", train_dataloader=data)
    Training(state, algorithms).run(epochs * len(data))
    return model.state_dict()


class TestEquality:
    """The weights are those of our own loop, bit for bit."""

    def test_draws_of_a_repeated_batch(self):
        """SAM computes each batch twice, with the same draws of algorithms and of dropout."""

        class Draws(Algorithm):
            runs_at = {Event.BEFORE_FORWARD: Stage.AUGMENT}

            def apply(self, event, state, logger):
                drawn.append((torch.rand(1, generator=state.generator(self)).item(), torch.rand(1).item()))

        drawn, model = [], make_net()
        host(Adapter(served_fields("Host"), model, [SAM(), Draws()]), make_data(3), 1, model)
        assert len(drawn) == 6
        assert drawn[::2] == drawn[1::2]
        assert len(set(drawn)) == 3

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_total_loss(self, accumulate):
        """Before the step, ``state.total_loss`` is the mean loss of the batches that it accumulates."""

        class Losses(Algorithm):
            runs_at = {Event.AFTER_LOSS: Stage.LOSS, Event.AFTER_TRAIN_BATCH: Stage.GRADIENT}

            def apply(self, event, state, logger):
                losses, value = (single, state.loss) if event is Event.AFTER_LOSS else (total, state.total_loss)
                losses.append(value.item())

        single, total, model = [], [], make_net()
        host(Adapter(served_fields("Host"), model, Losses()), make_data(), 1, model, accumulate)

        assert total == pytest.approx(torch.tensor(single).reshape(-1, accumulate).mean(1).tolist())
        assert len({*single}) == 4

    def test_a_model_without_loss(self):
        """The functions `forward` and `loss` replace a call of the model with a batch and its `loss`."""
        data, model = make_data(), make_net()
        layers = model.network
        adapter = Adapter(
            served_fields("Host"),
            layers,
            [MixUp(interpolate_loss=True), SelectiveBackprop(start=0, end=1)],
            forward=lambda batch: layers(batch[0]),
            loss=lambda outputs, batch, reduction="mean": cross_entropy(outputs, batch[1], reduction=reduction),
        )
        host(adapter, data, 2, layers)
        expected = our_loop([MixUp(interpolate_loss=True), SelectiveBackprop(start=0, end=1)], data, 2)
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


class TestPreparation:
    """The model changes before weights are loaded."""

    def test_the_length_of_the_training_is_known(self):
        """GyroDropout replaces its layers before weights are loaded if the duration and the length are given."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        adapter = Adapter(served_fields("Host"), model, GyroDropout(sigma=8, tau=2))

        adapter.prepare(max_duration="2ep", dataloader_len=4)

        assert (type(model[1]).__name__, model[1].period) == ("GyroDropout", 2)
        adapter.begin_fit()
        assert (adapter.state.dataloader_len, adapter.state.max_duration) == (4, "2ep")


class Seen(Algorithm):
    """Records the clock and the microbatch."""

    runs_at = dict.fromkeys((Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.BATCH_END), Stage.AUGMENT)
    reads = frozenset({"timestamp"})

    def __init__(self):
        self.seen = []

    def apply(self, event, state, logger):
        draw = state.generator(self).initial_seed() if event is not Event.BATCH_END else None
        self.seen.append((event.value, state.microbatch, int(state.timestamp.batch), draw))


class TestClock:
    """A batch of the clock is a step of the optimizers."""

    def test_accumulation(self):
        """Of eight batches, two for a step, the clock counts four with all samples."""
        model, adapter = make_net(), None
        adapter = Adapter(served_fields("Host"), model, EMA("2ba"), world_size=3)
        host(adapter, make_data(), 2, model, accumulate=2)
        clock = adapter.state.timestamp
        assert (clock.batch, clock.sample, clock.epoch) == ("4ba", "144sp", "2ep")

    def test_training_after_an_interrupted_one(self):
        """The batches of a step that was not completed do not count."""
        model = make_net()
        adapter = Adapter(served_fields("Host"), model, EMA("2ba"))
        adapter.begin_fit(sgd(model), max_duration="1ep")
        adapter.compute_loss(adapter.begin_batch(make_data(1)[0]))
        adapter.end_backward()
        host(adapter, make_data(2), 1, model)
        assert adapter.state.timestamp.sample == 12

    def test_length_known_to_surgery(self):
        """The length of an epoch in steps is known when layers are replaced, also if only `begin_fit` is called."""

        class Lengths(Algorithm):
            runs_at = {Event.INIT: Stage.ARCHITECTURE}
            reads = frozenset({"dataloader_len"})

            def apply(self, event, state, logger):
                lengths.append(state.dataloader_len)

        lengths, model = [], make_net()
        adapter = Adapter(served_fields("Host"), model, Lengths())
        adapter.begin_fit(sgd(model), max_duration="1ep", train_dataloader=make_data(), dataloader_len=2)
        assert lengths == [2]

    def test_samples_of_a_packed_batch(self):
        """The samples of a packed batch are its sequences; those of a batch without a first dimension do not count."""
        adapter = Adapter(served_fields("Host"), make_net(), [])
        adapter.prepare()
        adapter.begin_fit(max_duration="1ba")
        packed = {"input_ids": torch.zeros(1, 9), "cu_seq_lens_q": torch.tensor([0, 4, 9]), "max_length_q": 5}
        adapter.begin_batch(packed)
        with pytest.warns(UserWarning, match="cannot be counted"):
            adapter.begin_batch({"edges": torch.zeros(2, 7), "nodes": torch.zeros(3)})
        adapter.end_step()
        assert (adapter.state.timestamp.sample, adapter.state.timestamp.token) == (2, 9)

    def test_tokens_are_counted_after_algorithms(self):
        """The tokens of a batch are those that algorithms leave in it."""
        warmup = SeqLengthWarmup(duration=1.0, min_seq_length=8, max_seq_length=8)
        adapter = Adapter(served_fields("Host"), make_net(), warmup)
        adapter.prepare()
        adapter.begin_fit(max_duration="4ba")
        adapter.begin_batch({"input_ids": torch.zeros(2, 32)})
        adapter.end_step()
        assert (adapter.state.timestamp.sample, adapter.state.timestamp.token) == (2, 16)

    def test_each_microbatch_draws_its_own(self):
        """The batches of one step have different numbers and seeds."""
        model, seen = make_net(), Seen()
        host(Adapter(served_fields("Host"), model, seen), make_data(2), 1, model, accumulate=2)
        events = [place[:3] for place in seen.seen]
        assert events == [
            ("after_dataloader", -1, 0),
            ("before_forward", 0, 0),
            ("after_dataloader", 1, 0),
            ("before_forward", 1, 0),
            ("batch_end", -2, 1),
        ]
        assert len({place[3] for place in seen.seen[:3]}) == 3

    def test_what_algorithms_log(self):
        """Metrics of algorithms reach the host with the number of the step."""
        logged = []

        class Logs(Algorithm):
            runs_at = {Event.BATCH_END: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                logger.log_metrics({"seen": 1.0})

        model = make_net()
        adapter = Adapter(
            served_fields("Host"), model, Logs(), log=lambda metrics, step: logged.append((dict(metrics), step))
        )
        host(adapter, make_data(2), 1, model)
        assert logged == [({"seen": 1.0}, 1), ({"seen": 1.0}, 2)]


class TestServedFields:
    """A host that does not serve all fields rejects algorithms at construction."""

    @pytest.mark.parametrize(
        ("algorithm", "missing", "sentence"),
        [
            (
                LabelSmoothing(0.1),
                {"not_readable": {"outputs"}},
                "LabelSmoothing cannot run in Host: it reads 'outputs'",
            ),
            (SAM(), {"not_writable": {"optimizers"}}, "SAM cannot run in Host: it writes 'optimizers' at 'after_load'"),
            (NoOpModel(), {}, "NoOpModel cannot run in Host: it reads 'algorithms' at 'init'"),
            (
                SAM(),
                {"not_writable_at": {Event.AFTER_LOAD: {"optimizers"}}},
                "SAM cannot run in Host: it writes 'optimizers' at 'after_load'",
            ),
            (MixUp(), {"not_run": {Event.BEFORE_LOSS}}, "MixUp cannot run in Host: it runs at 'before_loss'"),
        ],
    )
    def test_refusals(self, algorithm, missing, sentence):
        """The error names the algorithm, the host, the field and the event."""
        with pytest.raises(ValueError, match=sentence):
            Adapter(served_fields("Host", **missing), make_net(), algorithm)

    def test_a_replaced_model(self):
        """The host trains the model that it has, so an algorithm must change it in place."""

        class Replaces(Algorithm):
            """Replaces the model by a copy."""

            runs_at = {Event.INIT: Stage.ARCHITECTURE}
            reads = writes = {"model"}

            def apply(self, event, state, logger):
                state.model = copy.deepcopy(state.model)

        with pytest.raises(ValueError, match="must keep the model object, which Host trains"):
            Adapter(served_fields("Host"), make_net(), Replaces()).prepare()


class TestSplitStep:
    """An adapter trains a step that is split at the call of a module."""

    def test_targets_changed_in_between(self):
        """A loss with smooth labels equals that of a split model, and the module runs once."""
        model, calls = make_net(), []
        model.network.register_forward_hook(lambda *_: calls.append(1))

        def training_step(batch):
            images, labels = batch
            return cross_entropy(model.network(images), labels)

        split = SplitStep(training_step, model.network)
        adapter = Adapter(
            served_fields("Host"), model, [MixUp(), LabelSmoothing(0.1)], forward=split.forward, loss=split.loss
        )
        trained = host(adapter, make_data(), 2, model)
        assert "forward" not in vars(model.network)
        torch.testing.assert_close(trained, our_loop([MixUp(), LabelSmoothing(0.1)], make_data(), 2), rtol=0, atol=0)


class TestLoss:
    """The loss is that of the host."""

    def test_no_loss(self):
        """The error for a loss that is None names the labels that a model of Transformers needs."""
        model = make_net()
        adapter = Adapter(served_fields("Host"), model, EMA("2ba"), loss=lambda *_: None)
        with pytest.raises(TypeError, match=r"got None\. A model of Transformers returns one only if .* with labels"):
            host(adapter, make_data(), 1, model)
