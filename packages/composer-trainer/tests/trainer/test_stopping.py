"""Ctrl-C and SIGTERM end a run cleanly, with real processes and signals."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from composer.checkpoint import newest_checkpoint
from composer.core import Callback, Evaluator
from composer.trainer.stopping import Stopped, StopSignals
from fixtures import make_loader, runs, small_run

PROGRAM = """
import signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever has started the tests
from composer.core import Callback
from composer.loggers import FileLogger
from composer.models import ComposerClassifier
from composer.trainer import Trainer

class Watch(Callback):
    def batch_start(self, state, logger):
        print("step", flush=True)
        time.sleep(0.2)
    def batch_end(self, state, logger):
        print("done", flush=True)
    def fit_end(self, state, logger):
        print("end", flush=True)
    def close(self, state, logger):
        print("closed", flush=True)
    def eval_start(self, state, logger):
        print("evaluated", flush=True)
    def eval_batch_start(self, state, logger):
        self.batch_start(state, logger)
    def eval_batch_end(self, state, logger):
        self.batch_end(state, logger)
    predict_batch_start, predict_batch_end = eval_batch_start, eval_batch_end

loader = [(torch.rand(4, 4), torch.zeros(4, dtype=torch.int64))] * 100
model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2, train_metrics=[], val_metrics=[])
trainer = Trainer(
    model=model, train_dataloader=loader, eval_dataloader=loader[:1], callbacks=Watch(), max_duration="1ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False, device="cpu",
    loggers=FileLogger(sys.argv[1]),
)
try:
    CALL
finally:
    print("left", flush=True)
"""


def run_with_signals(number, path, times=1, call="trainer.fit()", errors=None):
    """Return the exit code and the output lines of a run that receives a signal in its second batch.

    What it writes to stderr is appended to ``errors``. Shells call the exit code of a Ctrl-C 130.
    """
    program = textwrap.dedent(PROGRAM).replace("CALL", call)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if lines.count("step") == 2 and lines[-1] == "step":
                process.send_signal(number)
                if times == 2:
                    # The second one has to come while the same batch sleeps, after the first one was received.
                    time.sleep(0.05)
                    process.send_signal(number)
        process.wait(timeout=60)
        if errors is not None:
            errors += process.stderr.read().splitlines()
        return process.returncode, lines


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_sigterm_completes_the_batch_and_closes(self, tmp_path, number):
        """The batch is completed, FIT_END and close run, after Ctrl-C at the exit, and it exits as expected."""
        code, lines = run_with_signals(number, path := tmp_path / "log.jsonl")

        closing = ["closed", "left"] if number is signal.SIGTERM else ["left", "closed"]
        assert lines == ["step", "done", "step", "done", "end", *closing]
        assert code == (143 if number is signal.SIGTERM else -signal.SIGINT)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["batch"] for record in records if "loss/train/total" in record.get("metrics", {})] == [0, 1]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("call", ["trainer.eval(loader)", "trainer.predict(loader)"])
    def test_evaluation_and_prediction_end_after_the_batch(self, tmp_path, call, number):
        """The current batch is completed, callbacks and loggers are closed, and the process exits as expected."""
        code, lines = run_with_signals(number, tmp_path / "log.jsonl", call=call)

        closing = ["closed", "left"] if number is signal.SIGTERM else ["left", "closed"]
        assert [line for line in lines if line != "evaluated"] == ["step", "done", "step", "done", *closing]
        assert code == (143 if number is signal.SIGTERM else -signal.SIGINT)

    def test_second_ctrl_c_exits_immediately(self, tmp_path):
        """A second Ctrl-C ends the process within the batch."""
        code, lines = run_with_signals(signal.SIGINT, tmp_path / "log.jsonl", times=2)

        assert code == -signal.SIGINT
        assert "end" not in lines


class TestNoTraceback:
    @pytest.mark.parametrize("call", ["trainer.fit()", "trainer.eval(loader)", "trainer.predict(loader)"])
    def test_sentences(self, tmp_path, call):
        """A Ctrl-C that has stopped a training, an evaluation or a prediction writes sentences only."""
        errors = []

        code, _ = run_with_signals(signal.SIGINT, tmp_path / "log.jsonl", call=call, errors=errors)

        assert code == -signal.SIGINT
        stopped = (
            "The training was stopped by SIGINT after batch 2. There is no checkpoint to continue from: save_folder, "
            "run_name and autoresume=True save one."
        )
        sentences = ["SIGINT: stopping after this batch; Ctrl-C now stops immediately."]
        sentences += [stopped] if call == "trainer.fit()" else []
        assert errors[-len(sentences) :] == sentences
        assert not any("Traceback" in line for line in errors)

    def test_another_ctrl_c(self, tmp_path):
        """One that comes after the program has handled the first one has its traceback."""
        errors, call = [], "trainer.fit()\nexcept KeyboardInterrupt:\n    raise KeyboardInterrupt('later') from None"

        run_with_signals(signal.SIGINT, tmp_path / "log.jsonl", call=call, errors=errors)

        assert "Traceback (most recent call last):" in errors
        assert errors[-1] == "KeyboardInterrupt: later"


GROUP_PROGRAM = """
import os, signal, sys, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from composer.models import ComposerClassifier
from composer.trainer import Trainer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
phase, kind, folder = sys.argv[1:]

class Samples(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.02 if phase == "loading" else 0)
        return torch.full((4,), float(index)), 0

class Stream(IterableDataset):
    def __iter__(self):
        yield from map(Samples().__getitem__, range(200))

def loader(name=kind):
    if name == "stateful":
        return StatefulDataLoader(Samples(), 8, num_workers=2)
    samples = Stream() if name == "stream" else Samples()
    return DataLoader(samples, 8, num_workers=2, persistent_workers=True)

def ready(state, logger):
    if int(state.timestamp.batch) == 3:
        print("now", flush=True)
        time.sleep(0 if phase == "loading" else 0.3)

model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2, train_metrics=[], val_metrics=[])
trainer = Trainer(
    model=model, train_dataloader=loader(), eval_dataloader=loader("samples"), eval_interval="3ba", max_duration="9ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False, device="cpu", save_folder=folder,
    save_interval="1ba", seed=17,
)
events = {"loading": "before_dataloader", "computing": "before_loss", "evaluating": "eval_batch_start"}
trainer.engine.on(events.get(phase, "batch_checkpoint"), ready)
trainer.fit()
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="workers are shielded on Linux only")
@pytest.mark.parametrize(
    ("number", "phase", "kind"),
    [
        *((signal.SIGTERM, phase, "samples") for phase in ("loading", "computing", "evaluating", "saving")),
        (signal.SIGTERM, "loading", "stateful"),
        (signal.SIGINT, "loading", "stream"),
    ],
)
def test_signal_to_the_process_group(tmp_path, number, phase, kind):
    """A signal to all processes of a job, the loader's workers too, ends with a checkpoint; SIGTERM may come twice."""
    command = [sys.executable, "-c", GROUP_PROGRAM, phase, kind, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "now\n"
        os.killpg(process.pid, number)
        if number == signal.SIGTERM:  # timeout sends it to its child, and then to the group
            time.sleep(0.02)
            os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), errors
    assert newest_checkpoint(tmp_path).manifest.timestamp.batch >= 3


class Interrupting(Callback):
    """Sends a Ctrl-C at an event, once, and records when it is closed."""

    def __init__(self, event):
        self.closed, self.is_sent = False, False
        setattr(self, event, self.send)

    def send(self, state, logger):
        if int(state.timestamp.batch) == 7 and not self.is_sent:
            self.is_sent = True
            signal.raise_signal(signal.SIGINT)

    def batch_start(self, state, logger):
        pass

    def eval_batch_start(self, state, logger):
        pass

    def close(self, state, logger):
        self.closed = True


class TestCtrlC:
    @pytest.fixture(autouse=True)
    def usual_handler(self):
        """Raise KeyboardInterrupt at a Ctrl-C, as notebooks do."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def run(self, *callbacks):
        return small_run(
            max_duration="4ep", eval_dataloader=make_loader(seed=1), eval_interval="7ba", seed=17, callbacks=callbacks
        )

    @pytest.mark.parametrize("event", ["batch_start", "eval_batch_start"])
    def test_trainer_continues(self, event):
        """After a Ctrl-C in a training or its evaluation, eval and predict work, and fit completes the training."""
        expected, interrupting = self.run(), Interrupting(event)
        expected.fit()
        trainer = self.run(interrupting)

        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        values, outputs = trainer.eval(), trainer.predict(make_loader())
        between = int(trainer.state.timestamp.batch)
        trainer.fit()

        assert (between, len(values["eval"]), len(outputs)) == (8 if event == "batch_start" else 7, 2, 5)
        assert int(trainer.state.timestamp.batch) == 20
        weights = trainer.state.model.state_dict()
        assert all(torch.equal(weights[name], one) for name, one in expected.state.model.state_dict().items())
        assert not interrupting.closed

    def test_metrics_after_an_interrupted_evaluation(self):
        """An evaluation by fewer metrics changes those of later ones no more if it is interrupted."""
        interrupting = Interrupting("eval_batch_start")
        trainer = self.run(interrupting)
        trainer.fit(duration="6ba")
        trainer.state.timestamp = trainer.state.timestamp.to_next_batch()
        fewer = Evaluator(label="eval", dataloader=make_loader(), metric_names=["CrossEntropy"])

        with pytest.raises(KeyboardInterrupt):
            trainer.eval(fewer)

        assert interrupting.is_sent
        assert {*trainer.eval()["eval"]} == {"CrossEntropy", "MulticlassAccuracy"}

    def test_closed_with_the_trainer(self):
        """What was interrupted is closed by close(), and when the trainer is deleted."""
        closed = []
        for how in ("close", "del"):
            interrupting = Interrupting("batch_start")
            trainer = self.run(interrupting)
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
            if how == "close":
                trainer.close()
            runs._runs.remove(trainer)
            del trainer
            gc.collect()
            closed.append(interrupting.closed)

        assert closed == [True, True]


class TestListening:
    def test_handlers_are_restored(self):
        """Afterwards the previous handlers are active."""
        before = signal.getsignal(signal.SIGTERM)

        with StopSignals():
            during = signal.getsignal(signal.SIGTERM)

        assert during is not before
        assert signal.getsignal(signal.SIGTERM) is before

    def test_second_context(self):
        """The end of a second context of the same object restores only what this one has installed."""
        signals = StopSignals()
        with signals:
            pass
        handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)

        with signals:
            pass

        assert signal.signal(signal.SIGTERM, handler) is signal.SIG_IGN

    def test_incomplete_results_raise(self):
        """If the program handles the signal itself, an evaluation raises instead of returning a part of its results."""
        before = signal.signal(signal.SIGTERM, lambda *_: None)

        class Interrupt(Callback):
            def eval_batch_start(self, state, logger):
                signal.raise_signal(signal.SIGTERM)

        try:
            with pytest.raises(Stopped, match="Stopped by SIGTERM"):
                small_run(callbacks=Interrupt()).eval(make_loader())
        finally:
            signal.signal(signal.SIGTERM, before)
