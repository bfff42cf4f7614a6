"""Schedules compared with their formulas: batch k is trained with f(k)."""

import contextlib
import math
import re

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from composer import optim as schedules
from composer.core import State, Timestamp
from composer.loggers import InMemoryLogger
from composer.optim import compile_composer_scheduler
from fixtures import make_loader, record, small_run, trained

EPOCHS, BATCHES = 6, 10
TOTAL = EPOCHS * BATCHES


def make_state(max_duration=f"{EPOCHS}ep", batches=BATCHES, **options):
    """Return the state of a run of 6 epochs of 10 batches with 8 samples and 16 tokens each."""
    state = State(model=None, max_duration=max_duration, **options)
    state.set_dataloader(None, "train", batches)
    return state


def factors(schedule, state=None, ssr=1.0, count=TOTAL):
    """Return the factor before each batch of a run."""
    state = make_state() if state is None else state
    result = []
    for number in range(count):
        state.timestamp = Timestamp(
            epoch=number // BATCHES,
            batch=number,
            batch_in_epoch=number % BATCHES,
            sample=number * 8,
            token=number * 16,
        )
        result.append(schedule(state, ssr))
    return result


def cosine(fraction, last=0.0):
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * fraction))


FORMULAS = [
    (schedules.ConstantScheduler(alpha=0.5), lambda k: 0.5),
    (schedules.ConstantScheduler(0.5, "2ep"), lambda k: 0.5 if k < 20 else 1.0),
    (schedules.ConstantWithWarmupScheduler("5ba", alpha=0.5), lambda k: 0.5 * min(k / 5, 1)),
    (schedules.LinearScheduler(), lambda k: 1 - k / 60),
    (schedules.LinearScheduler(0.5, 0.1, "30ba"), lambda k: 0.5 - 0.4 * min(k / 30, 1)),
    (
        schedules.LinearWithWarmupScheduler("1ep", alpha_i=0.8, alpha_f=0.2),
        lambda k: 0.8 * k / 10 if k < 10 else 0.8 - 0.6 * (k - 10) / 50,
    ),
    (schedules.CosineAnnealingScheduler(), lambda k: cosine(k / 60)),
    (schedules.CosineAnnealingScheduler("3ep", alpha_f=0.1), lambda k: cosine(min(k / 30, 1), 0.1)),
    (
        schedules.CosineAnnealingWithWarmupScheduler("1ep", alpha_f=0.01),
        lambda k: k / 10 if k < 10 else cosine((k - 10) / 50, 0.01),
    ),
    (
        schedules.CosineAnnealingWithWarmupScheduler("0.1dur", "0.5dur"),
        lambda k: k / 6 if k < 6 else cosine(min((k - 6) / 24, 1)),
    ),
    (schedules.CosineAnnealingWithWarmupScheduler("0ba"), lambda k: cosine(k / 60)),
    (schedules.CosineAnnealingWarmRestartsScheduler("2ep"), lambda k: cosine(k % 20 / 20)),
    # 0.05 of 6 epochs is 0.30000000000000004, which must not come a batch late.
    (schedules.CosineAnnealingWarmRestartsScheduler("0.05dur"), lambda k: cosine(k % 3 / 3)),
    (schedules.ConstantScheduler(0.5, "0.05dur"), lambda k: 0.5 if k < 3 else 1.0),
    (
        schedules.CosineAnnealingWarmRestartsScheduler("8ba", t_mult=2.0, alpha_f=0.1),
        lambda k: cosine(
            k / 8 if k < 8 else (k - 8) / 16 if k < 24 else (k - 24) / 32 if k < 56 else (k - 56) / 64, 0.1
        ),
    ),
    (
        schedules.WarmupStableDecayScheduler("1ep", "2ep"),
        lambda k: k / 10 if k < 10 else 1 - math.sqrt(max(k - 40, 0) / 20),
    ),
    (
        schedules.WarmupStableDecayScheduler("5ba", decay="linear", alpha_f=0.1),
        lambda k: k / 5 if k < 5 else 1 - 0.9 * max(k - 48, 0) / 12,
    ),
    (
        schedules.WarmupStableDecayScheduler("0.8dur", "0.2dur", "cosine", 0.5),
        lambda k: k / 48 if k < 48 else cosine((k - 48) / 12, 0.5),
    ),
    (schedules.WarmupStableDecayScheduler("4ba", "0ba"), lambda k: min(k / 4, 1)),
    (schedules.WarmupStableDecayScheduler("0ba", "1dur", "linear"), lambda k: 1 - k / 60),
    (schedules.InverseSquareRootScheduler("1ep"), lambda k: k / 10 if k < 10 else math.sqrt(10 / k)),
    (
        schedules.InverseSquareRootScheduler("5ba", "2ep"),
        lambda k: k / 5 if k < 5 else 1 / math.sqrt((k - 5 + 20) / 20),
    ),
    (schedules.InverseSquareRootScheduler("0ba", "0.1dur"), lambda k: 1 / math.sqrt((k + 6) / 6)),
    (schedules.ExponentialScheduler(0.9), lambda k: 0.9 ** (k / 10)),
    (schedules.ExponentialScheduler(0.9, "3ba"), lambda k: 0.9 ** (k / 3)),
    (schedules.StepScheduler("2ep"), lambda k: 0.1 ** (k // 20)),
    (schedules.StepScheduler("7ba", gamma=0.5), lambda k: 0.5 ** (k // 7)),
    (
        schedules.MultiStepScheduler(["1ep", "25ba", "0.9dur"], 0.5),
        lambda k: 0.5 ** ((k >= 10) + (k >= 25) + (k >= 54)),
    ),
    (schedules.MultiStepWithWarmupScheduler("4ba", "3ep"), lambda k: k / 4 if k < 4 else 0.1 ** (k >= 30)),
    (schedules.PolynomialScheduler(2.0, alpha_f=0.2), lambda k: 0.2 + 0.8 * (1 - k / 60) ** 2),
    (
        schedules.PolynomialWithWarmupScheduler("1ep", power=3.0),
        lambda k: k / 10 if k < 10 else (1 - (k - 10) / 50) ** 3,
    ),
]


@pytest.mark.parametrize(("schedule", "formula"), FORMULAS, ids=[str(schedule) for schedule, _ in FORMULAS])
class TestFormulas:
    def test_values_match_the_formula(self, schedule, formula):
        """Before batch k, counted from 0, the factor is exactly f(k)."""
        assert factors(schedule) == pytest.approx([formula(k) for k in range(TOTAL)], abs=1e-12)

    def test_scale_schedule_ratio_below_one(self, schedule, formula):
        """With a ratio of 1/2, batch k has the factor of batch 2 k, also with fractional times."""
        if hasattr(schedule, "scale_warmup"):
            schedule = attrs.evolve(schedule, scale_warmup=True)

        result = factors(schedule, make_state(max_duration=f"{EPOCHS // 2}ep"), ssr=0.5, count=TOTAL // 2)

        assert result == pytest.approx([formula(2 * k) for k in range(TOTAL // 2)], abs=1e-12)


class TestUnits:
    @pytest.mark.parametrize(("unit", "per_batch"), [("ba", 1), ("sp", 8), ("tok", 16)])
    def test_units_are_equivalent(self, unit, per_batch):
        """Batches, samples and tokens give the same curve."""
        schedule = schedules.CosineAnnealingWithWarmupScheduler(f"{10 * per_batch}{unit}", f"{60 * per_batch}{unit}")

        in_epochs = factors(schedules.CosineAnnealingWithWarmupScheduler("1ep", "6ep"))
        assert factors(schedule) == pytest.approx(in_epochs)

    @pytest.mark.parametrize("complete", ["6ep", "1dur", "60ba"])
    def test_batches_and_epochs(self, complete):
        """With a known epoch length, a warm-up in batches can be combined with a schedule in epochs."""
        result = factors(schedules.CosineAnnealingWithWarmupScheduler("5ba", complete))

        assert result == pytest.approx([k / 5 if k < 5 else cosine((k - 5) / 55) for k in range(TOTAL)])

    def test_epochs_of_unknown_length_and_batches_raise(self):
        """The error states the two times and the remedy."""
        schedule = schedules.CosineAnnealingWithWarmupScheduler("5ba")

        with pytest.raises(ValueError, match=r"5ba and 1dur cannot be converted to one unit.*in one unit"):
            schedule(make_state(batches=None))

    def test_fraction_without_max_duration_raises(self):
        """A fraction requires a max_duration."""
        with pytest.raises(ValueError, match=r"1dur is a fraction of the training, which has no length.*max_duration"):
            schedules.LinearScheduler()(make_state(max_duration=None))

    @given(st.integers(1, 400))
    @settings(max_examples=50, deadline=None)
    def test_milestones_are_exact(self, batch):
        """0.07 of 100 batches is the seventh, despite rounding."""
        state = make_state(max_duration="400ba")
        schedule = schedules.MultiStepScheduler([f"{batch / 400}dur"])

        state.timestamp = Timestamp(batch=batch - 1)
        before = schedule(state)
        state.timestamp = Timestamp(batch=batch)

        assert (before, schedule(state)) == (1.0, pytest.approx(0.1))

    @given(st.integers(0, 1000), st.sampled_from([schedule for schedule, _ in FORMULAS]))
    @settings(max_examples=100, deadline=None)
    def test_factors_are_between_zero_and_one(self, batch, schedule):
        """This holds for any length of the run."""
        state = make_state()
        state.timestamp = Timestamp(epoch=batch // BATCHES, batch=batch, batch_in_epoch=batch % BATCHES)

        assert 0 <= schedule(state) <= 1


def test_function_of_a_step():
    """The error of a function that takes a number gets a note with the step of the state."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    state = State(model=None, max_duration="4ba", optimizers=optimizer)

    with pytest.raises(TypeError, match="unsupported operand") as raised:
        compile_composer_scheduler(lambda step: 1 / step, state)

    assert "is called with the State: its step is int(state.timestamp.batch)" in raised.value.__notes__[0]


def test_error_of_a_schedule_of_the_library():
    """It has no note about functions."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    with pytest.raises(ValueError, match="the training, which has no length") as raised:
        compile_composer_scheduler(schedules.CosineAnnealingScheduler(), State(model=None, optimizers=optimizer))

    assert not hasattr(raised.value, "__notes__")


class TestWarmup:
    def test_no_milestones(self):
        """Without milestones a multi-step schedule only warms up."""
        schedule = schedules.MultiStepWithWarmupScheduler("10ba", [])
        state = make_state()
        factors = []
        for batch in (0, 5, 10, 1000):
            state.timestamp = Timestamp(epoch=batch // BATCHES, batch=batch, batch_in_epoch=batch % BATCHES)
            factors.append(schedule(state))

        assert factors == [0, 0.5, 1, 1]

    @pytest.mark.parametrize(("scale_warmup", "warmup"), [(False, 10), (True, 20)])
    def test_scale_warmup(self, scale_warmup, warmup):
        """A warm-up keeps its length unless scale_warmup=True."""
        schedule = schedules.CosineAnnealingWithWarmupScheduler("10ba", "60ba", scale_warmup=scale_warmup)

        result = factors(schedule, make_state("120ba"), ssr=2.0, count=120)

        expected = [k / warmup if k < warmup else cosine((k - warmup) / (120 - warmup)) for k in range(120)]
        assert result == pytest.approx(expected)

    @pytest.mark.parametrize("t_max", ["2ep", "20ba", "1dur"])
    def test_other_unit_than_the_schedule_raises(self, t_max):
        """A warm-up in samples with a schedule in batches raises with both times and the remedy."""
        schedule = schedules.LinearWithWarmupScheduler("50sp", t_max=t_max)

        with pytest.raises(ValueError, match=rf"50sp and {t_max} cannot be converted to one unit: pass all"):
            compile_composer_scheduler(schedule, make_state(optimizers=sgd(0.1)))

    @pytest.mark.parametrize(
        ("schedule", "ratio", "warns"),
        [
            (schedules.MultiStepWithWarmupScheduler("7ep", "8ep"), 1.0, True),
            (schedules.MultiStepWithWarmupScheduler("61ba", "8ep"), 1.0, True),
            (schedules.MultiStepWithWarmupScheduler("60ba", "8ep"), 1.0, False),
            (schedules.LinearWithWarmupScheduler("7ep", t_max="20ep"), 1.0, True),
            (schedules.CosineAnnealingWithWarmupScheduler("4ep", "20ep", scale_warmup=True), 2.0, True),
            (schedules.CosineAnnealingWithWarmupScheduler("4ep", "20ep"), 2.0, False),
            (schedules.PolynomialWithWarmupScheduler("1sec", t_max="2sec"), 1.0, False),
        ],
    )
    def test_longer_than_the_training_warns(self, schedule, ratio, warns):
        """A training that ends within the warm-up gives a warning, unless its end is unknown."""
        state = make_state(optimizers=sgd(0.1))
        warning = pytest.warns(UserWarning, match=rf"t_warmup={schedule.t_warmup} is longer than the training of 6ep")

        with warning if warns else contextlib.nullcontext():
            compile_composer_scheduler(schedule, state, ratio)


@pytest.mark.parametrize("t_warmup", ["1ep", "0.5dur"])
def test_warmup_of_epochs_without_a_length(t_warmup):
    """Within an epoch of an unknown length the rate cannot rise, which gives a warning."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_loader(batch_size=None))

    schedule = schedules.LinearWithWarmupScheduler(t_warmup, t_max="3ep")
    loader = DataLoader(Stream(), batch_size=4)

    with pytest.warns(UserWarning, match=rf"t_warmup={t_warmup} is in epochs of an unknown length: .* first epoch"):
        small_run(train_dataloader=loader, schedulers=schedule, max_duration="2ep").fit()


STEPS = 20


def torch_rates(make):
    """Return the rates of a torch scheduler for 20 batches, stepped after each."""
    optimizer = sgd(1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_a_clock_of_batches_and_epochs():
    """Programs for MosaicML Composer set only these two counts of a clock."""
    state = State(model=None, max_duration="4ep", dataloader_len=1000)
    state.timestamp = state.timestamp.copy(batch=1500, epoch=1)

    assert schedules.LinearScheduler()(state) == 1 - 1500 / 4000


class TestTorchsOwn:
    """Schedules that torch has too are equal."""

    @pytest.mark.parametrize(
        ("schedule", "make"),
        [
            (schedules.ConstantScheduler(0.3), lambda opt: lr_scheduler.ConstantLR(opt, 0.3, total_iters=100)),
            (schedules.LinearScheduler(0.8, 0.2, "12ba"), lambda opt: lr_scheduler.LinearLR(opt, 0.8, 0.2, 12)),
            (
                schedules.CosineAnnealingScheduler(alpha_f=0.1),
                lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS, eta_min=0.1),
            ),
            (
                schedules.CosineAnnealingWarmRestartsScheduler("3ba", t_mult=2, alpha_f=0.1),
                lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2, eta_min=0.1),
            ),
            (
                schedules.CosineAnnealingWarmRestartsScheduler("6ba"),
                lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 6),
            ),
            (schedules.ExponentialScheduler(0.9, "1ba"), lambda opt: lr_scheduler.ExponentialLR(opt, 0.9)),
            (schedules.StepScheduler("6ba", 0.5), lambda opt: lr_scheduler.StepLR(opt, 6, 0.5)),
            (
                schedules.MultiStepScheduler(["5ba", "0.6dur"], 0.2),
                lambda opt: lr_scheduler.MultiStepLR(opt, [5, 12], 0.2),
            ),
            (schedules.PolynomialScheduler(2.0, "15ba"), lambda opt: lr_scheduler.PolynomialLR(opt, 15, 2.0)),
            (
                schedules.LinearWithWarmupScheduler("4ba", alpha_f=0.5),
                lambda opt: lr_scheduler.SequentialLR(
                    opt, [lr_scheduler.LambdaLR(opt, lambda k: k / 4), lr_scheduler.LinearLR(opt, 1.0, 0.5, 16)], [4]
                ),
            ),
            (
                schedules.CosineAnnealingWithWarmupScheduler("5ba"),
                lambda opt: lr_scheduler.SequentialLR(
                    opt, [lr_scheduler.LambdaLR(opt, lambda k: k / 5), lr_scheduler.CosineAnnealingLR(opt, 15)], [5]
                ),
            ),
            (
                schedules.PolynomialWithWarmupScheduler("4ba", power=1.5, t_max="14ba"),
                lambda opt: lr_scheduler.SequentialLR(
                    opt, [lr_scheduler.LambdaLR(opt, lambda k: k / 4), lr_scheduler.PolynomialLR(opt, 10, 1.5)], [4]
                ),
            ),
        ],
        ids=lambda value: type(value).__name__,
    )
    @pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
    def test_rates_equal_torch(self, schedule, make):
        """Rates are equal for each batch, also after a schedule's end."""
        result = factors(schedule, make_state(f"{STEPS}ba", batches=None), count=STEPS)

        assert result == pytest.approx(torch_rates(make), abs=1e-12)


class TestTransformers:
    """Schedules that Transformers has, too, are equal."""

    @pytest.mark.parametrize("decay", ["1-sqrt", "linear", "cosine"])
    def test_warmup_stable_decay(self, decay):
        """The rates are those of get_wsd_schedule, whose warm-up begins with min_lr_ratio."""
        schedule = schedules.WarmupStableDecayScheduler("4ba", "6ba", decay, alpha_f=0.1)

        rates = torch_rates(lambda opt: get_wsd_schedule(opt, 4, 6, STEPS, decay_type=decay, min_lr_ratio=0.1))

        result = factors(schedule, make_state(f"{STEPS}ba"), count=STEPS)
        assert result[4:] == pytest.approx(rates[4:], abs=1e-12)
        assert result[:4] == pytest.approx([(rate - 0.1) / 0.9 for rate in rates[:4]], abs=1e-12)

    @pytest.mark.parametrize(("warmup", "scale"), [(4, None), (4, 7), (0, 5)])
    def test_inverse_square_root(self, warmup, scale):
        """The rates are those of get_inverse_sqrt_schedule."""
        schedule = schedules.InverseSquareRootScheduler(f"{warmup}ba", None if scale is None else f"{scale}ba")

        rates = torch_rates(lambda opt: get_inverse_sqrt_schedule(opt, warmup, scale))

        assert factors(schedule, count=STEPS) == pytest.approx(rates, abs=1e-12)


ENDS = [
    (schedules.ConstantScheduler(0.5, "20ba"), 0.5, 0.5, 1.0),
    (schedules.ConstantWithWarmupScheduler("5ba", 0.5, "20ba"), 0.0, 0.5, 0.5),
    (schedules.LinearScheduler(0.8, 0.2, "20ba"), 0.8, 0.2 + 0.6 / 20, 0.2),
    (schedules.LinearWithWarmupScheduler("5ba", 0.8, 0.2, "20ba"), 0.0, 0.2 + 0.6 / 15, 0.2),
    (schedules.LinearWithWarmupScheduler("5ba", t_max="20ba"), 0.0, 1 / 15, 0.0),
    (schedules.LinearWithWarmupScheduler("20ba", 0.8, 0.2, "20ba"), 0.0, 0.8 * 19 / 20, 0.8),
    (schedules.CosineAnnealingScheduler("20ba", 0.1), 1.0, cosine(19 / 20, 0.1), 0.1),
    (schedules.CosineAnnealingWithWarmupScheduler("5ba", "20ba", 0.1), 0.0, cosine(14 / 15, 0.1), 0.1),
    (schedules.PolynomialScheduler(2.0, "20ba", 0.1), 1.0, 0.1 + 0.9 / 400, 0.1),
    (schedules.PolynomialWithWarmupScheduler("5ba", 2.0, "20ba", 0.1), 0.0, 0.1 + 0.9 / 225, 0.1),
]


@pytest.mark.parametrize(("schedule", "first", "last", "after"), ENDS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_first_and_last_values(schedule, first, last, after, ratio):
    """The first batch has the first value, the last one nearly the final value, later ones exactly."""
    state = make_state("100ba", batches=None)
    if ratio == 2.0 and hasattr(schedule, "scale_warmup"):
        schedule = attrs.evolve(schedule, scale_warmup=True)
    result = []
    for batch in (0, int(19 * ratio), int(20 * ratio), int(20 * ratio) + 1, 10_000):
        state.timestamp = Timestamp(batch=batch)
        result.append(schedule(state, ratio))

    assert result == pytest.approx([first, last, after, after, after], abs=1e-12)


class TestArguments:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: schedules.LinearScheduler(t_max="soon"), "t_max must be .*'soon'"),
            (lambda: schedules.MultiStepScheduler(["30ep", "9ep"]), "in ascending order, got 9ep after 30ep"),
            (lambda: schedules.LinearScheduler(t_max="0ba"), "t_max must be longer than 0, got 0ba"),
            (lambda: schedules.CosineAnnealingWithWarmupScheduler("-1ba"), "t_warmup must not be negative, got -1ba"),
            (lambda: schedules.CosineAnnealingScheduler(alpha_f=-0.1), "alpha_f"),
            (lambda: schedules.ExponentialScheduler(0.0), "gamma"),
            (lambda: schedules.PolynomialScheduler(-1.0), "power"),
            (lambda: schedules.MultiStepScheduler([]), "milestones must be one or several times"),
            (lambda: schedules.WarmupStableDecayScheduler("1ep", "-1ep"), "t_decay must not be negative, got -1ep"),
            (lambda: schedules.WarmupStableDecayScheduler("1ep", decay="sqrt"), "decay must be .*1-sqrt.*got 'sqrt'"),
            (lambda: schedules.InverseSquareRootScheduler("0ep"), "t_scale is required without a warm-up"),
            (lambda: schedules.InverseSquareRootScheduler("1ep", "0ep"), "t_scale must be longer than 0, got 0ep"),
            (lambda: schedules.MultiStepScheduler(["0ep"]), "milestones must be longer than 0"),
            (lambda: schedules.CosineAnnealingWarmRestartsScheduler("1ep", t_mult=0.5), "t_mult"),
        ],
    )
    def test_out_of_range(self, make, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            make()

    def test_number_without_unit_raises(self):
        """A number could be epochs or batches."""
        with pytest.raises(TypeError, match=r"t_max must be .*'10ep', got 10"):
            schedules.LinearScheduler(t_max=10)


def sgd(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


class TestCompile:
    def test_first_batch_has_its_rate_without_a_step(self):
        """Created at any time of a run, it sets the rate of the next batch."""
        optimizer = sgd(0.1)
        state = make_state("10ba", optimizers=optimizer)
        state.timestamp = Timestamp(batch=9)

        compile_composer_scheduler(schedules.LinearScheduler(), state)

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    def test_group_added_later(self):
        """A group added during training follows the schedule from its own rate."""
        optimizer = sgd(0.1)
        state = make_state("10ba", optimizers=optimizer)
        scheduler = compile_composer_scheduler(schedules.LinearScheduler(), state)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.4})

        state.timestamp = Timestamp(batch=5)
        scheduler.step()

        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2]

    def test_several_optimizers(self):
        """The trainer creates one scheduler for each."""
        first, second = sgd(0.1), sgd(0.2)
        state = make_state("10ba", optimizers=[first, second])

        for optimizer in state.optimizers:
            compile_composer_scheduler(schedules.ConstantScheduler(0.5), state, optimizer=optimizer)

        assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (0.05, 0.1)

    def test_custom_function(self):
        """Any function of the state and the ratio is a schedule."""
        optimizer = sgd(1.0)

        compile_composer_scheduler(lambda state, ssr=1.0: 0.25 * ssr, make_state(optimizers=optimizer), ssr=2.0)

        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("step_schedulers_every_batch", [None, True])
def test_real_training_follows_the_formula(step_schedulers_every_batch):
    """The optimizer steps with f(k) at batch k, for each of several optimizers."""
    network = torch.nn.Linear(4, 3)
    optimizers = [torch.optim.SGD([network.weight], lr=1.0), torch.optim.Adam([network.bias], lr=0.1)]
    used = [[], []]
    for rates, optimizer in zip(used, optimizers, strict=True):
        optimizer.register_step_pre_hook(
            lambda optimizer, *_, rates=rates: rates.append(optimizer.param_groups[0]["lr"])
        )
    trained(
        network=network,
        optimizers=optimizers,
        schedulers=schedules.CosineAnnealingWithWarmupScheduler("3ba", alpha_f=0.1),
        step_schedulers_every_batch=step_schedulers_every_batch,
        max_duration="4ep",
        loggers=InMemoryLogger(),
    )

    formula = [k / 3 if k < 3 else cosine((k - 3) / 17, 0.1) for k in range(20)]
    assert used[0] == pytest.approx(formula)
    assert used[1] == pytest.approx([0.1 * factor for factor in formula])


class TestSettings:
    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda passed: schedules.ConstantScheduler(alpha=passed), "alpha"),
            (lambda passed: schedules.LinearScheduler(alpha_i=passed), "alpha_i"),
            (lambda passed: schedules.LinearScheduler(alpha_f=passed), "alpha_f"),
            (lambda passed: schedules.CosineAnnealingWarmRestartsScheduler("1ep", t_mult=passed), "t_mult"),
            (lambda passed: schedules.ExponentialScheduler(gamma=passed), "gamma"),
            (lambda passed: schedules.PolynomialScheduler(power=passed), "power"),
        ],
        ids=["alpha", "alpha_i", "alpha_f", "t_mult", "gamma", "power"],
    )
    @pytest.mark.parametrize(
        ("value", "error"), [("0.5", TypeError), (None, TypeError), (float("inf"), ValueError), (-1, ValueError)]
    )
    def test_invalid_numbers_raise(self, make, name, value, error):
        """A value that is not a finite number in range raises with the parameter's name."""
        with pytest.raises(error, match=rf"^{name} must be .*, got '?{value}'?\."):
            make(value)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: schedules.CosineAnnealingWithWarmupScheduler(warmup_steps="5ba"), "'warmup_steps': use t_warmup."),
        (lambda: schedules.CosineAnnealingScheduler(T_max="1ep"), "'T_max'; did you mean 't_max'?"),
        (lambda: schedules.DecoupledSGDW([torch.zeros(1)], lr=0.1, decay=0.1), "'decay'. Its arguments are params, lr"),
    ],
)
def test_unknown_arguments(make, hint):
    """Constructors of schedules and optimizers suggest the right names."""
    with pytest.raises(TypeError, match=re.escape(f"has no argument {hint}")):
        make()


@pytest.mark.parametrize(
    "schedule", [schedules.CosineAnnealingWithWarmupScheduler("0ba"), schedules.LinearWithWarmupScheduler("0ep")]
)
def test_no_warmup_in_another_unit(schedule):
    """A warm-up of length 0 has no unit that the training would have to be counted in."""
    found = record("batch_start", lambda state: state.optimizers[0].param_groups[0]["lr"])

    trained(max_duration="64sp", schedulers=schedule, callbacks=found)

    assert found.values[0] == pytest.approx(0.1)
