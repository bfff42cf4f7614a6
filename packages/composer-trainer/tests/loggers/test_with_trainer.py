"""All loggers in one training agree, and do not change it."""

import io
import json

import pytest
import torch

from composer.callbacks import LRMonitor, SpeedMonitor
from composer.core import Callback
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, ProgressBarLogger
from fixtures import make_loader, trained, weights
from fixtures.processes import run_processes

EPOCHS, BATCHES = 2, 5


def train(**options):
    """Return a trainer that has trained a small network with dropout."""
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    settings = {"eval_dataloader": make_loader(), "train_metrics": None, "max_duration": f"{EPOCHS}ep", "seed": 3}
    return trained(network=network, **settings | options)


@pytest.fixture
def run(tmp_path):
    """Return a run's trainer and the records of each logger."""
    memory, lines, bar = InMemoryLogger(), io.StringIO(), io.StringIO()
    path = tmp_path / "metrics.jsonl"
    loggers = [memory, FileLogger(str(path)), ConsoleLogger("1ep", lines), ProgressBarLogger(bar)]
    trainer = train(loggers=loggers, callbacks=[LRMonitor(), SpeedMonitor()])
    return trainer, memory, [json.loads(line) for line in path.read_text().splitlines()], lines, bar


def test_console_and_bar_show_the_end(run):
    """Both show the last loss and evaluation."""
    _, memory, _, lines, bar = run
    loss = f"{memory.most_recent_values['loss/train/total']:.4g}"
    accuracy = f"{memory.most_recent_values['metrics/eval/MulticlassAccuracy']:.4g}"

    results = lines.getvalue().rpartition("[Eval batch=5/5] Eval on eval data:\n")[2]
    assert f"Eval metrics/eval/MulticlassAccuracy: {accuracy}" in results
    last_lines = lines.getvalue().rpartition("[epoch=2][batch=5/5]:\n")[2]
    assert f"Train loss/train/total: {loss}" in last_lines
    last = bar.getvalue().splitlines()[-1]
    assert last.startswith("epoch 2/2, ")
    assert f"Accuracy={accuracy} (best " in last
    assert f", loss={loss}" in last


def test_loggers_do_not_change_training(run):
    """The weights are bit-identical with and without all loggers and callbacks."""
    trainer, *_ = run

    plain = train()

    assert torch.equal(weights(trainer), weights(plain))


class Kill(Callback):
    """Ends the run by an error at the start of a batch."""

    def __init__(self, batch):
        self.batch = batch

    def batch_start(self, state, logger):
        if state.timestamp.batch == self.batch:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["log.jsonl", "{run_name}/log.jsonl"])
@pytest.mark.parametrize("batch", [1, 3, 5, 8])
def test_restart_gives_no_duplicate_lines(tmp_path, name, batch):
    """With autoresume a run continues its file: before the first checkpoint, between two, and after an epoch."""
    options = {"run_name": "first", "save_folder": str(tmp_path / "saved"), "save_interval": "5ba", "autoresume": True}
    with pytest.raises(KeyboardInterrupt):
        train(loggers=FileLogger(str(tmp_path / name), flush_interval=1), callbacks=Kill(batch), **options)

    memory = InMemoryLogger()
    train(loggers=[FileLogger(str(tmp_path / name), flush_interval=1), memory], **options)

    [path] = tmp_path.rglob("log.jsonl")
    written = [line for line in map(json.loads, path.read_text().splitlines()) if "metrics" in line]
    steps = {
        metric: [line["batch"] for line in written if metric in line["metrics"]]
        for metric in ("loss/train/total", "metrics/eval/MulticlassAccuracy")
    }
    assert steps == {"loss/train/total": [*range(10)], "metrics/eval/MulticlassAccuracy": [5, 10]}


TWO_PROCESSES = """
import sys
from composer.loggers import FileLogger
from fixtures import small_run, vector_batches

for epochs in (1, 2):
    with small_run(
        train_dataloader=vector_batches(),
        max_duration=f"{epochs}ep",
        loggers=FileLogger("{run_name}-rank{rank}.txt"),
        run_name="first",
        load_path=None if epochs == 1 else "checkpoints/latest",
        save_folder="checkpoints",
    ) as trainer:
        trainer.fit()
"""


def test_each_process_resumes_its_file(tmp_path):
    """A resumed run of two processes continues both files."""
    program = tmp_path / "program.py"
    program.write_text(TWO_PROCESSES)
    run_processes(program, 2, cwd=tmp_path)

    files = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    losses = {name: text.count('"loss/train/total"') for name, text in files.items()}

    assert losses == {"first-rank0.txt": 10, "first-rank1.txt": 10}


CONSOLE = """
from fixtures import trained

trained(max_duration="5ba", train_metrics=None, log_to_console=True, console_log_interval="2ba", dist_timeout=30)
"""


def test_the_console_of_two_processes(tmp_path):
    """Only the first one has it, and computes no metric for which it would wait for the other."""
    program = tmp_path / "program.py"
    program.write_text(CONSOLE)

    run_processes(program, 2, cwd=tmp_path)
