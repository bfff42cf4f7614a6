"""Metrics as lines of text."""

import io
import sys

import pytest
import torch
from tqdm import tqdm

from composer import Trainer
from composer.core import Event, Trace
from composer.loggers import ConsoleLogger
from composer.models import ComposerClassifier


def printed(stream):
    return stream.getvalue().splitlines()


class TestConsoleLogger:
    def test_line_at_every_interval_and_epoch_end(self, make_loop):
        """A line has the clock and the latest values; printed values are not printed again."""
        stream = io.StringIO()

        make_loop(ConsoleLogger("2ba", stream)).fit()

        assert printed(stream) == [
            "[epoch 1/2, batch 2/3] loss/train/total=1",
            "[epoch 1/2, end] loss/train/total=2",
            "[epoch 2/2, batch 1/3] loss/train/total=3",
            "[epoch 2/2, batch 3/3] loss/train/total=5",
        ]

    def test_every_batch_by_default(self, make_loop):
        """The default interval is one batch."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(stream=stream)).fit()

        assert len(printed(stream)) == 6

    @pytest.mark.parametrize(("interval", "lines"), [(1, 2), ("2ep", 1)])
    def test_interval_in_epochs(self, make_loop, interval, lines):
        """An interval in epochs prints at the end of those epochs only."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(interval, stream)).fit()

        assert len(printed(stream)) == lines

    def test_fraction_of_a_training_in_epochs(self, make_loop):
        """A sixth of two epochs of three batches is a batch."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(f"{1 / 6}dur", stream)).fit()

        assert len(printed(stream)) == 6

    def test_interval_in_iterations(self):
        """With iterations of two epochs, a line is printed at the end of each, with the last batch's values."""
        stream = io.StringIO()
        network = torch.nn.Linear(2, 2)
        with Trainer(
            model=ComposerClassifier(network, train_metrics=[]),
            train_dataloader=[(torch.rand(1, 2), torch.tensor([0]))] * 3,
            optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
            max_duration="2iter",
            loggers=ConsoleLogger("1iter", stream),
            progress_bar=False,
            device="cpu",
        ) as trainer:
            trainer.state.iteration_length = "2ep"
            trainer.fit()

        assert [line.partition("]")[0] for line in printed(stream) if line.startswith("[")] == [
            "[epoch 2, end",
            "[epoch 4, end",
        ]

    def test_total_batches(self, make_loop):
        """If the training's length is in batches, batches are counted from the start."""
        stream = io.StringIO()

        make_loop(ConsoleLogger("0.5dur", stream), max_duration="6ba").fit()

        assert printed(stream)[-1] == "[epoch 2, batch 6/6] loss/train/total=5"

    def test_evaluation_line(self, make_loop):
        """Evaluation results are printed when it ends, without training values."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger("100ba", stream))
        loop.batch()

        loop.evaluate("test", accuracy=0.9375)

        assert printed(stream) == ["[batch 1, test] metrics/test/Accuracy=0.9375"]

    def test_remaining_values_are_printed_at_the_end(self, make_loop):
        """Values logged after the last interval are printed at the end of training."""
        stream = io.StringIO()

        make_loop(ConsoleLogger("100ba", stream), max_duration="3ba").fit(epochs=1)

        assert printed(stream) == ["[epoch 1, end] loss/train/total=2"]

    def test_values_are_read_when_printed(self, make_loop, unread):
        """Device values are read when printed, all of a line together."""
        loop = make_loop(ConsoleLogger("4ba", io.StringIO()))
        reads = []

        for number in range(4):
            loop.batch(slow=unread(number), slower=unread(number))
            reads.append(unread.counter.reads)

        assert reads == [0, 0, 0, 1]

    def test_long_lines_are_wrapped(self, make_loop):
        """Losses and metrics are first, on lines of at most 120 characters."""
        stream = io.StringIO()
        rest = {f"throughput/number_{place}": place for place in range(9)}

        make_loop(ConsoleLogger(stream=stream)).batch(**rest, **{"metrics/train/Accuracy": 0.5})

        first, second, *_ = printed(stream)
        assert first.startswith(
            "[epoch 1/2, batch 1/3] loss/train/total=0, metrics/train/Accuracy=0.5, throughput/number_0=0,"
        )
        assert second.startswith("    throughput/")
        assert max(map(len, printed(stream))) <= 120

    def test_tensor_values(self, make_loop):
        """A metric with several values is printed."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(stream=stream)).batch(per_class=torch.tensor([0.5, 1.0]))

        assert printed(stream) == ["[epoch 1/2, batch 1/3] loss/train/total=0, per_class=[0.5, 1.0]"]

    def test_replaced_streams(self, make_loop, capsys):
        """Standard streams that are replaced after construction are used."""
        make_loop(ConsoleLogger(stream="stdout")).batch()

        assert capsys.readouterr().out == "[epoch 1/2, batch 1/3] loss/train/total=0\n"

    def test_rank_zero_only(self, make_loop):
        """Other processes print nothing."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger(stream=stream), rank=1)

        loop.fit(evaluate=True)
        loop.logger.log_hyperparameters({"lr": 0.1})

        assert stream.getvalue() == ""

    def test_settings_and_tables(self, make_loop):
        """Hyperparameters are one line, tables are columns."""
        stream = io.StringIO()
        logger = make_loop(ConsoleLogger(stream=stream)).logger

        logger.log_hyperparameters({"lr": 0.1, "seed": 17})
        logger.log_table(["id", "score"], [[1000, 0.5]], name="best")

        assert printed(stream) == ["hyperparameters: lr=0.1, seed=17", "best:", "id    score", "1000  0.5"]

    def test_log_traces(self, make_loop):
        """Traces are printed with log_traces=True only."""
        silent, stream = io.StringIO(), io.StringIO()
        loop = make_loop(ConsoleLogger(stream=silent), ConsoleLogger(stream=stream, log_traces=True))

        loop.logger.log_traces({"algorithm_traces/EMA/batch_end": Trace("EMA", Event.BATCH_END, run=True)})
        loop.batch()

        assert "algorithm_traces/EMA/batch_end=ran" in stream.getvalue()
        assert "EMA" not in silent.getvalue()

    def test_progress_bar(self, make_loop):
        """A line does not overlap a progress bar."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger(stream=stream))

        with tqdm(total=3, file=stream):
            loop.batch()

        assert "\r[epoch 1/2, batch 1/3] loss/train/total=0\n" in stream.getvalue()

    def test_file_is_flushed(self, make_loop, tmp_path):
        """Lines are flushed to a file, also if tqdm prints them."""
        with (tmp_path / "lines.txt").open("w") as file:
            make_loop(ConsoleLogger(stream=file)).batch()

            assert (tmp_path / "lines.txt").read_text() == "[epoch 1/2, batch 1/3] loss/train/total=0\n"

    def test_without_tqdm(self, make_loop, monkeypatch):
        """If tqdm is not imported, lines are printed directly."""
        monkeypatch.delitem(sys.modules, "tqdm")
        stream = io.StringIO()

        make_loop(ConsoleLogger(stream=stream)).batch()

        assert printed(stream) == ["[epoch 1/2, batch 1/3] loss/train/total=0"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"log_interval": "often"}, "'often'"), ({"stream": "nowhere"}, "stream must be"), ({"stream": 3}, "got 3")],
    )
    def test_bad_arguments(self, options, message):
        """Invalid arguments raise at construction."""
        with pytest.raises(ValueError, match=message):
            ConsoleLogger(**options)
