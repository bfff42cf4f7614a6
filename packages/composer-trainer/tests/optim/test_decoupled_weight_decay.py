"""Optimizers with decoupled weight decay against their formulas, written out in float64."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer import Trainer
from composer.algorithms import SAM
from composer.callbacks import LRMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler

pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=:UserWarning")

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4)


def make_weights(shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def make_gradients(shapes, steps, seed=1):
    """Return for each step a gradient of each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(steps)]


def train(optimizer, weights, gradients, rates=None):
    """Step with each of the gradients, at each of the rates."""
    for step, of_step in enumerate(gradients):
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def sgdw_by_hand(weights, gradients, rates, first_rate, momentum, dampening, weight_decay, nesterov):
    """Return the weights after SGD, as the formula has it."""
    weights, velocity = [weight.detach().clone() for weight in weights], [None] * len(weights)
    for rate, of_step in zip(rates, gradients, strict=True):
        for i, gradient in enumerate(of_step):
            weights[i] = weights[i] - rate / first_rate * weight_decay * weights[i]
            velocity[i] = gradient if velocity[i] is None else momentum * velocity[i] + (1 - dampening) * gradient
            step = gradient + momentum * velocity[i] if nesterov else velocity[i]
            weights[i] = weights[i] - rate * (step if momentum else gradient)
    return weights


def adamw_by_hand(weights, gradients, rates, first_rate, betas, eps, weight_decay, amsgrad):
    """Return the weights after Adam, as the formula has it."""
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


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
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
        """Whatever the shapes, settings and course of the rate, weights are those of the formula."""
        nesterov = nesterov and momentum > 0 and dampening == 0
        weights, gradients = make_weights(shapes), make_gradients(shapes, len(rates))
        options = (momentum, dampening, weight_decay, nesterov)
        expected = sgdw_by_hand(weights, gradients, rates, first_rate, *options)

        found = train(DecoupledSGDW(weights, first_rate, *options), weights, gradients, rates)

        assert_close(found, expected)

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
        """Whatever the shapes, settings and course of the rate, weights are those of the formula."""
        weights, gradients = make_weights(shapes), make_gradients(shapes, len(rates))
        options = (betas, eps, weight_decay, amsgrad)
        expected = adamw_by_hand(weights, gradients, rates, first_rate, *options)

        found = train(DecoupledAdamW(weights, first_rate, *options), weights, gradients, rates)

        assert_close(found, expected)

    @pytest.mark.parametrize("momentum", [0, 0.9])
    def test_without_decay_it_is_torchs_sgd(self, momentum):
        """To the bit, in float32."""
        shapes = [(3, 4), (5,)]
        ours, theirs = make_weights(shapes, torch.float32), make_weights(shapes, torch.float32)
        gradients = make_gradients(shapes, 4)

        found = train(DecoupledSGDW(ours, 0.1, momentum), ours, gradients)
        expected = train(torch.optim.SGD(theirs, 0.1, momentum), theirs, gradients)

        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    @pytest.mark.parametrize("amsgrad", [False, True])
    def test_at_a_constant_rate_it_is_torchs_adamw(self, amsgrad):
        """Torch multiplies the decay by the rate, so that lr * weight_decay here is its weight_decay."""
        shapes = [(3, 4), (5,)]
        ours, theirs = make_weights(shapes), make_weights(shapes)
        gradients = make_gradients(shapes, 6)

        found = train(DecoupledAdamW(ours, 0.02, (0.9, 0.99), 1e-8, 0.02 * 0.3, amsgrad), ours, gradients)
        torch_adamw = torch.optim.AdamW(theirs, 0.02, (0.9, 0.99), 1e-8, 0.3, amsgrad)
        expected = train(torch_adamw, theirs, gradients)

        assert_close(found, expected)

    def test_defaults(self):
        """Those that users of Composer know."""
        adamw, sgdw = DecoupledAdamW(make_weights([(1,)])), DecoupledSGDW(make_weights([(1,)]), lr=0.1)

        assert adamw.defaults == {
            "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-5, "amsgrad": False
        }  # fmt: skip
        assert sgdw.defaults == {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}


def make_sgdw(weights, lr=0.1, weight_decay=1e-4):
    return DecoupledSGDW(weights, lr=lr, momentum=0.9, weight_decay=weight_decay)


def make_adamw(weights, lr=0.1, weight_decay=1e-4):
    return DecoupledAdamW(weights, lr=lr, weight_decay=weight_decay)


@pytest.fixture(params=[make_sgdw, make_adamw], ids=["SGDW", "AdamW"])
def make(request):
    """Return a function that makes one of the two: ``make(weights, lr=…, weight_decay=…)``."""
    return request.param


class TestDecay:
    @pytest.mark.parametrize("lr", [0.001, 0.5])
    def test_does_not_depend_on_the_rate(self, make, lr):
        """With gradients of 0, weights shrink alike at any rate, by the formula."""
        (weight,) = make_weights([(3,)])
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)

        make([weight], lr=lr, weight_decay=0.01).step()

        assert_close([weight.detach()], [before * 0.99])

    def test_follows_the_schedule(self, make):
        """At half the initial rate, half is taken off; at none, nothing."""
        (weight,) = make_weights([(3,)])
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer = make([weight], lr=0.4, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][step])

        for _ in range(3):
            optimizer.step()
            schedule.step() if schedule.last_epoch < 2 else None

        assert_close([weight.detach()], [before * 0.99 * 0.995])

    def test_from_no_rate_at_all(self, make):
        """A rate that was 0 at first has no fraction; then the decay is whole, and none while the rate is 0."""
        (weight,) = make_weights([(3,)])
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer = make([weight], lr=0.0, weight_decay=0.01)

        optimizer.step()
        unchanged = weight.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()

        assert torch.equal(unchanged, before)
        assert_close([weight.detach()], [before * 0.99])

    def test_groups_have_their_own(self, make):
        """Rate and decay of each group hold for it alone."""
        first, second = make_weights([(3,), (2,)])
        expected = [first.detach() * 0.9, second.detach().clone()]
        optimizer = make([{"params": [first]}, {"params": [second], "weight_decay": 0.0, "lr": 1.0}], weight_decay=0.1)
        for weight in (first, second):
            weight.grad = torch.zeros_like(weight)

        optimizer.step()

        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 1.0]
        assert_close([first.detach(), second.detach()], expected)


class TestStep:
    def test_parameters_without_gradient_are_left_alone(self, make):
        """Neither decay nor momentum touches them, and they get no state."""
        first, second = make_weights([(3,), (2,)])
        before = second.detach().clone()
        optimizer = make([first, second])

        train(optimizer, [first, second], [[torch.ones(3), None]])

        assert torch.equal(second, before)
        assert list(optimizer.state) == [first]

    def test_nothing_has_a_gradient(self, make):
        """Then nothing happens."""
        optimizer = make(make_weights([(3,)]))

        assert optimizer.step() is None
        assert not optimizer.state

    def test_a_gradient_that_comes_later_counts_its_own_steps(self):
        """Adam corrects the bias of each average by its own age."""
        weights, gradients = make_weights([(2,), (2,)]), make_gradients([(2,), (2,)], 3)
        late = adamw_by_hand(
            [weights[1]], [[one[1]] for one in gradients[1:]], [0.1] * 2, 0.1, (0.9, 0.95), 1e-8, 0, False
        )
        gradients[0][1] = None

        found = train(DecoupledAdamW(weights, 0.1, weight_decay=0), weights, gradients)

        assert_close([found[1]], late)

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

    def test_several_dtypes(self, make):
        """Weights of several dtypes in one group each have their own arithmetic."""
        weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)]

        train(make(weights, weight_decay=0.5), weights, [[torch.zeros(2, dtype=torch.float64)] * 3])

        assert [weight.dtype for weight in weights] == [torch.float64, torch.float32, torch.bfloat16]
        assert all(weight.tolist() == [0.5, 0.5] for weight in weights)

    def test_complex_weights_are_pairs_of_real_ones(self, make):
        """Real and imaginary parts are trained as if they stood beside each other."""
        (real,) = make_weights([(3, 2)])
        (gradient,) = make_gradients([(3, 2)], 1)[0]
        whole = nn.Parameter(torch.view_as_complex(real.detach().clone()))
        whole.grad, real.grad = torch.view_as_complex(gradient), gradient

        for weight in (whole, real):
            make([weight]).step()

        assert_close([torch.view_as_real(whole.detach())], [real.detach()])

    def test_sparse_gradients_are_refused(self, make):
        """By name, with the remedy."""
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = make(table.parameters())
        table(torch.tensor([1])).sum().backward()

        with pytest.raises(ValueError, match=r"cannot use sparse gradients.*sparse=False"):
            optimizer.step()

    def test_does_not_read_the_device(self, make):
        """Nothing of a step asks a weight or gradient for its value: counters are on the CPU."""
        with torch.device("meta"):
            weight = nn.Parameter(torch.ones(3))
            weight.grad = torch.ones(3)
            optimizer = make([weight])
            optimizer.step()
            optimizer.step()

        held = optimizer.state[weight]
        assert held.get("step", torch.tensor(2.0)).item() == 2.0
        assert {value.device.type for name, value in held.items() if name != "step"} == {"meta"}


class TestState:
    def test_goes_on_after_a_round_trip(self, make):
        """Half of the steps, saved and loaded into another, give the bits of all of them."""
        shapes = [(3, 4), (5,)]
        gradients, rates = make_gradients(shapes, 6), [0.1, 0.09, 0.08, 0.07, 0.06, 0.05]
        straight, broken = make_weights(shapes, torch.float32), make_weights(shapes, torch.float32)
        expected = train(make(straight), straight, gradients, rates)
        first = make(broken)
        train(first, broken, gradients[:3], rates[:3])
        saved = copy.deepcopy(first.state_dict())

        second = make(broken, lr=0.7)
        second.load_state_dict(saved)
        found = train(second, broken, gradients[3:], rates[3:])

        assert second.param_groups[0]["initial_lr"] == 0.1
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    @pytest.mark.parametrize("fused", [False, True])
    def test_takes_torchs_state(self, fused):
        """What torch's AdamW saved goes on here, with its rate as the initial one and its counts on the CPU."""
        shapes = [(3, 4)]
        weights, gradients = make_weights(shapes), make_gradients(shapes, 4)
        expected = adamw_by_hand(weights, gradients, [0.1] * 4, 0.1, (0.9, 0.95), 1e-8, 0, False)
        theirs = torch.optim.AdamW(weights, 0.1, (0.9, 0.95), weight_decay=0, fused=fused)
        train(theirs, weights, gradients[:2])

        ours = DecoupledAdamW(weights, lr=0.5)
        ours.load_state_dict(theirs.state_dict())
        found = train(ours, weights, gradients[2:])

        assert ours.param_groups[0]["initial_lr"] == 0.1
        assert ours.state[weights[0]]["step"].device.type == "cpu"
        assert_close(found, expected)

    def test_schedulers_of_torch_start_from_the_initial_rate(self, make):
        """Made in the middle of a run, they know the rate that the optimizer was made with."""
        optimizer = make(make_weights([(2,)]), lr=0.4)
        optimizer.param_groups[0]["lr"] = 0.1

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)

        assert schedule.get_last_lr() == [0.2]

    def test_a_copy_is_whole(self, make):
        """Copied with its weights, as by pickle, it goes on as it would have."""
        weights, gradients = make_weights([(3,)]), make_gradients([(3,)], 4)
        optimizer = make(weights)
        train(optimizer, weights, gradients[:2])

        copied_weights, copied = copy.deepcopy((weights, optimizer))

        assert_close(train(copied, copied_weights, gradients[2:]), train(optimizer, weights, gradients[2:]))


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -0.1}, r"lr must be at least 0, got -0\.1"),
            ({"lr": float("nan")}, "lr must be at least 0, got nan"),
            ({"lr": 0.1, "weight_decay": -1e-5}, "weight_decay must be at least 0"),
            ({"lr": 0.1, "momentum": -1}, "momentum must be at least 0, got -1"),
            ({"lr": 0.1, "nesterov": True}, "nesterov requires momentum above 0 and dampening=0, got momentum=0"),
            ({"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": True}, r"dampening=0\.5"),
        ],
    )
    def test_sgdw(self, options, message):
        """What cannot be is refused at once, by name."""
        with pytest.raises(ValueError, match=message):
            DecoupledSGDW(make_weights([(1,)]), **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0\.9, 1\.0\)"),
            ({"betas": (0.9,)}, "betas must be two numbers"),
            ({"eps": -1e-8}, "eps must be at least 0"),
        ],
    )
    def test_adamw(self, options, message):
        """What cannot be is refused at once, by name."""
        with pytest.raises(ValueError, match=message):
            DecoupledAdamW(make_weights([(1,)]), **options)

    @pytest.mark.parametrize(
        ("optimizer", "options", "message"),
        [
            (DecoupledSGDW, {"nesterov": "no"}, "nesterov must be True or False, got 'no'"),
            (DecoupledSGDW, {"dampening": "0"}, "dampening must be a number, got '0'"),
            (DecoupledAdamW, {"amsgrad": "no"}, "amsgrad must be True or False, got 'no'"),
            (DecoupledAdamW, {"betas": 0.9}, "betas must be two numbers"),
            (DecoupledAdamW, {"betas": ("0.9", 0.99)}, "betas must be two numbers"),
        ],
    )
    def test_other_kinds_are_refused(self, optimizer, options, message):
        """A value of the wrong kind is refused by the parameter's name."""
        with pytest.raises(TypeError, match=f"^{message}"):
            optimizer(make_weights([(1,)]), lr=0.1, **options)

    def test_a_rate_in_a_tensor(self, make):
        """The rate has to be a number, which needs no reading."""
        with pytest.raises(TypeError, match=r"lr must be a number, got tensor\(0\.1000\)"):
            make(make_weights([(1,)]), lr=torch.tensor(0.1))

    def test_a_group_of_its_own_is_checked_and_not_added(self, make):
        """Settings of a group are looked at as those of the optimizer are."""
        optimizer = make(make_weights([(1,)]))

        with pytest.raises(ValueError, match="lr must be at least 0"):
            optimizer.add_param_group({"params": make_weights([(2,)]), "lr": -1.0})

        assert len(optimizer.param_groups) == 1

    @pytest.mark.filterwarnings("error")
    def test_large_decay_warns(self):
        """A decay as for torch's AdamW would take off far too much; the warning is at the caller's line."""
        with pytest.warns(UserWarning, match=r"weight_decay=0\.01 removes that fraction of.*1e-5 are usual") as caught:
            DecoupledAdamW(make_weights([(1,)]), weight_decay=0.01)
        with pytest.warns(UserWarning, match=r"weight_decay=0\.001 removes"):
            DecoupledSGDW([{"params": make_weights([(1,)]), "weight_decay": 1e-3}], lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DecoupledAdamW(make_weights([(1,)]), weight_decay=9e-4)

        assert caught[0].filename == __file__


def fit(optimizer_of, algorithms=(), max_duration="4ep", **options):
    """Train a small classifier for real, and return its weights and history."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    history = InMemoryLogger()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 4, generator=generator)
    data = list(zip(inputs.split(8), inputs[:, :3].argmax(dim=1).split(8), strict=True))
    trainer = Trainer(
        model=ComposerClassifier(network, num_classes=3),
        train_dataloader=data,
        optimizers=optimizer_of(network.parameters()),
        max_duration=max_duration,
        algorithms=list(algorithms),
        callbacks=LRMonitor(),
        loggers=history,
        progress_bar=False,
        device="cpu",
        seed=3,
        **options,
    )
    trainer.fit()
    trainer.close()
    return [parameter.detach().clone() for parameter in network.parameters()], history


class TestInTraining:
    def test_learns(self, make):
        """A real training's loss falls, and the rate is logged under the optimizer's name."""
        _, history = fit(lambda weights: make(weights, lr=0.05), max_duration="30ep", schedulers=LinearScheduler())

        losses = history.get_timeseries("loss/train/total")["loss/train/total"]
        assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
        assert {name for name in history.data if name.startswith("lr-Decoupled")} in (
            {"lr-DecoupledSGDW/group0"},
            {"lr-DecoupledAdamW/group0"},
        )

    @pytest.mark.filterwarnings("ignore:SAM changes nothing with rho=0.0")
    def test_sam_around_it(self, make):
        """With SAM, the step is that from the worst weights nearby; a neighbourhood of 0 changes nothing."""
        plain, _ = fit(lambda weights: make(weights, lr=0.05))
        with_none, _ = fit(lambda weights: make(weights, lr=0.05), [SAM(rho=0.0)])
        with_some, _ = fit(lambda weights: make(weights, lr=0.05), [SAM(rho=0.5)])

        assert all(torch.equal(one, other) for one, other in zip(plain, with_none, strict=True))
        assert not torch.equal(plain[0], with_some[0])

    def test_loss_scaler(self, make):
        """Gradients that were scaled by a power of 2 give the same bits; those that overflow, no step and no decay."""
        ours, scaled = make_weights([(3,)], torch.float32), make_weights([(3,)], torch.float32)
        plain, with_scaler = make(ours), make(scaled)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

        for factor in (1.0, float("inf"), 2.0):
            plain.zero_grad()
            with_scaler.zero_grad()
            scaler.scale((scaled[0] * factor).sum()).backward()
            scaler.step(with_scaler)
            scaler.update()
            if factor != float("inf"):
                (ours[0] * factor).sum().backward()
                plain.step()

        assert torch.equal(ours[0], scaled[0])

    @pytest.mark.filterwarnings("ignore:torch.distributed:FutureWarning")
    def test_sharded_weights(self, make):
        """DTensors, as fully_shard makes them, are trained like others."""
        from torch.distributed import destroy_process_group, init_process_group
        from torch.distributed._tensor import DTensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            whole, sharded = nn.Linear(4, 3), nn.Linear(4, 3)
            sharded.load_state_dict(whole.state_dict())
            fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
            for model in (whole, sharded):
                optimizer = make(model.parameters())
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).square().sum().backward()
                    optimizer.step()

            assert isinstance(sharded.weight, DTensor)
            assert torch.equal(sharded.weight.full_tensor(), whole.weight)
        finally:
            destroy_process_group()
