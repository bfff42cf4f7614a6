"""One progress bar per fit."""

import gc
import io
import re
import time
import warnings

import pytest
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAccuracy

from composer.loggers import ProgressBarLogger
from composer.loggers import progress_bar_logger as module


class Terminal(io.StringIO):
    """A stream that is a terminal of unknown width."""

    def isatty(self):
        return True


@pytest.fixture
def always_due(monkeypatch):
    """Draw at every opportunity."""
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_DRAWINGS", 0.0)


@pytest.fixture
def set_width(monkeypatch):
    """Return a function that sets the width of all terminals."""
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


def drawings(stream):
    """Return the drawn bars without their time-dependent parts."""
    return [
        re.sub(r"\[[^,\]]*, *[^,\]]*", "[", text).strip(" ]")
        for text in re.split(r"[\r\n]|\x1b\[A", stream.getvalue())
        if text.strip()
    ]


class TestFitBar:
    def test_counts_the_batches_of_all_epochs(self, make_loop):
        """There is one bar, with the total of all epochs' batches."""
        stream = Terminal()

        make_loop(ProgressBarLogger(stream)).fit()

        assert "| 0/6" in stream.getvalue()
        assert re.search(r"Epoch 2/2: 100%\|.*\| 6/6 .*loss=5\] *\n", stream.getvalue())

    @pytest.mark.parametrize(
        ("options", "output"),
        [
            ({"max_duration": "6ba"}, r"100%\|.*\| 6/6 \[.*ba"),
            ({"max_duration": "24sp"}, r"100%\|.*\| 24.0/24.0 \[.*sp"),
            ({"max_duration": "3sec"}, r"100%\|.*\| 3/3s"),
            ({"max_duration": "2iter"}, r"100%\|.*\| 6/6 "),
            ({"max_duration": "1iter", "iteration_length": "2ep"}, r"100%\|.*\| 6/6 "),
            ({"max_duration": "12ba"}, r"50%\|.*\| 6/12 "),
        ],
    )
    def test_counts_in_the_unit_of_the_training(self, make_loop, options, output):
        """A training in batches, samples or seconds is shown in that unit."""
        stream = Terminal()

        make_loop(ProgressBarLogger(stream), **options).fit()

        assert re.search(output, stream.getvalue())

    def test_loader_without_a_length(self, make_loop):
        """If an epoch's length is unknown, batches are counted."""
        stream = Terminal()
        loop = make_loop(ProgressBarLogger(stream))
        loop.state.dataloader_len = None

        loop.fit()

        assert re.search(r"Epoch 2/2: 6ba \[", stream.getvalue())

    def test_starts_at_the_current_time(self, make_loop):
        """A second or resumed fit starts at the clock."""
        stream = Terminal()
        loop = make_loop(ProgressBarLogger(stream)).fit()
        loop.state.max_duration = "4ep"
        stream.truncate(0)

        loop.fit()

        assert re.search(r"Epoch 3/4:  50%\|.*\| 6/12 ", stream.getvalue())
        assert re.search(r"Epoch 4/4: 100%\|.*\| 12/12 ", stream.getvalue())

    def test_shows_the_last_evaluation(self, make_loop, always_due):
        """The last evaluation's metrics are shown before the loss."""
        stream = Terminal()

        make_loop(ProgressBarLogger(stream)).fit(evaluate=True)

        assert re.search(r"\| 3/6 .*, Accuracy=0.75, loss=2\]", stream.getvalue())
        assert re.search(r"\| 6/6 .*, Accuracy=0.75, loss=5\] *\n$", stream.getvalue())

    @pytest.mark.parametrize("columns", [24, 60, 80, 110, 200])
    def test_is_not_wider_than_the_terminal(self, make_loop, always_due, set_width, columns):
        """No drawing is wider than the terminal, and no number is cut off."""
        stream = Terminal()
        set_width(columns)
        loop = make_loop(ProgressBarLogger(stream), batches=120, max_duration="2ep")

        loop.fit(evaluate=True)

        drawn = [text for text in re.split(r"[\r\n]|\x1b\[A", stream.getvalue()) if text.startswith(("Epoch", "eval"))]
        assert 24 <= max(map(len, drawn)) <= columns
        # A loss of three digits has no room in 24 columns, and is not shown as one of two.
        assert columns > 24 or not any(re.search(r"5\d%, loss", text) for text in drawn)

    def test_loss_is_read_only_when_drawn(self, make_loop, unread):
        """Between updates nothing synchronizes."""
        bar = ProgressBarLogger(Terminal())
        loop = make_loop(bar, max_duration="1000ba")
        loop.engine.run_event("fit_start")
        began = time.monotonic()

        for number in range(200):
            loop.batch(**{"loss/train/total": unread(number)})
        drawings_at_most = (time.monotonic() - began) / 0.1 + 1

        assert unread.counter.reads <= drawings_at_most < 200

    def test_rank_zero_only(self, make_loop):
        """Other processes draw nothing."""
        stream = Terminal()

        make_loop(ProgressBarLogger(stream), rank=1).fit(evaluate=True)

        assert stream.getvalue() == ""

    def test_disabled_by_the_environment(self, run_in_subprocess, tmp_path):
        """With TQDM_DISABLE=1 no bar is drawn, and the lines of the epochs remain."""
        program = """
import io
stream = io.StringIO()
stream.isatty = lambda: True
make_trainer(ProgressBarLogger(stream))[0].fit()
report_facts(lines=stream.getvalue().splitlines())
"""

        facts = run_in_subprocess(program, tmp_path, TQDM_DISABLE="1")

        assert [line.split(",")[0] for line in facts["lines"]] == ["epoch 1/2", "epoch 2/2"]


def drawings_with_time(stream):
    """Return the drawn bars."""
    return [text.strip() for text in re.split(r"[\r\n]|\x1b\[A", stream.getvalue()) if text.strip()]


class TestLinesOfEpochs:
    def lines(self, stream):
        return [text for text in drawings_with_time(stream) if text.startswith("epoch")]

    def test_each_epoch_leaves_a_line(self, make_loop):
        """The line has the epoch, its time, the metrics of its evaluation and the loss of its last batch."""
        stream = Terminal()

        make_loop(ProgressBarLogger(stream)).fit(evaluate=True)

        assert [re.sub(r"[\d.]+ s", "0 s", line) for line in self.lines(stream)] == [
            "epoch 1/2, 0 s: Accuracy=0.75, loss=2",
            "epoch 2/2, 0 s: Accuracy=0.75, loss=5",
        ]

    @pytest.mark.parametrize(
        ("metric", "best"), [(BinaryAccuracy, "0.9 in epoch 2"), (MeanSquaredError, "0.5 in epoch 1")]
    )
    def test_best_value_so_far(self, make_loop, metric, best):
        """The best value is the largest or the smallest, as the metric declares, with its epoch."""
        stream, accuracies = Terminal(), iter([0.5, 0.9, 0.75])
        loop = make_loop(ProgressBarLogger(stream), max_duration="3ep")
        loop.state.eval_metrics = {"eval": {"Accuracy": metric()}}
        evaluate = loop.evaluate
        loop.evaluate = lambda: evaluate(accuracy=next(accuracies))

        loop.fit(epochs=3, evaluate=True)

        assert f"Accuracy=0.75 (best {best}), loss=8" in self.lines(stream)[-1]


class TestWithoutTerminal:
    def test_short_training_writes_the_lines_of_its_epochs(self, make_loop):
        """In a file there is no bar and no control character; a training of seconds leaves a line for each epoch."""
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream)).fit(evaluate=True)

        assert [re.sub(r"[\d.]+ s", "0 s", line) for line in stream.getvalue().splitlines()] == [
            "epoch 1/2, 0 s: Accuracy=0.75, loss=2",
            "epoch 2/2, 0 s: Accuracy=0.75, loss=5",
        ]

    def test_progress_is_written_at_intervals(self, make_loop, monkeypatch):
        """A line with the progress is written when ten seconds have passed since the last one."""
        stream, now = io.StringIO(), [100.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        loop = make_loop(ProgressBarLogger(stream), batches=10)
        loop.engine.run_event("fit_start")
        loop.engine.run_event("epoch_start")

        for _ in range(10):
            now[0] += 4.0
            loop.batch()

        assert drawings(stream) == [
            "Epoch 1/2:  15% 3/20 [, loss=2",
            "Epoch 1/2:  30% 6/20 [, loss=5",
            "Epoch 1/2:  45% 9/20 [, loss=8",
        ]


class TestShortBars:
    def test_evaluation_within_fit(self, make_loop, always_due):
        """The bar of an evaluation in a fit disappears."""
        stream = Terminal()

        make_loop(ProgressBarLogger(stream)).fit(evaluate=True)

        assert "eval: 100%" in stream.getvalue()
        assert "eval: " not in drawings(stream)[-1]
        assert stream.getvalue().endswith("\n")

    def test_aborted_run_is_cleaned_up(self, make_loop):
        """After an error in an evaluation no bar is open, and another fit draws a bar."""
        stream = Terminal()
        loop = make_loop(ProgressBarLogger(stream))
        for event in ["fit_start", "eval_before_all", "eval_start"]:
            loop.engine.run_event(event)

        loop.fit()
        loop.engine.close()
        gc.collect()

        assert re.search(r"\| 6/6 .*loss=5\] *\n$", stream.getvalue())


NOTEBOOK = """
import torch
from composer import Trainer
from composer.models import ComposerClassifier

network = torch.nn.Linear(4, 3)
data = [(torch.rand(4, 4), torch.tensor([0, 1, 2, 0]))] * 5
trainer = Trainer(
    model=ComposerClassifier(network),
    train_dataloader=data,
    eval_dataloader=data,
    optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
    max_duration="2ep",
    device="cpu",
)
trainer.fit()
trainer.predict(data)
trainer.close()
"""


@pytest.fixture(scope="module")
def widgets():
    """The states of a notebook's widgets after a training with evaluations and a prediction."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's client, about its connection
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    output = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    return [(widget["model_name"], widget["state"]) for widget in output]


class TestNotebook:
    def test_fit_bar(self, widgets):
        """The widget is full and green at the end, with the loss and the last evaluation."""
        bars = [state for model, state in widgets if model == "FloatProgressModel"]
        texts = [state["value"].replace("\u2007", " ") for model, state in widgets if model == "HTMLModel"]

        assert [(bar["value"], bar["max"]) for bar in bars if bar["bar_style"] == "success"] == [(10, 10)]
        assert "Epoch 2/2: 100%" in texts
        assert any(re.search(r"10/10 .*Accuracy=.*, loss=", text) for text in texts)
