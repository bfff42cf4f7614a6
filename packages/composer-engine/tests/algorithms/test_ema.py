"""EMA: the average, when it is updated, and when it replaces the training weights."""

import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer.algorithms import EMA
from composer.core import Event, Stage, explain
from fixtures import full_copy, same_bits


@pytest.fixture
def make_ema():
    """Return the averaged weights of an engine's EMA, by name."""
    return lambda engine: engine.state.algorithms[-1].get_ema_model(engine.state.model).state_dict()


@pytest.fixture
def average():
    """Return the average of weights by the recurrence, with the weight of the old average before each."""

    def compute(weights, smoothings):
        result = dict(weights[0])
        for now, smoothing in zip(weights[1:], smoothings, strict=True):
            for name, value in now.items():
                blend = smoothing * result[name] + (1 - smoothing) * value
                result[name] = blend if value.is_floating_point() else value
        return result

    return compute


@pytest.fixture
def close():
    """Return whether two dictionaries of tensors are equal up to rounding."""
    return lambda one, other: (
        one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    )


@pytest.fixture
def started_engine(norm_net, make_engine, step, batch):
    """An engine with an EMA after three steps, whose average differs from the weights."""
    engine = make_engine(norm_net(), EMA(half_life="2ba"))
    for _ in range(3):
        step(engine, batch)
    return engine


class TestAverage:
    @pytest.mark.filterwarnings("ignore:EMA changes nothing with smoothing=0")
    @pytest.mark.parametrize(
        ("settings", "options", "smoothing"),
        [
            ({"half_life": "2ba"}, {}, 0.5**0.5),
            ({"half_life": 4}, {}, 0.5**0.25),
            ({"half_life": "16sp"}, {}, 0.5**0.5),  # a batch has 8 samples
            ({"half_life": "0.25dur"}, {"max_duration": "8ba"}, 0.5**0.5),
            ({"half_life": "0.5dur"}, {"max_duration": "64sp"}, 0.5**0.25),
            ({"half_life": "0.25dur"}, {"max_duration": "4ep", "dataloader_len": 5}, 0.5**0.2),
            ({"half_life": "1ep", "update_interval": "1ba"}, {"dataloader_len": 5}, 0.5**0.2),
            ({"half_life": None, "smoothing": 0.8}, {}, 0.8),
            ({"half_life": None, "smoothing": 0}, {}, 0.0),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_per_batch(
        self, norm_net, make_engine, step, batch, make_ema, average, close, settings, options, smoothing
    ):
        """The average starts as the first step's weights and is updated with the same smoothing at each later step."""
        engine = make_engine(norm_net(), EMA(**settings), **options)
        weights = [full_copy(step(engine, batch).model) for _ in range(4)]

        averaged = make_ema(engine)

        assert close(averaged, average(weights, [smoothing] * 3))

    @pytest.mark.parametrize(
        ("settings", "options", "smoothing"),
        [
            ({"half_life": "2ep"}, {}, 0.5**0.5),
            ({"half_life": "4ba", "update_interval": "1ep"}, {}, 0.5**0.5),
            ({"half_life": "0.25dur", "update_interval": "1ep"}, {"max_duration": "4ep"}, 0.5),
            ({"half_life": None, "smoothing": 0.8, "update_interval": "1ep"}, {}, 0.8),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_per_epoch(
        self,
        norm_net,
        make_engine,
        step,
        end_epoch,
        batch,
        make_ema,
        average,
        close,
        settings,
        options,
        smoothing,
    ):
        """With an interval in epochs, only weights at the ends of epochs are averaged."""
        engine = make_engine(norm_net(), EMA(**settings), **options)
        weights = []
        for _ in range(3):
            for _ in range(2):
                step(engine, batch)
            end_epoch(engine)
            weights.append(full_copy(engine.state.model))
        step(engine, batch)

        averaged = make_ema(engine)

        assert close(averaged, average(weights, [smoothing] * 2))

    def test_epochs_of_unknown_length(self, norm_net, make_engine, step, end_epoch, batch, make_ema, average, close):
        """An epoch of unknown length is counted at its end."""
        engine = make_engine(norm_net(), EMA(half_life="1ep", update_interval="1ba"))
        weights = []
        for _ in range(2):
            weights += [full_copy(step(engine, batch).model) for _ in range(2)]
            end_epoch(engine)

        averaged = make_ema(engine)

        assert close(averaged, average(weights, [1, 0.5, 1]))

    def test_longer_training_rescales_half_life(self, norm_net, make_engine, step, batch, make_ema, average, close):
        """After a training is extended, the half-life is a fraction of the new length."""
        engine = make_engine(norm_net(), EMA(half_life="0.5dur"), max_duration="2ba")
        weights = [full_copy(step(engine, batch).model) for _ in range(2)]
        engine.state.max_duration = "8ba"
        weights += [full_copy(step(engine, batch).model)]

        averaged = make_ema(engine)

        assert close(averaged, average(weights, [0.5, 0.5**0.25]))

    @pytest.mark.parametrize(
        ("settings", "batches", "smoothing"),
        [
            ({"half_life": "4ba", "update_interval": "2ba"}, [1, 2, 4, 6], 0.5**0.5),
            ({"half_life": "4ba", "update_interval": "3ba"}, [1, 3, 6], 0.5**0.75),
            ({"half_life": None, "smoothing": 0.9, "update_interval": "2ba"}, [1, 2, 4, 6], 0.9),
            ({"half_life": "4ba", "update_interval": "2ba", "ema_start": "3ba"}, [3, 4, 6], 0.5**0.5),
            ({"half_life": "4ba", "update_interval": "3ba", "ema_start": "4ba"}, [4, 6], 0.5**0.75),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_update_interval(
        self, norm_net, make_engine, step, batch, make_ema, average, close, settings, batches, smoothing
    ):
        """Averaging begins with the first batch, and each update at an interval has the share of the interval.

        MosaicML Composer 0.32.1 averages the same weights with the same shares, in an evaluation after 6 batches: the
        shares are the solution of a linear system of its averages and the weights after each batch.
        """
        engine = make_engine(norm_net(), EMA(**settings))
        weights = [full_copy(step(engine, batch).model) for _ in range(7)]

        averaged = make_ema(engine)

        assert close(averaged, average([weights[number - 1] for number in batches], [smoothing] * (len(batches) - 1)))

    def test_buffers(self, started_engine, make_ema):
        """A norm's running mean is averaged; its batch counter is copied."""
        weights, averaged = started_engine.state.model.state_dict(), make_ema(started_engine)

        assert not torch.allclose(averaged["layers.1.running_mean"], weights["layers.1.running_mean"])
        assert averaged["layers.1.num_batches_tracked"] == 3

    def test_shared_weights(self, watch, make_engine, step, batch, make_ema, average, close):
        """Tied weights are averaged once."""
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        model = watch(nn.Sequential(first, nn.Tanh(), second, nn.Linear(8, 3)))
        engine = make_engine(model, EMA(half_life="1ba"))
        weights = [full_copy(step(engine, batch).model) for _ in range(3)]

        averaged = make_ema(engine)

        assert close(averaged, average(weights, [0.5] * 2))


class TestStart:
    @pytest.mark.parametrize("start", ["3ba", 3, "0.5dur", "24sp"])
    def test_starts_at_ema_start(self, norm_net, make_engine, step, batch, make_ema, average, close, start):
        """Weights before ema_start are not averaged."""
        engine = make_engine(norm_net(), EMA(half_life="1ba", ema_start=start), max_duration="6ba")
        weights = [full_copy(step(engine, batch).model) for _ in range(4)]

        averaged = make_ema(engine)

        assert close(averaged, average(weights[2:], [0.5]))

    def test_no_average_before_start(self, norm_net, make_engine, step, batch):
        """Before the start there is no averaged model, and evaluation uses the training weights."""
        engine = make_engine(norm_net(), EMA(ema_start="3ba"))
        step(engine, batch)
        before = full_copy(engine.state.model)

        engine.run_event("eval_start")

        assert same_bits(full_copy(engine.state.model), before)
        assert same_bits(engine.state.algorithms[0].get_training_model(engine.state.model).state_dict(), before)
        with pytest.raises(RuntimeError, match="EMA has not averaged anything yet: it begins at 3ba"):
            engine.state.algorithms[0].get_ema_model(engine.state.model)

    @pytest.mark.parametrize(
        ("name", "settings"), [("half_life", {"half_life": "0.1dur"}), ("", {"ema_start": "0.1dur"})]
    )
    def test_fraction_without_max_duration_raises(self, norm_net, make_engine, step, batch, name, settings):
        """A fraction without a max_duration raises an error that names the setting."""
        engine = make_engine(norm_net(), EMA(**settings))

        with pytest.raises(ValueError, match=f"{name}.*0.1dur.* is a fraction of State.max_duration, which is not set"):
            [step(engine, batch) for _ in range(2)]


class TestEvaluation:
    @pytest.mark.parametrize("kind", ["eval", "predict"])
    def test_evaluation_uses_averages(self, started_engine, make_ema, kind):
        """During an evaluation the model has the averaged weights."""
        averaged = make_ema(started_engine)

        started_engine.run_event(f"{kind}_start")

        assert same_bits(full_copy(started_engine.state.model), averaged)

    @pytest.mark.parametrize(
        "events",
        [
            ["eval_start", "eval_end"],
            ["predict_start", "predict_end"],
            ["eval_start", "eval_end"] * 3,
            ["eval_start", "predict_start", "predict_end", "eval_end"],
            ["eval_start", "eval_start", "eval_end", "eval_end"],
            ["eval_start", "eval_start", "eval_end"],
            ["eval_end"],
        ],
        ids=" ".join,
    )
    def test_training_weights_are_restored(self, started_engine, make_ema, events):
        """After an evaluation the training weights are restored bit for bit, and the average has not changed."""
        before, averaged = full_copy(started_engine.state.model), make_ema(started_engine)

        for event in events:
            started_engine.run_event(event)

        assert same_bits(full_copy(started_engine.state.model), before)
        assert same_bits(make_ema(started_engine), averaged)

    def test_restored_after_an_error(self, started_engine):
        """After an evaluation fails, engine.restore() restores the training weights, also if called twice."""
        before = full_copy(started_engine.state.model)
        started_engine.run_event("eval_start")

        started_engine.restore()
        started_engine.restore()

        assert same_bits(full_copy(started_engine.state.model), before)

    def test_training_on_averages_raises(self, started_engine, step, batch):
        """A loop that does not restore the weights before training raises."""
        started_engine.run_event("eval_start")

        with pytest.raises(RuntimeError, match=r"averages are still in the model.*engine.restore\(\)"):
            step(started_engine, batch)

    def test_evaluation_does_not_change_training(self, norm_net, make_engine, step, batch):
        """Evaluations between steps change neither the training nor the average."""
        model, first, results = norm_net(), None, []
        first = full_copy(model)
        for evaluates in (False, True):
            model = norm_net()
            model.load_state_dict(first)
            engine = make_engine(model, EMA(half_life="2ba"))
            for _ in range(4):
                step(engine, batch)
                for event in ("eval_start", "eval_end") if evaluates else ():
                    engine.run_event(event)
            results.append((full_copy(model), engine.state.algorithms[0].get_ema_model(model).state_dict()))

        assert same_bits(results[0][0], results[1][0])
        assert same_bits(results[0][1], results[1][1])


class Growing(nn.Module):
    """A layer with a cache that grows at each call, and other buffers that cannot be averaged."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("cache", torch.ones(1, 2))
        self.register_buffer("filled", None)
        self.register_buffer("removed", torch.ones(1, 2))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("quantized", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("expanded", torch.ones(1, 2).expand(3, 2))

    def forward(self, input):
        self.removed = None if self.filled is not None else self.removed
        self.filled = torch.ones(2)
        self.cache = torch.cat([self.cache, self.cache[-1:] + 1])
        return self.linear(input)


class TestBuffersWithoutAverage:
    def test_are_copied(self, watch, make_engine, step, batch):
        """Evaluations have the buffers of the last update, and the training its own."""
        model = watch(Growing())
        engine = make_engine(model, EMA(half_life="2ba"))
        for _ in range(3):
            step(engine, batch)
        cache = model.layers.cache

        engine.run_event("eval_start")
        within = model.layers.cache
        model(batch)
        engine.run_event("eval_end")
        step(engine, batch)

        assert torch.equal(within, torch.tensor([[1.0], [2], [3], [4]]).expand(4, 2))
        assert within is not cache
        assert torch.equal(model.layers.cache, torch.tensor([[1.0], [2], [3], [4], [5]]).expand(5, 2))

    @pytest.mark.parametrize("events", [[], ["eval_start"]], ids=["training", "evaluating"])
    def test_do_not_prevent_loading(self, watch, make_engine, step, batch, events):
        """Averages can be loaded when a cache has another size, and are then those of the saved weights."""
        engine = make_engine(watch(Growing()), EMA(half_life="2ba"))
        for _ in range(3):
            step(engine, batch)
        averaged = engine.state.algorithms[0].get_ema_model(engine.state.model).layers.linear.weight
        for event in events:
            engine.run_event(event)

        other = make_engine(watch(Growing()), EMA(half_life="2ba"))
        if events:
            other.state.model.layers.linear.load_state_dict(engine.state.model.layers.linear.state_dict())
        other.state.algorithms[0].load_state_dict(engine.state.algorithms[0].state_dict())
        other.state.timestamp = engine.state.timestamp
        other.run_event("fit_start")
        other.run_event("eval_start")

        assert torch.equal(other.state.model.layers.linear.weight, averaged)


class TestWrapping:
    @pytest.mark.parametrize("wrap_first", [False, True])
    @pytest.mark.parametrize(
        "wrap",
        [lambda layers: torch.compile(layers, backend="eager"), checkpoint_wrapper],
        ids=["compiled", "checkpointed"],
    )
    def test_may_change(self, watch, make_engine, step, batch, wrap, wrap_first):
        """Averages of a model can be loaded for the same model with another wrapping, in both directions."""
        layers = [nn.Linear(8, 4), nn.Linear(4, 3)]
        wrapped = [wrap(nn.Linear(8, 4)), nn.Linear(4, 3)]
        first, second = (wrapped, layers) if wrap_first else (layers, wrapped)
        engine = make_engine(watch(nn.Sequential(*first)), EMA(half_life="2ba"))
        for _ in range(2):
            step(engine, batch)
        expected = [*engine.state.algorithms[0].get_ema_model(engine.state.model).parameters()]

        other = make_engine(watch(nn.Sequential(*second)), EMA(half_life="2ba"))
        other.state.algorithms[0].load_state_dict(engine.state.algorithms[0].state_dict())
        other.run_event("eval_start")

        averages = [*other.state.model.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(averages, expected, strict=True))


class TestCopies:
    @pytest.mark.parametrize("evaluating", [False, True])
    def test_copies_of_both_models(self, started_engine, evaluating):
        """Copies with averaged and with training weights are available inside and outside an evaluation."""
        (algorithm,), model = started_engine.state.algorithms, started_engine.state.model
        before = full_copy(model)
        started_engine.run_event("eval_start")
        averaged = full_copy(model)
        if not evaluating:
            started_engine.run_event("eval_end")
        weights = full_copy(model)

        copies = algorithm.get_ema_model(model), algorithm.get_training_model(model)

        assert same_bits(copies[0].state_dict(), averaged)
        assert same_bits(copies[1].state_dict(), before)
        assert same_bits(full_copy(model), weights)


class TestSharded:
    @pytest.fixture
    def mesh(self):
        """A device mesh of this process."""
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        distributed.destroy_process_group()

    def test_weights_left_unsharded_by_an_evaluation(self, mesh, watch, make_engine, step, batch):
        """Training uses the training weights if fully_shard left weights unsharded after an evaluation."""

        def trained(shard):
            torch.manual_seed(17)
            model = shard(watch(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))))
            engine = make_engine(model, EMA(half_life="2ba"))
            for _ in range(2):
                step(engine, batch)
                engine.run_event("eval_start")
                with torch.no_grad():
                    averaged = model(batch)
                engine.run_event("eval_end")
            step(engine, batch)
            return averaged, [weight.detach() for weight in model.parameters()]

        expected, weights = trained(lambda model: model)
        averaged, sharded = trained(lambda model: fully_shard(model, mesh=mesh))

        torch.testing.assert_close(averaged, expected)
        torch.testing.assert_close([weight.full_tensor() for weight in sharded], weights)
        assert all(isinstance(weight, DTensor) for weight in sharded)

    def test_weights_that_are_loaded_after_the_training(self, mesh, watch, make_engine, step, batch):
        """They are evaluated as they are; forward passes and evaluations change nothing for the averages."""
        model = fully_shard(watch(nn.Linear(8, 3)), mesh=mesh)
        engine = make_engine(model, EMA(half_life="2ba"))
        for _ in range(2):
            step(engine, batch)
        engine.run_event("fit_end")

        def evaluated():
            with torch.no_grad():
                engine.run_event("eval_start")
                outputs = model(batch)
                engine.run_event("eval_end")
                model(batch)
            return outputs

        assert torch.equal(evaluated(), evaluated())
        model.load_state_dict({name: torch.zeros_like(weight) for name, weight in model.state_dict().items()})
        with pytest.warns(UserWarning, match="changed after their training"):
            assert not evaluated().any()


class TestPlan:
    @pytest.mark.parametrize(
        ("settings", "event"),
        [
            ({}, "batch_end"),
            ({"half_life": "2ep"}, "epoch_end"),
            ({"half_life": "2ep", "update_interval": "5ba"}, "batch_end"),
            ({"update_interval": "2ep"}, "epoch_end"),
        ],
    )
    def test_runs_in_the_unit_of_the_interval(self, settings, event):
        """The average is updated at the end of the interval's unit."""
        entries = explain(EMA(**settings)).entries

        assert set(entries) == {"fit_start", "fit_end", event, "eval_start", "eval_end", "predict_start", "predict_end"}
        assert {one.stage for listed in entries.values() for one in listed} == {Stage.WEIGHTS}


class TestSlowAverage:
    """A training in which the first weights of the average keep more than half of their influence."""

    @pytest.mark.parametrize(
        ("settings", "max_duration", "message"),
        [
            ({}, "10ba", "such as '1ba'"),
            ({}, "999ba", "halves in 1000 batches, and the fit averages over 999. .* such as '99ba'"),
            ({}, "9ep", "halves in 1000 batches, and the fit averages over 900"),
            ({"half_life": "5ep"}, "400ba", "halves in 500 batches"),
            ({"ema_start": "0.5dur"}, "1900ba", "averages over 950"),
            (
                {"ema_start": "0.5dur", "half_life": "0.6dur"},
                "10ep",
                "halves in 600 batches, and the fit averages over 500",
            ),
            ({"half_life": None, "smoothing": 0.999}, "690ba", "halves in 693 batches"),
            ({"half_life": None, "smoothing": 0.999, "update_interval": "2ba"}, "1300ba", "halves in 1386 batches"),
        ],
    )
    def test_warns(self, norm_net, make_engine, settings, max_duration, message):
        """It is reported when the fit starts, with a shorter half-life."""
        with pytest.warns(UserWarning, match=f"averages of EMA are mostly the weights .* {message}"):
            make_engine(norm_net(), EMA(**settings), max_duration=max_duration, dataloader_len=100)

    @pytest.mark.parametrize(
        ("settings", "options"),
        [
            ({}, {"max_duration": "1000ba"}),
            ({}, {"max_duration": "10ep", "dataloader_len": 100}),
            ({}, {"max_duration": "9ep"}),
            ({}, {}),
            ({}, {"max_duration": "9ba"}),
            ({"half_life": "500sp"}, {"max_duration": "10ba"}),
            ({"half_life": None, "smoothing": 0.0}, {"max_duration": "10ba"}),
        ],
    )
    def test_is_not_reported(self, norm_net, make_engine, settings, options):
        """Nothing is reported of a longer training, a trial of a few batches, or an unknown length."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_engine(norm_net(), EMA(**settings), **options)

        assert not [one for one in caught if "influence halves" in str(one.message)]

    @pytest.mark.parametrize(("batches", "reports"), [(20, True), (99, True), (100, False)])
    def test_early_evaluation(self, norm_net, make_engine, batches, reports):
        """An evaluation of averages that are mostly the first weights is reported once, with the other metrics."""
        engine = make_engine(norm_net(), EMA(half_life="100ba"), max_duration="1000ba")
        for _ in range(batches):
            engine.state.timestamp = engine.state.timestamp.to_next_batch()
            engine.run_event(Event.BATCH_END)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for event in [Event.EVAL_START, Event.EVAL_END] * 2:
                engine.run_event(event)

        found = [str(one.message) for one in caught if "training_weights=True" in str(one.message)]
        assert len(found) == reports
