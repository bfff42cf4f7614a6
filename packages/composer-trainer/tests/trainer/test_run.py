"""What a run computes and counts in each batch."""

import contextlib
import copy
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.algorithms import SeqLengthWarmup
from composer.checkpoint import find_checkpoints
from composer.core import Callback, DataSpec, Evaluator, Event, State
from composer.functional import soft_cross_entropy
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.trainer.run import TrainingClock
from fixtures import make_classifier, make_loader, small_run, trained
from fixtures.processes import run_processes


def test_custom_token_count():
    """A subclass of DataSpec may count tokens in its method."""

    class Spec(DataSpec):
        def get_num_tokens_in_batch(self, batch, token_type="total"):
            return 100

    trainer = small_run(train_dataloader=Spec(make_loader()), max_duration="300tok")
    trainer.fit()

    assert (int(trainer.state.timestamp.batch), int(trainer.state.timestamp.token)) == (3, 300)


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


def test_uncounted_tokens_raise():
    """A training in tokens with batches without tokens raises."""
    trainer = small_run(max_duration="20tok")

    with pytest.raises(ValueError, match="an epoch had no token"):
        trainer.fit()


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

    @pytest.mark.parametrize("options", [{"reset_time": True}, {"train_dataloader": make_loader(batch_size=5)}])
    def test_other_batches_are_counted_from_zero(self, options):
        """A training that begins again, or with other data, does not count the batches before."""
        trainer, _ = self.run()
        trainer.fit(duration="3ba")

        trainer.fit(duration="1ba", **options)

        assert trainer.state.train_metrics["MulticlassAccuracy"]._update_count == 1


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

    def test_interrupted_twice(self, tmp_path):
        """A second signal in the repeated evaluation leaves it to the next run, and the last run is complete."""
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "5ba"}
        reasons = []
        for at in (4, 4, None, None):
            trainer, evaluated = self.run(at, **saving)
            reasons.append(trainer.fit().reason)
            trainer.close()
            if reasons[-1] == "max_duration='5ba' is reached":
                batches = evaluated()

        complete = ["max_duration='5ba' is reached", "max_duration='5ba' was reached before"]
        assert reasons == ["stopped by SIGTERM", "stopped by SIGTERM", *complete]
        assert batches == [4, 5]

    def test_completed_evaluation_is_in_the_checkpoint(self, tmp_path):
        """Also that of the end: the checkpoint of the moment gets its metric, and nothing is due any more."""
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "5ba"}
        metrics = []
        for at in (5, None):
            trainer, _ = self.run(at, save_best="eval/MulticlassAccuracy", **saving)
            trainer.fit()
            trainer.close()
            metrics.append(dict(find_checkpoints(str(tmp_path))[-1].manifest.metrics))
        trainer, _ = self.run(**saving)

        assert trainer.fit().reason == "max_duration='5ba' was reached before"
        assert "metrics/eval/MulticlassAccuracy" not in {name for name, one in metrics[0].items() if one is not None}
        assert metrics[1]["metrics/eval/MulticlassAccuracy"] is not None

    def test_of_the_last_epoch(self, tmp_path):
        """The checkpoint of the stop is replaced by that of the end, which counts the iteration, too."""
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "1ep"}
        reasons = []
        for at in (5, None, None):
            trainer, _ = self.run(at, eval_interval="1ep", **saving)
            reasons.append(trainer.fit().reason)
            trainer.close()

        complete = ["max_duration='1ep' is reached", "max_duration='1ep' was reached before"]
        assert reasons == ["stopped by SIGTERM", *complete]
        assert find_checkpoints(str(tmp_path))[-1].manifest.timestamp.iteration == 1

    @pytest.mark.parametrize("interval", ["4ba", "1ep"])
    def test_shorter_training_is_over(self, tmp_path, interval):
        """If the resumed run is shorter than what is done, it only evaluates: the schedule has ended before."""

        def schedule(state, ssr):
            done = state.get_elapsed_duration().value
            assert done <= 1
            return 1 - done / 2

        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "schedulers": schedule}
        stopped, _ = self.run({"4ba": 8, "1ep": 10}[interval], max_duration="3ep", eval_interval=interval, **saving)
        stopped.fit()
        stopped.close()

        resumed, evaluated = self.run(max_duration="1ep", eval_interval=interval, **saving)
        result = resumed.fit()

        assert (evaluated(), result.steps) == ([{"4ba": 8, "1ep": 10}[interval]], 0)
        assert resumed.state.schedulers[0].get_last_lr() == stopped.state.schedulers[0].get_last_lr()

    class Counts(Dataset):
        """Counts the samples that it has returned."""

        calls = 0

        def __len__(self):
            return 6

        def __getitem__(self, index):
            self.calls += 1
            return torch.full((4,), float(self.calls)), 0

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    class Stream(IterableDataset):
        """As Hugging Face's, it begins where a loaded state is, and its state after an evaluation is the end."""

        begin = place = 0

        def __iter__(self):
            for place in range(self.begin, 6):
                self.place = place + 1
                yield torch.full((4,), float(place + 1)), 0

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.begin = self.place = state["place"]

    @pytest.mark.parametrize("is_resumed", [False, True])
    @pytest.mark.parametrize(("kind", "first"), [(Counts, 7), (Stream, 1)])
    def test_data_set_that_saves_itself(self, tmp_path, kind, first, is_resumed):
        """The repeated evaluation has the samples of one that is not stopped."""
        samples = []

        class Note(Callback):
            def eval_batch_end(self, state, logger):
                samples.extend(state.batch[0][:, 0].tolist())

        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "4ba"}

        def make(at):
            loader = DataLoader(kind(), batch_size=2)
            return self.run(None, eval_dataloader=loader, callbacks=[self.Interrupt(at), Note()], **saving)[0]

        trainer = make(4)
        trainer.fit()
        if is_resumed:
            trainer.close()
            trainer = make(None)
        trainer.fit()

        assert samples == [1, 2, 3, 4, 5, 6, first, first + 1, *range(first, first + 6)]

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

    def test_without_metrics_at_the_end(self, tmp_path):
        """An interrupted evaluation for callbacks alone is in no metric, and yet is complete after the next run."""
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "5ba"}
        reasons = []
        for at in (5, None, None):
            data = Evaluator(label="eval", dataloader=make_loader(), metric_names=[])
            trainer, _ = self.run(at, eval_dataloader=data, **saving)
            reasons.append(trainer.fit().reason)
            trainer.close()

        complete = ["max_duration='5ba' is reached", "max_duration='5ba' was reached before"]
        assert reasons == ["stopped by SIGTERM", *complete]

    def test_best_checkpoint_of_the_last_batch(self, tmp_path):
        """An evaluation of the end that a signal interrupts is in the checkpoint that was saved as the best before."""
        data = [
            Evaluator(label="eval", dataloader=make_loader(), eval_interval="1ep"),
            Evaluator(label="late", dataloader=make_loader(), eval_interval="9ep"),
        ]

        class Interrupt(Callback):
            def eval_batch_start(self, state, logger):
                if state.dataloader_label == "late":
                    signal.raise_signal(signal.SIGTERM)

        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True, "max_duration": "1ep"}
        saving |= {"eval_dataloader": data, "save_best": "eval/MulticlassAccuracy"}
        stopped, _ = self.run(callbacks=Interrupt(), **saving)
        stopped.fit()
        stopped.close()
        labels = []
        resumed, _ = self.run(callbacks=[], **saving)
        resumed.engine.on(Event.EVAL_START, lambda state, _: labels.append(state.dataloader_label))
        resumed.fit()

        assert labels == ["late"]
        assert "metrics/late/MulticlassAccuracy" in find_checkpoints(str(tmp_path))[-1].manifest.metrics

    def test_longer_training_has_another_end(self, tmp_path):
        """If the resumed run trains longer, the evaluation of the former end is not due, and its own is complete."""
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True}
        stopped, _ = self.run(5, max_duration="5ba", **saving)
        stopped.fit()
        stopped.close()

        resumed, evaluated = self.run(max_duration="9ba", train_metrics=None, **saving)
        resumed.fit()

        assert evaluated() == [6, 8, 9]
        assert list(resumed.state.train_metric_values) == ["MulticlassAccuracy"]  # of the epoch's first four batches

    def test_resumed_without_data_to_evaluate_on(self, tmp_path):
        """A run that does not evaluate any more continues without the evaluation."""
        saving = {"save_folder": str(tmp_path), "run_name": "run", "autoresume": True}
        stopped, _ = self.run(4, max_duration="5ba", **saving)
        stopped.fit()
        stopped.close()

        resumed, _ = self.run(max_duration="5ba", eval_dataloader=None, **saving)

        assert resumed.fit().steps == 1
        assert not resumed._resume_state.interrupted


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


def test_losses_in_callbacks_without_a_logger():
    """Without a logger a callback reads the same losses in each batch, also those of a batch that is over."""

    def losses(*, logs):
        read = []
        with small_run(max_duration="4ba", loggers=InMemoryLogger() if logs else None) as trainer:
            assert trainer.engine.logger.is_heard is logs
            trainer.engine.on("batch_end", lambda state, _: read.append(state.total_loss_dict))
            trainer.fit()
        return [dict(one) for one in read]

    result = losses(logs=False)

    assert result == losses(logs=True)
    assert len({one["loss/train/total"] for one in result}) == 4


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


@pytest.fixture
def run_clock(clock):
    """The clock of a run; the system's clock advances by a second with each reading."""
    clock.step = 1.0
    return TrainingClock(State(model=None))


def test_elapsed_since_the_last_call(run_clock):
    """Each call returns the microseconds since the last one."""
    assert [run_clock.elapsed(), run_clock.elapsed()] == [1_000_000, 1_000_000]


def test_paused_time_is_excluded(run_clock):
    """The time within a paused block is excluded."""
    with run_clock.paused():
        time.perf_counter()

    assert run_clock.elapsed() == 2_000_000  # of 4 seconds


def test_count_batch(run_clock):
    """A batch advances the timestamp by its samples, tokens and time, and keeps the previous one."""
    before = run_clock.state.timestamp

    run_clock.count_batch(4, 8, 5_000_000)

    now = run_clock.state.timestamp
    assert (now.batch, now.sample, now.token) == (1, 4, 8)
    assert now.total_wct.total_seconds() == 5
    assert run_clock.state.previous_timestamp is before
