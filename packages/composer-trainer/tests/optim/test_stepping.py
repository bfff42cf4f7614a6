"""What the optimizers share: decays on lists of tensors, cautious steps, and the rounding of 16-bit weights."""

import copy
import itertools

import pytest
import torch
from torch import nn

from composer.callbacks import OptimizerMonitor
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW, Muon, muon_with_adamw
from composer.optim.stepping import _round_stochastically, decay, takes_lists
from fixtures import full_copy, make_classifier, same_bits, trained, vector_batches

LR, DECAY = 0.1, 0.05
ROUNDINGS = pytest.mark.parametrize("rounding", ["stochastic", "kahan"])


def adamw(weights, **options):
    return DecoupledAdamW(weights, LR, weight_decay=options.pop("decay", DECAY), **options)


def muon(weights, **options):
    # Muon multiplies the decay by the rate.
    return Muon(weights, LR, weight_decay=options.pop("decay", DECAY) / LR, **options)


BOTH = pytest.mark.parametrize("make", [adamw, muon])


pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=:UserWarning")


def weights_and_gradients(dtype=torch.float64, steps=3, shape=(6, 4)):
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    return weight, [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def train(make, dtype=torch.float64, **options):
    """Return the weights before and after each step."""
    weight, gradients = weights_and_gradients(dtype)
    optimizer, states = make([weight], **options), [weight.detach().clone()]
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        states.append(weight.detach().clone())
    return states


def directions(make):
    """Return the direction ``u`` of each step, which depends only on the gradients: the steps without decay."""
    states = train(make, decay=0.0)
    return [(before - after) for before, after in itertools.pairwise(states)]


class TestCautious:
    @BOTH
    def test_weight_decay(self, make):
        """Only elements with ``u * weights >= 0`` decay (arXiv:2510.12402)."""
        (weight, *after), steps = train(make, cautious_weight_decay=True), directions(make)

        for step, result in zip(steps, after, strict=True):
            weight = weight - DECAY * (step * weight >= 0) * weight - step
            torch.testing.assert_close(result, weight)

    @BOTH
    def test_update(self, make):
        """Only elements with ``u * gradient > 0`` are applied, times elements / (applied + 1) (arXiv:2411.16085)."""
        (weight, *after), steps = train(make, cautious_update=True), directions(make)
        _, gradients = weights_and_gradients()

        for step, gradient, result in zip(steps, gradients, after, strict=True):
            mask = step * gradient > 0
            assert mask.any()
            weight = (1 - DECAY) * weight - step * mask * mask.numel() / (mask.sum() + 1)
            torch.testing.assert_close(result, weight)

    @BOTH
    def test_together(self, make):
        """The decay is where the applied direction agrees, and where nothing is applied."""
        options = {"cautious_update": True, "cautious_weight_decay": True}
        (weight, *after), steps = train(make, **options), directions(make)
        _, gradients = weights_and_gradients()

        for step, gradient, result in zip(steps, gradients, after, strict=True):
            mask = step * gradient > 0
            applied = step * mask * mask.numel() / (mask.sum() + 1)
            weight = weight - DECAY * (applied * weight >= 0) * weight - applied
            torch.testing.assert_close(result, weight)

    def test_masks_are_not_trivial(self):
        """In these tests, later steps oppose some of the gradients and of the weights."""
        for make in (adamw, muon):
            step, (weight, *_) = directions(make)[2], train(make)
            _, gradients = weights_and_gradients()

            assert 0 < (step * gradients[2] > 0).sum() < 24
            assert 0 < (step * weight >= 0).sum() < 24

    def test_small_gradients_in_float16(self):
        """Elements whose product with the gradient is 0 in float16 are compared by their signs."""
        gradient, steps = 1e-6 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), []
        for cautious in (False, True):
            weight = nn.Parameter(torch.zeros(32, 32).half())
            weight.grad = gradient.half()
            muon([weight], decay=0.0, rounding="kahan", cautious_update=cautious).step()
            steps.append(-weight.detach())

        assert torch.equal(steps[1] != 0, steps[0].sign() * gradient.half().sign() > 0)

    def test_amsgrad_and_complex_weights(self):
        """Complex weights are pairs of real ones, in which signs are compared."""
        real, gradients = weights_and_gradients(shape=(6, 2))
        complete = nn.Parameter(torch.view_as_complex(real.detach().clone()))
        options = {"cautious_update": True, "cautious_weight_decay": True, "amsgrad": True}
        first, second = adamw([real], **options), adamw([complete], **options)
        for gradient in gradients:
            real.grad, complete.grad = gradient, torch.view_as_complex(gradient)
            first.step()
            second.step()

        torch.testing.assert_close(torch.view_as_real(complete.detach()), real.detach())

    def test_both_kinds_of_groups(self):
        """In muon_with_adamw the options apply to all groups."""
        model = make_classifier()

        optimizer = muon_with_adamw(model, 0.1, cautious_update=True, cautious_weight_decay=True, rounding="kahan")

        keys = ("cautious_update", "cautious_weight_decay", "rounding")
        assert {tuple(group[key] for key in keys) for group in optimizer.param_groups} == {(True, True, "kahan")}


class TestRounding:
    def test_mean_is_exact(self):
        """A value between two neighbours becomes either, with the probabilities that keep its mean."""
        value = 1 + 2**-7 * 0.3  # between 1 and 1 + 2**-7
        values = torch.full((40_000,), value)

        _round_stochastically(values, seed=3)

        assert torch.equal(values, values.bfloat16().float())
        assert set(values.tolist()) == {1.0, 1 + 2**-7}
        assert values.double().mean().item() == pytest.approx(value, abs=4 * 2**-7 * 0.46 / 200)

    def test_exact_values_remain(self):
        """Numbers of bfloat16, infinite values and NaN do not change."""
        values = torch.tensor([0.0, -1.5, 3.0e38, float("inf"), float("-inf"), float("nan")]).bfloat16().float()
        before = values.clone()

        _round_stochastically(values, seed=3)

        torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)

    @BOTH
    def test_compensation(self, make):
        """After small steps, weights and compensation together are those of float32; plain bfloat16 loses the steps."""
        (before, _), moved = weights_and_gradients(torch.bfloat16), {}
        for dtype, rounding in ((torch.bfloat16, "kahan"), (torch.bfloat16, "nearest"), (torch.float32, "nearest")):
            weight = nn.Parameter(before.detach().clone().to(dtype))
            optimizer = make([weight], decay=0.0, rounding=rounding)
            optimizer.param_groups[0]["lr"] = 1e-4
            _, gradients = weights_and_gradients(torch.bfloat16)
            for _ in range(50):
                weight.grad = gradients[0].to(dtype)
                optimizer.step()
            kept = optimizer.state[weight].get("compensation", torch.zeros(()))
            moved[dtype, rounding] = weight.detach().float() + kept.float() - before.detach().float()

        exact = moved[torch.float32, "nearest"]
        torch.testing.assert_close(moved[torch.bfloat16, "kahan"], exact, rtol=0.03, atol=2.5e-4)
        assert (moved[torch.bfloat16, "nearest"] == 0).double().mean() > 0.8

    @BOTH
    @ROUNDINGS
    def test_weights_of_32_bits_are_not_rounded(self, make, rounding):
        """Nothing changes for them."""
        expected = train(make, torch.float32, cautious_weight_decay=True)
        result = train(make, torch.float32, cautious_weight_decay=True, rounding=rounding)

        assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))

    @pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF, 0x7FC00000])
    def test_any_nan_remains_nan(self, bits):
        """Also those whose lower half is not 0, such as that of CUDA, 0x7fffffff."""
        values = torch.tensor([bits], dtype=torch.int32).view(torch.float32).repeat(64)

        _round_stochastically(values, seed=3)

        assert values.isnan().all()

    @BOTH
    def test_nan_in_a_gradient(self, make):
        """It reaches the weight instead of being rounded to zero."""
        weight, [gradient, *_] = weights_and_gradients(torch.bfloat16)
        weight.grad = torch.full_like(gradient, float("nan"))
        weight.grad.view(torch.int16).fill_(0x7FFF)

        make([weight], rounding="stochastic").step()

        assert weight.isnan().all()

    @BOTH
    def test_random_numbers_are_those_of_the_seed(self, make):
        """They depend on torch's seed and not on what has been drawn, and draw nothing from its generators."""
        ends = []
        for seed, count in ((1, 0), (1, 5), (2, 0)):
            torch.manual_seed(seed)
            torch.rand(count)
            before = torch.get_rng_state()
            ends.append(train(make, torch.bfloat16, rounding="stochastic")[-1])
            assert torch.equal(torch.get_rng_state(), before)

        assert torch.equal(ends[0], ends[1])
        assert not torch.equal(ends[0], ends[2])
        assert not torch.equal(ends[0], train(make, torch.bfloat16)[-1])

    @BOTH
    @pytest.mark.parametrize("separate", [False, True], ids=["groups", "optimizers"])
    def test_random_numbers_differ(self, make, separate):
        """Equal weights in one group, in two, and in two optimizers get different random numbers, in each step."""
        shape = (16, 16)
        weights = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for _ in range(3)]
        other = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        groups = [{"params": weights[:2]}, {"params": weights[2:]}]
        if separate:
            optimizers = [make(weights[:2], rounding="stochastic"), make([*weights[2:], other], rounding="stochastic")]
        else:
            optimizers = [make(groups, rounding="stochastic")]
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        steps = []
        for _ in range(2):
            for weight in weights:
                nn.init.ones_(weight)
                weight.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.state.clear()
                optimizer.step()
            steps += [weight.detach().clone() for weight in weights]

        assert not any(torch.equal(one, two) for one, two in itertools.combinations(steps, 2))

    @BOTH
    @ROUNDINGS
    def test_state_continues(self, make, rounding):
        """A saved state continues bit for bit."""
        weight, gradients = weights_and_gradients(torch.bfloat16, steps=6)
        other = nn.Parameter(weight.detach().clone())
        straight, first = make([weight], rounding=rounding), make([other], rounding=rounding)
        second = make([other], rounding=rounding)
        for number, gradient in enumerate(gradients):
            if number == 3:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            weight.grad, other.grad = gradient, gradient.clone()
            straight.step()
            (first if number < 3 else second).step()

        assert torch.equal(weight, other)


def fit(kind, dtype, rounding="nearest"):
    """Return the first and the final loss of five linear maps, on average: one has noise of about 5 %."""
    losses = torch.tensor([fit_one(kind, dtype, rounding, seed) for seed in range(5)], dtype=torch.float64)
    return losses.mean(0).tolist()


def fit_one(kind, dtype, rounding, seed):
    """Fit a linear map to noisy targets with a small rate, and return the first and the final loss of its weights."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 8, generator=generator)
    targets = inputs @ torch.ones(8, 8) + 0.3 * torch.randn(64, 8, generator=generator)
    weight = nn.Parameter(torch.full((8, 8), 1.125).to(dtype))
    kind, rate = (DecoupledAdamW, 1e-3) if kind == "adamw" else (Muon, 4e-3)
    optimizer = kind([weight], rate, weight_decay=0.0, rounding=rounding)
    losses = []
    for _ in range(500):
        optimizer.zero_grad()
        ((inputs.to(dtype) @ weight).float() - targets).square().mean().backward()
        losses.append((inputs @ weight.detach().float() - targets).square().mean().item())
        optimizer.step()
    return losses[0], losses[-1]


class TestTraining:
    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_bfloat16_moves(self, kind):
        """Plain bfloat16 does not advance; with both roundings the loss is that of float32 within 5 %."""
        first, exact = fit(kind, torch.float32)
        _, stuck = fit(kind, torch.bfloat16)

        assert exact < 0.5 * first
        assert stuck == first
        for rounding in ("stochastic", "kahan"):
            _, loss = fit(kind, torch.bfloat16, rounding)
            assert loss == pytest.approx(exact, rel=0.05), rounding

    @ROUNDINGS
    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_resumes_exactly(self, tmp_path, rounding, kind):
        """A run of bfloat16 weights that is resumed ends with bit-identical weights and states."""
        batches = [(inputs.bfloat16(), targets) for inputs, targets in vector_batches()]

        def run(duration, **options):
            model = make_classifier().bfloat16()
            optimizer = (
                DecoupledAdamW(model.parameters(), 1e-3, rounding=rounding)
                if kind == "adamw"
                else muon_with_adamw(model, 1e-3, rounding=rounding)
            )
            settings = {"model": model, "optimizers": optimizer, "train_dataloader": batches, "run_name": "run"}
            return trained(**settings, max_duration=duration, **options).state

        straight = run("2ep")
        run("1ep", save_folder=str(tmp_path))
        resumed = run("2ep", load_path=str(tmp_path / "latest"))

        assert resumed.timestamp.batch == straight.timestamp.batch == 10
        assert same_bits(full_copy(straight.model), full_copy(resumed.model))
        [first], [second] = straight.optimizers, resumed.optimizers
        assert str(first.state_dict()) == str(second.state_dict())

    @pytest.mark.filterwarnings("ignore:DecoupledAdamW updates:UserWarning")
    def test_lost_updates_are_reported(self):
        """The monitor logs the fraction of updates that rounding loses, only of 16-bit weights that lose any."""

        def logged(rounding, dtype):
            model, history = make_classifier().to(dtype), InMemoryLogger()
            batches = [(inputs.to(dtype), targets) for inputs, targets in vector_batches()]
            trained(
                model=model,
                optimizers=DecoupledAdamW(model.parameters(), 5e-4, weight_decay=0.0, rounding=rounding),
                train_dataloader=batches,
                callbacks=OptimizerMonitor(batch_log_interval=1),
                loggers=history,
            )
            return {name: values[-1][1] for name, values in history.data.items() if name.startswith("lost_updates")}

        nearest = logged("nearest", torch.bfloat16)
        assert len(nearest) == 5  # of four parameters, and together
        assert 0.7 < nearest["lost_updates/global"] < 1
        assert logged("kahan", torch.bfloat16) == logged("nearest", torch.float32) == {}


class TestErrors:
    def test_float16(self):
        """Stochastic rounding of float16 raises at construction, and Kahan summation supports it."""
        weight, _ = weights_and_gradients(torch.float16)

        with pytest.raises(ValueError, match=r"rounding='stochastic' requires weights in bfloat16.* got float16"):
            DecoupledAdamW([weight], rounding="stochastic")
        assert DecoupledAdamW([weight], rounding="kahan").param_groups

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"rounding": "up"}, ValueError, "rounding must be one of 'nearest', 'stochastic', 'kahan', got 'up'"),
            ({"cautious_update": 1}, TypeError, "cautious_update must be True or False, got 1"),
            ({"cautious_weight_decay": "no"}, TypeError, "cautious_weight_decay must be True or False, got 'no'"),
        ],
    )
    @BOTH
    def test_invalid_settings(self, make, options, error, message):
        """The error has the name of the setting."""
        with pytest.raises(error, match=message):
            make([weights_and_gradients()[0]], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decay_is_not_rounded(dtype):
    """On a CPU, weights of 16 bits are multiplied by 0.998 and not by 0.9961, the nearest number of bfloat16."""
    weights = [torch.tensor([2.609375, -1.5], dtype=dtype), torch.tensor(0.25, dtype=dtype)]
    expected = [(weight.double() * 0.998).to(dtype) for weight in weights]

    decay(weights, 0.002)

    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_lists_of_32_bits():
    """Only lists with tensors of 16 bits on a CPU are processed one by one."""
    assert takes_lists([torch.ones(2), torch.ones(2, dtype=torch.bfloat16, device="meta")])
    assert not takes_lists([torch.ones(2), torch.ones(2, dtype=torch.float16)])
