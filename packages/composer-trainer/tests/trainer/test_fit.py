"""fit: duration, continuation and results."""

import datetime

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import LabelSmoothing
from composer.callbacks import NaNMonitor
from composer.core import Callback, DataSpec, Time
from composer.diagnostics import find_lr
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import ConstantScheduler
from fixtures import make_classifier, make_loader, small_run, weights


class TestNaN:
    @pytest.mark.parametrize("algorithms", [[], [LabelSmoothing(0.1)]])
    @pytest.mark.parametrize("max_duration", ["1ep", "2ba", "3ep"])
    def test_warns_if_no_label_counts(self, algorithms, max_duration):
        """A training whose labels are all ignored warns once, after an epoch or at the end."""
        data = TensorDataset(torch.rand(20, 4), torch.full((20,), -100))
        trainer = small_run(
            train_dataloader=DataLoader(data, batch_size=4), algorithms=algorithms, max_duration=max_duration
        )

        with pytest.warns(UserWarning, match=r"loss is 0 in all batches, because no label counts") as caught:
            trainer.fit()

        assert len(caught) == 1

    @pytest.mark.parametrize("first", [0, 1, 4, 130])
    def test_names_the_first_batch_as_the_monitor_does(self, first):
        """The warning has the first batch since which all losses are NaN, also in a long epoch."""
        batches = [(torch.rand(2, 4), torch.tensor([0, 1])) for _ in range(133)]
        batches[first][0].fill_(torch.nan)
        trainers = [small_run(train_dataloader=batches, callbacks=one) for one in ([], NaNMonitor())]
        message = rf"The training loss is not a number \(NaN\) since batch {first}, counted from 0"

        with pytest.warns(UserWarning, match=message):
            trainers[0].fit(duration="2ep")
        with pytest.raises(RuntimeError, match=message):
            trainers[1].fit(duration="2ep")


class TestDuration:
    @pytest.mark.parametrize(
        ("duration", "batches"),
        [("2ep", 10), ("7ba", 7), ("9sp", 3), (3, 15), (Time(1, "ep"), 5), ("1iter", 5)],
    )
    def test_trains_until_max_duration_is_reached(self, duration, batches):
        """Training ends with the first batch at which the duration, in its unit, is reached."""
        trainer = small_run(max_duration=duration)

        trainer.fit()

        assert trainer.state.timestamp.batch == batches

    def test_clock_is_logged(self):
        """Batches and samples are logged with every batch, epochs at their start, tokens if counted."""
        log, counted = InMemoryLogger(), InMemoryLogger()
        spec = DataSpec(make_loader(), get_num_tokens_in_batch=lambda batch: 10)

        small_run(max_duration="6ba", loggers=log).fit()
        small_run(train_dataloader=spec, max_duration="2ba", loggers=counted).fit()

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

    def test_duration_in_seconds(self):
        """A duration in seconds ends with the first batch after it, by the training clock."""
        trainer, after = small_run(max_duration="0.2sec"), []
        trainer.engine.on("batch_end", lambda state, _: after.append(state.timestamp.total_wct))

        trainer.fit()

        assert after[-2] < datetime.timedelta(seconds=0.2) <= trainer.state.timestamp.total_wct

    def test_completed_training_returns_immediately(self):
        """A finished training is not trained on."""
        trainer = small_run(max_duration="1ep")
        trainer.fit()
        before = weights(trainer)

        trainer.fit()

        assert torch.equal(before, weights(trainer))
        assert trainer.state.timestamp.batch == 5

    def test_fit_duration_is_added(self):
        """fit(duration=) extends the training by that duration."""
        trainer = small_run(max_duration="1ep")
        trainer.fit()

        trainer.fit(duration="3ba")

        assert trainer.state.timestamp.batch == 8

    def test_reset_time(self):
        """With reset_time the clock starts at zero and the complete duration is trained again."""
        trainer = small_run(max_duration="1ep")
        trainer.fit()

        trainer.fit(reset_time=True)

        assert trainer.state.timestamp.copy(total_wct=datetime.timedelta()).batch == 5
        assert trainer.state.timestamp.epoch == 1

    def test_reset_time_after_a_stop(self):
        """The duration is that of the Trainer again, and not where the first training was stopped."""
        trainer = small_run(max_duration="2ep")
        subscription = trainer.engine.on("batch_end", lambda state, _: state.stop_training("enough"))
        trainer.fit()
        stopped_at = int(trainer.state.timestamp.batch)
        subscription.remove()

        trainer.fit(reset_time=True)

        assert (stopped_at, int(trainer.state.timestamp.batch)) == (1, 10)

    def test_stop_training(self):
        """A callback can stop the training; the current batch is completed."""

        class StopAtThree(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch == 3:
                    state.stop_training()

        trainer = small_run(max_duration="10ep", callbacks=StopAtThree())

        trainer.fit()

        assert trainer.state.timestamp.batch == 3

    def test_scale_schedule_ratio_shortens_the_training(self):
        """Half the ratio is half the length."""
        trainer = small_run(max_duration="4ep", scale_schedule_ratio=0.5)

        trainer.fit()

        assert trainer.state.timestamp.epoch == 2

    def test_subset_shortens_the_epoch(self):
        """An epoch has train_subset_num_batches batches."""
        trainer = small_run(max_duration="2ep", train_subset_num_batches=2)

        trainer.fit()

        assert trainer.state.timestamp.batch == 4

    def test_loader_without_a_length(self):
        """A loader without a length ends its epoch when it is exhausted."""

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([(torch.ones(4), torch.tensor(1)) for _ in range(6)])

        trainer = small_run(train_dataloader=torch.utils.data.DataLoader(Stream(), batch_size=2), max_duration="2ep")

        trainer.fit()

        assert trainer.state.timestamp.batch == 6
        assert trainer.state.timestamp.epoch == 2


def plain_settings(trainer):
    """Return what arguments of ``fit`` change."""
    state, schedule = trainer.state, trainer._schedule
    settings = (state.max_duration, state.device_train_microbatch_size, state.precision, state.timestamp)
    data = (state.train_dataloader, state.dataloader, state.dataloader_label, trainer._data.batches)
    evaluated = (state.evaluators, [*state.eval_metrics])
    return (*settings, *data, *evaluated, schedule.schedulers, schedule.end_of_part)


class TestContinueTraining:
    def test_two_fits_equal_one(self):
        """After a stop within an epoch, another fit continues with bit-identical results."""
        complete = small_run(model=make_classifier(), train_dataloader=make_loader(shuffle=True), max_duration="13ba")
        complete.fit()

        parts = small_run(model=make_classifier(), train_dataloader=make_loader(shuffle=True))
        for more in ("3ba", "4ba", "6ba"):
            parts.fit(duration=more)

        assert torch.equal(weights(complete), weights(parts))

    def test_the_rest_after_a_part(self):
        """A fit without a duration trains to ``max_duration``, also after one with a part of it."""
        complete = small_run(model=make_classifier(), train_dataloader=make_loader(shuffle=True), max_duration="4ep")
        complete.fit()

        parts = small_run(model=make_classifier(), train_dataloader=make_loader(shuffle=True), max_duration="4ep")
        parts.fit(duration="1ep")
        parts.fit()

        assert parts.state.timestamp.epoch == 4
        assert torch.equal(weights(complete), weights(parts))

    @pytest.mark.parametrize("reset_time", [False, True])
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"train_dataloader": []}, "train_dataloader has no batches"),
            ({"precision": "amp_fp8"}, "cannot change 'fp32'"),
        ],
    )
    def test_rejected_call(self, wrong, error, reset_time):
        """A call that raises an error changes neither the data, nor their position, nor the clock or the settings."""
        trainer = small_run(max_duration="3ep", precision="fp32", device_train_microbatch_size=2)
        trainer.fit(duration="1ep")
        data = {"train_dataloader": make_loader(), "train_dataloader_label": "other", "eval_dataloader": make_loader()}
        changes = {"precision": "amp_bf16", "device_train_microbatch_size": 4, "schedulers": ConstantScheduler()}
        before = plain_settings(trainer)

        with pytest.raises(ValueError, match=error):
            trainer.fit(duration="1ep", reset_time=reset_time, **(data | changes | wrong))

        assert plain_settings(trainer) == before
        assert trainer.fit().steps == 10

    def test_epoch_starts_once(self):
        """Continuing within an epoch does not restart it."""

        class Count(Callback):
            starts = ends = 0

            def epoch_start(self, state, logger):
                self.starts += 1

            def epoch_end(self, state, logger):
                self.ends += 1

        count = Count()
        trainer = small_run(callbacks=count)

        trainer.fit(duration="3ba")
        trainer.fit(duration="2ba")

        assert (count.starts, count.ends) == (1, 1)

    def test_same_loader_in_fit_continues(self):
        """Passing the current loader to fit again does not restart its epoch."""
        complete = small_run(model=make_classifier(), train_dataloader=make_loader(shuffle=True))
        complete.fit(duration="8ba")
        loader = make_loader(shuffle=True)

        parts = small_run(model=make_classifier(), train_dataloader=None)
        for _ in range(4):
            parts.fit(train_dataloader=DataSpec(loader), duration="2ba")

        assert torch.equal(weights(complete), weights(parts))
        assert parts.state.timestamp.epoch == 1


class TestModes:
    @pytest.mark.parametrize("use", ["fit", "find_lr"])
    def test_frozen_norms_stay_in_evaluation_mode(self, use):
        """The statistics of a frozen norm that is in evaluation mode when training begins do not change."""
        frozen = nn.BatchNorm1d(8).eval().requires_grad_(False)
        model = ComposerClassifier(
            nn.Sequential(nn.LazyLinear(8), frozen, nn.Dropout(), nn.Linear(8, 3)), num_classes=3
        )
        data = [(torch.rand(4, 4) + 5, torch.zeros(4, dtype=torch.long))] * 8
        model.module(data[0][0])
        before, modes = frozen.running_mean.clone(), [module.training for module in model.modules()]

        trainer = small_run(model=model, train_dataloader=data, max_duration="1ep")
        trainer.fit() if use == "fit" else find_lr(trainer)

        assert torch.equal(frozen.running_mean, before)
        assert [module.training for module in model.modules()] == modes

    @pytest.mark.parametrize("use", ["fit", "find_lr", "load_weights"])
    def test_base_model_in_evaluation_mode(self, use, tmp_path):
        """A base model as ``from_pretrained`` returns it trains under a new head, also after an evaluation."""
        base, trains = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout()).eval(), []
        model = ComposerClassifier(nn.Sequential(base, nn.Linear(8, 3)), num_classes=3)
        data = [(torch.rand(4, 4), torch.zeros(4, dtype=torch.long))] * 2
        settings = {"model": model, "train_dataloader": data, "eval_dataloader": data}
        if use == "load_weights":
            small_run(**settings).save_checkpoint(tmp_path / "weights", weights_only=True)
            settings |= {"load_path": tmp_path / "weights", "load_weights_only": True}
        trainer = small_run(**settings, max_duration="4ba", eval_interval="2ba")
        base[2].register_forward_pre_hook(lambda *_: trains.append({module.training for module in base.modules()}))

        find_lr(trainer) if use == "find_lr" else trainer.fit()

        by_fit = [{True}] * 2 + [{False}] * 2
        assert trains == by_fit * 2 if use in {"fit", "load_weights"} else trains == [{True}] * len(trains) != []
