"""ReduceLROnPlateau in real trainings, compared with torch's scheduler."""

import math
from functools import partial

import pytest
import torch
from torchmetrics import Metric

from composer.callbacks import ReduceLROnPlateau
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler
from fixtures import small_run
from fixtures.runs import record

SCRIPT = [1.0, 2.0, 2.0, 1.5, 2.1, 2.10001, 2.0, math.nan, 1.0, 3.0, 3.0, 3.0, 2.9, 2.8, 2.7]
WORSE_IS_MORE = [0.5, 0.4, 0.4, 0.45, 0.3, 0.29999, 0.3, 0.35, 0.2, 0.2, 0.2, 0.21, 0.2, 0.2, 0.2]


class Score(Metric):
    """A metric that returns the next value of a list with each evaluation."""

    full_state_update = False
    higher_is_better = True

    def __init__(self, script):
        super().__init__()
        self.script, self.reads = script, 0

    def update(self, *_):
        pass

    def compute(self):
        self.reads += 1
        return torch.tensor(self.script[self.reads - 1], dtype=torch.float64)


class Error(Score):
    higher_is_better = False


def make(callback, script=SCRIPT, *, score=Score, start=0, optimizer=torch.optim.SGD, **options):
    """Return a trainer that evaluates after each of its epochs of five batches, one for each value."""
    torch.manual_seed(0)
    metric = score(script)
    metric.reads = start
    model = ComposerClassifier(torch.nn.Linear(4, 3), train_metrics=[], val_metrics={"Score": metric})
    data = [(torch.ones(2, 4), torch.tensor([0, 1]))] * 5
    settings = {"train_dataloader": data, "eval_dataloader": data[:1], "max_duration": f"{len(script)}ep"}
    settings["optimizers"] = optimizer(model.parameters(), lr=0.1)
    return small_run(model=model, callbacks=callback, **settings | options)


def rate(trainer):
    return trainer.state.optimizers[0].param_groups[0]["lr"]


def rates_of_torch(script, mode, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, found = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, eps=0.0, **options), []
    for value in script:
        scheduler.step(value)
        found.append(optimizer.param_groups[0]["lr"])
    return found


class TestRates:
    @pytest.mark.parametrize(
        "options",
        [
            {"patience": 0},
            {"patience": 1, "factor": 0.5},
            {"patience": 2, "threshold": 0.1},
            {"patience": 0, "cooldown": 2, "min_lr": 0.02, "factor": 0.3},
        ],
    )
    @pytest.mark.parametrize("mode", ["max", "min"])
    def test_equal_those_of_torch(self, options, mode):
        """The direction is that of the metric, and after each evaluation the rate is that of torch's scheduler."""
        script = SCRIPT if mode == "max" else WORSE_IS_MORE

        callback = ReduceLROnPlateau("eval/Score", **options)
        trainer, found = make(callback, script, score=Score if mode == "max" else Error), []

        for _ in script:
            trainer.fit(duration="1ep")
            found.append(rate(trainer))

        assert found == pytest.approx(rates_of_torch(script, mode, **options))
        assert found[-1] < 0.1

    def test_beside_a_schedule(self):
        """A schedule multiplies the reduced rate."""
        found = record("batch_start", lambda state: state.optimizers[0].param_groups[0]["lr"])
        callbacks = [ReduceLROnPlateau("eval/Score", factor=0.5, patience=0), found]

        make(callbacks, [1.0, 0.0, 2.0, 3.0], schedulers=LinearScheduler(alpha_f=0.0)).fit()

        rates = [0.1] * 10 + [0.05] * 10  # reduced after the second epoch
        assert found.values == pytest.approx([rate * (1 - batch / 20) for batch, rate in enumerate(rates)])

    @pytest.mark.parametrize("optimizer", [DecoupledAdamW, DecoupledSGDW])
    def test_decoupled_weight_decay_follows(self, optimizer):
        """The fraction of the weights that a step removes is reduced with the rate, also beside a schedule."""

        def rate_and_fraction(state):
            (group,) = state.optimizers[0].param_groups
            return group["lr"], group["lr"] / group["initial_lr"] * group["weight_decay"]

        found = record("batch_start", rate_and_fraction)
        callbacks = [ReduceLROnPlateau("eval/Score", factor=0.5, patience=0, min_lr=0.02), found]
        settings = {"optimizer": partial(optimizer, weight_decay=1e-4), "schedulers": LinearScheduler(alpha_f=0.5)}
        make(callbacks, [1.0, 0.0, 0.0, 0.0, 0.0], **settings).fit()

        assert found.values[-1][0] < 0.02
        for rate, fraction in found.values:
            assert fraction == pytest.approx(rate * 1e-4 / 0.1)

    def test_resumed_training_is_identical(self, tmp_path):
        """Rates and weights of a resumed training are those of an uninterrupted one."""
        options = {"factor": 0.5, "patience": 1}
        uninterrupted = make(ReduceLROnPlateau("eval/Score", **options))
        uninterrupted.fit()
        first = make(ReduceLROnPlateau("eval/Score", **options), save_folder=str(tmp_path), save_interval="1ep")
        first.fit(duration="7ep")
        first.close()

        second = make(ReduceLROnPlateau("eval/Score", **options), start=7, load_path=str(tmp_path))
        second.fit()

        assert rate(uninterrupted) == rate(second) < 0.1
        weights = [trainer.state.model.module.weight for trainer in (uninterrupted, second)]
        assert torch.equal(*weights)


class TestErrors:
    def test_scheduler_of_torch(self):
        """A scheduler of torch would overwrite the rates."""
        trainer = make(ReduceLROnPlateau("eval/Score"))
        steps = torch.optim.lr_scheduler.StepLR(trainer.state.optimizers[0], 2)
        with pytest.raises(ValueError, match=r"StepLR of torch sets the learning rates itself"):
            trainer.fit(schedulers=steps)

    def test_settings(self):
        """Unknown metrics and values out of range raise."""
        with pytest.raises(ValueError, match=r"did you mean 'eval/Score'"):
            make(ReduceLROnPlateau("eval/Scores")).fit()
        with pytest.raises(ValueError, match=r"factor must"):
            ReduceLROnPlateau("eval/Score", factor=1.0)
        with pytest.raises(ValueError, match=r"patience must"):
            ReduceLROnPlateau("eval/Score", patience=-1)

    def test_scheduler_of_torch_as_a_scheduler(self):
        """The error names the callback."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        with pytest.raises(TypeError, match=r"composer\.callbacks\.ReduceLROnPlateau\(monitor\)"):
            make(None, schedulers=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
