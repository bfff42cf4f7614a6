"""How long fit trains, where it goes on, and what it computes."""

import datetime
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
        """Training ends with the first batch at which the duration, in its own unit, is reached."""
        trainer = make_trainer(max_duration=duration)

        trainer.fit()

        assert trainer.state.timestamp.batch == batches

    def test_tokens_count(self, make_trainer):
        """A duration in tokens ends by what the data spec counts."""
        spec = DataSpec(make_trainer.loader(), get_num_tokens_in_batch=lambda batch: 10)
        trainer = make_trainer(train_dataloader=spec, max_duration="25tok")

        trainer.fit()

        assert trainer.state.timestamp.token == 30

    def test_clock_is_logged(self, make_trainer):
        """Batches and samples are logged with every batch, epochs as one begins, tokens where there are some."""
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

    def test_seconds_end_training(self, make_trainer):
        """A duration in seconds ends with the first batch after it, by the training's own clock."""
        trainer = make_trainer(max_duration="0.2sec")

        trainer.fit()

        spent = trainer.state.timestamp.total_wct
        assert datetime.timedelta(seconds=0.2) <= spent < datetime.timedelta(seconds=5)

    def test_seconds_are_those_of_the_training(self, make_trainer):
        """What callbacks do before the first epoch takes nothing from a duration in seconds."""

        class Slow(Callback):
            def fit_start(self, state, logger):
                time.sleep(0.3)

        trainer = make_trainer(callbacks=Slow(), max_duration="1ba")

        trainer.fit()

        assert trainer.state.timestamp.total_wct.total_seconds() < 0.3

    def test_clock_counts_the_time_of_batches(self, make_trainer):
        """The time of a batch is what it takes by another clock, callbacks included."""

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

    def test_nothing_left_returns_at_once(self, make_trainer):
        """A finished training is not trained on."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()
        before = make_trainer.weights(trainer)

        trainer.fit()

        assert torch.equal(before, make_trainer.weights(trainer))
        assert trainer.state.timestamp.batch == 5

    def test_duration_adds_to_what_is_done(self, make_trainer):
        """fit(duration=) trains so much longer, whatever was done before."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()

        trainer.fit(duration="3ba")

        assert trainer.state.timestamp.batch == 8

    def test_reset_time_begins_anew(self, make_trainer):
        """With reset_time the clock starts at zero and the whole duration is trained again."""
        trainer = make_trainer(max_duration="1ep")
        trainer.fit()

        trainer.fit(reset_time=True)

        assert trainer.state.timestamp.copy(total_wct=datetime.timedelta()).batch == 5
        assert trainer.state.timestamp.epoch == 1

    def test_stop_training_ends_with_the_batch(self, make_trainer):
        """A callback can end the training; the batch under way is finished."""

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
        """A training that ends within its warm-up ends like any other, for any unit of the schedule."""
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
    def test_a_ratio_with_nothing_to_stretch(self, make_trainer, ratio):
        """A ratio that fit is given alone is refused, as the length was stretched when the trainer was made."""
        trainer = make_trainer(max_duration="1ep")

        with pytest.raises(ValueError, match=r"scale_schedule_ratio=.* give duration or schedulers"):
            trainer.fit(scale_schedule_ratio=ratio)

    def test_subset_shortens_the_epoch(self, make_trainer):
        """An epoch has as many batches as train_subset_num_batches says."""
        trainer = make_trainer(max_duration="2ep", train_subset_num_batches=2)

        trainer.fit()

        assert trainer.state.timestamp.batch == 4

    def test_loader_without_a_length(self, make_trainer):
        """A loader that does not know its length ends its epoch when it has nothing more."""

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([(torch.ones(4), torch.tensor(1)) for _ in range(6)])

        trainer = make_trainer(train_dataloader=torch.utils.data.DataLoader(Stream(), batch_size=2), max_duration="2ep")

        trainer.fit()

        assert trainer.state.timestamp.batch == 6
        assert trainer.state.timestamp.epoch == 2


class TestGoingOn:
    def test_two_fits_equal_one(self, make_trainer):
        """Stopped in the middle of an epoch and called again, fit continues with bit-identical results."""
        whole = make_trainer(
            model=make_trainer.model(), train_dataloader=make_trainer.loader(shuffle=True), max_duration="13ba"
        )
        whole.fit()

        parts = make_trainer(model=make_trainer.model(), train_dataloader=make_trainer.loader(shuffle=True))
        for more in ("3ba", "4ba", "6ba"):
            parts.fit(duration=more)

        assert torch.equal(make_trainer.weights(whole), make_trainer.weights(parts))

    def test_epoch_starts_once(self, make_trainer):
        """Continuing in the middle of an epoch does not restart it."""

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

    def test_an_iteration_that_was_done_is_counted_after_a_resume(self, make_trainer, tmp_path):
        """A checkpoint of an epoch's end is older than its iteration's: the run that goes on counts that first."""
        make_trainer(max_duration="3iter", save_folder=str(tmp_path), run_name="run").fit()

        resumed = make_trainer(max_duration="3iter", load_path=str(tmp_path / "ep1-ba5"))
        resumed.fit()

        clock = resumed.state.timestamp
        assert (clock.iteration, clock.epoch, clock.batch, clock.epoch_in_iteration) == (3, 3, 15, 0)

    def test_a_checkpoint_saved_between_loading_and_training(self, make_trainer, tmp_path):
        """It contains the loaded data position: a run resumed from it produces bit-identical results."""
        options = {"train_dataloader": make_trainer.loader(shuffle=True), "max_duration": "2ep"}
        whole = make_trainer(
            **options, model=make_trainer.model(), save_folder=str(tmp_path / "whole"), save_interval="1ba"
        )
        whole.fit()
        between = make_trainer(
            **options, model=make_trainer.model(), load_path=str(tmp_path / "whole" / "ep0-ba3"), run_name="between"
        )
        copied = between.save_checkpoint(str(tmp_path / "copied"))

        resumed = make_trainer(**options, model=make_trainer.model(), load_path=copied)
        resumed.fit()

        assert resumed.state.timestamp.batch == 10
        assert torch.equal(make_trainer.weights(whole), make_trainer.weights(resumed))

    def test_a_loader_that_is_given_again_goes_on(self, make_trainer):
        """Passing the current loader to fit again does not restart its epoch."""
        whole = make_trainer(model=make_trainer.model(), train_dataloader=make_trainer.loader(shuffle=True))
        whole.fit(duration="8ba")
        loader = make_trainer.loader(shuffle=True)

        parts = make_trainer(model=make_trainer.model(), train_dataloader=None)
        for _ in range(4):
            parts.fit(train_dataloader=DataSpec(loader), duration="2ba")

        assert torch.equal(make_trainer.weights(whole), make_trainer.weights(parts))
        assert parts.state.timestamp.epoch == 1


class TestStep:
    def test_equals_a_loop_by_hand(self, make_trainer):
        """What is learnt is what the plain loop learns, bit for bit."""
        by_hand = make_trainer.model()
        optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
        for _ in range(2):
            for inputs, targets in make_trainer.loader():
                optimizer.zero_grad()
                nn.functional.cross_entropy(by_hand.module(inputs), targets).backward()
                optimizer.step()

        trainer = make_trainer(model=make_trainer.model(), max_duration="2ep")
        trainer.fit()

        expected = torch.cat([parameter.detach().flatten() for parameter in by_hand.parameters()])
        assert torch.equal(make_trainer.weights(trainer), expected)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
    def test_split_into_microbatches_makes_no_difference(self, make_trainer, size):
        """The weights are the same for any split of a batch, unequal parts included, up to rounding in float64."""

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

        whole, whole_loss = train(None)
        split, split_loss = train(size)

        torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(split_loss, whole_loss, rtol=1e-12, atol=1e-14)

    def test_the_batch_is_whole_again_after_its_microbatches(self, make_trainer):
        """Who looks at the batch when it is done sees all of it."""
        sizes = []

        class Look(Callback):
            def after_train_batch(self, state, logger):
                sizes.append(len(state.batch[0]))

        make_trainer(device_train_microbatch_size=1, callbacks=Look(), max_duration="2ba").fit()

        assert sizes == [4, 4]

    def test_several_optimizers_all_step(self, make_trainer):
        """Every optimizer changes its own parameters."""
        model = make_trainer.model()
        first, last = model.module[0], model.module[2]
        before = weights_of(model)
        trainer = make_trainer(
            model=model,
            optimizers=[torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(last.parameters())],
            max_duration="1ba",
        )

        trainer.fit()

        assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

    def test_optimizer_that_takes_a_closure(self, make_trainer):
        """An optimizer that computes the loss several times a step gets it computed, events included."""

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

    def test_loss_in_parts_is_summed_and_logged(self, make_trainer):
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


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


class TestPrecision:
    def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(self, make_trainer):
        """Autocast covers the forward pass, and not the weights."""
        seen = []

        class Look(Callback):
            def after_forward(self, state, logger):
                seen.append(state.outputs.dtype)

        trainer = make_trainer(precision="amp_bf16", callbacks=Look(), max_duration="1ba")

        trainer.fit()

        assert seen == [torch.bfloat16]
        assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}

    def test_fp16_scales_the_loss_and_trains(self, make_trainer):
        """The loss is scaled, gradients are not by the time algorithms see them, and weights change."""
        sizes = []

        class Look(Callback):
            def after_train_batch(self, state, logger):
                sizes.append(max(parameter.grad.abs().max().item() for parameter in state.model.parameters()))

        trainer = make_trainer(precision="amp_fp16", callbacks=Look(), max_duration="1ba")
        before = make_trainer.weights(trainer)

        trainer.fit()

        assert trainer.state.scaler.get_scale() > 1
        assert sizes[0] < 10
        assert not torch.equal(before, make_trainer.weights(trainer))

    def test_unknown_precision_is_refused(self, make_trainer):
        """The error names the precisions that there are."""
        with pytest.raises(ValueError, match="precision must be one of fp32, amp_fp16"):
            make_trainer(precision="fp64")


class TestErrors:
    def test_an_error_in_a_callback_ends_the_run_and_closes_it(self, make_trainer):
        """The error comes out as it is, after callbacks were closed."""

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

    def test_no_data(self, make_trainer):
        """Without data, fit says what to give."""
        model = make_trainer.model()
        trainer = Trainer(
            model=model, optimizers=torch.optim.SGD(model.parameters(), lr=1), max_duration=1, progress_bar=False
        )

        with pytest.raises(ValueError, match="train_dataloader"):
            trainer.fit()

    def test_no_duration(self, make_trainer):
        """Without a duration, fit says what to give."""
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
            ({"train_subset_num_batches": 0}, "train_subset_num_batches must be"),
            ({"seed": -1}, "seed must be in"),
        ],
    )
    def test_values_out_of_range(self, make_trainer, options, message):
        """Every bad value is refused at construction, by its name."""
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
    def test_values_of_the_wrong_kind(self, make_trainer, options, message):
        """Every argument of a wrong kind is refused, by its name."""
        with pytest.raises(TypeError, match=message):
            make_trainer(**options).fit()

    def test_a_plain_module_is_refused(self):
        """A module without a loss cannot be trained; the error says how to wrap it."""
        with pytest.raises(TypeError, match="ComposerClassifier"):
            Trainer(model=nn.Linear(2, 2))

    def test_missing_optimizer_warns(self, make_trainer):
        """Without an optimizer there is a default, and a warning that says which."""
        with pytest.warns(UserWarning, match=r"SGD.*lr=0.1") as warned:
            trainer = Trainer(model=make_trainer.model(), progress_bar=False, device="cpu")

        assert [warning.filename for warning in warned] == [__file__]
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.1


class TestSchedulers:
    def test_torch_schedulers_step_each_epoch(self, make_trainer):
        """By default torch's own schedulers step at the end of an epoch."""
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
        trainer = make_trainer(model=model, optimizers=optimizer, schedulers=scheduler, max_duration="2ep")

        trainer.fit()

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    def test_torch_schedulers_step_each_batch_if_asked(self, make_trainer):
        """step_schedulers_every_batch makes them step after each batch."""
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
        """Batch k is trained with f(k): the schedule does not lag a batch behind."""
        rates = []

        class Look(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        trainer = make_trainer(
            schedulers=lambda state, ssr=1.0: 1 - state.timestamp.batch.value / 10, callbacks=Look(), max_duration="4ba"
        )

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.09, 0.08, 0.07])


def test_clock_after_an_epoch(make_trainer):
    """After an epoch the clock has counted its samples, batches and the epoch itself."""
    trainer = make_trainer(max_duration="1ep")

    trainer.fit()

    counted = trainer.state.timestamp
    assert (counted.epoch, counted.batch, counted.sample, counted.batch_in_epoch) == (1, 5, 20, 0)
    assert isinstance(counted, Timestamp)


def test_events_may_be_named_by_text(make_trainer):
    """Whoever listens is called in the order of the drawing."""
    seen = []

    class Everything(Callback):
        def run_event(self, event, state, logger):
            seen.append(event)

    make_trainer(callbacks=Everything(), max_duration="1ba").fit()

    assert seen[:4] == [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START]
    assert seen[-1] is Event.FIT_END


class TestSchedulesOverSeveralFits:
    def test_a_longer_training_has_its_own_rates_from_its_first_batch(self, make_trainer):
        """When fit(duration=) makes the training longer, a schedule over its whole length is followed at once."""
        rates = []

        class Look(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        def falling(state, ssr=1.0):
            return 1 - state.timestamp.batch.value / state.max_duration.value

        trainer = make_trainer(schedulers=falling, callbacks=Look(), max_duration="4ba")

        trainer.fit()
        trainer.fit(duration="4ba")

        assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.05, 0.0375, 0.025, 0.0125])

    def test_several_functions_are_refused(self, make_trainer):
        """Two functions for one learning rate cannot both be right."""
        constant = [lambda state, ssr=1.0: 1.0] * 2

        with pytest.raises(ValueError, match="returns the product"):
            make_trainer(schedulers=constant, max_duration="1ba")

    def test_a_schedule_that_asks_for_the_epoch_is_followed_from_its_first_batch(self, make_trainer):
        """What changes with the epoch changes with the epoch's first batch, not with its second."""
        rates = []

        class Look(Callback):
            def after_train_batch(self, state, logger):
                rates.append(state.optimizers[0].param_groups[0]["lr"])

        trainer = make_trainer(
            schedulers=lambda state, ssr=1.0: 0.5 if state.timestamp >= "1ep" else 1.0,
            callbacks=Look(),
            train_subset_num_batches=2,
            max_duration="2ep",
        )

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])

    def test_a_part_of_an_epoch_of_unknown_length_is_refused(self, make_trainer):
        """A warm-up within an epoch that nobody knows the length of would never end."""
        from composer.optim import CosineAnnealingWithWarmupScheduler

        trainer = make_trainer(
            train_dataloader=Endless(), schedulers=CosineAnnealingWithWarmupScheduler("0.1dur"), max_duration="1ep"
        )

        with pytest.raises(ValueError, match="a data loader with a known length"):
            trainer.fit()


class Endless:
    """A loader that does not know its length."""

    def __iter__(self):
        return iter([(torch.ones(2, 4), torch.ones(2, dtype=torch.long))] * 3)


class TestOptimizers:
    def test_one_of_another_model_is_refused(self, make_trainer):
        """It would train what is not there."""
        with pytest.raises(ValueError, match="SGD holds 4 parameters of 4 that are not the model's"):
            make_trainer(optimizers=torch.optim.SGD(make_trainer.model().parameters(), lr=1))

    def test_one_made_before_the_model_was_changed_is_refused(self, make_trainer):
        """A layer that was replaced after the optimizer was made would never be trained."""
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        model.module[2] = nn.Linear(8, 3)

        with pytest.raises(ValueError, match="after the optimizer was made"):
            make_trainer(model=model, optimizers=optimizer)

    def test_one_with_a_part_of_the_model_is_fine(self, make_trainer):
        """Whoever gives only the last layer's parameters trains only those."""
        model = make_trainer.model()
        before = model.module[0].weight.detach().clone()

        make_trainer(
            model=model, optimizers=torch.optim.SGD(model.module[2].parameters(), lr=1), max_duration="1ba"
        ).fit()

        assert torch.equal(before, model.module[0].weight)

    def test_none_at_all_is_refused(self, make_trainer):
        """An empty list would train nothing."""
        with pytest.raises(ValueError, match="optimizers is empty"):
            make_trainer(optimizers=[])


def test_a_loss_that_is_replaced_on_the_way(make_trainer):
    """From the next batch on the model's new loss is used."""
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


def test_tokens_of_a_data_spec_of_ones_own(make_trainer):
    """A class of one's own may count tokens in its method."""

    class Spec(DataSpec):
        def get_num_tokens_in_batch(self, batch, token_type="total"):
            return 100

    trainer = make_trainer(train_dataloader=Spec(make_trainer.loader()), max_duration="300tok")
    trainer.fit()

    assert (int(trainer.state.timestamp.batch), int(trainer.state.timestamp.token)) == (3, 300)


def test_tokens_that_are_never_counted_are_refused(make_trainer):
    """A training in tokens, of batches without any, would never end."""
    trainer = make_trainer(max_duration="20tok")

    with pytest.raises(ValueError, match="a whole epoch had no token"):
        trainer.fit()


def test_an_error_at_init_closes_callbacks(make_trainer):
    """What was opened before the error is finished."""
    closed = []

    class Fails(Callback):
        def init(self, state, logger):
            raise LookupError("on purpose")

        def close(self, state, logger):
            closed.append(True)

    with pytest.raises(LookupError, match="on purpose"):
        make_trainer(callbacks=Fails())

    assert closed == [True]


def test_a_batch_that_is_computed_again_draws_the_same_and_is_measured_once(make_trainer):
    """However often an optimizer wants the gradients of a step, draws are equal and its samples count once."""
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


class TestLookingAround:
    """SAM computes a step's gradients twice: at the weights, and at the worst weights nearby."""

    def test_layers_drop_the_same_both_times(self, make_trainer):
        """Where both places are the same weights, dropout gives the same outputs, too."""
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

    def test_the_loss_that_is_logged_is_that_of_the_weights(self, make_trainer):
        """What is logged for the first batch is the loss that it has without SAM."""
        losses = []
        for algorithms in ([], [SAM(rho=5.0)]):
            torch.manual_seed(0)
            logger = InMemoryLogger()
            make_trainer(algorithms=algorithms, loggers=logger, max_duration="1ba").fit()
            losses.append(logger.get_timeseries("loss/train/total")["loss/train/total"][0])

        assert losses[0] == losses[1]
