"""A callback or logger that is used in a second Trainer works like a new one."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from composer import callbacks
from composer.core import LoggerDestination
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, TensorboardLogger
from fixtures import make_classifier, make_loader, small_run

COMPONENTS = {
    "ActivationMonitor": lambda folder: callbacks.ActivationMonitor("3ba", only_log_wandb=False),
    "CheckpointSaver": lambda folder: callbacks.CheckpointSaver(f"{folder}/{{run_name}}"),
    "CostMonitor": lambda folder: callbacks.CostMonitor(),
    "EarlyStopper": lambda folder: callbacks.EarlyStopper("MulticlassAccuracy", "eval"),
    "GradientNoiseScale": lambda folder: callbacks.GradientNoiseScale(batch_log_interval=2),
    "LRMonitor": lambda folder: callbacks.LRMonitor(),
    "NaNMonitor": lambda folder: callbacks.NaNMonitor(),
    "OptimizerMonitor": lambda folder: callbacks.OptimizerMonitor(batch_log_interval=2),
    "RuntimeEstimator": lambda folder: callbacks.RuntimeEstimator(),
    "SpeedMonitor": lambda folder: callbacks.SpeedMonitor(),
    "ThresholdStopper": lambda folder: callbacks.ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.99),
    "ConsoleLogger": lambda folder: ConsoleLogger("4ba", stream=io.StringIO()),
    "FileLogger": lambda folder: FileLogger(f"{folder}/{{run_name}}.txt", capture_stdout=False),
    "InMemoryLogger": lambda folder: InMemoryLogger(),
    "TensorboardLogger": lambda folder: TensorboardLogger(f"{folder}/runs"),
}
OWN = {
    "CheckpointSaver": lambda one: [Path(path).name for path in one.saved_checkpoints],
    "CostMonitor": lambda one: {(cost.component, cost.event): cost.calls for cost in one.table()},
    "EarlyStopper": lambda one: (one.best, one.stopped_at),
    "ThresholdStopper": lambda one: (one.last, one.stopped_at),
    "ConsoleLogger": lambda one: one.stream.getvalue().splitlines()[-1],
    "FileLogger": lambda one: [json.loads(line).get("metrics") for line in one.path.read_text().splitlines()],
    "InMemoryLogger": lambda one: {name: [float(value) for _, value in values] for name, values in one.data.items()},
    "TensorboardLogger": lambda one: Path(one.run_id).name,
}
"""What is compared besides the logs."""


def trained_with(component, name, *, is_broken_off=False):
    """Train with a component, or until an error in the second batch, and return the logs and the component's own."""
    recorder = InMemoryLogger()
    is_logger = isinstance(component, LoggerDestination)

    def fail(state, logger):
        if is_broken_off and state.timestamp.batch == 1:
            raise RuntimeError("broken off")

    with small_run(
        model=make_classifier(),
        eval_dataloader=make_loader(),
        max_duration="3ep",
        device_train_microbatch_size=2,
        callbacks=[] if is_logger else [component],
        loggers=[component, recorder] if is_logger else [recorder],
        run_name=name,
        auto_log_hparams=False,
    ) as trainer:
        trainer.engine.on("after_train_batch", fail)
        with contextlib.suppress(RuntimeError) if is_broken_off else contextlib.nullcontext():
            trainer.fit()
    logged = {
        name: [(int(clock.batch), str(value)) for clock, value in values] for name, values in recorder.data.items()
    }
    return logged, OWN.get(type(component).__name__, lambda _: None)(component)


@pytest.mark.parametrize("is_broken_off", [False, True], ids=["ended", "broken off"])
@pytest.mark.parametrize("name", COMPONENTS)
def test_in_a_second_trainer(name, is_broken_off, clock, tmp_path):
    """After a completed or aborted run, a component works in a second trainer like a new one."""
    clock.step = 1.0  # with each reading, so that measurements are the same each time
    expected = trained_with(COMPONENTS[name](tmp_path / "new"), "second")
    used = COMPONENTS[name](tmp_path / "used")
    trained_with(used, "first", is_broken_off=is_broken_off)

    assert trained_with(used, "second") == expected


@pytest.mark.parametrize("name", ["FileLogger", "TensorboardLogger"])
def test_logger_of_an_open_run_raises(name, tmp_path):
    """A logger that another run still uses raises."""
    used = COMPONENTS[name](tmp_path)
    small_run(loggers=used)

    with pytest.raises(RuntimeError, match=f"{name} is used by another run that is not closed"):
        small_run(loggers=used)
