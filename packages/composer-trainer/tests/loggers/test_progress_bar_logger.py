"""One progress bar per fit."""

import gc
import io
import re
import subprocess
import sys
import time
import warnings

import pytest
import tqdm.std

from composer.core import Trace
from composer.loggers import ProgressBarLogger
from composer.loggers import progress_bar_logger as module


@pytest.fixture
def always_due(monkeypatch):
    """Draw at every opportunity."""
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_DRAWINGS", 0.0)


def drawings(stream):
    """Return the drawn bars without their time-dependent parts."""
    return [
        re.sub(r"\s*\[[^,\]]*(, *[^,\]]*(/s|s/\w+))?", "", text).strip(" ]")
        for text in re.split(r"[\r\n]|\x1b\[A", stream.getvalue())
        if text.strip()
    ]


class TestFitBar:
    def test_counts_the_batches_of_all_epochs(self, make_loop):
        """There is one bar, with the total of all epochs' batches."""
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream)).fit()

        assert "| 0/6" in stream.getvalue()
        assert re.search(r"Epoch 2/2: 100%\|.*\| 6/6 .*loss=5\] *\n", stream.getvalue())
        assert stream.getvalue().count("\n") == 1

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
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream), **options).fit()

        assert re.search(output, stream.getvalue())

    def test_loader_without_a_length(self, make_loop):
        """If an epoch's length is unknown, batches are counted."""
        stream = io.StringIO()
        loop = make_loop(ProgressBarLogger(stream))
        loop.state.dataloader_len = None

        loop.fit()

        assert re.search(r"Epoch 2/2: 6ba \[", stream.getvalue())

    def test_starts_at_the_current_time(self, make_loop):
        """A second or resumed fit starts at the clock."""
        stream = io.StringIO()
        loop = make_loop(ProgressBarLogger(stream)).fit()
        loop.state.max_duration = "4ep"
        stream.truncate(0)

        loop.fit()

        assert re.search(r"Epoch 3/4:  50%\|.*\| 6/12 ", stream.getvalue())
        assert re.search(r"Epoch 4/4: 100%\|.*\| 12/12 ", stream.getvalue())

    def test_shows_the_last_evaluation(self, make_loop, always_due):
        """The last evaluation's metrics are shown next to the loss."""
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream)).fit(evaluate=True)

        assert re.search(r"\| 3/6 .*loss=2, eval/Accuracy=0.75\]", stream.getvalue())
        assert re.search(r"\| 6/6 .*loss=5, eval/Accuracy=0.75\] *\n$", stream.getvalue())

    def test_loss_is_read_only_when_drawn(self, make_loop, unread):
        """Between updates nothing synchronizes."""
        bar = ProgressBarLogger(io.StringIO())
        loop = make_loop(bar, max_duration="1000ba")
        loop.engine.run_event("fit_start")
        began = time.monotonic()

        for number in range(200):
            loop.batch(**{"loss/train/total": unread(number)})
        drawings_at_most = (time.monotonic() - began) / 0.1 + 1

        assert unread.counter.reads <= drawings_at_most < 200

    def test_update_rate(self, make_loop):
        """The bar is drawn at most ten times per second."""
        stream = io.StringIO()
        loop = make_loop(ProgressBarLogger(stream), max_duration="1000000ba")
        loop.engine.run_event("fit_start")
        began = time.monotonic()

        while time.monotonic() - began < 0.5:
            loop.batch()

        assert 2 <= stream.getvalue().count("\r") <= 8

    def test_rank_zero_only(self, make_loop):
        """Other processes draw nothing."""
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream), rank=1).fit(evaluate=True)

        assert stream.getvalue() == ""

    def test_replaced_streams(self, make_loop, capsys):
        """Standard streams that are replaced after construction are used; the default is stderr."""
        make_loop(ProgressBarLogger()).fit()

        assert "6/6" in capsys.readouterr().err

    def test_log_traces(self, make_loop):
        """Traces are shown with log_traces=True only."""
        silent, stream = io.StringIO(), io.StringIO()
        loop = make_loop(ProgressBarLogger(silent), ProgressBarLogger(stream, log_traces=True))
        loop.engine.run_event("fit_start")

        loop.logger.log_traces({"algorithm_traces/EMA/batch_end": Trace("EMA", run=True)})

        assert "algorithm_traces/EMA/batch_end: Trace(name='EMA'" in stream.getvalue()
        assert "EMA" not in silent.getvalue()

    def test_starts_no_thread(self, make_loop, monkeypatch):
        """Tqdm's monitor thread is not started, as data loaders fork."""
        started = []
        monkeypatch.setattr(tqdm.std.tqdm, "monitor", None)
        monkeypatch.setattr(tqdm.std, "TMonitor", lambda *arguments: started.append(arguments))

        make_loop(ProgressBarLogger(io.StringIO())).fit()

        assert started == []

    def test_bad_stream(self):
        """A value without write raises at construction."""
        with pytest.raises(ValueError, match=r"stream must be .* or an open text file, got 'file\.txt'"):
            ProgressBarLogger("file.txt")


class TestShortBars:
    def test_evaluation_within_fit(self, make_loop, always_due):
        """The bar of an evaluation in a fit disappears."""
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream)).fit(evaluate=True)

        assert "eval: 100%" in stream.getvalue()
        assert "eval: " not in drawings(stream)[-1]
        assert stream.getvalue().endswith("\n")

    def test_standalone_evaluation(self, make_loop):
        """The bar of a standalone evaluation stays and shows its metrics."""
        stream = io.StringIO()

        make_loop(ProgressBarLogger(stream)).evaluate("test")

        assert re.search(r"test: 100%\|.*\| 2/2 .*Accuracy=0.75\] *\n$", stream.getvalue())

    def test_prediction(self, make_loop, always_due):
        """The bar of a prediction disappears."""
        stream = io.StringIO()
        loop = make_loop(ProgressBarLogger(stream))

        for event in ["predict_start", *["predict_batch_end"] * 3, "predict_end"]:
            loop.engine.run_event(event)

        assert re.search(r"Predicting: 100%\|.*\| 3/3 ", stream.getvalue())
        assert not stream.getvalue().endswith("\n")

    def test_aborted_run_is_cleaned_up(self, make_loop):
        """After an error in an evaluation no bar is open, and another fit draws a bar."""
        stream = io.StringIO()
        loop = make_loop(ProgressBarLogger(stream))
        for event in ["fit_start", "eval_before_all", "eval_start"]:
            loop.engine.run_event(event)

        loop.fit()
        loop.engine.close()
        gc.collect()

        assert re.search(r"\| 6/6 .*loss=5\] *\n$", stream.getvalue())


def test_tqdm_import_is_lazy():
    """Importing the loggers does not import tqdm's bars."""
    program = "import sys, composer.loggers; print('tqdm.auto' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


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
        assert any(re.search(r"10/10 .*loss=.*, eval/MulticlassAccuracy=", text) for text in texts)

    def test_short_bars_complete(self, widgets):
        """The bars of evaluations and predictions reach their totals, so that none is shown as failed."""
        short = [state for model, state in widgets if model == "FloatProgressModel" and state["max"] == 5]

        assert [(bar["value"], bar["bar_style"]) for bar in short] == [(5, "")] * 3
