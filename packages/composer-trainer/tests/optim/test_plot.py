"""Plots of schedules match the rates of a run."""

import pytest
import torch

from composer.callbacks import LRMonitor
from composer.loggers import InMemoryLogger
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    InverseSquareRootScheduler,
    LinearScheduler,
    MultiStepScheduler,
    StepScheduler,
    WarmupStableDecayScheduler,
    plot_schedule,
)
from fixtures import make_classifier, trained, vector_batches

matplotlib = pytest.importorskip("matplotlib", reason="it is what draws, and optional")


@pytest.fixture(autouse=True)
def _agg():
    """Draw into memory, and close all figures."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def drawn(axes):
    """Return each line's points by its label."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.get_lines()}


def rates_of_a_run(schedulers, max_duration, batches, lr, **options):
    """Return the learning rates of a real training."""
    model, history = make_classifier(), InMemoryLogger()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = {"train_dataloader": vector_batches(batches), "max_duration": max_duration}
    training = {"optimizers": optimizer, "schedulers": schedulers(optimizer), "callbacks": LRMonitor()}
    trained(model=model, loggers=history, **data, **training, **options)
    return history.get_timeseries("lr-SGD/group0")["lr-SGD/group0"]


class TestPlotSchedule:
    @pytest.mark.parametrize("ratio", [1.0, 0.5])
    @pytest.mark.parametrize(
        "schedule",
        [
            CosineAnnealingWithWarmupScheduler("3ba", t_max="3ep", alpha_f=0.1),
            WarmupStableDecayScheduler("3ba", "0.3dur"),
            InverseSquareRootScheduler("3ba", "1ep"),
        ],
        ids=lambda schedule: type(schedule).__name__,
    )
    def test_matches_a_training(self, schedule, ratio):
        """Each batch of a training has the plotted rate, also the last."""
        axes = plot_schedule(schedule, "4ep", batches_in_epoch=5, scale_schedule_ratio=ratio, base_lr=0.2)

        trained = rates_of_a_run(lambda _: schedule, "4ep", 5, 0.2, scale_schedule_ratio=ratio)
        ((where, rates),) = drawn(axes).values()
        assert rates == pytest.approx([*trained, trained[-1]])
        assert where == pytest.approx([place / 5 for place in range(len(trained) + 1)])

    @pytest.mark.parametrize("every_batch", [False, True])
    def test_torch_schedulers(self, every_batch):
        """A function that creates a torch scheduler is plotted as the trainer steps it."""

        def make(optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, 2)

        axes = plot_schedule(make, "4ep", batches_in_epoch=3, base_lr=0.2, step_schedulers_every_batch=every_batch)

        trained = rates_of_a_run(make, "4ep", 3, 0.2, step_schedulers_every_batch=every_batch)
        _, rates = drawn(axes)["make"]
        assert rates[:-1] == pytest.approx(trained)

    def test_labels(self):
        """Each schedule has a line and its name in the legend."""
        schedules = {"warm": CosineAnnealingWithWarmupScheduler("2ba"), "line": LinearScheduler()}

        axes = plot_schedule(schedules, "10ba")

        assert list(drawn(axes)) == ["warm", "line"]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["warm", "line"]

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            (([], "4ep"), {}, ValueError, "schedulers must be at least one schedule, got none"),
            ((0.5, "4ep"), {}, TypeError, r"schedulers must be functions f\(state, ssr\).*got 0\.5"),
            ((torch.optim.lr_scheduler.StepLR, "4ep"), {}, TypeError, "Write lambda optimizer"),
            ((LinearScheduler(), "0ep"), {}, ValueError, "max_duration must be a length of time"),
            ((LinearScheduler(), "1dur"), {}, ValueError, "max_duration must be a length of time"),
            ((LinearScheduler(), "4ep"), {"batches_in_epoch": 0}, ValueError, "batches_in_epoch must be at least 1"),
            ((LinearScheduler(), "4ep"), {"num_points": 1}, ValueError, "num_points must be at least 2"),
            ((LinearScheduler(), "4ep"), {"scale_schedule_ratio": 0}, ValueError, "scale_schedule_ratio must be more"),
            ((StepScheduler("5ba"), "4ep"), {}, ValueError, "step_size=5ba cannot be drawn over 4ep.*batches_in_epoch"),
            ((ExponentialScheduler(0.9), "40ba"), {}, ValueError, "decay_period=1ep cannot be drawn over 40ba"),
            ((MultiStepScheduler(["1ep", "9sp"]), "4ep"), {}, ValueError, "milestones=9sp cannot be drawn"),
            ((StepScheduler("9sp"), "4ep"), {"batches_in_epoch": 5}, ValueError, "step_size=9sp cannot be drawn"),
            (
                (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), "4ba"),
                {},
                ValueError,
                "a torch scheduler.*in a run of 4ba it is not known when it steps",
            ),
        ],
    )
    def test_invalid_arguments_raise(self, arguments, options, error, message):
        """The error has the argument's name."""
        with pytest.raises(error, match=message):
            plot_schedule(*arguments, **options)
