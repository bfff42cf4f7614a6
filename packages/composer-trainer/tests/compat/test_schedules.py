"""Learning rates of MosaicML Composer, compared with those that were measured there."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.compat import lag_schedules
from composer.compat.schedules import check_same_unit
from composer.core import Time
from composer.models import ComposerClassifier
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
)


def by_epoch(state, ssr=1.0):
    return 1 / (1 + int(state.timestamp.epoch))


def by_batch_in_epoch(state):
    return 1 / (1 + int(state.timestamp.batch_in_epoch))


def by_sample(state, ssr=1.0):
    return 1 / (1 + int(state.timestamp.sample))


def by_torch(optimizer):
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


# The rates that optimizers had in `before_train_batch` of MosaicML Composer 0.32.1, by the program below: three epochs
# of four batches of four samples, and a learning rate of 1.
MEASURED = [
    (
        LinearWithWarmupScheduler("4ba"),
        {},
        [0, 0, 0.25, 0.5, 0.75, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25],
    ),
    (
        CosineAnnealingWithWarmupScheduler("2ba"),
        {},
        [0, 0, 0.5, 1, 0.9755, 0.9045, 0.7939, 0.6545, 0.5, 0.3455, 0.2061, 0.0955],
    ),
    (MultiStepScheduler(["1ep", "2ep"]), {}, [1] * 5 + [0.1] * 4 + [0.01] * 3),
    (LinearWithWarmupScheduler("4ba"), {"scale_schedule_ratio": 0.6667}, [0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5]),
    (by_epoch, {}, [1] * 5 + [0.5] * 4 + [0.3333] * 3),
    (by_batch_in_epoch, {}, [1, 1, 0.5, 0.3333, 0.25, 1, 0.5, 0.3333, 0.25, 1, 0.5, 0.3333]),
    (by_sample, {}, [1, 1, 0.2, 0.1111, 0.0769, 0.0588, 0.0476, 0.04, 0.0345, 0.0303, 0.027, 0.0244]),
    (LinearScheduler(), {"step_schedulers_every_batch": False}, [1] * 4 + [0.6667] * 4 + [0.3333] * 4),
    (by_epoch, {"step_schedulers_every_batch": False}, [1] * 8 + [0.5] * 4),
    (by_torch, {}, [1] * 4 + [0.5] * 4 + [0.3333] * 4),
]


def rates_of(scheduler, step_schedulers_every_batch=True, **settings):
    """Return the rate of each batch."""
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = by_torch(optimizer) if scheduler is by_torch else scheduler
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.randn(16, 2), torch.randint(2, (16,))), batch_size=4),
        max_duration="3ep",
        optimizers=optimizer,
        schedulers=lag_schedules(given, step_schedulers_every_batch=step_schedulers_every_batch),
        step_schedulers_every_batch=None if scheduler is by_torch else step_schedulers_every_batch,
        device="cpu",
        progress_bar=False,
        **settings,
    )
    rates = []
    trainer.engine.on("before_train_batch", lambda state, _: rates.append(state.optimizers[0].param_groups[0]["lr"]))
    trainer.fit()
    return rates


@pytest.mark.parametrize(("scheduler", "settings", "rates"), MEASURED)
def test_rates_are_those_of_composer(scheduler, settings, rates):
    """Each batch has the rate that was measured."""
    assert rates_of(scheduler, **settings) == pytest.approx(rates, abs=5e-5)


@pytest.mark.parametrize("scheduler", [LinearWithWarmupScheduler("4ba"), by_sample])
@pytest.mark.parametrize(("interval", "saved", "done"), [("3ba", "ep0-ba3", 3), ("1ep", "ep1-ba4", 4)])
def test_a_resumed_run_has_the_same_rates(scheduler, interval, saved, done, tmp_path):
    """From within and from the end of an epoch, a run continues with the rate of the batch before."""
    rates = rates_of(scheduler, save_folder=tmp_path, save_interval=interval)

    assert rates_of(scheduler, load_path=tmp_path / saved) == rates[done:]


def test_several_schedulers():
    """A list is returned in its order; schedulers of torch are returned as they are."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    of_torch = by_torch(optimizer)

    first, second = lag_schedules([of_torch, by_epoch])

    assert first is of_torch
    assert second is not by_epoch


@pytest.mark.parametrize(
    ("t_warmup", "t_max", "is_right"),
    [("1ba", "2ba", True), ("1tok", "2tok", True), ("1ba", "2sp", False), ("1ba", "2ep", False), ("1ep", "2ep", False)],
)
def test_units_of_a_schedule(t_warmup, t_max, is_right):
    """A warm-up and a schedule have the same unit, and none in epochs is left."""
    times = Time.from_timestring(t_warmup), Time.from_timestring(t_max)

    if is_right:
        check_same_unit(*times)
    else:
        with pytest.raises(ValueError, match=f"got {t_warmup} and {t_max}"):
            check_same_unit(*times)
