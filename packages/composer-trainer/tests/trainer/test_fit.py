"""fit: duration, continuation and results."""

import copy
import datetime
import logging
import pickle
import time

import pytest
import torch
from torch import nn

from composer.algorithms import SAM
from composer.core import Algorithm, Callback, DataSpec, Event, Time, Timestamp
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import LinearWithWarmupScheduler
from composer.trainer import Trainer


class TestDuration:
    @pytest.mark.parametrize(
        ("duration", "batches"),
        [("2ep", 10), ("7ba", 7), ("9sp", 3), (3, 15), (Time(1, "ep"), 5), ("1iter", 5)],
    )
    def test_trains_until_max_duration_is_reached(self, make_trainer, duration, batches):
        """Training ends with the first batch at which the duration, in its unit, is reached."""
        trainer = make_trainer(max_duration=duration)

        trainer.fit()

        assert trainer.state.timestamp.batch == batches

    def test_duration_in_tokens(self, make_trainer):
        """A duration in tokens ends by the data spec's counts."""
        spec = DataSpec(make_trainer.loader(), get_num_tokens_in_batch=lambda batch: 10)
        trainer = make_trainer(train_dataloader=spec, max_duration="25tok")

        trainer.fit()

        assert trainer.state.timestamp.token == 30

    def test_clock_is_logged(self, make_trainer):
        """Batches and samples are logged with every batch, epochs at their start, tokens if counted."""
        log, counted = InMemoryLogger(), InMemoryLogger()
        spec = DataSpec(make_trainer.loader(), get_num_tokens_in_batch=lambda batch: 10)

        make_trainer(max_duration="6ba", loggers=log).fit()
        make_trainer(train_dataloader=spec, max_duration="2ba", loggers=counted).fit()

        of = {name: [value for _, value in entries] for name, entries in log.data.items()}
        assert of["time/batch"] == [0, 1, 2, 3, 4, 5]
        assert of["time/sample"] == [0, 4, 8, 12, 16, 20]
        assert of["time/batch_in_epoch"] == [0, 1, 2, 3, 4, 0]
        assert of["time/sample_in_epoch"] == [0, 4, 8, 12, 16, 0]
        assert [(clock.counts.batch, value) for clock, value in log.data["time/epoch"]] == [(0, 0), (5, 1)]
        assert of["time/iteration"] == of["time/epoch"]
        assert of["trainer/device_train_microbatch_size"] == [4, 4]
        assert "time/token" not in of
        assert [value for _, value in counted.data["time/token"]] == [0, 10]
        assert [value for _, value in counted.data["time/token_in_epoch"]] == [0, 10]

    def test_duration_in_seconds(self, make_trainer):
        """A duration in seconds ends with the first batch after it, by the training clock."""
        trainer = make_trainer(max_duration="0.2sec")

        trainer.fit()

        spent = trainer.state.timestamp.total_wct
        assert datetime.timedelta(seconds=0.2) <= spent < datetime.timedelta(seconds=5)

    def test_time_before_training_is_excluded(self, make_trainer):
        """Callbacks before the first epoch do not use up a duration in seconds."""

        class Slow(Callback):
            def fit_start(self, state, logger):
                time.sleep(0.3)

        trainer = make_trainer(callbacks=Slow(), max_duration="1ba")

        trainer.fit()

        assert trainer.state.timestamp.total_wct.total_seconds() < 0.3

    def test_clock_counts_the_time_of_batches(self, make_trainer):
        """A batch's time is its wall time, including callbacks."""

        class Slow(Callback):
            def batch_start(self, state, logger):
                time.sleep(0.05)

        trainer = make_trainer(callbacks=Slow(), max_duration="3ba")

        began = time.monotonic()
        trainer.fit()
        clock, passed = trainer.state.timestamp, time.monotonic() - began

        assert 0.15 <= clock.total_wct.total_seconds() <= passed
        assert 0.05 <= clock.batch_wct.total_seconds() <= passed - 0.1
        assert clock.total_wct == clock.iteration_wct == clock.epoch_wct

    def test_completed_training_returns_immediately(self, make_trainer):
        """A finished training is not trained on."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()
        before = make_trainer.weights(trainer)

        trainer.fit()

        assert torch.equal(before, make_trainer.weights(trainer))
        assert trainer.state.timestamp.batch == 5

    def test_fit_duration_is_added(self, make_trainer):
        """fit(duration=) extends the training by that duration."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()

        trainer.fit(duration="3ba")

        assert trainer.state.timestamp.batch == 8

    def test_reset_time(self, make_trainer):
        """With reset_time the clock starts at zero and the complete duration is trained again."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()

        trainer.fit(reset_time=True)

        assert trainer.state.timestamp.copy(total_wct=datetime.timedelta()).batch == 5
        assert trainer.state.timestamp.epoch == 1

    def test_stop_training(self, make_trainer):
        """A callback can stop the training; the current batch is completed."""

        class StopAtThree(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch == 3:
                    state.stop_training()

        trainer = make_trainer(max_duration="10ep", callbacks=StopAtThree())

        trainer.fit()

        assert trainer.state.timestamp.batch == 3

    @pytest.mark.parametrize(("warmup", "duration"), [("3ep", "10ep"), ("30sp", "200sp"), ("10ba", "50ba")])
    @pytest.mark.parametrize("hook", ["after_train_batch", "batch_end", "epoch_end"])
    def test_stop_training_within_the_warmup(self, make_trainer, warmup, duration, hook):
        """A training can be stopped within its warm-up, for any unit of the schedule."""
        ends = []

        class StopInTheFirstEpoch(Callback):
            def fit_end(self, state, logger):
                ends.append(state.optimizers[0].param_groups[0]["lr"])

        def stop_at_the_end(self, state, logger):
            if state.timestamp.batch >= 4:
                state.stop_training()

        setattr(StopInTheFirstEpoch, hook, stop_at_the_end)
        trainer = make_trainer(
            schedulers=LinearWithWarmupScheduler(warmup), max_duration=duration, callbacks=StopInTheFirstEpoch()
        )

        trainer.fit()
        trainer.fit()

        assert trainer.state.timestamp.batch == (4 if hook == "batch_end" else 5)
        assert len(ends) == 1
        assert 0 < ends[0] < 0.1

    def test_scale_schedule_ratio_shortens_the_training(self, make_trainer):
        """Half the ratio is half the length."""
        trainer = make_trainer(max_duration="4ep", scale_schedule_ratio=0.5)

        trainer.fit()

        assert trainer.state.timestamp.epoch == 2

    @pytest.mark.parametrize("ratio", [0.5, -1])
    def test_ratio_in_fit_without_schedule_raises(self, make_trainer, ratio):
        """A ratio passed to fit alone raises, as the length was scaled by the trainer."""
        trainer = make_trainer(max_duration="1ep")

        with pytest.raises(ValueError, match=r"scale_schedule_ratio=.* give duration or schedulers"):
            trainer.fit(scale_schedule_ratio=ratio)

    def test_subset_shortens_the_epoch(self, make_trainer):
        """An epoch has train_subset_num_batches batches."""
        trainer = make_trainer(max_duration="2ep", train_subset_num_batches=2)

        trainer.fit()

        assert trainer.state.timestamp.batch == 4

    def test_loader_without_a_length(self, make_trainer):
        """A loader without a length ends its epoch when it is exhausted."""

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([(torch.ones(4), torch.tensor(1)) for _ in range(6)])

        trainer = make_trainer(train_dataloader=torch.utils.data.DataLoader(Stream(), batch_size=2), max_duration="2ep")

        trainer.fit()

        assert trainer.state.timestamp.batch == 6
        assert trainer.state.timestamp.epoch == 2


class TestContinueTraining:
    def test_two_fits_equal_one(self, make_trainer):
        """After a stop within an epoch, another fit continues with bit-identical results."""
        complete = make_trainer(
            model=make_trainer.model(), train_dataloader=make_trainer.loader(shuffle=True), max_duration="13ba"
        )
        complete.fit()

        parts = make_trainer(model=make_trainer.model(), train_dataloader=make_trainer.loader(shuffle=True))
        for more in ("3ba", "4ba", "6ba"):
            parts.fit(duration=more)

        assert torch.equal(make_trainer.weights(complete), make_trainer.weights(parts))

    def test_epoch_starts_once(self, make_trainer):
        """Continuing within an epoch does not restart it."""

        class Count(Callback):
            starts = ends = 0

            def epoch_start(self, state, logger):
                self.starts += 1

            def epoch_end(self, state, logger):
                self.ends += 1

        count = Count()
        trainer = make_trainer(callbacks=count)

        trainer.fit(duration="3ba")
        trainer.fit(duration="2ba")

        assert (count.starts, count.ends) == (1, 1)

    def test_iteration_is_counted_after_a_resume(self, make_trainer, tmp_path):
        """A checkpoint at an epoch's end precedes the iteration's end, which the resumed run counts first."""
        make_trainer(max_duration="3iter", save_folder=str(tmp_path), run_name="run").fit()

        resumed = make_trainer(max_duration="3iter", load_path=str(tmp_path / "ep1-ba5"))
        resumed.fit()

        clock = resumed.state.timestamp
        assert (clock.iteration, clock.epoch, clock.batch, clock.epoch_in_iteration) == (3, 3, 15, 0)

    def test_checkpoint_between_loading_and_training(self, make_trainer, tmp_path):
        """It contains the loaded data position: a run resumed from it produces bit-identical results."""
        options = {"train_dataloader": make_trainer.loader(shuffle=True), "max_duration": "2ep"}
        complete = make_trainer(
            **options, model=make_trainer.model(), save_folder=str(tmp_path / "whole"), save_interval="1ba"
        )
        complete.fit()
        between = make_trainer(
            **options, model=make_trainer.model(), load_path=str(tmp_path / "whole" / "ep0-ba3"), run_name="between"
        )
        copied = between.save_checkpoint(str(tmp_path / "copied"))

        resumed = make_trainer(**options, model=make_trainer.model(), load_path=copied)
        resumed.fit()

        assert resumed.state.timestamp.batch == 10
        assert torch.equal(make_trainer.weights(complete), make_trainer.weights(resumed))

    def test_same_loader_in_fit_continues(self, make_trainer):
        """Passing the current loader to fit again does not restart its epoch."""
        complete = make_trainer(model=make_trainer.model(), train_dataloader=make_trainer.loader(shuffle=True))
        complete.fit(duration="8ba")
        loader = make_trainer.loader(shuffle=True)

        parts = make_trainer(model=make_trainer.model(), train_dataloader=None)
        for _ in range(4):
            parts.fit(train_dataloader=DataSpec(loader), duration="2ba")

        assert torch.equal(make_trainer.weights(complete), make_trainer.weights(parts))
        assert parts.state.timestamp.epoch == 1


class TestStep:
    def test_equals_a_plain_loop(self, make_trainer):
        """The weights are bit-identical to a plain loop's."""
        plain_model = make_trainer.model()
        optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
        for _ in range(2):
            for inputs, targets in make_trainer.loader():
                optimizer.zero_grad()
                nn.functional.cross_entropy(plain_model.module(inputs), targets).backward()
                optimizer.step()

        trainer = make_trainer(model=make_trainer.model(), max_duration="2ep")
        trainer.fit()

        expected = torch.cat([parameter.detach().flatten() for parameter in plain_model.parameters()])
        assert torch.equal(make_trainer.weights(trainer), expected)

    @pytest.mark.filterwarnings("ignore:device_train_microbatch_size=100 is larger")
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
    def test_microbatches_do_not_change_weights(self, make_trainer, size):
        """Weights are equal for any split of a batch, also an uneven one, up to rounding in float64."""

        def train(microbatch_size):
            loader = DataSpec(
                make_trainer.loader(samples=22, batch_size=5),
                batch_transforms=lambda batch: [batch[0].double(), batch[1]],
            )
            trainer = make_trainer(
                model=make_trainer.model().double(),
                train_dataloader=loader,
                device_train_microbatch_size=microbatch_size,
                max_duration="3ep",
            )
            trainer.fit()
            return make_trainer.weights(trainer), trainer.state.total_loss

        complete, whole_loss = train(None)
        split, split_loss = train(size)

        torch.testing.assert_close(split, complete, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(split_loss, whole_loss, rtol=1e-12, atol=1e-14)

    def test_batch_is_restored_after_microbatches(self, make_trainer):
        """After its microbatches the state has the complete batch."""
        sizes = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                sizes.append(len(state.batch[0]))

        make_trainer(device_train_microbatch_size=1, callbacks=Observer(), max_duration="2ba").fit()

        assert sizes == [4, 4]

    def test_several_optimizers_all_step(self, make_trainer):
        """Every optimizer updates its parameters."""
        model = make_trainer.model()
        first, last = model.module[0], model.module[2]
        before = get_weights(model)
        trainer = make_trainer(
            model=model,
            optimizers=[torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(last.parameters())],
            max_duration="1ba",
        )

        trainer.fit()

        assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

    def test_optimizer_with_closure(self, make_trainer):
        """An optimizer that computes the loss several times per step runs the events each time."""

        class CountForwards(Callback):
            count = 0

            def before_forward(self, state, logger):
                self.count += 1

        model, count = make_trainer.model(), CountForwards()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        trainer = make_trainer(model=model, optimizers=optimizer, callbacks=count, max_duration="2ba")
        before = make_trainer.weights(trainer)

        trainer.fit()

        assert count.count > 2
        assert not torch.equal(before, make_trainer.weights(trainer))

    def test_several_losses_are_summed_and_logged(self, make_trainer):
        """A model with several losses is trained on their sum; each is logged by its name."""
        from composer.loggers import InMemoryLogger

        class TwoLosses(ComposerClassifier):
            def loss(self, outputs, batch):
                cross_entropy = nn.functional.cross_entropy(outputs, batch[1])
                return {"cross_entropy": cross_entropy, "size": outputs.square().mean()}

        torch.manual_seed(0)
        log = InMemoryLogger()
        trainer = make_trainer(model=TwoLosses(nn.Linear(4, 3), num_classes=3), loggers=log, max_duration="1ba")

        trainer.fit()

        total, *parts = (float(log.data[f"loss/train/{name}"][-1][1]) for name in ("total", "cross_entropy", "size"))
        assert total == pytest.approx(sum(parts))


def get_weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


class TestPrecision:
    def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(self, make_trainer):
        """Autocast covers the forward pass; weights stay in float32."""
        recorded = []

        class Observer(Callback):
            def after_forward(self, state, logger):
                recorded.append(state.outputs.dtype)

        trainer = make_trainer(precision="amp_bf16", callbacks=Observer(), max_duration="1ba")

        trainer.fit()

        assert recorded == [torch.bfloat16]
        assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}

    def test_fp16_scales_the_loss_and_trains(self, make_trainer):
        """The loss is scaled, gradients are unscaled before algorithms run, and weights change."""
        sizes = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                sizes.append(max(parameter.grad.abs().max().item() for parameter in state.model.parameters()))

        trainer = make_trainer(precision="amp_fp16", callbacks=Observer(), max_duration="1ba")
        before = make_trainer.weights(trainer)

        trainer.fit()

        assert trainer.state.scaler.get_scale() > 1
        assert sizes[0] < 10
        assert not torch.equal(before, make_trainer.weights(trainer))

    def test_unknown_precision_raises(self, make_trainer):
        """The error lists the precisions."""
        with pytest.raises(ValueError, match="precision must be one of fp32, amp_fp16"):
            make_trainer(precision="fp64")


class TestErrors:
    def test_callback_errors_propagate(self, make_trainer):
        """The error propagates after callbacks were closed."""

        class Fails(Callback):
            closed = False

            def batch_end(self, state, logger):
                raise KeyError("on purpose")

            def close(self, state, logger):
                self.closed = True

        fails = Fails()
        trainer = make_trainer(callbacks=fails, max_duration="1ep")

        with pytest.raises(KeyError, match="on purpose"):
            trainer.fit()

        assert fails.closed
        with pytest.raises(RuntimeError, match="closed"):
            trainer.fit()

    def test_closed_trainer(self, make_trainer):
        """A trainer that was closed raises also if its training is complete."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()
        trainer.close()

        with pytest.raises(RuntimeError, match="The engine is closed"):
            trainer.fit()

    def test_missing_data(self, make_trainer):
        """The error states the missing argument."""
        model = make_trainer.model()
        trainer = Trainer(
            model=model, optimizers=torch.optim.SGD(model.parameters(), lr=1), max_duration=1, progress_bar=False
        )

        with pytest.raises(ValueError, match="train_dataloader"):
            trainer.fit()

    def test_missing_duration(self, make_trainer):
        """The error states the missing argument."""
        with pytest.raises(ValueError, match="max_duration"):
            make_trainer().fit()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_duration": "0ep"}, "max_duration must be more than 0"),
            ({"max_duration": "0.5dur"}, "cannot be a fraction of itself"),
            ({"max_duration": "ten epochs"}, "number followed by a unit"),
            ({"scale_schedule_ratio": 0}, "scale_schedule_ratio must be more than 0"),
            ({"device_train_microbatch_size": 0}, "device_train_microbatch_size must be"),
            ({"device": "gpux"}, "device must be"),
            ({"device": "meta"}, "cannot be used here"),
            ({"train_dataloader": []}, "train_dataloader has no batches"),
            ({"eval_dataloader": []}, "The loader of 'eval' has no batches to evaluate on"),
            ({"train_subset_num_batches": 0}, "train_subset_num_batches must be"),
            ({"seed": -1}, "seed must be in"),
        ],
    )
    def test_values_out_of_range(self, make_trainer, options, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            make_trainer(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"algorithms": [Algorithm]}, r"write Algorithm\(\)"),
            ({"callbacks": ["LRMonitor"]}, "callbacks must be Callback objects"),
            ({"loggers": ["file"]}, "loggers must be LoggerDestination objects"),
            ({"optimizers": ["SGD"]}, "optimizers must be torch.optim.Optimizer objects"),
            ({"schedulers": ["cosine"], "max_duration": 1}, "schedulers must be"),
            ({"train_dataloader": 3}, "dataloader must be an iterable"),
        ],
    )
    def test_values_of_wrong_types(self, make_trainer, options, message):
        """Values of wrong types raise with their names."""
        with pytest.raises(TypeError, match=message):
            make_trainer(**options).fit()

    def test_plain_module_raises(self):
        """A module without a loss raises; the error states how to wrap it."""
        with pytest.raises(TypeError, match="ComposerClassifier"):
            Trainer(model=nn.Linear(2, 2))

    def test_missing_optimizer_warns(self, make_trainer):
        """Without an optimizer a default is used, with a warning that states it."""
        with pytest.warns(UserWarning, match=r"SGD.*lr=0.1") as warned:
            trainer = Trainer(model=make_trainer.model(), progress_bar=False, device="cpu")

        assert [warning.filename for warning in warned] == [__file__]
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.1


class TestSchedulers:
    def test_torch_schedulers_step_each_epoch(self, make_trainer):
        """By default torch schedulers step at the end of an epoch."""
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
        trainer = make_trainer(model=model, optimizers=optimizer, schedulers=scheduler, max_duration="2ep")

        trainer.fit()

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    def test_step_schedulers_every_batch(self, make_trainer):
        """step_schedulers_every_batch steps them after each batch."""
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        trainer = make_trainer(
            model=model,
            optimizers=optimizer,
            schedulers=scheduler,
            step_schedulers_every_batch=True,
            max_duration="3ba",
        )

        trainer.fit()

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)

    def test_functions_set_each_batch_by_its_number(self, make_trainer):
        """Batch k is trained with f(k)."""
        rates = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        trainer = make_trainer(
            schedulers=lambda state, ssr=1.0: 1 - state.timestamp.batch.value / 10,
            callbacks=Observer(),
            max_duration="4ba",
        )

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.09, 0.08, 0.07])


def test_clock_after_an_epoch(make_trainer):
    """After an epoch the clock has its samples, batches and the epoch."""
    trainer = make_trainer(max_duration="1ep")

    trainer.fit()

    counted = trainer.state.timestamp
    assert (counted.epoch, counted.batch, counted.sample, counted.batch_in_epoch) == (1, 5, 20, 0)
    assert isinstance(counted, Timestamp)


def test_event_order(make_trainer):
    """Callbacks are called in the order of the event diagram."""
    recorded = []

    class Everything(Callback):
        def run_event(self, event, state, logger):
            recorded.append(event)

    make_trainer(callbacks=Everything(), max_duration="1ba").fit()

    assert recorded[:4] == [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START]
    assert recorded[-1] is Event.FIT_END


class TestSchedulesOverSeveralFits:
    def test_extended_training_rescales_the_schedule(self, make_trainer):
        """After fit(duration=) the schedule uses the new length from the first batch."""
        rates = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        def falling(state, ssr=1.0):
            return 1 - state.timestamp.batch.value / state.max_duration.value

        trainer = make_trainer(schedulers=falling, callbacks=Observer(), max_duration="4ba")

        trainer.fit()
        trainer.fit(duration="4ba")

        assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.05, 0.0375, 0.025, 0.0125])

    def test_several_functions_raise(self, make_trainer):
        """Two functions for one learning rate raise."""
        constant = [lambda state, ssr=1.0: 1.0] * 2

        with pytest.raises(ValueError, match="returns the product"):
            make_trainer(schedulers=constant, max_duration="1ba")

    def test_function_without_an_optimizer_raises(self, make_trainer):
        """A function raises if every optimizer has a torch scheduler, which it would not affect."""
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        both = [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1), LinearWithWarmupScheduler("1ba")]

        with pytest.raises(ValueError, match="would change no learning rate"):
            make_trainer(model=model, optimizers=optimizer, schedulers=both, max_duration="2ep")

    def test_epoch_schedule_applies_from_the_first_batch(self, make_trainer):
        """A schedule by epoch changes with the epoch's first batch."""
        rates = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        trainer = make_trainer(
            schedulers=lambda state, ssr=1.0: 0.5 if state.timestamp >= "1ep" else 1.0,
            callbacks=Observer(),
            train_subset_num_batches=2,
            max_duration="2ep",
        )

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])

    def test_fraction_of_an_epoch_of_unknown_length_raises(self, make_trainer):
        """A warm-up within an epoch of unknown length raises."""
        from composer.optim import CosineAnnealingWithWarmupScheduler

        trainer = make_trainer(
            train_dataloader=Endless(), schedulers=CosineAnnealingWithWarmupScheduler("0.1dur"), max_duration="1ep"
        )

        with pytest.raises(ValueError, match="a data loader with a known length"):
            trainer.fit()


class Endless:
    """A loader without a length."""

    def __iter__(self):
        return iter([(torch.ones(2, 4), torch.ones(2, dtype=torch.long))] * 3)


class TestOptimizers:
    def test_optimizer_of_another_model_raises(self, make_trainer):
        """Its parameters are not in the model."""
        with pytest.raises(ValueError, match="SGD holds 4 parameters of 4 that are not the model's"):
            make_trainer(optimizers=torch.optim.SGD(make_trainer.model().parameters(), lr=1))

    def test_stale_optimizer_raises(self, make_trainer):
        """A layer that was replaced after the optimizer was created would not be trained."""
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        model.module[2] = nn.Linear(8, 3)

        with pytest.raises(ValueError, match="after the optimizer was made"):
            make_trainer(model=model, optimizers=optimizer)

    def test_partial_optimizer(self, make_trainer):
        """An optimizer with the last layer's parameters trains only those."""
        model = make_trainer.model()
        before = model.module[0].weight.detach().clone()

        make_trainer(
            model=model, optimizers=torch.optim.SGD(model.module[2].parameters(), lr=1), max_duration="1ba"
        ).fit()

        assert torch.equal(before, model.module[0].weight)

    def test_empty_list_raises(self, make_trainer):
        """An empty list of optimizers raises."""
        with pytest.raises(ValueError, match="optimizers is empty"):
            make_trainer(optimizers=[])


def test_replaced_loss(make_trainer):
    """The model's new loss is used from the next batch on."""
    used = []

    class Replacing(Callback):
        def batch_start(self, state, logger):
            if int(state.timestamp.batch) == 2:
                own = state.model.loss

                def loss(outputs, batch):
                    used.append(int(state.timestamp.batch))
                    return own(outputs, batch)

                state.model.loss = loss

    make_trainer(callbacks=Replacing(), max_duration="5ba").fit()

    assert used == [2, 3, 4]


def test_custom_token_count(make_trainer):
    """A subclass of DataSpec may count tokens in its method."""

    class Spec(DataSpec):
        def get_num_tokens_in_batch(self, batch, token_type="total"):
            return 100

    trainer = make_trainer(train_dataloader=Spec(make_trainer.loader()), max_duration="300tok")
    trainer.fit()

    assert (int(trainer.state.timestamp.batch), int(trainer.state.timestamp.token)) == (3, 300)


def test_uncounted_tokens_raise(make_trainer):
    """A training in tokens with batches without tokens raises."""
    trainer = make_trainer(max_duration="20tok")

    with pytest.raises(ValueError, match="a whole epoch had no token"):
        trainer.fit()


def test_error_at_init_closes_callbacks(make_trainer):
    """Callbacks are closed after an error at INIT."""
    closed = []

    class Fails(Callback):
        def init(self, state, logger):
            raise LookupError("on purpose")

        def close(self, state, logger):
            closed.append(True)

    with pytest.raises(LookupError, match="on purpose"):
        make_trainer(callbacks=Fails())

    assert closed == [True]


def test_recomputed_batch_has_equal_draws(make_trainer):
    """A batch that an optimizer computes several times has equal draws, and its samples are counted once."""
    draws, counted = [], []

    class Draw(Callback):
        def before_forward(self, state, logger):
            draws.append(torch.rand((), generator=state.generator(self)).item())

        def batch_end(self, state, logger):
            counted.append(int(state.train_metrics["MulticlassAccuracy"]._update_count))

    model = make_trainer.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    make_trainer(model=model, optimizers=optimizer, callbacks=Draw(), max_duration="1ba").fit()

    assert len(draws) > 1
    assert len(set(draws)) == 1
    assert counted == [1]


class TestSAM:
    """SAM computes a step's gradients twice: at the weights, and at the worst weights nearby."""

    def test_dropout_is_equal_in_both_passes(self, make_trainer):
        """If both passes have equal weights, dropout gives equal outputs."""
        outputs = []

        class Note(Callback):
            def after_forward(self, state, logger):
                outputs.append(state.outputs.detach().clone())

        model = make_trainer.model()
        model.module.append(nn.Dropout(0.5))

        make_trainer(model=model, algorithms=SAM(rho=1e-30), callbacks=Note(), max_duration="2ba").fit()

        assert len(outputs) == 4
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[2], outputs[3])
        assert not torch.equal(outputs[0] == 0, outputs[2] == 0)

    def test_logged_loss_is_unperturbed(self, make_trainer):
        """The first batch's logged loss equals the loss without SAM."""
        losses = []
        for algorithms in ([], [SAM(rho=5.0)]):
            torch.manual_seed(0)
            logger = InMemoryLogger()
            make_trainer(algorithms=algorithms, loggers=logger, max_duration="1ba").fit()
            losses.append(logger.get_timeseries("loss/train/total")["loss/train/total"][0])

        assert losses[0] == losses[1]


class LogsItself(ComposerClassifier):
    """A model that logs in its loss, as models of MosaicML Composer do."""

    def loss(self, outputs, batch, *args, **kwargs):
        if self.logger is not None:
            self.logger.log_metrics({"scores/largest": outputs.max()})
        return super().loss(outputs, batch, *args, **kwargs)


class TestLoggerOfTheModel:
    def test_logs_with_the_trainer(self, make_trainer):
        """Within a trainer a model logs to its destinations; before and after it, it has no logger."""
        model, history = LogsItself(nn.Linear(4, 3), num_classes=3, train_metrics=[]), InMemoryLogger()
        assert model.logger is None
        trainer = make_trainer(model=model, loggers=history, max_duration="3ba")

        trainer.fit()

        assert [clock.counts.batch for clock, _ in history.data["scores/largest"]] == [0, 1, 2]
        trainer.close()
        assert model.logger is None

    def test_the_latest_trainer_logs(self, make_trainer):
        """A model that a second trainer receives logs to that one."""
        model = LogsItself(nn.Linear(4, 3), num_classes=3, train_metrics=[])

        first, second = make_trainer(model=model), make_trainer(model=model)
        assert model.logger is second.logger
        first.close()

        assert model.logger is second.logger

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_copies_have_no_logger(self, make_trainer, duplicate):
        """The logger, which refers to the run, is neither copied nor pickled."""
        model = LogsItself(nn.Linear(4, 3), num_classes=3, train_metrics=[])
        trainer = make_trainer(model=model)

        again = duplicate(model)

        assert (model.logger, again.logger) == (trainer.logger, None)
        assert again.state_dict().keys() == model.state_dict().keys()

    def test_own_attributes_are_kept(self, make_trainer):
        """A logger of another kind that the model has is not replaced, and other modules get none."""
        model, other = LogsItself(nn.Linear(4, 3), num_classes=3, train_metrics=[]), logging.getLogger("mine")
        model.logger = other

        make_trainer(model=model)

        assert model.logger is other
