"""Metrics as lines of text."""

import io

import pytest
from tqdm import tqdm

from composer.loggers import ConsoleLogger
from fixtures import small_run


def printed(stream):
    return stream.getvalue().splitlines()


def headings(stream):
    return [line for line in printed(stream) if line.startswith("[")]


class TestConsoleLogger:
    def test_first_batch_and_every_interval(self, make_loop):
        """The place is followed by all values that are new since the last time, in their order."""
        stream = io.StringIO()

        make_loop(ConsoleLogger("2ba", stream)).fit()

        assert printed(stream) == [
            "[epoch=1][batch=1/3]:",
            "\t Train loss/train/total: 0.0000",
            "\t Train time/batch: 0",
            "[epoch=1][batch=2/3]:",
            "\t Train loss/train/total: 1.0000",
            "\t Train time/batch: 1",
            "[epoch=2][batch=1/3]:",
            "\t Train loss/train/total: 3.0000",
            "\t Train time/batch: 3",
            "[epoch=2][batch=3/3]:",
            "\t Train loss/train/total: 5.0000",
            "\t Train time/batch: 5",
        ]

    def test_training_metrics_of_each_interval(self):
        """A line of the epoch so far is printed with each block, as in MosaicML Composer, and no block between them."""
        stream, seen = io.StringIO(), []

        def accuracy(state, logger):
            seen.append(state.train_metrics["MulticlassAccuracy"].compute().item())

        trainer = small_run(max_duration="2ep", train_metrics=None, loggers=ConsoleLogger("2ba", stream))
        trainer.engine.on("batch_end", accuracy)
        trainer.fit()

        batches = [1, 2, 4, 6, 8, 10]
        assert headings(stream) == [f"[epoch={1 + (n - 1) // 5}][batch={(n - 1) % 5 + 1}/5]:" for n in batches]
        lines = [line for line in printed(stream) if "MulticlassAccuracy" in line]
        assert lines == [f"\t Train metrics/train/MulticlassAccuracy: {seen[n - 1]:.4f}" for n in batches]

    def test_control_characters_are_escaped(self, make_loop):
        """A terminal does not obey the names and values of what is logged."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger("1ba", stream))
        loop.engine.on("batch_end", lambda state, logger: logger.log_metrics({"metrics/\x1b[2J": 0.5}))
        loop.engine.on("fit_start", lambda state, logger: logger.log_hyperparameters({"name": "\x1b]0;title\a"}))

        loop.fit()

        assert "\t Train metrics/\\x1b[2J: 0.5000" in printed(stream)
        assert not {"\x1b", "\a"} & {*stream.getvalue()}

    def test_every_batch_by_default(self, make_loop):
        """The default interval is one batch."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(stream=stream)).fit()

        assert len(headings(stream)) == 6

    @pytest.mark.parametrize(("interval", "epochs"), [(1, [1, 2, 3, 4]), ("2ep", [1, 2, 4]), ("3ep", [1, 3, 4])])
    def test_interval_in_epochs(self, make_loop, interval, epochs):
        """An interval in epochs prints at the end of the first epoch, of those, and of the training."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(interval, stream), max_duration="4ep").fit(epochs=4)

        assert headings(stream) == [f"[epoch={epoch}][batch=3/3]:" for epoch in epochs]

    def test_total_batches(self, make_loop):
        """If the training's length is in batches, batches are counted from the start."""
        stream = io.StringIO()

        make_loop(ConsoleLogger("0.5dur", stream), max_duration="6ba").fit()

        assert headings(stream) == [f"[batch={batch}/6]:" for batch in (1, 3, 6)]

    def test_evaluation(self, make_loop):
        """The results of an evaluation are printed when it ends, without values of the training."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger("100ba", stream))
        loop.batch()
        loop.batch()

        loop.evaluate("test", accuracy=0.9375)

        assert printed(stream)[3:] == [
            "[Eval batch=1/2] Eval on test data",
            "[Eval batch=2/2] Eval on test data:",
            "\t Eval metrics/test/Accuracy: 0.9375",
        ]

    @pytest.mark.parametrize(
        ("batches", "shown"),
        [(320, [*range(1, 320, 32), 320]), (3, [1, 2, 3]), (13, [1, 3, 4, 5, 7, 8, 9, 11, 12, 13]), (1, [1])],
    )
    def test_progress_of_an_evaluation(self, make_loop, batches, shown):
        """There is a line for the first batch, for about each tenth of the batches, and for the last."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger(stream=stream), batches=batches)
        loop.engine.run_event("eval_start")

        for _ in range(batches):
            loop.engine.run_event("eval_batch_end")
        loop.logger.log_metrics({"metrics/eval/Accuracy": 1.0})
        loop.engine.run_event("eval_end")

        ends = [int(line.partition("=")[2].partition("/")[0]) for line in headings(stream)]
        assert ends[0] == 1
        assert ends[-1] == batches
        assert len(ends) <= 11
        assert ends == shown

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (12, "12"),
            (0.0, "0.0000"),
            (56817.21484375, "56817.2148"),
            (-0.25, "-0.2500"),
            (0.000123456, "0.0001235"),
            (1.25e-05, "0.00001250"),
            (float("nan"), "nan"),
            (float("-inf"), "-inf"),
            ("x" * 1000, "x" * 197 + "..."),
        ],
    )
    def test_numbers(self, make_loop, value, text):
        """Numbers have four decimals, or more if they are small, and never an exponent."""
        stream = io.StringIO()

        make_loop(ConsoleLogger(stream=stream)).batch(value=value)

        assert printed(stream)[-1] == f"\t Train value: {text}"

    def test_rank_zero_only(self, make_loop):
        """Other processes print nothing."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger(stream=stream), rank=1)

        loop.fit(evaluate=True)
        loop.logger.log_hyperparameters({"lr": 0.1})

        assert stream.getvalue() == ""

    @pytest.mark.parametrize("begin", ["fit_start", "eval_standalone_start", "predict_start"])
    def test_hyperparameters(self, make_loop, begin):
        """All hyperparameters are printed once, sorted, when something begins."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger(stream=stream))
        loop.logger.log_hyperparameters({"seed": 17, "BlurPool": {"min_channels": 16}})
        loop.logger.log_hyperparameters({"lr": 0.1})
        assert printed(stream) == []

        for event in (begin, "fit_start"):
            loop.engine.run_event(event)

        frame = "*" * 30
        assert printed(stream) == [frame, "Config:", "BlurPool/min_channels: 16", "lr: 0.1", "seed: 17", "", frame]

    def test_progress_bar(self, make_loop):
        """A line does not overlap a progress bar."""
        stream = io.StringIO()
        loop = make_loop(ConsoleLogger(stream=stream))

        with tqdm(total=3, file=stream):
            loop.batch()

        assert "\r[epoch=1][batch=1/3]:\n\t Train loss/train/total: 0.0000\n" in stream.getvalue()

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"log_interval": "often"}, "'often'"), ({"stream": "nowhere"}, "stream must be"), ({"stream": 3}, "got 3")],
    )
    def test_bad_arguments(self, options, message):
        """Invalid arguments raise at construction."""
        with pytest.raises(ValueError, match=message):
            ConsoleLogger(**options)
