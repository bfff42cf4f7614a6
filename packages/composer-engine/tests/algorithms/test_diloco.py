"""DiLoCo in one process: outer steps by their formula."""

import pytest
import torch
from torch import nn

from composer.algorithms import EMA, DepthStacking, DiLoCo, diloco
from composer.core import AlgorithmConflictError, Event, NoEffectWarning, State
from fixtures.models import WithLoss
from fixtures.surgery import start


@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_steps(nesterov):
    """Every second batch, SGD with momentum steps along the change of the weights since the last outer step."""
    engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo("2ba", 0.7, 0.9, nesterov=nesterov))
    state = engine.state
    weight = state.model.network[0].weight
    expected, momentum, found = weight.detach().double().clone(), torch.zeros(1, 2).double(), []
    outer = expected.clone()
    for batch in range(4):
        engine.run_event("batch_start")
        change = torch.tensor([[0.25, -0.5]]) * (batch + 1)
        with torch.no_grad():
            weight.add_(change)
        expected += change
        state.timestamp = state.timestamp.to_next_batch(4)
        engine.run_event("batch_end")
        if batch % 2:
            gradient = outer - expected
            momentum = 0.9 * momentum + gradient
            outer = outer - 0.7 * (gradient + 0.9 * momentum if nesterov else momentum)
            expected = outer.clone()
        found.append((weight.detach().double(), expected.clone()))

    for weights, formula in found:
        torch.testing.assert_close(weights, formula, rtol=1e-6, atol=1e-6)
    assert state.algorithms[0].acted == 2


@pytest.mark.parametrize("is_changed", [True, False])
def test_weights_loaded_between_fits(is_changed):
    """A second fit begins with weights that were loaded after the first, and else has the momentum of the first."""
    engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo("2ba", 1.0, 0.5, nesterov=False))
    state = engine.state
    weight = state.model.network[0].weight

    def train():
        for _ in range(2):
            engine.run_event("batch_start")
            with torch.no_grad():
                weight.add_(0.5)
            state.timestamp = state.timestamp.to_next_batch(4)
            engine.run_event("batch_end")

    nn.init.zeros_(weight)
    train()
    assert weight.tolist() == [[1.0, 1.0]]
    engine.run_event("fit_end")
    if is_changed:
        nn.init.constant_(weight, 8.0)
    engine.run_event("fit_start")
    train()

    assert weight.tolist() == ([[9.0, 9.0]] if is_changed else [[2.5, 2.5]])


@pytest.mark.parametrize("is_changed", [True, False])
def test_stopped_between_outer_steps(is_changed):
    """A stopped fit leaves the averages in the model, and goes on with its own weights; or with others if loaded."""
    engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo("2ba", 1.0, 0.5, nesterov=False))
    (diloco,), state = engine.state.algorithms, engine.state
    state.max_duration = "4ba"
    weight = state.model.network[0].weight

    def train(batches):
        for _ in range(batches):
            engine.run_event("batch_start")
            with torch.no_grad():
                weight.add_(0.5)
            state.timestamp = state.timestamp.to_next_batch(4)
            engine.run_event("batch_end")

    nn.init.zeros_(weight)
    engine.run_event("fit_start")
    train(3)
    state.stop_training()
    engine.run_event("fit_end")
    assert weight.tolist() == [[1.0, 1.0]]
    assert diloco.state_dict()["own_weights"]["network.0.weight"].tolist() == [[1.5, 1.5]]
    if is_changed:
        nn.init.constant_(weight, 8.0)
    assert diloco.evaluation_weights(state) is None
    assert bool(diloco.state_dict()["averaged_weights"]) is not is_changed
    state.max_duration = "4ba"
    engine.run_event("fit_start")
    train(1)

    assert weight.tolist() == ([[8.5, 8.5]] if is_changed else [[2.5, 2.5]])


class TestEndWithoutDuration:
    def fifty_steps(self, interval, *, stop=None):
        """Return the weights after 50 steps of 1 and the end of the training, which has no max_duration."""
        engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo(interval, 1.0, 0.0))
        engine.state.max_duration = None
        nn.init.zeros_(engine.state.model.network[0].weight)
        engine.run_event("fit_start")
        add_steps(engine, 50)
        if stop is not None:
            engine.state.stop_training()
            engine.state.stop_reason = stop
        engine.run_event("fit_end")
        return engine.state.model.network[0].weight.tolist()

    def test_has_a_last_outer_step(self):
        """A loop that ends without a stop keeps all steps, also where no max_duration tells the end."""
        assert self.fifty_steps("30ba") == [[50.0, 50.0]]

    def test_stopped(self):
        """A stop leaves the weights after the last outer step, also without a max_duration."""
        assert self.fifty_steps("30ba", stop="enough") == [[30.0, 30.0]]

    def test_stopped_before_an_outer_step(self):
        """The first weights in place of the trained ones have a warning; not after a signal, as the run is resumed."""
        with pytest.warns(NoEffectWarning, match="no outer step .* 50ba.* shorter sync_every than 60ba.* is resumed"):
            assert self.fifty_steps("60ba", stop="enough") == [[0.0, 0.0]]

        assert self.fifty_steps("60ba", stop="stopped by a signal") == [[0.0, 0.0]]

    def test_another_process_is_stopped(self):
        """Processes take the same decision where only one of them was stopped."""
        diloco, state = DiLoCo(), State(nn.Linear(2, 2))
        decisions = []
        for others in ([False], [True]):
            state.gather = lambda own, others=others: [own, *others]
            decisions.append(diloco._is_complete(Event.FIT_END, state))

        assert decisions == [True, False]


class TestLoadedState:
    def test_of_an_earlier_version(self):
        """A state without the weights of the first process, which was saved in the training itself, loads."""
        weights = {"network.0.weight": torch.ones(1, 2)}
        former = {"averaged_weights": weights, "momenta": weights, "is_apart": True}
        diloco = DiLoCo()
        diloco.check_state_dict(former)
        diloco.load_state_dict(former)

        assert diloco.state_dict() == {**former, "own_weights": {}}
        with pytest.raises(ValueError, match="'momenta' is missing"):
            diloco.check_state_dict({"averaged_weights": {}, "is_apart": False})

    def test_after_a_fit(self):
        """A state that is loaded after a fit stays, although the model has other weights than the fit has left."""
        engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo("2ba", 1.0, 0.5))
        engine.state.max_duration = "4ba"
        (diloco,), weight = engine.state.algorithms, engine.state.model.network[0].weight
        nn.init.zeros_(weight)
        engine.run_event("fit_start")
        add_steps(engine, 3)
        saved, trained = diloco.state_dict(), weight.detach().clone()
        add_steps(engine, 1)
        engine.run_event("fit_end")
        diloco.load_state_dict(saved)
        with torch.no_grad():
            weight.copy_(trained)

        assert diloco.state_dict() == saved
        assert saved["averaged_weights"]

    def test_to_save_changes_nothing(self):
        """A save after a fit has no progress of other weights than the model's, and begins nothing again."""
        engine = start(WithLoss(nn.Sequential(nn.Linear(2, 1, bias=False))), DiLoCo("2ba", 1.0, 0.5))
        (diloco,), weight = engine.state.algorithms, engine.state.model.network[0].weight
        engine.run_event("fit_start")
        add_steps(engine, 2)
        engine.run_event("fit_end")
        left, saved = weight.detach().clone(), diloco.state_dict()
        nn.init.zeros_(weight)
        of_others = diloco.state_dict()
        with torch.no_grad():
            weight.copy_(left)

        assert of_others == {"averaged_weights": {}, "momenta": {}, "is_apart": False, "own_weights": {}}
        assert saved["momenta"]
        assert diloco.state_dict() == saved


def add_steps(engine, count):
    """Train for some batches, each of which adds 1 to the weights."""
    for _ in range(count):
        engine.run_event("batch_start")
        with torch.no_grad():
            engine.state.model.network[0].weight.add_(1.0)
        engine.state.timestamp = engine.state.timestamp.to_next_batch(4)
        engine.run_event("batch_end")


@pytest.mark.filterwarnings("ignore:DepthStacking.* would find nothing")
@pytest.mark.parametrize(
    ("other", "text"), [(DepthStacking("2ba"), "the number of weights"), (EMA("2ba"), "evaluation")]
)
def test_conflicts(other, text):
    """Another average, and a growth of the model in the training, raise an error before it."""
    with pytest.raises(AlgorithmConflictError, match=text):
        start(WithLoss(nn.Sequential(nn.Linear(2, 2))), DiLoCo("2ba"), other)


class _WithModes(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


def _estimating(weights):
    return torch.optim.SGD([{"params": list(weights), "d": 1e-6}], lr=0.1)


@pytest.mark.parametrize(("make", "message"), [(_WithModes, "has others in its state"), (_estimating, "its rate")])
def test_optimizers(make, message, monkeypatch):
    """Optimizers with two sets of weights, or in several processes a rate that depends on gradients, raise an error."""
    monkeypatch.setattr(diloco, "rank_and_processes", lambda: (0, 2 if make is _estimating else 1))
    model = nn.Linear(2, 2)
    state = State(model, optimizers=make(model.parameters()))
    state.gather = list

    with pytest.raises(ValueError, match=message):
        diloco._check(state)


def test_state_of_a_process(monkeypatch):
    """A process replaces the states of its optimizer by its own, also if those of the first are more or fewer."""
    monkeypatch.setattr(diloco, "rank_and_processes", lambda: (1, 2))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.sum().backward()
    optimizer.step()
    of_process = diloco._process_state(DiLoCo(), State(model, optimizers=optimizer))
    saved = of_process.state_dict()
    expected = {name: one.clone() for name, one in optimizer.state[model.weight].items()}
    assert [*optimizer.state] == [model.weight]

    optimizer.state[model.weight] = {"other": torch.ones(2, 2)}
    optimizer.state[model.bias] = {"step": torch.tensor(3.0)}
    of_process.load_state_dict(saved)

    assert [*optimizer.state] == [model.weight]
    torch.testing.assert_close(optimizer.state[model.weight], expected, rtol=0, atol=0)
