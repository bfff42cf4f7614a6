"""EMA: the average, when it is updated, and when it replaces the training weights."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer.algorithms import EMA
from composer.core import Event, Stage, explain


class RunningMean(nn.Module):
    """A layer that puts a new tensor in the place of its buffer at each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, input):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * input.detach().mean(0)
        return input - self.mean


@pytest.fixture
def ema_of():
    """Return the averaged weights of an engine's EMA, by name."""
    return lambda engine: engine.state.algorithms[-1].get_ema_model(engine.state.model).state_dict()


@pytest.fixture
def average():
    """Return the average of some weights by the recurrence, with the weight of the old average before each."""

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
    """Return whether two dictionaries of tensors are the same up to rounding."""
    return lambda one, other: (
        one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    )


@pytest.fixture
def begun(norm_net, engine_of, step, batch):
    """An engine with an EMA after three steps; its average is not its weights."""
    engine = engine_of(norm_net(), EMA(half_life="2ba"))
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
    def test_of_batches(
        self, norm_net, engine_of, step, batch, weights_of, ema_of, average, close, settings, options, smoothing
    ):
        """Begun with the weights of the first step, it moves by the same part at each of the following."""
        engine = engine_of(norm_net(), EMA(**settings), **options)
        weights = [weights_of(step(engine, batch).model) for _ in range(4)]

        averaged = ema_of(engine)

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
    def test_of_epochs(
        self,
        norm_net,
        engine_of,
        step,
        end_epoch,
        batch,
        weights_of,
        ema_of,
        average,
        close,
        settings,
        options,
        smoothing,
    ):
        """Taken at the ends of epochs, only the weights there count."""
        engine = engine_of(norm_net(), EMA(**settings), **options)
        weights = []
        for _ in range(3):
            for _ in range(2):
                step(engine, batch)
            end_epoch(engine)
            weights.append(weights_of(engine.state.model))
        step(engine, batch)

        averaged = ema_of(engine)

        assert close(averaged, average(weights, [smoothing] * 2))

    def test_across_the_end_of_an_epoch(
        self, norm_net, engine_of, step, end_epoch, batch, weights_of, ema_of, average, close
    ):
        """Durations that are counted in epochs pass evenly within and between epochs."""
        engine = engine_of(norm_net(), EMA(half_life="0.25dur"), max_duration="4ep", dataloader_len=2)
        weights = []
        for _ in range(3):
            weights += [weights_of(step(engine, batch).model) for _ in range(2)]
            end_epoch(engine)

        averaged = ema_of(engine)

        assert close(averaged, average(weights, [0.5**0.5] * 5))

    def test_epochs_of_unknown_length(
        self, norm_net, engine_of, step, end_epoch, batch, weights_of, ema_of, average, close
    ):
        """Without a length, an epoch counts when it is over."""
        engine = engine_of(norm_net(), EMA(half_life="1ep", update_interval="1ba"))
        weights = []
        for _ in range(2):
            weights += [weights_of(step(engine, batch).model) for _ in range(2)]
            end_epoch(engine)

        averaged = ema_of(engine)

        assert close(averaged, average(weights, [1, 0.5, 1]))

    def test_a_training_made_longer(self, norm_net, engine_of, step, batch, weights_of, ema_of, average, close):
        """When a training is continued for longer, the half-life is a fraction of the new length."""
        engine = engine_of(norm_net(), EMA(half_life="0.5dur"), max_duration="2ba")
        weights = [weights_of(step(engine, batch).model) for _ in range(2)]
        engine.state.max_duration = "8ba"
        weights += [weights_of(step(engine, batch).model)]

        averaged = ema_of(engine)

        assert close(averaged, average(weights, [0.5, 0.5**0.25]))

    def test_every_few_batches(self, norm_net, engine_of, step, batch, weights_of, ema_of, average, close):
        """With an interval of two batches every second one counts, and two pass between them."""
        engine = engine_of(norm_net(), EMA(half_life="4ba", update_interval="2ba"))
        weights = [weights_of(step(engine, batch).model) for _ in range(7)]

        averaged = ema_of(engine)

        assert close(averaged, average(weights[1::2], [0.5**0.5] * 2))

    def test_buffers(self, begun, ema_of):
        """A norm's mean is averaged, its count of batches is the last one."""
        weights, averaged = begun.state.model.state_dict(), ema_of(begun)

        assert not torch.allclose(averaged["layers.1.running_mean"], weights["layers.1.running_mean"])
        assert averaged["layers.1.num_batches_tracked"] == 3

    def test_buffers_that_are_replaced(self, watch, engine_of, step, batch, weights_of, ema_of, average, close):
        """A module may put a new tensor in a buffer's place: what is in the model counts."""
        model = watch(nn.Sequential(nn.Linear(8, 3), RunningMean()))
        engine = engine_of(model, EMA(half_life="1ba"))
        weights = [weights_of(step(engine, batch).model) for _ in range(3)]

        averaged = ema_of(engine)
        engine.run_event("eval_start")

        assert close(averaged, average(weights, [0.5] * 2))
        assert close(weights_of(model), averaged)

    def test_shared_weights(self, watch, engine_of, step, batch, weights_of, ema_of, average, close):
        """Weights in two places of a model are averaged once."""
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        model = watch(nn.Sequential(first, nn.Tanh(), second, nn.Linear(8, 3)))
        engine = engine_of(model, EMA(half_life="1ba"))
        weights = [weights_of(step(engine, batch).model) for _ in range(3)]

        averaged = ema_of(engine)

        assert close(averaged, average(weights, [0.5] * 2))


class TestStart:
    @pytest.mark.parametrize("start", ["3ba", 3, "0.5dur", "24sp"])
    def test_begins_late(self, norm_net, engine_of, step, batch, weights_of, ema_of, average, close, start):
        """Weights before the start do not count."""
        engine = engine_of(norm_net(), EMA(half_life="1ba", ema_start=start), max_duration="6ba")
        weights = [weights_of(step(engine, batch).model) for _ in range(4)]

        averaged = ema_of(engine)

        assert close(averaged, average(weights[2:], [0.5]))

    def test_goes_on_in_a_longer_training(self, norm_net, engine_of, step, batch, weights_of, ema_of, average, close):
        """Once begun it goes on, also where the training is made so long that the start lies ahead again."""
        engine = engine_of(norm_net(), EMA(half_life="1ba", ema_start="0.5dur"), max_duration="2ba")
        weights = [weights_of(step(engine, batch).model) for _ in range(2)]
        engine.state.max_duration = "100ba"
        weights.append(weights_of(step(engine, batch).model))

        averaged = ema_of(engine)

        assert close(averaged, average(weights, [0.5] * 2))

    def test_nothing_before(self, norm_net, engine_of, step, batch, weights_of, same_bits):
        """Before the start there is no averaged model, and evaluation uses the training weights."""
        engine = engine_of(norm_net(), EMA(ema_start="3ba"))
        step(engine, batch)
        before = weights_of(engine.state.model)

        engine.run_event("eval_start")

        assert same_bits(weights_of(engine.state.model), before)
        assert same_bits(engine.state.algorithms[0].get_training_model(engine.state.model).state_dict(), before)
        with pytest.raises(RuntimeError, match="EMA has not averaged anything yet: it begins at 3ba"):
            engine.state.algorithms[0].get_ema_model(engine.state.model)

    def test_length_of_the_training_need_not_be_known(self, norm_net, engine_of, step, batch, ema_of):
        """With the default settings a loop without a maximum duration is averaged from its first batch on."""
        engine = engine_of(norm_net(), EMA())

        step(engine, batch)

        assert ema_of(engine)

    @pytest.mark.parametrize(
        ("name", "settings"), [("half_life", {"half_life": "0.1dur"}), ("", {"ema_start": "0.1dur"})]
    )
    def test_fractions_need_a_length(self, norm_net, engine_of, step, batch, name, settings):
        """A fraction of a training without a length is an error that names what is missing."""
        engine = engine_of(norm_net(), EMA(**settings))

        with pytest.raises(ValueError, match=f"{name}.*0.1dur.* is a fraction of State.max_duration, which is not set"):
            [step(engine, batch) for _ in range(2)]


class TestEvaluation:
    @pytest.mark.parametrize("kind", ["eval", "predict"])
    def test_averages_stand_in(self, begun, weights_of, same_bits, ema_of, kind):
        """Between start and end the model has the averaged weights."""
        averaged = ema_of(begun)

        begun.run_event(f"{kind}_start")

        assert same_bits(weights_of(begun.state.model), averaged)

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
    def test_training_weights_come_back(self, begun, weights_of, same_bits, ema_of, events):
        """After the end the model has its own weights bit for bit, and the average is what it was."""
        before, averaged = weights_of(begun.state.model), ema_of(begun)

        for event in events:
            begun.run_event(event)

        assert same_bits(weights_of(begun.state.model), before)
        assert same_bits(ema_of(begun), averaged)

    def test_prediction_within_an_evaluation(self, begun, weights_of, same_bits, ema_of):
        """The evaluation goes on with the averaged weights after the prediction."""
        averaged = ema_of(begun)

        for event in ("eval_start", "predict_start", "predict_end"):
            begun.run_event(event)

        assert same_bits(weights_of(begun.state.model), averaged)

    def test_parameters_stay_the_objects(self, begun):
        """The optimizer's parameters are the model's during and after an evaluation."""
        before = list(begun.state.model.parameters())

        begun.run_event("eval_start")

        assert all(one is other for one, other in zip(before, begun.state.model.parameters(), strict=True))

    def test_restored_after_an_error(self, begun, weights_of, same_bits):
        """When an evaluation was broken off, the engine gives the training weights back, also when asked twice."""
        before = weights_of(begun.state.model)
        begun.run_event("eval_start")

        begun.restore()
        begun.restore()

        assert same_bits(weights_of(begun.state.model), before)

    def test_next_evaluation_after_an_error(self, begun, weights_of, same_bits, ema_of):
        """After an evaluation that was broken off and restored, the next one is like any other."""
        before, averaged = weights_of(begun.state.model), ema_of(begun)
        begun.run_event("eval_start")
        begun.restore()

        begun.run_event("predict_start")
        within = weights_of(begun.state.model)
        begun.run_event("predict_end")

        assert same_bits(within, averaged)
        assert same_bits(weights_of(begun.state.model), before)

    def test_training_on_averages_is_an_error(self, begun, step, batch):
        """A loop that does not restore the weights gets an error instead of training the averages."""
        begun.run_event("eval_start")

        with pytest.raises(RuntimeError, match=r"averages are still in the model.*engine.restore\(\)"):
            step(begun, batch)

    def test_training_goes_on_as_without(self, norm_net, engine_of, step, batch, weights_of, same_bits):
        """Evaluations between the steps change no bit of training, nor of the average."""
        model, first, results = norm_net(), None, []
        first = weights_of(model)
        for evaluates in (False, True):
            model = norm_net()
            model.load_state_dict(first)
            engine = engine_of(model, EMA(half_life="2ba"))
            for _ in range(4):
                step(engine, batch)
                for event in ("eval_start", "eval_end") if evaluates else ():
                    engine.run_event(event)
            results.append((weights_of(model), engine.state.algorithms[0].get_ema_model(model).state_dict()))

        assert same_bits(results[0][0], results[1][0])
        assert same_bits(results[0][1], results[1][1])


class TestCopies:
    @pytest.mark.parametrize("evaluating", [False, True])
    def test_both_models(self, begun, weights_of, same_bits, evaluating):
        """Copies with the averaged and with the training weights can be had in and out of an evaluation."""
        (algorithm,), model = begun.state.algorithms, begun.state.model
        before = weights_of(model)
        begun.run_event("eval_start")
        averaged = weights_of(model)
        if not evaluating:
            begun.run_event("eval_end")
        held = weights_of(model)

        copies = algorithm.get_ema_model(model), algorithm.get_training_model(model)

        assert same_bits(copies[0].state_dict(), averaged)
        assert same_bits(copies[1].state_dict(), before)
        assert same_bits(weights_of(model), held)

    def test_are_copies(self, begun, weights_of, same_bits):
        """What is done to a copy does not reach the model or the average."""
        (algorithm,), model = begun.state.algorithms, begun.state.model
        before, averaged = weights_of(model), algorithm.get_ema_model(model).state_dict()

        for copy in (algorithm.get_ema_model(model), algorithm.get_training_model(model)):
            nn.init.zeros_(copy.layers[0].weight)

        assert same_bits(weights_of(model), before)
        assert same_bits(algorithm.get_ema_model(model).state_dict(), averaged)


class TestSharded:
    @pytest.fixture
    def mesh(self):
        """A group of this process alone."""
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        distributed.destroy_process_group()

    def test_weights_that_an_evaluation_left_whole(self, mesh, watch, engine_of, step, batch):
        """After an evaluation's forward pass fully_shard leaves weights whole; training goes on with the right ones."""

        def trained(shard):
            torch.manual_seed(17)
            model = shard(watch(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))))
            engine = engine_of(model, EMA(half_life="2ba"))
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
    def test_updates(self, settings, event):
        """The average is taken at the end of what the interval is counted in."""
        entries = explain(EMA(**settings)).entries

        assert set(entries) == {"fit_start", "fit_end", event, "eval_start", "eval_end", "predict_start", "predict_end"}
        assert {one.stage for listed in entries.values() for one in listed} == {Stage.WEIGHTS}

    def test_names_events_of_the_loop(self):
        """The events are members, so that they print as such."""
        assert all(isinstance(event, Event) for event in EMA().runs_at_events())


def test_one_for_two_models_is_an_error(begun, norm_net, engine_of, step, batch):
    """An EMA that has averaged a model does not pass its weights off as those of another."""
    used = begun.state.algorithms[-1]

    with pytest.raises(RuntimeError, match="EMA of its own"):
        step(engine_of(norm_net(), used), batch)
