"""SWA: the mean of the weights in the last part of a training."""

import pytest
import torch

from composer.algorithms import EMA, SWA
from composer.core import Engine, NoEffectWarning, State
from fixtures import full_copy, same_bits


@pytest.fixture
def run(norm_net, make_engine, step, batch, end_epoch):
    """Return a function that trains for ten epochs of two batches and calls back after each batch and epoch."""

    def train(*algorithms, epochs=10, callback=lambda engine, moment: None, engine=None):
        engine = engine or make_engine(norm_net(), *algorithms, max_duration="10ep")
        for _ in range(epochs):
            for _ in range(2):
                step(engine, batch)
                callback(engine, "batch")
            end_epoch(engine)
            callback(engine, "epoch")
        return engine

    return train


@pytest.fixture
def evaluate():
    """Return a function that runs an evaluation and returns its weights."""

    def weights_during(engine):
        engine.run_event("eval_start")
        during = {name: tensor.clone() for name, tensor in engine.state.model.state_dict().items()}
        engine.run_event("eval_end")
        return during

    return weights_during


def mean_of(weights):
    """Return the mean by name; for integers the last value."""
    return {
        name: torch.stack([each[name] for each in weights]).mean(0) if weights[0][name].is_floating_point() else last
        for name, last in weights[-1].items()
    }


class TestAverage:
    def test_averages_epoch_ends(self, run, evaluate):
        """From swa_start on, the weights at each epoch's end are averaged with equal weight."""
        at_ends = []

        def note(engine, moment):
            if moment == "epoch":
                at_ends.append(full_copy(engine.state.model))

        engine = run(SWA(swa_start="4ep", swa_end="9ep"), epochs=8, callback=note)

        expected = mean_of(at_ends[3:])
        averaged = evaluate(engine)
        assert all(torch.allclose(averaged[name], expected[name], atol=1e-6) for name in expected)

    def test_interval_in_batches(self, run, evaluate):
        """An interval in batches counts batches across epochs."""
        after = []

        def note(engine, moment):
            if moment == "batch":
                after.append(full_copy(engine.state.model))

        engine = run(SWA(swa_start="6ba", swa_end="19ba", update_interval="3ba"), epochs=6, callback=note)

        expected = mean_of([after[5], after[8], after[11]])
        averaged = evaluate(engine)
        assert all(torch.allclose(averaged[name], expected[name], atol=1e-6) for name in expected)

    def test_training_weights_are_restored(self, run, evaluate):
        """After an evaluation the training weights are restored bit for bit, as the same objects."""
        engine = run(SWA(swa_start="2ep", swa_end="9ep"), epochs=5)
        before, objects = full_copy(engine.state.model), list(engine.state.model.parameters())

        during = evaluate(engine)

        assert not same_bits(during, before)
        assert same_bits(full_copy(engine.state.model), before)
        assert all(one is other for one, other in zip(engine.state.model.parameters(), objects, strict=True))

    def test_no_average_before_start(self, run, evaluate):
        """Evaluations before swa_start use the training weights, and there is no averaged model."""
        engine = run(SWA(swa_start="8ep", swa_end="9ep"), epochs=3)

        assert same_bits(evaluate(engine), full_copy(engine.state.model))
        with pytest.raises(RuntimeError, match="8ep"):
            engine.state.algorithms[0].get_swa_model(engine.state.model)


class TestEnd:
    def test_model_has_the_averages_at_the_end(self, run, evaluate):
        """At swa_end the model receives the averages, and evaluations use the model directly."""
        at_ends = []

        def note(engine, moment):
            if moment == "epoch":
                at_ends.append(full_copy(engine.state.model))

        engine = run(SWA(swa_start="4ep", swa_end="7ep"), epochs=6, callback=note)
        run(engine=engine, epochs=1, callback=lambda engine, moment: None)

        # The seventh epoch's own end was averaged, too, before the model took over.
        averaged = full_copy(engine.state.model)
        assert torch.equal(evaluate(engine)["layers.0.weight"], averaged["layers.0.weight"])
        plain = mean_of(at_ends[3:])
        assert not torch.equal(averaged["layers.0.weight"], plain["layers.0.weight"])

    def test_training_continues_after_the_end(self, run):
        """After swa_end steps change the weights, and nothing is averaged."""
        engine = run(SWA(swa_start="2ep", swa_end="4ep"), epochs=4)
        at_end = full_copy(engine.state.model)

        run(engine=engine, epochs=1)

        assert not same_bits(full_copy(engine.state.model), at_end)
        assert engine.state.algorithms[0].state_dict()["is_over"]


class TestLearningRate:
    @pytest.mark.parametrize(("strategy", "expected"), [("linear", [0.075, 0.05]), ("cos", [0.075, 0.05])])
    def test_anneals_to_swa_lr(self, strategy, expected, run):
        """In two updates the rate changes from its value to swa_lr; both strategies meet halfway."""
        rates = []
        algorithm = SWA(
            swa_start="4ep",
            swa_end="9ep",
            schedule_swa_lr=True,
            anneal_strategy=strategy,
            anneal_steps=2,
            swa_lr=0.05,
        )

        run(
            algorithm,
            epochs=6,
            callback=lambda engine, moment: rates.append(engine.state.optimizers[0].param_groups[0]["lr"]),
        )

        assert rates[:11] == [0.1] * 11
        assert rates[11] == pytest.approx(expected[0])
        assert rates[-1] == pytest.approx(expected[1])

    def test_is_unchanged_without_swa_lr(self, run):
        """Without swa_lr the rates do not change."""
        engine = run(SWA(swa_start="4ep", swa_end="9ep", schedule_swa_lr=True), epochs=6)

        assert engine.state.optimizers[0].param_groups[0]["lr"] == 0.1

    def test_is_constant_with_schedule_swa_lr(self, run):
        """With schedule_swa_lr and no swa_lr, the rate at swa_start is used, independent of schedulers."""

        def decay(engine, moment):
            engine.state.optimizers[0].param_groups[0]["lr"] *= 0.9

        rates = []
        engine = run(SWA(swa_start="2ep", swa_end="9ep", schedule_swa_lr=True), epochs=3, callback=decay)
        engine.run_event("batch_end")
        rates.append(engine.state.optimizers[0].param_groups[0]["lr"])

        assert rates == pytest.approx([0.1 * 0.9**5])


class TestState:
    @pytest.mark.parametrize("kind", [SWA, EMA])
    def test_weights_to_save(self, kind, run):
        """Outside evaluations the averaged weights are saved; during one, the training weights."""
        engine = run(kind(**({"swa_start": "2ep", "swa_end": "9ep"} if kind is SWA else {})), epochs=4)
        algorithm = engine.state.algorithms[0]

        outside = algorithm.state_dict()
        engine.run_event("eval_start")
        during = algorithm.state_dict()
        engine.run_event("eval_end")

        assert {"averaged_weights", "training_weights"} & outside.keys() == {"averaged_weights"}
        assert {"averaged_weights", "training_weights"} & during.keys() == {"training_weights"}

    @pytest.mark.parametrize("kind", [SWA, EMA])
    def test_saved_during_an_evaluation(self, kind, run, norm_net, make_engine):
        """A state saved during an evaluation restores both sets of weights."""
        settings = {"swa_start": "2ep", "swa_end": "9ep"} if kind is SWA else {}
        engine = run(kind(**settings), epochs=4)
        training = full_copy(engine.state.model)
        engine.run_event("eval_start")
        in_model, saved = full_copy(engine.state.model), engine.state.algorithms[0].state_dict()

        model = norm_net()
        model.load_state_dict(in_model)
        other = make_engine(model, kind(**settings), max_duration="10ep", start=False)
        other.state.algorithms[0].load_state_dict(saved)
        other.run_event("fit_start")

        assert same_bits(full_copy(model), training)
        other.run_event("eval_start")
        assert same_bits(full_copy(model), in_model)

    @pytest.mark.parametrize("kind", [SWA, EMA])
    def test_weights_of_another_model_raise(self, kind, run, watch, make_engine):
        """A state of a model with other layers raises, with their names."""
        engine = run(kind(**({"swa_start": "2ep", "swa_end": "9ep"} if kind is SWA else {})), epochs=4)
        other = make_engine(watch(), kind(), max_duration="10ep", start=False)
        other.state.algorithms[0].load_state_dict(engine.state.algorithms[0].state_dict())

        with pytest.raises(ValueError, match=r"layers\.weight"):
            other.run_event("fit_start")


@pytest.mark.parametrize("algorithm", [SWA(swa_start="5ep", swa_end="6ep"), EMA(ema_start="5ep")], ids=["SWA", "EMA"])
def test_warns_if_it_never_started(algorithm, run):
    """A fit that ends before averaging starts gives a warning with the start time."""
    engine = run(algorithm, epochs=2)

    with pytest.warns(NoEffectWarning, match="5ep"):
        engine.run_event("fit_end")


@pytest.mark.parametrize(("swa_start", "swa_end"), [("8ep", "9ep"), ("9ep", "20ep")])
def test_warns_of_one_update(run, swa_start, swa_end):
    """A fit in which only one state was averaged gives a warning, whether averaging has ended or not."""
    engine = run(SWA(swa_start=swa_start, swa_end=swa_end, update_interval="2ep"))

    with pytest.warns(NoEffectWarning, match="has averaged only one state .* Choose a shorter update_interval"):
        engine.run_event("fit_end")


def test_fraction_without_max_duration_raises(norm_net, batch, step):
    """'0.7dur' without a max_duration raises an error with the remedy."""
    model = norm_net()
    state = State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
    engine = Engine(state, algorithms=SWA(update_interval="1ba"))
    engine.run_event("fit_start")

    with pytest.raises(ValueError, match="max_duration"):
        step(engine, batch)
