"""fast_dev_run: a few batches of each kind, and no files."""

import pytest

from composer.callbacks import CheckpointSaver, ExportForInferenceCallback, SavePretrained
from composer.core import Callback, Event
from composer.loggers import FileLogger
from composer.optim import CosineAnnealingWithWarmupScheduler
from fixtures import make_loader, small_run, weights


class Count(Callback):
    """Counts the calls of each event."""

    def __init__(self):
        self.counts = dict.fromkeys(Event, 0)

    def run_event(self, event, state, logger):
        self.counts[event] += 1


def test_batches_of_each_kind():
    """Three batches are trained, evaluated and predicted, whatever the durations and intervals are."""
    count, loader = Count(), make_loader()
    trainer = small_run(
        fast_dev_run=3, max_duration="90ep", eval_dataloader=loader, eval_interval="70ba", callbacks=count
    )

    result = trainer.fit()
    evaluated_in_fit = count.counts[Event.EVAL_BATCH_END]
    trainer.eval()
    outputs = trainer.predict(loader)

    assert (result.steps, result.reason) == (3, "fast_dev_run=3 is complete; max_duration='90ep' is not reached")
    assert (count.counts[Event.BATCH_END], count.counts[Event.EPOCH_END], count.counts[Event.FIT_END]) == (3, 1, 1)
    assert (evaluated_in_fit, count.counts[Event.EVAL_BATCH_END], len(outputs)) == (3, 6, 3)


def test_writes_nothing(tmp_path, monkeypatch):
    """No checkpoint, no exported model and no file of a logger is written."""
    monkeypatch.chdir(tmp_path)
    trainer = small_run(
        fast_dev_run=True,
        max_duration="2ep",
        save_folder="checkpoints",
        save_best="eval/MulticlassAccuracy",
        run_name="first",
        autoresume=True,
        eval_dataloader=make_loader(),
        callbacks=[CheckpointSaver("others"), ExportForInferenceCallback("torchexport", "m.pt2"), SavePretrained("hf")],
        loggers=FileLogger("log.jsonl"),
    )

    trainer.fit()
    trainer.save_checkpoint_to_save_folder()
    trainer.close()

    assert list(tmp_path.iterdir()) == []


def test_schedule_is_that_of_the_complete_training():
    """The learning rates are those of the first batches of the training with epochs of three batches."""
    rates = []

    class Watch(Callback):
        def batch_start(self, state, logger):
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    trainer = small_run(
        fast_dev_run=3,
        max_duration="10ep",
        schedulers=CosineAnnealingWithWarmupScheduler("1ep"),
        callbacks=Watch(),
    )

    trainer.fit()

    assert rates == pytest.approx([0.0, 0.1 / 3, 0.2 / 3])


def test_checkpoint_to_load(tmp_path):
    """Of a checkpoint only the weights are loaded, so that a complete run trains three more batches."""
    trained = small_run(max_duration="2ep")
    trained.fit()
    path = trained.save_checkpoint(str(tmp_path / "done"))

    trainer = small_run(max_duration="2ep", load_path=path, fast_dev_run=3)

    assert weights(trainer).equal(weights(trained))
    assert trainer.fit().steps == 3
