"""Schedulers in a training: when they step, and over several calls of fit."""

import contextlib
import math

import pytest
import torch
from torch.optim import lr_scheduler

from composer.algorithms import SWA
from composer.core import Callback
from composer.diagnostics import find_lr
from composer.optim import (
    ConstantScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
    LinearScheduler,
    StepScheduler,
    WarmupStableDecayScheduler,
)
from fixtures import full_copy, make_classifier, record, same_bits, small_run


class TestSchedulers:
    def test_torch_schedulers_step_each_epoch(self):
        """By default torch schedulers step at the end of an epoch."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
        trainer = small_run(model=model, optimizers=optimizer, schedulers=scheduler, max_duration="2ep")

        trainer.fit()

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    def test_step_schedulers_every_batch(self):
        """step_schedulers_every_batch steps them after each batch."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        trainer = small_run(
            model=model,
            optimizers=optimizer,
            schedulers=scheduler,
            step_schedulers_every_batch=True,
            max_duration="3ba",
        )

        trainer.fit()

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)

    @pytest.mark.parametrize("by_torch", [True, False])
    def test_an_epoch_at_rate_0_warns(self, by_torch):
        """A rate of 0 until the first epoch has ended is named, once; a training that goes on has another one."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rising = LinearScheduler(0.0, 1.0, t_max="4ep")
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 4) if by_torch else rising
        trainer = small_run(
            model=model,
            optimizers=optimizer,
            schedulers=scheduler,
            step_schedulers_every_batch=False,
            max_duration="4ep",
        )

        with pytest.warns(UserWarning, match=r"rate is 0 until the first epoch has ended.* (LambdaLR|ClockLR) steps"):
            trainer.fit(duration="1ep")
        assert optimizer.param_groups[0]["lr"] == 0.25
        trainer.fit(duration="1ep")

    def test_functions_set_each_batch_by_its_number(self):
        """Batch k is trained with f(k)."""
        rates = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        trainer = small_run(
            schedulers=lambda state, ssr=1.0: 1 - state.timestamp.batch.value / 10,
            callbacks=Observer(),
            max_duration="4ba",
        )

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.09, 0.08, 0.07])


def chained(optimizer, steps):
    first = lr_scheduler.LinearLR(optimizer, total_iters=4)
    second = lr_scheduler.CosineAnnealingLR(optimizer, steps - 4)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [4])


def of_transformers(optimizer, steps):
    transformers = pytest.importorskip("transformers", reason="it has schedules of its own")
    return transformers.get_cosine_schedule_with_warmup(optimizer, 4, steps)


KNOWN_STEPS = {
    "OneCycleLR": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "LinearLR": lambda optimizer, steps: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps),
    "MultiStepLR": lambda optimizer, steps: lr_scheduler.MultiStepLR(optimizer, [steps // 2, steps - 1]),
    "SequentialLR": chained,
    "ChainedScheduler": lambda optimizer, steps: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, steps)]
    ),
    "LambdaLR": of_transformers,
}


@pytest.mark.filterwarnings("ignore:The learning rate is 0 until the first epoch")
class TestKnownNumbersOfSteps:
    """A schedule of so many steps as the training has batches steps after each epoch only by mistake."""

    def run(self, make, steps, max_duration="4ep", part=None, **options):
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"optimizers": optimizer, "schedulers": make(optimizer, steps), "max_duration": max_duration}
        return small_run(model=model, **settings, **options).fit(duration=part)

    @pytest.mark.filterwarnings(
        "ignore:The epoch parameter in `scheduler.step:UserWarning"
    )  # SequentialLR of torch 2.7
    @pytest.mark.parametrize("max_duration", ["4ep", "20ba"])
    @pytest.mark.parametrize("name", KNOWN_STEPS)
    def test_of_the_batches_warn(self, name, max_duration):
        """The warning names the numbers and the remedy."""
        message = rf"{name} has (19|20) steps, .* makes 4 steps.*in 20 batches.*step_schedulers_every_batch=True"
        with pytest.warns(UserWarning, match=message):
            self.run(KNOWN_STEPS[name], 20, max_duration)

    @pytest.mark.parametrize(
        ("name", "options", "steps"),
        [
            ("wsd", {"num_warmup_steps": 2, "num_stable_steps": 8, "num_decay_steps": 10}, 20),
            ("wsd", {"num_warmup_steps": 2, "num_decay_steps": 10, "num_training_steps": 20}, 20),
            ("constant_schedule_with_warmup", {"num_warmup_steps": 6}, 6),
            ("inverse_sqrt", {"num_warmup_steps": 6}, 6),
            ("linear", {"num_warmup_steps": 0, "num_training_steps": 7}, 7),
            ("constant_schedule_with_warmup", {"num_warmup_steps": 3}, None),
        ],
    )
    def test_of_transformers(self, name, options, steps):
        """Transformers' schedules are in batches, so that one with more steps than epochs does not end."""
        transformers = pytest.importorskip("transformers", reason="it has schedules of its own")
        names = {
            "wsd": "wsd_schedule",
            "inverse_sqrt": "inverse_sqrt_schedule",
            "linear": "linear_schedule_with_warmup",
        }
        make = getattr(transformers, f"get_{names.get(name, name)}")

        with pytest.warns(UserWarning, match=f"LambdaLR has {steps} steps") if steps else contextlib.nullcontext():
            self.run(lambda optimizer, _: make(optimizer, **options), 0)

    @pytest.mark.parametrize("part", ["1ep", "1ba"])
    def test_of_a_training_in_parts(self, part):
        """The steps are compared with all of the training."""
        with pytest.warns(UserWarning, match="CosineAnnealingLR has 20 steps.* a training of '4ep' makes 4 steps"):
            self.run(lr_scheduler.CosineAnnealingLR, 20, part=part)

    @pytest.mark.parametrize("options", [{"step_schedulers_every_batch": choice} for choice in (True, False)])
    def test_a_choice_does_not_warn(self, options):
        """The argument says when they step."""
        assert self.run(lr_scheduler.CosineAnnealingLR, 20, **options).steps == 20

    @pytest.mark.parametrize("steps", [2, 4, 5, 40])
    def test_other_numbers_do_not_warn(self, steps):
        """A schedule in epochs may be shorter than the training, or longer."""
        assert self.run(lr_scheduler.CosineAnnealingLR, steps).steps == 20


class TestProlongedTraining:
    """A schedule that decays to the end of the training begins to decay again in a longer one."""

    def run(self, folder, max_duration, scheduler, stop_at=None, **options):
        trainer = small_run(
            schedulers=scheduler, max_duration=max_duration, save_folder=str(folder), save_interval="1ba", **options
        )
        if stop_at is not None:
            trainer.engine.on("batch_end", lambda state, _: state.stop_training(), every=stop_at)
        trainer.fit()
        return trainer

    def test_within_the_decay_warns(self, tmp_path):
        """The rate of the next batch was that of batch 3 of 4, and is that of batch 3 of 12."""
        self.run(tmp_path / "first", "4ba", LinearScheduler(alpha_f=0.0), stop_at="3ba")

        with pytest.warns(
            UserWarning, match=r"learning rate rises from 0\.025 to 0\.075 at batch 3.*max_duration='12ba'"
        ):
            self.run(
                tmp_path / "second", "12ba", LinearScheduler(alpha_f=0.0), load_path=str(tmp_path / "first" / "ep0-ba3")
            )

    @pytest.mark.parametrize(
        ("scheduler", "max_duration"),
        [
            (LinearScheduler(alpha_f=0.0), "4ba"),  # the same one
            (LinearScheduler(alpha_f=0.0, t_max="4ba"), "12ba"),
            (ConstantScheduler(), "12ba"),
            (WarmupStableDecayScheduler(t_warmup="1ba", t_decay="1ba"), "12ba"),  # still in the stable phase
        ],
    )
    def test_an_equal_rate_does_not_warn(self, tmp_path, scheduler, max_duration):
        """The end of a training may be moved if the rate does not depend on it."""
        self.run(tmp_path / "first", "4ba", scheduler, stop_at="3ba")

        second = self.run(tmp_path / "second", max_duration, scheduler, load_path=str(tmp_path / "first" / "ep0-ba3"))

        assert second.state.timestamp.batch == max_duration


class TestSchedulesOverSeveralFits:
    def test_a_new_optimizer_is_scheduled(self):
        """An optimizer that the program sets between two fits has the rates of the schedule."""
        model, rates = make_classifier(), []
        trainer = small_run(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
            schedulers=LinearScheduler(alpha_f=0.0, t_max="10ba"),
            max_duration="4ba",
        )
        trainer.fit()
        trainer.state.optimizers = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer.engine.on("batch_start", lambda state, _: rates.append(state.optimizers[0].param_groups[0]["lr"]))

        trainer.fit(duration="3ba")

        assert rates == pytest.approx([0.3, 0.25, 0.2])

    def test_epochs_of_other_lengths(self):
        """A schedule in epochs follows the part of the training that is over, after epochs of other lengths, too."""
        rates, parts = [], []

        class Observer(Callback):
            def batch_start(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])
                parts.append(1 - state.get_elapsed_duration().value)

        model, data = make_classifier(), torch.utils.data.TensorDataset(torch.rand(20, 4), torch.arange(20) % 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = torch.utils.data.DataLoader(data, 2)
        trainer = small_run(
            model=model, train_dataloader=loader, optimizers=optimizer, callbacks=Observer(), max_duration="1ep"
        )
        trainer.fit()
        shorter = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(16)), 2)

        trainer.fit(train_dataloader=shorter, duration="1ep", schedulers=LinearScheduler(alpha_f=0.0))

        assert rates[10:] == pytest.approx(parts[10:])

    def test_extended_training_rescales_the_schedule(self):
        """After fit(duration=) the schedule uses the new length from the first batch."""
        rates = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        def falling(state, ssr=1.0):
            return 1 - state.timestamp.batch.value / state.max_duration.value

        trainer = small_run(schedulers=falling, callbacks=Observer(), max_duration="4ba")

        trainer.fit()
        with pytest.warns(UserWarning, match="learning rate rises from 0 to 0.05"):
            trainer.fit(duration="4ba")

        assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.05, 0.0375, 0.025, 0.0125])

    def test_one_function_for_each_optimizer(self, tmp_path):
        """Functions are used in the order of the optimizers that have no torch scheduler, also after a resume."""

        def make(**options):
            torch.manual_seed(3)
            model = make_classifier(torch.nn.Sequential(*[torch.nn.Linear(4, size) for size in (4, 4, 3)]))
            first, second, third = (list(part.parameters()) for part in model.module)
            matrices = torch.optim.SGD(first[:1], lr=0.1, momentum=0.9)
            with_torch = torch.optim.SGD(second, lr=1.0)
            optimizers = [matrices, with_torch, DecoupledAdamW([*first[1:], *third], lr=1.0)]
            options["schedulers"] = [
                LinearScheduler(),
                torch.optim.lr_scheduler.ExponentialLR(with_torch, 0.5),
                ConstantScheduler(alpha=0.25),
            ]
            trainer = small_run(model=model, optimizers=optimizers, max_duration="4ba", **options)
            rates = record("before_forward", lambda state: [one.param_groups[0]["lr"] for one in state.optimizers])
            trainer.state.callbacks.append(rates)
            return trainer, rates

        complete, rates = make()
        complete.engine.on("batch_checkpoint", lambda s, _: s.timestamp.batch == 2 and complete.save_checkpoint(path))
        path = str(tmp_path / "two")
        complete.fit()
        resumed, others = make(load_path=path)
        resumed.fit()

        assert rates.values == [[pytest.approx(rate), 1.0, 0.25] for rate in (0.1, 0.075, 0.05, 0.025)]
        assert others.values == rates.values[2:]
        assert same_bits(full_copy(resumed.state.model), full_copy(complete.state.model))

    def test_epoch_schedule_applies_from_the_first_batch(self):
        """A schedule by epoch changes with the epoch's first batch."""
        rates = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        trainer = small_run(
            schedulers=lambda state, ssr=1.0: 0.5 if state.timestamp >= "1ep" else 1.0,
            callbacks=Observer(),
            train_subset_num_batches=2,
            max_duration="2ep",
        )

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])


OPTIMIZERS = pytest.mark.parametrize("kind", [DecoupledSGDW, DecoupledAdamW, torch.optim.SGD, torch.optim.AdamW])


def rates_of(trainer):
    """Train, and return the learning rate of each batch."""
    rates = record("before_forward", lambda state: float(state.optimizers[0].param_groups[0]["lr"]))
    trainer.state.callbacks.append(rates)
    trainer.fit()
    return rates.values


def run_with(kind, lr, model=None, **options):
    """Return a trainer with an optimizer of a class, and the optimizer."""
    model = model or make_classifier()
    optimizer = kind(model.parameters(), lr=lr, weight_decay=0.0)
    return small_run(model=model, optimizers=optimizer, **options), optimizer


class TestAssignedRates:
    """A rate that the user assigns is the one that a schedule multiplies from then on."""

    @OPTIMIZERS
    @pytest.mark.parametrize("search", [False, True])
    def test_before_the_training(self, kind, search):
        """Between the constructor and the training, also after find_lr."""
        trainer, optimizer = run_with(kind, 0.1, schedulers=LinearScheduler(), max_duration="4ba")
        if search:
            find_lr(trainer, num_batches=2)
        optimizer.param_groups[0]["lr"] = 0.004

        assert rates_of(trainer) == pytest.approx([0.004, 0.003, 0.002, 0.001])
        assert optimizer.param_groups[0]["initial_lr"] == 0.004

    @OPTIMIZERS
    def test_before_a_second_training(self, kind):
        """A second training with the optimizer uses the new rate, or without one that of the first training."""
        trainer, optimizer = run_with(kind, 0.1, schedulers=LinearScheduler(), max_duration="2ba")
        trainer.fit()
        options = {"model": trainer.state.model, "schedulers": LinearScheduler(), "max_duration": "2ba"}

        assert rates_of(small_run(optimizers=optimizer, **options)) == [0.1, 0.05]
        optimizer.param_groups[0]["lr"] = 0.004
        assert rates_of(small_run(optimizers=optimizer, **options)) == [0.004, 0.002]

    @OPTIMIZERS
    def test_in_a_training_and_resumed(self, kind, tmp_path):
        """A rate that a callback assigns is used for its batch and then multiplied, and a resumed run is identical."""

        class Assign(Callback):
            def batch_start(self, state, logger):
                if state.timestamp.batch == 2:
                    state.optimizers[0].param_groups[0]["lr"] = 0.5

        def make(**options):
            torch.manual_seed(3)
            options |= {"schedulers": LinearScheduler(), "callbacks": Assign(), "max_duration": "8ba"}
            return run_with(kind, 0.1, **options)[0]

        complete = make()
        rates = rates_of(complete)
        stopped = make()
        stopped.engine.on("batch_end", lambda state, _: state.timestamp.batch == 4 and stopped.save_checkpoint(path))
        path = str(tmp_path / "four")
        stopped.fit()
        resumed = make(load_path=path)

        assert rates == pytest.approx([0.1, 0.0875, 0.5, 0.3125, 0.25, 0.1875, 0.125, 0.0625])
        assert rates_of(resumed) == rates[4:]
        assert same_bits(full_copy(resumed.state.model), full_copy(complete.state.model))


SCHEDULES = {
    "none": lambda optimizer: {},
    "constant": lambda optimizer: {"schedulers": ConstantScheduler()},
    "linear": lambda optimizer: {"schedulers": LinearScheduler()},
    "by epoch": lambda optimizer: {"schedulers": LinearScheduler(), "step_schedulers_every_batch": False},
    "torch": lambda optimizer: {"schedulers": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
}


class TestRatesOfSWA:
    """From swa_start on SWA sets the rates, whatever the schedule."""

    @pytest.mark.parametrize("schedule", list(SCHEDULES))
    @pytest.mark.parametrize("as_rate", [float, torch.tensor])
    def test_one_owner(self, schedule, as_rate, tmp_path):
        """Every batch from swa_start on has swa_lr, and a run resumed in the middle of an epoch is identical."""

        def make(**options):
            torch.manual_seed(3)
            model = make_classifier()
            optimizer = torch.optim.SGD(model.parameters(), lr=as_rate(0.1), foreach=False)
            swa = SWA("1ep", "3ep", schedule_swa_lr=True, anneal_steps=1, swa_lr=0.01, update_interval="1ep")
            options |= {"train_subset_num_batches": 3, "max_duration": "4ep", **SCHEDULES[schedule](optimizer)}
            return small_run(model=model, optimizers=optimizer, algorithms=swa, **options)

        complete, saved = make(), {}
        for event in ("batch_checkpoint", "epoch_checkpoint"):  # after the third epoch SWA is over
            complete.engine.on(
                event,
                lambda state, _, at=event: saved.update(
                    {complete.save_checkpoint(f"{tmp_path}/{at}-{state.timestamp.batch}"): int(state.timestamp.batch)}
                ),
            )
        rates = rates_of(complete)
        assert rates[0] == pytest.approx(0.1)
        assert rates[3:] == pytest.approx([0.01] * 9)

        for path, batch in saved.items():
            resumed = make(load_path=path)
            assert rates_of(resumed) == rates[batch:]
            assert same_bits(full_copy(resumed.state.model), full_copy(complete.state.model))


class TestSteppedSchedulers:
    @pytest.mark.parametrize(
        ("factor", "kind"),
        [
            (None, TypeError),
            ("0.5", TypeError),
            ([1.0], TypeError),
            (math.nan, ValueError),
            (math.inf, ValueError),
            (-1.0, ValueError),
            (-1, ValueError),
        ],
    )
    def test_invalid_factors_raise(self, factor, kind):
        """A function that returns nothing or a negative factor raises with its name."""

        def half(state, ssr=1.0):
            return factor

        with pytest.raises(kind, match=r"\.half must return the factor of the learning rates, .* 0 or more, got"):
            small_run(schedulers=half, max_duration="1ba").fit()

    @pytest.mark.parametrize("optimizers", [None, "own"])
    def test_scheduler_of_another_optimizer(self, optimizers):
        """A torch scheduler of an unused optimizer raises."""
        model = make_classifier()
        options = {} if optimizers is None else {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)

        with pytest.raises(ValueError, match="schedulers: StepLR belongs to another optimizer"):
            small_run(model=model, schedulers=scheduler, **options)

    def test_several_for_one_optimizer(self):
        """The product of two schedules is one function, as the error says; two raise, as one would have no effect."""
        first, second = StepScheduler("1ba", 0.5), LinearScheduler(t_max="4ba")
        with pytest.raises(
            ValueError, match=r"2 schedules that are no torch schedulers, for 1 of.*multiply them"
        ) as caught:
            small_run(schedulers=[first, second], max_duration="4ba")

        multiply = eval(
            str(caught.value).partition("multiply them: ")[2].rstrip("."), {"first": first, "second": second}
        )
        trainer = small_run(schedulers=multiply, max_duration="4ba")
        rates = []
        trainer.engine.on("batch_start", lambda state, _: rates.append(state.optimizers[0].param_groups[0]["lr"]))
        trainer.fit()

        assert rates == pytest.approx([rates[0] * factor for factor in (1, 0.5 * 0.75, 0.25 * 0.5, 0.125 * 0.25)])
