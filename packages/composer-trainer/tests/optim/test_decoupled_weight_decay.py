"""Optimizers with decoupled weight decay compared with their formulas in float64."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer.callbacks import LRMonitor
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler
from fixtures import make_classifier, trained, vector_batches

pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=:UserWarning")

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4)


def make_weights(shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def make_gradients(shapes, steps, seed=1):
    """Return a gradient of each shape for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(steps)]


def train(optimizer, weights, gradients, rates=None):
    """Step with each of the gradients and learning rates."""
    for step, of_step in enumerate(gradients):
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def reference_sgdw(weights, gradients, rates, first_rate, momentum, dampening, weight_decay, nesterov):
    """Return the weights after SGD, by the formula."""
    weights, velocity = [weight.detach().clone() for weight in weights], [None] * len(weights)
    for rate, of_step in zip(rates, gradients, strict=True):
        for i, gradient in enumerate(of_step):
            weights[i] = weights[i] - rate / first_rate * weight_decay * weights[i]
            velocity[i] = gradient if velocity[i] is None else momentum * velocity[i] + (1 - dampening) * gradient
            step = gradient + momentum * velocity[i] if nesterov else velocity[i]
            weights[i] = weights[i] - rate * (step if momentum else gradient)
    return weights


def reference_adamw(weights, gradients, rates, first_rate, betas, eps, weight_decay, amsgrad):
    """Return the weights after Adam, by the formula."""
    weights = [weight.detach().clone() for weight in weights]
    mean, square, largest = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    for t, (rate, of_step) in enumerate(zip(rates, gradients, strict=True), start=1):
        for i, gradient in enumerate(of_step):
            weights[i] = weights[i] - rate / first_rate * weight_decay * weights[i]
            mean[i] = betas[0] * mean[i] + (1 - betas[0]) * gradient
            square[i] = betas[1] * square[i] + (1 - betas[1]) * gradient**2
            largest[i] = torch.maximum(largest[i], square[i])
            divisor = (largest[i] if amsgrad else square[i]) / (1 - betas[1] ** t)
            weights[i] = weights[i] - rate * mean[i] / (1 - betas[0] ** t) / (divisor.sqrt() + eps)
    return weights


def assert_close(result, expected):
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class TestFormulas:
    @given(
        shapes=SHAPES,
        rates=st.lists(st.floats(0, 1), min_size=1, max_size=5),
        first_rate=st.floats(0.01, 1),
        momentum=st.sampled_from([0, 0.5, 0.9]),
        dampening=st.sampled_from([0, 0.3]),
        weight_decay=st.sampled_from([0, 1e-5, 0.1]),
        nesterov=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_sgdw(self, shapes, rates, first_rate, momentum, dampening, weight_decay, nesterov):
        """For any shapes, settings and learning rates, weights match the formula."""
        nesterov = nesterov and momentum > 0 and dampening == 0
        weights, gradients = make_weights(shapes), make_gradients(shapes, len(rates))
        options = (momentum, dampening, weight_decay, nesterov)
        expected = reference_sgdw(weights, gradients, rates, first_rate, *options)

        result = train(DecoupledSGDW(weights, first_rate, *options), weights, gradients, rates)

        assert_close(result, expected)

    @given(
        shapes=SHAPES,
        rates=st.lists(st.floats(0, 1), min_size=1, max_size=5),
        first_rate=st.floats(0.01, 1),
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
        eps=st.sampled_from([1e-8, 1e-3]),
        weight_decay=st.sampled_from([0, 1e-5, 0.1]),
        amsgrad=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_adamw(self, shapes, rates, first_rate, betas, eps, weight_decay, amsgrad):
        """For any shapes, settings and learning rates, weights match the formula."""
        weights, gradients = make_weights(shapes), make_gradients(shapes, len(rates))
        options = (betas, eps, weight_decay, amsgrad)
        expected = reference_adamw(weights, gradients, rates, first_rate, *options)

        result = train(DecoupledAdamW(weights, first_rate, *options), weights, gradients, rates)

        assert_close(result, expected)

    @pytest.mark.parametrize("momentum", [0, 0.9])
    def test_equals_torch_sgd_without_decay(self, momentum):
        """Results are bit-identical in float32."""
        shapes = [(3, 4), (5,)]
        actual, reference = make_weights(shapes, torch.float32), make_weights(shapes, torch.float32)
        gradients = make_gradients(shapes, 4)

        result = train(DecoupledSGDW(actual, 0.1, momentum), actual, gradients)
        expected = train(torch.optim.SGD(reference, 0.1, momentum), reference, gradients)

        assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))

    def test_defaults(self):
        """The defaults are Composer's."""
        adamw, sgdw = DecoupledAdamW(make_weights([(1,)])), DecoupledSGDW(make_weights([(1,)]), lr=0.1)

        assert adamw.defaults == {
            "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-5, "amsgrad": False,
            "cautious_weight_decay": False, "cautious_update": False, "rounding": "nearest",
        }  # fmt: skip
        assert sgdw.defaults == {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}


def make_sgdw(weights, lr=0.1, weight_decay=1e-4):
    return DecoupledSGDW(weights, lr=lr, momentum=0.9, weight_decay=weight_decay)


def make_adamw(weights, lr=0.1, weight_decay=1e-4):
    return DecoupledAdamW(weights, lr=lr, weight_decay=weight_decay)


@pytest.fixture(params=[make_sgdw, make_adamw], ids=["SGDW", "AdamW"])
def make(request):
    """Return a function that creates one of the two: ``make(weights, lr=…, weight_decay=…)``."""
    return request.param


class TestDecay:
    @pytest.mark.parametrize("lr", [0.001, 0.5])
    def test_does_not_depend_on_the_rate(self, make, lr):
        """With zero gradients, weights decay by the formula at any learning rate."""
        (weight,) = make_weights([(3,)])
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)

        make([weight], lr=lr, weight_decay=0.01).step()

        assert_close([weight.detach()], [before * 0.99])

    def test_follows_the_schedule(self, make):
        """At half the initial rate, the decay is halved; at zero there is none."""
        (weight,) = make_weights([(3,)])
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer = make([weight], lr=0.4, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][step])

        for _ in range(3):
            optimizer.step()
            schedule.step() if schedule.last_epoch < 2 else None

        assert_close([weight.detach()], [before * 0.99 * 0.995])

    def test_groups(self, make):
        """Each group has its own rate and decay."""
        first, second = make_weights([(3,), (2,)])
        expected = [first.detach() * 0.9, second.detach().clone()]
        optimizer = make([{"params": [first]}, {"params": [second], "weight_decay": 0.0, "lr": 1.0}], weight_decay=0.1)
        for weight in (first, second):
            weight.grad = torch.zeros_like(weight)

        optimizer.step()

        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 1.0]
        assert_close([first.detach(), second.detach()], expected)


class TestStep:
    def test_parameters_without_gradient(self, make):
        """They do not change and have no state."""
        first, second = make_weights([(3,), (2,)])
        before = second.detach().clone()
        optimizer = make([first, second])

        train(optimizer, [first, second], [[torch.ones(3), None]])

        assert torch.equal(second, before)
        assert list(optimizer.state) == [first]

    def test_late_gradients_have_their_own_step_count(self):
        """The bias correction uses each parameter's step count."""
        weights, gradients = make_weights([(2,), (2,)]), make_gradients([(2,), (2,)], 3)
        late = reference_adamw(
            [weights[1]], [[one[1]] for one in gradients[1:]], [0.1] * 2, 0.1, (0.9, 0.95), 1e-8, 0, False
        )
        gradients[0][1] = None

        result = train(DecoupledAdamW(weights, 0.1, weight_decay=0), weights, gradients)

        assert_close([result[1]], late)

    def test_closure(self, make):
        """A closure computes the gradients, and its loss is returned."""
        (weight,) = make_weights([(3,)])
        before = weight.detach().clone()

        def closure():
            loss = weight.square().sum()
            loss.backward()
            return loss

        assert make([weight]).step(closure) == before.square().sum()
        assert not torch.equal(weight, before)

    def test_sparse_gradients_raise(self, make):
        """The error states the remedy."""
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = make(table.parameters())
        table(torch.tensor([1])).sum().backward()

        with pytest.raises(ValueError, match=r"cannot use sparse gradients.*sparse=False"):
            optimizer.step()

    def test_does_not_synchronize(self, make):
        """A step reads no weight or gradient: step counts are on the CPU."""
        with torch.device("meta"):
            weight = nn.Parameter(torch.ones(3))
            weight.grad = torch.ones(3)
            optimizer = make([weight])
            optimizer.step()
            optimizer.step()

        param_state = optimizer.state[weight]
        assert param_state.get("step", torch.tensor(2.0)).item() == 2.0
        assert {value.device.type for name, value in param_state.items() if name != "step"} == {"meta"}


class TestState:
    def test_resume_is_bit_identical(self, make):
        """Saving and loading after half of the steps does not change the result."""
        shapes = [(3, 4), (5,)]
        gradients, rates = make_gradients(shapes, 6), [0.1, 0.09, 0.08, 0.07, 0.06, 0.05]
        straight, broken = make_weights(shapes, torch.float32), make_weights(shapes, torch.float32)
        expected = train(make(straight), straight, gradients, rates)
        first = make(broken)
        train(first, broken, gradients[:3], rates[:3])
        saved = copy.deepcopy(first.state_dict())

        second = make(broken, lr=0.7)
        second.load_state_dict(saved)
        result = train(second, broken, gradients[3:], rates[3:])

        assert second.param_groups[0]["initial_lr"] == 0.1
        assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))

    @pytest.mark.parametrize("fused", [False, True])
    def test_loads_the_state_of_torch(self, fused):
        """A state of torch's AdamW is loaded, with its rate as the initial one and step counts on the CPU."""
        shapes = [(3, 4)]
        weights, gradients = make_weights(shapes), make_gradients(shapes, 4)
        expected = reference_adamw(weights, gradients, [0.1] * 4, 0.1, (0.9, 0.95), 1e-8, 0, False)
        reference = torch.optim.AdamW(weights, 0.1, (0.9, 0.95), weight_decay=0, fused=fused)
        train(reference, weights, gradients[:2])

        actual = DecoupledAdamW(weights, lr=0.5)
        actual.load_state_dict(reference.state_dict())
        result = train(actual, weights, gradients[2:])

        assert actual.param_groups[0]["initial_lr"] == 0.1
        assert actual.state[weights[0]]["step"].device.type == "cpu"
        assert_close(result, expected)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -0.1}, r"lr must be at least 0, got -0\.1"),
            ({"lr": float("nan")}, r"lr must be at least 0, got nan"),
            ({"lr": 0.1, "weight_decay": -1e-5}, r"weight_decay must be at least 0"),
            ({"lr": 0.1, "momentum": -1}, r"momentum must be at least 0, got -1"),
            ({"lr": 0.1, "nesterov": True}, "nesterov requires momentum above 0 and dampening=0, got momentum=0"),
            ({"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": True}, r"dampening=0\.5"),
        ],
    )
    def test_invalid_sgdw_arguments_raise(self, options, message):
        """The error has the argument's name."""
        with pytest.raises(ValueError, match=message):
            DecoupledSGDW(make_weights([(1,)]), **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0\.9, 1\.0\)"),
            ({"betas": (0.9,)}, "betas must be two numbers"),
            ({"eps": -1e-8}, r"eps must be at least 0"),
        ],
    )
    def test_invalid_adamw_arguments_raise(self, options, message):
        """The error has the argument's name."""
        with pytest.raises(ValueError, match=message):
            DecoupledAdamW(make_weights([(1,)]), **options)

    @pytest.mark.filterwarnings("error")
    def test_large_decay_warns(self):
        """A decay meant for torch's AdamW gives a warning at the caller's line."""
        with pytest.warns(UserWarning, match=r"weight_decay=0\.01 removes that fraction of.*1e-5 are usual") as caught:
            DecoupledAdamW(make_weights([(1,)]), weight_decay=0.01)
        with pytest.warns(UserWarning, match=r"weight_decay=0\.001 removes"):
            DecoupledSGDW([{"params": make_weights([(1,)]), "weight_decay": 1e-3}], lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DecoupledAdamW(make_weights([(1,)]), weight_decay=9e-4)

        assert caught[0].filename == __file__


def fit(optimizer_of, **options):
    """Train a small classifier, and return its weights and history."""
    model, history = make_classifier(), InMemoryLogger()
    settings = {"train_dataloader": vector_batches(3, size=8), "max_duration": "4ep", "callbacks": LRMonitor()}
    trained(model=model, optimizers=optimizer_of(model.parameters()), loggers=history, **settings | options)
    return [parameter.detach().clone() for parameter in model.parameters()], history


class TestInTraining:
    def test_learns(self, make):
        """A training lowers the loss, and the rate is logged under the optimizer's name."""
        _, history = fit(lambda weights: make(weights, lr=0.05), max_duration="30ep", schedulers=LinearScheduler())

        losses = history.get_timeseries("loss/train/total")["loss/train/total"]
        assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
        assert {name for name in history.data if name.startswith("lr-Decoupled")} in (
            {"lr-DecoupledSGDW/group0"},
            {"lr-DecoupledAdamW/group0"},
        )

    def test_loss_scaler(self, make):
        """Gradients scaled by a power of 2 give bit-identical results; non-finite ones skip step and decay."""
        actual, scaled = make_weights([(3,)], torch.float32), make_weights([(3,)], torch.float32)
        plain, with_scaler = make(actual), make(scaled)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

        for factor in (1.0, float("inf"), 2.0):
            plain.zero_grad()
            with_scaler.zero_grad()
            scaler.scale((scaled[0] * factor).sum()).backward()
            scaler.step(with_scaler)
            scaler.update()
            if factor != float("inf"):
                (actual[0] * factor).sum().backward()
                plain.step()

        assert torch.equal(actual[0], scaled[0])

    @pytest.mark.filterwarnings("ignore:torch.distributed:FutureWarning")
    def test_sharded_weights(self, make):
        """DTensors of fully_shard are supported."""
        from torch.distributed import destroy_process_group, init_process_group
        from torch.distributed._tensor import DTensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            complete, sharded = nn.Linear(4, 3), nn.Linear(4, 3)
            sharded.load_state_dict(complete.state_dict())
            fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
            for model in (complete, sharded):
                optimizer = make(model.parameters())
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).square().sum().backward()
                    optimizer.step()

            assert isinstance(sharded.weight, DTensor)
            assert torch.equal(sharded.weight.full_tensor(), complete.weight)
        finally:
            destroy_process_group()
