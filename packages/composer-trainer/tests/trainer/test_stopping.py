"""Ctrl-C and SIGTERM end a run cleanly, shown with real processes and real signals."""

import json
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from composer.trainer.stopping import StopSignals

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

loader = [(torch.rand(4, 4), torch.zeros(4, dtype=torch.int64))] * 100
model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2, train_metrics=[])
trainer = Trainer(
    model=model, train_dataloader=loader, eval_dataloader=loader[:1], callbacks=Watch(), max_duration="1ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False, device="cpu",
    loggers=FileLogger(sys.argv[1]),
)
try:
    trainer.fit()
finally:
    print("left", flush=True)
"""


def stopped_by(number, path, times=1):
    """Return the exit code and the lines of a run that gets a signal in its second batch."""
    program = textwrap.dedent(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if lines.count("step") == 2 and lines[-1] == "step":
                process.send_signal(number)
                if times == 2:
                    # The second one has to come while the same batch sleeps.
                    process.send_signal(number)
        process.wait(timeout=60)
        return process.returncode, lines


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_batch_ends_and_all_is_closed(self, tmp_path, number):
        """The batch is finished, the end of the fit and the closing are seen, and the process goes as it should."""
        code, lines = stopped_by(number, path := tmp_path / "log.jsonl")

        assert lines == ["step", "done", "step", "done", "end", "closed", "left"]
        assert code == (143 if number is signal.SIGTERM else -signal.SIGINT)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["batch"] for record in records if "loss/train/total" in record.get("metrics", {})] == [0, 1]

    def test_a_second_one_acts_at_once(self, tmp_path):
        """A second SIGTERM ends the process in the middle of the batch."""
        code, lines = stopped_by(signal.SIGTERM, tmp_path / "log.jsonl", times=2)

        assert code in {-signal.SIGTERM, 143}
        assert code == 143 or "end" not in lines


class TestListening:
    def test_handlers_are_put_back(self):
        """Afterwards signals do what they did before."""
        before = signal.getsignal(signal.SIGTERM)

        with StopSignals():
            during = signal.getsignal(signal.SIGTERM)

        assert during is not before
        assert signal.getsignal(signal.SIGTERM) is before

    def test_the_programs_own_handler_is_called_at_the_end(self):
        """A handler that the program has set is called when the run has ended, not in its middle."""
        called = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        try:
            with StopSignals() as signals:
                signal.raise_signal(signal.SIGTERM)
                during = (signals.received, list(called))

            assert during == (signal.SIGTERM, [])
            assert called == [signal.SIGTERM]
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_what_is_ignored_stays_so(self):
        """A signal that the program ignores, as one that nohup has started does, stops nothing."""
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with StopSignals() as signals:
                signal.raise_signal(signal.SIGTERM)

            assert signals.received is None
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_other_threads_do_not_listen(self):
        """Only a main thread can; in others training simply goes on."""
        seen = []

        def listen():
            with StopSignals() as signals:
                seen.append(signals.received)

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()

        assert seen == [None]
