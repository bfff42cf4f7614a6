"""What a run computes and counts in each batch."""

import contextlib
import copy
import signal

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.algorithms import SeqLengthWarmup
from composer.core import Callback
from composer.functional import soft_cross_entropy
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from fixtures import make_classifier, make_loader, small_run, trained
from fixtures.processes import run_processes


def test_tokens_are_counted_after_algorithms():
    """A duration in tokens counts those that algorithms leave in the batch."""

    class Model(ComposerModel):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 2)

        def forward(self, batch):
            return self.embedding(batch["input_ids"])

        def loss(self, outputs, batch):
            return outputs.mean()

    rows = [{"input_ids": torch.full((32,), row)} for row in range(8)]
    logger = InMemoryLogger()
    model = Model()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=4),
        max_duration="96tok",
        algorithms=SeqLengthWarmup(duration=1.0, min_seq_length=8, max_seq_length=8),
        loggers=logger,
        progress_bar=False,
    )

    trainer.fit()

    assert (int(trainer.state.timestamp.batch), int(trainer.state.timestamp.sample)) == (3, 12)
    assert [tokens for _, tokens in logger.data["time/token"]] == [0, 32, 64]


class TestTrainMetrics:
    """The training metrics of an epoch in which a run is stopped."""

    def run(self, **options):
        """Return a trainer, and its logger."""
        torch.manual_seed(0)
        logger = InMemoryLogger()
        return small_run(train_metrics=None, loggers=logger, max_duration="2ep", **options), logger

    def logged(self, logger):
        return [(int(clock.batch), float(value)) for clock, value in logger.data["metrics/train/MulticlassAccuracy"]]

    def test_resumed_run_counts_all_batches(self, tmp_path):
        """A run that was stopped by a duration and resumed logs the metrics of complete epochs."""
        uninterrupted, expected = self.run()
        uninterrupted.fit()
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True}
        stopped, _ = self.run(**saving)
        stopped.fit(duration="3ba")
        stopped.close()

        resumed, logger = self.run(**saving)
        resumed.fit()

        assert self.logged(logger) == self.logged(expected)

    def test_next_fit_counts_all_batches(self):
        """Each stop logs the metrics of the epoch so far, and the end of the epoch those of all of its batches."""
        uninterrupted, expected = self.run()
        uninterrupted.fit()

        trainer, logger = self.run()
        for duration in ("2ba", "2ba", "6ba"):
            trainer.fit(duration=duration)

        logged = dict(self.logged(logger))
        assert list(logged) == [2, 4, 5, 10]
        assert [(batch, logged[batch]) for batch in (5, 10)] == self.logged(expected)


class TestInterruptedEvaluation:
    """An evaluation that a SIGTERM has stopped, in a program that handles the signal itself."""

    class Interrupt(Callback):
        """Sends the signal in the first batch of the evaluation after a batch of the training."""

        def __init__(self, batch):
            self.at = {batch}

        def eval_batch_start(self, state, logger):
            if int(state.timestamp.batch) in self.at:
                self.at.clear()
                signal.raise_signal(signal.SIGTERM)

    @pytest.fixture(autouse=True)
    def _handler(self):
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        yield
        signal.signal(signal.SIGTERM, before)

    def run(self, at=None, **options):
        """Return a trainer that evaluates after every other batch and at the end, and the batches of evaluations."""
        logger = InMemoryLogger()
        options = {"eval_dataloader": make_loader(), "eval_interval": "2ba", "callbacks": self.Interrupt(at)} | options
        trainer = small_run(loggers=logger, **options)
        return trainer, lambda: [int(clock.batch) for clock, _ in logger.data["metrics/eval/MulticlassAccuracy"]]

    @pytest.mark.parametrize("at", [4, 5])
    def test_next_fit_begins_with_it(self, at):
        """The next call of fit repeats it, also if it was that of the end, and evaluates no more often than without."""
        trainer, evaluated = self.run(at, max_duration="5ba")
        reasons = [trainer.fit().reason for _ in range(3)]

        assert evaluated() == [2, 4, 5]
        assert reasons == [
            "stopped by SIGTERM",
            "max_duration='5ba' is reached",
            "max_duration='5ba' was reached before",
        ]

    @pytest.mark.parametrize("saves_at_end", [True, False])
    @pytest.mark.parametrize("is_killed", [True, False])
    def test_checkpoint_of_the_last_batch(self, tmp_path, saves_at_end, is_killed):
        """A run that resumes from one that was saved before the evaluation of the end begins with this evaluation."""

        def is_due(state, event):
            return int(state.timestamp.batch) == 5 and (saves_at_end or event != "fit_end")

        class Fail(Callback):
            def eval_start(self, state, logger):
                if int(state.timestamp.batch) == 5:
                    raise RuntimeError("killed")

        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "5ba"}
        saving |= {"save_interval": is_due, "eval_interval": "2ba"}
        stopped, _ = self.run(5, callbacks=Fail() if is_killed else self.Interrupt(5), **saving)
        with pytest.raises(RuntimeError, match="killed") if is_killed else contextlib.nullcontext():
            stopped.fit()
        stopped.close()

        resumed, evaluated = self.run(callbacks=[], **saving)
        resumed.fit()
        resumed.close()
        again, _ = self.run(callbacks=[], **saving)

        assert evaluated() == [5]
        assert (again.fit().reason == "max_duration='5ba' was reached before") is saves_at_end


def test_losses_are_numbers_in_callbacks():
    """After a batch, a callback reads its losses as numbers by the names under which they are logged."""
    read, memory = [], InMemoryLogger()
    model = small_run().state.model
    loss = model.loss
    model.loss = lambda outputs, batch: {"own": loss(outputs, batch), "more": 0.5 * loss(outputs, batch)}

    with small_run(model=model, max_duration="1ep", loggers=memory, device_train_microbatch_size=2) as trainer:
        trainer.engine.on("batch_end", lambda state, _: read.append(dict(state.total_loss_dict)))
        trainer.fit()

    assert read[0].keys() == {"loss/train/own", "loss/train/more", "loss/train/total"}
    for name in read[0]:
        assert [losses[name] for losses in read] == [float(value) for _, value in memory.data[name]]


LOSSES = """
import torch
from composer.core import DataSpec
from composer.distributed import get_global_rank, get_world_size
from composer.models import ComposerClassifier
from composer.trainer import Trainer

generator = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
targets[16:] = -100
parts = [(0, 3), (3, 8)][get_global_rank() :][:1] if get_world_size() > 1 else [(0, 8)]
batches = [(inputs[first + a : first + b], targets[first + a : first + b]) for first in (0, 8, 16) for a, b in parts]
torch.manual_seed(0)
model = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3)
trainer = Trainer(model=model, train_dataloader=batches, optimizers=torch.optim.SGD(model.parameters(), 0.1),
                  max_duration="1ep", device="cpu", progress_bar=False, device_train_microbatch_size=3)
trainer.engine.on("batch_end", lambda state, _: print(float(state.total_loss), *state.total_loss_dict.values()))
trainer.fit()
"""


def test_losses_in_callbacks_of_several_processes(tmp_path):
    """After a batch of 3 and 5 samples, callbacks of both processes read the mean over 8 samples, also without logs.

    It is 0 for a batch without a label.
    """
    program = tmp_path / "program.py"
    program.write_text(LOSSES)

    expected = [float(each) for each in run_processes(program, 1)[0].split()]

    assert len(set(expected)) == 3  # of three batches, each read twice
    assert expected[-2:] == [0, 0]
    for printed in run_processes(program, 2):
        assert [float(each) for each in printed.split()] == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:The training loss is 0 in all batches")
@pytest.mark.parametrize(
    "loss_fn", [soft_cross_entropy, nn.CrossEntropyLoss(ignore_index=1), nn.functional.cross_entropy]
)
@pytest.mark.parametrize("size", [None, 2])
def test_batch_without_labels(loss_fn, size):
    """If all labels are ignored, the loss is 0 and no weight changes, whether the batch is split or not."""
    ignored = 1 if isinstance(loss_fn, nn.Module) else -100
    batches, memory = [(torch.randn(4, 4), torch.full((4,), ignored))], InMemoryLogger()
    model = make_classifier(nn.Linear(4, 3), loss_fn=loss_fn)
    before = copy.deepcopy(model.state_dict())

    trained(
        model=model, train_dataloader=batches, max_duration="1ep", loggers=memory, device_train_microbatch_size=size
    )

    assert [float(loss) for _, loss in memory.data["loss/train/total"]] == [0]
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_metrics_at_the_end_of_an_epoch(tmp_path):
    """A callback reads the epoch's metrics at EPOCH_END; a run that is saved there continues as if it had not been."""

    class Reader(Callback):
        def __init__(self, trainer=None):
            self.trainer, self.values = trainer, []

        def epoch_end(self, state, logger):
            self.values.append(float(state.train_metrics["MulticlassAccuracy"].compute()))
            if self.trainer is not None:
                self.trainer.save_checkpoint(str(tmp_path / "ep{epoch}"))

    def train(reader, **options):
        metrics, memory = [MulticlassAccuracy(3, average="micro")], InMemoryLogger()
        trainer = small_run(train_metrics=metrics, callbacks=reader, max_duration="3ep", loggers=memory, **options)
        reader.trainer = None if options else trainer
        with trainer:
            trainer.fit()
        return [float(value) for _, value in memory.data["metrics/train/MulticlassAccuracy"]]

    first, second = Reader(), Reader()
    logged = train(first)
    continued = train(second, load_path=str(tmp_path / "ep1"))

    assert first.values == logged
    assert len(set(logged)) > 1
    assert continued == second.values == logged[1:]


def test_metrics_after_the_training():
    """After each call of fit, the training metrics contain the last epoch, and only this one."""
    metric = MulticlassAccuracy(3, average="micro")
    trainer = small_run(train_metrics=metric, max_duration="2ep")
    for duration in (None, "1ep"):
        trainer.fit(duration=duration)

        metric = trainer.state.train_metrics["MulticlassAccuracy"]
        assert metric._update_count == len(trainer.state.train_dataloader)
        assert metric.compute() == trainer.state.train_metric_values["MulticlassAccuracy"]
