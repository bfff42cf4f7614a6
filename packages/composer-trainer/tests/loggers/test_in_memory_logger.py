"""Logged values can be read."""

import re

import pytest
import torch

from composer.loggers import InMemoryLogger


class TestInMemoryLogger:
    def test_values_with_timestamps(self, make_loop):
        """Each value is stored with its batch's clock."""
        history = InMemoryLogger()

        make_loop(history).fit()

        assert [value for _, value in history.data["loss/train/total"]] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert [int(clock.epoch) for clock, _ in history.data["loss/train/total"]] == [0, 0, 0, 1, 1, 1]
        assert [int(clock.batch) for clock, _ in history.data["loss/train/total"]] == [0, 1, 2, 3, 4, 5]

    def test_timeseries_columns(self, make_loop):
        """Columns have equal length, one per unit."""
        history = InMemoryLogger()
        make_loop(history).fit()

        series = history.get_timeseries("loss/train/total")

        assert series["loss/train/total"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert series["sample"] == [0, 4, 8, 12, 16, 20]
        assert series["batch_in_epoch"] == [0, 1, 2, 0, 1, 2]
        assert series["total_wct"] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]

    def test_timeseries_of_an_unknown_metric_raises(self, make_loop):
        """The error lists the metrics."""
        history = InMemoryLogger()
        make_loop(history).fit()

        with pytest.raises(ValueError, match=r"loss/train/total, time/batch.*got 'loss'"):
            history.get_timeseries("loss")

    def test_most_recent(self, make_loop):
        """The last value of each metric with its timestamp."""
        history = InMemoryLogger()
        make_loop(history).fit(evaluate=True)

        assert history.most_recent_values == {"loss/train/total": 5.0, "time/batch": 5, "metrics/eval/Accuracy": 0.75}
        assert history.most_recent_timestamps["metrics/eval/Accuracy"].epoch == 2

    def test_hyperparameters_and_tables(self, make_loop):
        """Hyperparameters are merged; a table replaces one of its name."""
        history = InMemoryLogger()
        logger = make_loop(history).logger

        logger.log_hyperparameters({"lr": 0.1})
        logger.log_hyperparameters({"seed": 17})
        logger.log_table(["id", "score"], [[1, 0.5]], name="best")

        assert history.hyperparameters == {"lr": 0.1, "seed": 17}
        assert history.tables == {"best": {"columns": ["id", "score"], "rows": [[1, 0.5]]}}

    def test_every(self, make_loop):
        """With an interval the latest value of each name is stored with its step."""
        history = InMemoryLogger(every="2ba")

        make_loop(history).fit()

        assert [(int(clock.batch), value) for clock, value in history.data["loss/train/total"]] == [
            (1, 1.0),
            (3, 3.0),
            (5, 5.0),
        ]

    def test_images(self, make_loop):
        """Images are stored with the clock, as bytes."""
        history = InMemoryLogger()
        loop = make_loop(history)
        loop.batch()

        loop.logger.log_images(torch.ones(2, 3, 4, 5), name="white")

        ((clock, images),) = history.images["white"]
        assert clock.batch == 1
        assert [tuple(image.shape) for image in images] == [(4, 5, 3)] * 2
        assert images[0].unique().tolist() == [255]


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
class TestPlot:
    @pytest.fixture(autouse=True)
    def no_window(self, monkeypatch):
        """Draw without a screen, and close all figures."""
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("agg")
        yield
        matplotlib.pyplot.close("all")

    def test_plot_metric(self, make_loop):
        """The line has the values at their batches."""
        history = InMemoryLogger()
        make_loop(history).fit()

        axes = history.plot("loss/train/total")

        (line,) = axes.lines
        assert line.get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
        assert line.get_ydata().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch", "loss/train/total")

    def test_plot_several_metrics(self, make_loop, tmp_path):
        """Several metrics have a legend; the figure can be saved; a single value is a point."""
        import matplotlib.pyplot as plt

        history = InMemoryLogger()
        make_loop(history).fit(evaluate=True)
        history.log_metrics({"once": 1.0})
        figure, axes = plt.subplots()

        returned = history.plot(["loss/train/total", "metrics/eval/Accuracy", "once"], ax=axes, x="total_wct")
        figure.savefig(tmp_path / "picture.png")

        assert returned is axes
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [
            "loss/train/total",
            "metrics/eval/Accuracy",
            "once",
        ]
        assert axes.lines[0].get_xdata().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
        assert axes.get_xlabel() == "seconds"
        assert axes.lines[2].get_marker() == "o"
        assert (tmp_path / "picture.png").stat().st_size > 1000

    def test_unknown_names_raise(self, make_loop):
        """An unknown metric or unit raises."""
        history = InMemoryLogger()
        make_loop(history).fit()

        with pytest.raises(ValueError, match="got 'loss'"):
            history.plot("loss")
        with pytest.raises(ValueError, match=r"x must be one of iteration, epoch, batch, .* got 'step'"):
            history.plot("loss/train/total", x="step")


def test_in_a_notebook():
    """A table shows the number of values of each metric, the last one, the lowest and the highest."""
    history = InMemoryLogger()
    for value in (2.0, 0.5, 1.0):
        history.log_metrics({"loss<x>": value, "name": "no number"})

    assert re.findall(r"<td[^>]*>([^<]*)<", history._repr_html_()) == ["loss&lt;x&gt;", "3", "1", "0.5", "2"]
