"""Averages of a model's weights, of which EMA and SWA compute theirs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from composer.algorithms import EMA, SWA
from composer.algorithms._averages import AveragedWeights
from composer.core import Event, evaluation_weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_averaged_in_32(dtype):
    """Updates that 16 bits cannot represent count, also with evaluations between them, and after a resume."""

    def fill(value):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)

    model, averages = nn.Linear(4, 4).to(dtype), AveragedWeights("EMA")
    fill(1.0)
    averages.begin(model)
    fill(1.5)

    for update in range(3000):
        averages.update(model, 2 ** (-1 / 1000))
        if update % 100 == 0:
            with averages.in_model(model):
                assert model.weight.dtype == dtype
        if update == 1500:
            saved, averages = averages.state_dict(), AveragedWeights("EMA")
            averages.load_state_dict(saved)
            averages.check(model, training=True)

    expected = 1.5 - 0.5 / 8
    assert averages.state_dict()["averaged_weights"]["weight"].mean().item() == pytest.approx(expected, rel=1e-4)
    with averages.in_model(model):
        assert torch.equal(model.weight, torch.full_like(model.weight, expected))
    assert torch.equal(model.weight, torch.full_like(model.weight, 1.5))


def spectral_model():
    torch.manual_seed(0)
    return nn.Sequential(spectral_norm(nn.Linear(8, 32)), nn.BatchNorm1d(32))


def train(model, seed):
    """Change the weights, and update the vectors of the spectral norm and the statistics."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
        model.train()(torch.randn(4, 8))


def largest_singular_value(model):
    return torch.linalg.matrix_norm(model.eval()[0].weight, 2).item()


class TestBuffers:
    def test_vectors_of_a_spectral_norm(self):
        """In an evaluation with averages the vectors have norm 1, and the largest singular value is not enlarged."""
        model, averages = spectral_model(), AveragedWeights("EMA")
        averages.begin(model)
        for seed in range(6):
            train(model, seed)
            averages.update(model, 0.9)

        buffers = dict(model.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        with averages.in_model(model):
            within = {name: buffer.clone() for name, buffer in model.named_buffers()}
            assert largest_singular_value(model) < 10

        for name, value in within.items():
            assert torch.equal(value, before[name]) is ("running" not in name), name
        assert all(torch.equal(buffers[name], value) for name, value in before.items())

    @pytest.mark.parametrize("evaluating", [False, True])
    def test_copies_are_saved(self, evaluating):
        """A resumed run evaluates with the copies of the last update, and trains with its own buffers, bit for bit."""

        def end(model, averages):
            with averages.in_model(model):
                within = copy.deepcopy(model.state_dict())
            averages.restore()
            return [*within.values(), *model.state_dict().values()]

        model, averages = spectral_model(), AveragedWeights("EMA")
        averages.begin(model)
        train(model, 1)
        averages.update(model, 0.9)
        train(model, 2)
        averages.swap(Event.EVAL_START) if evaluating else None
        resumed, loaded = copy.deepcopy(model), AveragedWeights("EMA")
        loaded.load_state_dict(copy.deepcopy(averages.state_dict()))
        loaded.check(resumed, training=False)

        pairs = zip(end(resumed, loaded), end(model, averages), strict=True)

        assert all(torch.equal(own, expected) for own, expected in pairs)

    def test_low_precision(self):
        """Copies of buffers in 16 bits are exact."""
        model, averages = nn.BatchNorm1d(3).bfloat16(), AveragedWeights("EMA")
        model.register_buffer("rates", torch.ones(3, dtype=torch.bfloat16))
        averages.begin(model)
        model.rates.fill_(0.1)
        averages.update(model, 0.9)
        model.rates.fill_(0.2)

        with averages.in_model(model):
            assert torch.equal(model.rates, torch.full((3,), 0.1, dtype=torch.bfloat16))
        assert torch.equal(model.rates, torch.full((3,), 0.2, dtype=torch.bfloat16))


def adapted_model():
    """Return a frozen base in bfloat16 with a trained head, which starts with ones."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[0].requires_grad_(False)
    return model


def averaged_names(averages):
    return {*averages.state_dict()["averaged_weights"]}


HEAD, ALL = {"1.weight", "1.bias"}, {"0.weight", "0.bias", "1.weight", "1.bias"}


class TestFrozen:
    def test_have_no_average(self):
        """Only trained parameters take memory and are saved; an evaluation uses the present value of the others."""
        model, averages = adapted_model(), AveragedWeights("EMA")
        averages.begin(model)
        nn.init.constant_(model[1].weight, 3)
        averages.update(model, 0.5)
        nn.init.constant_(model[0].weight, 5)  # by something else than the optimizer

        assert averaged_names(averages) == HEAD
        with averages.in_model(model):
            assert {*averages.state_dict()["training_weights"]} == HEAD
            assert model[0].weight.mean() == 5
            assert model[1].weight.mean() == 2
        copied = averages.copy_into(model, averaged=True)
        assert (copied[0].weight.mean(), copied[1].weight.mean()) == (5, 2)

    def test_unfrozen_later(self):
        """The average of a layer that is trained later begins with the first update after that."""
        model, averages = adapted_model(), AveragedWeights("EMA")
        averages.begin(model)
        averages.update(model, 0.5)
        model[0].requires_grad_(True)
        nn.init.constant_(model[0].weight, 2)
        nn.init.constant_(model[1].weight, 3)
        averages.update(model, 0.5)
        nn.init.constant_(model[0].weight, 4)
        averages.update(model, 0.5)

        assert averaged_names(averages) == ALL
        with averages.in_model(model):
            assert (model[0].weight.mean(), model[1].weight.mean()) == (3, 2.5)
        assert model[0].weight.mean() == 4

    @pytest.mark.parametrize("evaluating", [False, True])
    @pytest.mark.parametrize("later", [False, True])
    def test_resume(self, evaluating, later):
        """Layers that are frozen or unfrozen after the start have the same averages after a resume, bit for bit."""

        def train(model, averages, value):
            nn.init.constant_(model[0].weight, value)
            nn.init.constant_(model[1].weight, -value)
            averages.update(model, 0.7)

        def freeze(model):
            model[0].requires_grad_(later)
            model[1].requires_grad_(not later)

        model, averages = adapted_model(), AveragedWeights("EMA")
        model[0].requires_grad_(not later)
        averages.begin(model)
        train(model, averages, 2)
        averages.swap(Event.EVAL_START) if evaluating else None
        resumed, loaded = copy.deepcopy(model).requires_grad_(True), AveragedWeights("EMA")
        loaded.load_state_dict(copy.deepcopy(averages.state_dict()))
        if evaluating:  # at the start of a fit, before a callback freezes layers
            loaded.check(resumed, training=False)
        results = []
        for one, its_averages in ((model, averages), (resumed, loaded)):
            its_averages.restore()
            freeze(one)
            its_averages.check(one, training=True)
            train(one, its_averages, 3)
            results.append(its_averages.state_dict()["averaged_weights"])

        assert results[0].keys() == results[1].keys() == ALL
        assert all(torch.equal(results[0][name], results[1][name]) for name in ALL)

    def test_averages_of_all_weights_are_loaded(self):
        """Former checkpoints, with averages of frozen parameters, are loaded and continued."""
        model = adapted_model()
        former = {name: weight.detach().float() + 1 for name, weight in model.named_parameters()}
        averages = AveragedWeights("EMA")
        averages.load_state_dict({"averaged_weights": former})
        averages.check(model, training=True)
        averages.update(model, 0.5)

        assert averaged_names(averages) == ALL
        assert all((one == 1.5).all() for one in averages.state_dict()["averaged_weights"].values())

    def test_weights_of_another_model(self):
        """Averages of parameters that the model does not have, or with another shape, are an error."""
        for name, shape, message in (
            ("2.weight", (8, 8), "unexpected are .*2.weight"),
            ("1.weight", (8, 8), r"'1.weight' has shape \(8, 8\) there and \(4, 8\) here"),
        ):
            averages = AveragedWeights("EMA")
            averages.load_state_dict({"averaged_weights": {name: torch.ones(shape)}})
            with pytest.raises(ValueError, match=message):
                averages.check(adapted_model(), training=True)


def seven(model):
    return {name: torch.full_like(tensor, 7) for name, tensor in model.state_dict().items()}


def evaluated(engine):
    """Return a weight as it is evaluated."""
    with evaluation_weights(engine.state):
        return engine.state.model.layers.weight.detach().clone()


class TestOtherWeights:
    """Averages belong to the weights with which a training, or an evaluation before, has ended."""

    @pytest.fixture(params=[lambda: EMA("2ba"), lambda: SWA("0ba", "9ep", "1ba")], ids=["EMA", "SWA"])
    def engine(self, request, watch, make_engine, step, batch):
        """A training of three batches."""
        engine = make_engine(watch(), request.param(), max_duration="9ep")
        for _ in range(3):
            step(engine, batch)
        return engine

    @pytest.mark.parametrize("inference", [False, True])
    @pytest.mark.parametrize("assign", [False, True])
    def test_after_the_training(self, engine, assign, inference):
        """Loaded weights are evaluated, also other tensors and those of inference mode, and no averages are saved."""
        (algorithm,), model = engine.state.algorithms, engine.state.model
        engine.run_event("fit_end")
        assert "averaged_weights" in algorithm.state_dict()
        with torch.inference_mode(inference):
            model.load_state_dict(seven(model), assign=assign)

        with pytest.warns(UserWarning, match=f"{type(algorithm).__name__}'s averages.*are not used"):
            assert bool((evaluated(engine) == 7).all())
        assert "averaged_weights" not in algorithm.state_dict()

    def test_between_evaluations(self, engine, step, batch):
        """Weights that are loaded between two evaluations are evaluated; after another batch the averages."""
        (algorithm,), model = engine.state.algorithms, engine.state.model
        evaluated(engine)
        model.load_state_dict(seven(model))
        with pytest.warns(UserWarning, match="changed after their training"):
            assert bool((evaluated(engine) == 7).all())
        assert "averaged_weights" in algorithm.state_dict()  # the training continues
        step(engine, batch)

        assert bool((evaluated(engine) < 7).all())

    def test_training_from_other_weights(self, engine, step, batch):
        """A training that continues after the weights were changed averages these, not the former ones."""
        (algorithm,), model = engine.state.algorithms, engine.state.model
        engine.run_event("fit_end")
        model.load_state_dict(seven(model))
        with pytest.warns(UserWarning, match="changed after their training"):
            engine.run_event("fit_start")
        weights = []
        for _ in range(2):
            step(engine, batch)
            weights.append(model.layers.weight.detach().clone())

        share = 0.5 if isinstance(algorithm, SWA) else 1 - 0.5**0.5
        torch.testing.assert_close(evaluated(engine), torch.lerp(*weights, share))

    def test_training_that_continues(self, engine, step, batch):
        """A training that continues from its own weights keeps its averages, and saves them."""
        (algorithm,) = engine.state.algorithms
        for event in ("fit_end", "fit_start"):
            engine.run_event(event)
            before = evaluated(engine)
        assert torch.equal(algorithm.state_dict()["averaged_weights"]["layers.weight"], before)
        step(engine, batch)
        assert not torch.equal(evaluated(engine), engine.state.model.layers.weight)
