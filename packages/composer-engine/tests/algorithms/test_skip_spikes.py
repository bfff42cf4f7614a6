"""SkipSpikes: what is measured, what is undone, and what cannot be."""

import pytest
import torch

from composer.algorithms import EMA, SAM, GradientClipping, SkipSpikes
from composer.core import AlgorithmConflictError, State, explain
from composer.core.testing import Training
from fixtures.models import WithLoss, make_network

optim = torch.optim
PLANTED = {9, 14}


def batches(planted=PLANTED, count=20):
    """Return batches of eight samples; the inputs of the planted ones are too large."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, 4, generator=generator)
    inputs[sorted(planted)] *= 1e4
    return list(zip(inputs, torch.randint(3, (count, 8), generator=generator), strict=True))


def end(make_optimizer, *algorithms, planted=PLANTED):
    """Train on the batches; return the weights."""
    model = WithLoss(make_network())
    optimizer = make_optimizer(model.parameters())
    state = State(model, optimizers=optimizer, max_duration="20ba", train_dataloader=batches(planted))
    Training(state, algorithms).run(20)
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def guard(**settings):
    return SkipSpikes("20std", window=8, **settings)


def test_clipping_limits_the_norm():
    """With ``action="clip"`` the gradients of spikes have the norm of the limit, and others do not change."""
    norms = []

    class Recording(optim.SGD):
        def step(self, closure=None):
            closure()
            norms.append(torch.cat([one.grad.flatten() for one in self.param_groups[0]["params"]]).norm().item())
            super().step()

    def make(parameters):
        return Recording(parameters, lr=1e-9)

    end(make)
    free, norms = norms, []
    end(make, guard(action="clip"))
    history = torch.tensor(free[1:9])
    limit = history.mean() + 20 * history.std()

    assert free[9] > 100 * limit
    assert norms[9] == pytest.approx(limit.item(), rel=1e-3)
    assert [norms[number] for number in range(20) if number not in PLANTED] == pytest.approx(
        [free[number] for number in range(20) if number not in PLANTED], rel=1e-4
    )


def test_measures_before_other_clipping():
    """It sees the norm before GradientClipping, wherever it is in the list; averages do not see the skipped step."""
    algorithms = [GradientClipping("norm", 0.1), EMA(half_life="2ba"), guard()]
    end(lambda parameters: optim.SGD(parameters, lr=0.01), *algorithms)
    plan = explain(algorithms).entries

    assert int(algorithms[-1].state_dict()["num_spikes"]) == 2
    assert [entry.key for entry in plan["after_train_batch"]] == ["SkipSpikes", "GradientClipping"]
    assert [entry.key for entry in plan["batch_end"]] == ["SkipSpikes", "EMA"]


def test_conflicts_with_sam():
    """SAM computes the gradients of a step twice; the error names both and a remedy."""
    with pytest.raises(AlgorithmConflictError, match="use GradientClipping"):
        explain([SAM(), SkipSpikes()])


def test_state_that_is_no_tensor_is_rejected():
    """An optimizer that counts in its state is rejected, with its name, before one of its steps is undone."""

    class Counting(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for weight in self.param_groups[0]["params"]:
                self.state[weight]["count"] = self.state[weight].get("count", 0) + 1

    with pytest.raises(ValueError, match=r"undo a step of Counting .*'count' in its state is on the host"):
        end(lambda parameters: Counting(parameters, lr=0.01), guard())


@pytest.mark.parametrize("in_place", [True, False])
def test_tensors_in_lists_are_restored(in_place):
    """Lists of tensors in a state or a group, as of SOAP, are restored, also if a step replaces them."""
    made = []

    class Preconditioned(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                self._add(group, group["params"][0].grad.abs().sum())
                for weight in group["params"]:
                    self.state[weight]["rule"] = "ab,b->a"
                    self._add(self.state[weight], weight.grad.abs().sum())

        def _add(self, held, value):
            [total] = held.setdefault("factors", [torch.zeros(())])
            held["factors"] = [total.add_(value) if in_place else total + value]

    def make(parameters):
        made.append(Preconditioned(parameters, lr=0.01))
        return made[-1]

    end(make, guard())

    held = [*made[0].state.values(), *made[0].param_groups]
    assert all(0 < total["factors"][0] < 1e3 for total in held)


def test_first_step_of_a_weight_is_not_undone():
    """A step in which an optimizer creates state is kept, as the state cannot be removed, and does not count."""
    model = WithLoss(make_network())
    head, algorithm = list(model.parameters())[-1].requires_grad_(False), guard()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = head.clone()
    state = State(model, optimizers=optimizer, max_duration="20ba", train_dataloader=batches({9}))
    training = Training(state, [algorithm])

    training.run(9)
    head.requires_grad_(True)
    training.run(10)

    assert not torch.equal(head, before)
    assert int(algorithm.state_dict()["num_spikes"]) == 0


def test_fused_optimizers_skip_their_step():
    """An optimizer with ``fused=True`` skips the step itself, and keeps no attribute of it."""
    made = []

    def make(parameters):
        made.append(optim.AdamW(parameters, lr=0.01, fused=True))
        return made[-1]

    skipped = end(make, guard())

    assert skipped.isfinite().all()
    assert "found_inf" not in vars(made[0])
    assert int(next(iter(made[0].state.values()))["step"]) == 18


def test_scaler_of_the_loop_is_an_error():
    """If another part of the loop removes the decision from a fused optimizer, as GradScaler does, an error says so."""

    class Scaled(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            del self.found_inf

    with pytest.raises(RuntimeError, match="could not skip steps of Scaled, because a GradScaler"):
        end(lambda parameters: Scaled(parameters, lr=0.01, fused=True), guard())


@pytest.mark.parametrize(("window", "is_reported"), [(8, False), (64, True)])
def test_a_training_shorter_than_the_window_is_reported(window, is_reported, caplog):
    """A training in which no batch was compared has a warning with the number of the first that would be."""
    model = WithLoss(make_network())
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    training = Training(
        State(model, optimizers=optimizer, max_duration="20ba", train_dataloader=batches({})),
        [SkipSpikes(window=window)],
    )
    training.run(20)
    training.finish()

    text = "compared none of the 20 batches, as it compares from batch 33 on with window=64"
    assert (text in caplog.text) is is_reported
