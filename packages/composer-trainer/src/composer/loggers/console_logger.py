"""Print metrics as lines of text."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from composer.core import Interval, Logger, LoggerDestination, State, Time, Timestamp, TimeUnit, Trace
from composer.core.checks import printable
from composer.distributed import get_world_size
from composer.functional.checks import check_flags
from composer.loggers.values import Stream, aligned, check_stream, flat, open_stream, read

_WHOLE_EPOCHS = (TimeUnit.EPOCH, TimeUnit.ITERATION)
_FRAME = "*" * 30
NUM_EVAL_LOGGING_EVENTS = 10
_SIGNIFICANT, _LONGEST = 4, 200


class ConsoleLogger(LoggerDestination):
    r"""Print the metrics of the first batch and of every ``log_interval``, and of each evaluation.

    Example::

        [epoch=2][batch=40/120]:
        \t Train loss/train/total: 0.3215
        \t Train lr-SGD/group0: 0.0500
        [Eval batch=1/20] Eval on eval data
        [Eval batch=20/20] Eval on eval data:
        \t Eval metrics/eval/MulticlassAccuracy: 0.9521

    The hyperparameters are printed when a training, evaluation or prediction begins. Then it prints, in the format of
    MosaicML Composer: the latest values of all metrics that were logged since the previous lines; with an interval that
    is not in epochs, the training metrics of the epoch so far, in several processes at its end instead; a line for each
    tenth of an evaluation, and its results.

    Values are read only when they are printed. In a distributed run the process of rank 0 prints. Lines and a progress
    bar can share a terminal.

    Args:
        log_interval: How often: a time, a string, or a number of epochs. With an interval in epochs, lines are also
            printed at the end of the first epoch; with other units, also for the first batch.
        stream: ``"stderr"``, ``"stdout"`` or an open text file.
        log_traces: Whether to print which algorithms ran.

    Raises:
        ValueError: ``log_interval`` is not a length of time, or ``stream`` is not writable.

    Example:
        >>> from composer.core import Logger, State
        >>> console = ConsoleLogger(log_interval="10ba", stream="stdout")
        >>> Logger(State(model=None), destinations=console).log_table(["id", "score"], [[7, 0.5]], name="best")
        best:
        id  score
        7   0.5
    """

    def __init__(
        self,
        log_interval: Time | str | int = "1ba",
        stream: Stream = "stderr",
        log_traces: bool = False,
    ) -> None:
        self.log_interval = Interval.named("log_interval", log_interval)
        self.stream = check_stream(stream)
        check_flags(log_traces=log_traces)
        self.should_log_traces = log_traces
        self._hyperparameters: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._is_evaluating = False
        self._evaluated_batches = 0
        self._is_first_rank = True
        self._last_batch = self._last_check = Timestamp()
        self._printed_batch: Timestamp | None = None

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Store hyperparameters until a training, evaluation or prediction begins."""
        self._hyperparameters |= flat(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store the metrics until they are printed."""
        latest = self._evaluation if self._is_evaluating else self._new
        for name, value in metrics.items():
            latest[name] = value.detach() if hasattr(value, "detach") else value

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Store which algorithms ran until it is printed, if ``log_traces`` is True."""
        if self.should_log_traces:
            self._new.update({name: _ran(trace) for name, trace in traces.items()})

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Print a table."""
        lines = aligned([[str(cell) for cell in row] for row in (columns, *rows)])
        self._print("\n".join([f"{name}:", *lines]))

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and print only in the process of rank 0."""
        self._hyperparameters, self._new, self._evaluation, self._is_evaluating = {}, {}, {}, False
        self._is_first_rank = state.rank == 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Print the hyperparameters, and count the interval from here."""
        self._print_hyperparameters()
        self._is_evaluating = False
        self._last_batch = self._last_check = state.timestamp
        self._printed_batch = None

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Print the hyperparameters, also when a prediction begins."""
        self._print_hyperparameters()

    predict_start = eval_standalone_start

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print the metrics if they are due."""
        self._last_batch = state.timestamp
        if self.log_interval.every.unit not in _WHOLE_EPOCHS and self._is_due(TimeUnit.BATCH, state):
            # Several processes would have to compute a metric together, and only one may have this logger.
            if state.train_metrics and get_world_size() == 1:
                values = {name: metric.compute() for name, metric in state.train_metrics.items()}
                self._new |= flat({f"metrics/{state.dataloader_label or 'train'}": values})
            self._print_all(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Print the metrics if they are due with an interval in epochs; in several processes those of the epoch."""
        unit = self.log_interval.every.unit
        if unit is TimeUnit.EPOCH and self._is_due(unit, state):
            self._print_all(state)
        elif unit not in _WHOLE_EPOCHS and get_world_size() > 1:
            names = [name for name in self._new if name.startswith("metrics/")]
            self._print_metrics({name: self._new.pop(name) for name in names}, "Train", self._where(state))

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Print the metrics if they are due with an interval in iterations."""
        unit = self.log_interval.every.unit
        if unit is TimeUnit.ITERATION and self._is_due(unit, state):
            self._print_all(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Print the remaining metrics, if the last batch has not been printed, and what ended the training early."""
        if self._printed_batch is not self._last_batch:
            self._print_all(state)
        if state.stop_reason is not None:
            self._print(f"Training ended: {state.stop_reason}")

    def eval_start(self, state: State, logger: Logger) -> None:
        """Collect the metrics of an evaluation separately."""
        self._evaluation.clear()
        self._is_evaluating, self._evaluated_batches = True, 0

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Print the progress of an evaluation at its first batch and with each tenth."""
        before, of = self._evaluated_batches, state.dataloader_len
        self._evaluated_batches = now = before + 1
        if of is None or now == of:  # the results follow after the last batch
            return
        # At the first batch, and whenever another tenth is complete.
        if not before or before * NUM_EVAL_LOGGING_EVENTS // of != (before - 1) * NUM_EVAL_LOGGING_EVENTS // of:
            self._print(self._progress(state))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Print the results of the evaluation."""
        self._is_evaluating = False
        self._print_metrics(self._evaluation, "Eval", self._progress(state))

    def _print_all(self, state: State) -> None:
        self._printed_batch = self._last_batch
        self._print_metrics(self._new, "Train", self._where(state))

    def _is_due(self, unit: TimeUnit, state: State) -> bool:
        """Return whether the interval has passed since the last check, or the first batch, epoch or iteration ended."""
        before, self._last_check = self._last_check, state.timestamp
        is_first = bool(self.log_interval.every.value) and state.timestamp.count(unit) == 1
        passed = self.log_interval.passed(before, state.timestamp, state.max_duration, state.dataloader_len)
        return passed or is_first

    def _where(self, state: State) -> str:
        """Return the place of the last batch: in the training if ``max_duration`` is in batches, else in its epoch."""
        clock, whole = self._last_batch, state.max_duration
        if whole is not None and whole.unit is TimeUnit.BATCH:
            return f"[batch={clock.count(TimeUnit.BATCH)}/{whole.value}]"
        of = "" if state.dataloader_len is None else f"/{state.dataloader_len}"
        batch = clock.count(TimeUnit.BATCH, in_epoch=True)
        return f"[epoch={clock.count(TimeUnit.EPOCH) + 1}][batch={batch}{of}]"

    def _progress(self, state: State) -> str:
        of = "" if state.dataloader_len is None else f"/{state.dataloader_len}"
        return f"[Eval batch={self._evaluated_batches}{of}] Eval on {state.dataloader_label or 'eval'} data"

    def _print_hyperparameters(self) -> None:
        if self._hyperparameters:
            lines = [f"{name}: {value}" for name, value in sorted(self._hyperparameters.items())]
            self._print("\n".join([_FRAME, "Config:", *lines, "", _FRAME]))
        self._hyperparameters = {}

    def _print_metrics(self, metrics: dict[str, Any], kind: str, where: str) -> None:
        if metrics and self._is_first_rank:
            values = map(_format, read(list(metrics.values())))
            lines = [f"\t {kind} {name}: {value}" for name, value in zip(metrics, values, strict=True)]
            self._print("\n".join([f"{where}:", *lines]))
        metrics.clear()

    def _print(self, text: str) -> None:
        if not self._is_first_rank:
            return
        # If there are progress bars, tqdm clears them, prints, and redraws them. It is not imported just for that.
        tqdm, text = sys.modules.get("tqdm"), printable(text)  # names of metrics may be from a file
        stream = open_stream(self.stream)
        if tqdm is None:
            print(text, file=stream, flush=True)
        else:
            tqdm.tqdm.write(text, file=stream)
            stream.flush()


def _ran(trace: Trace) -> str:
    code = "" if trace.exit_code is None else f" ({trace.exit_code})"
    return f"ran{code}" if trace.run else "did not run"


def _format(value: Any) -> str:
    """Format a value with at least four decimals and four significant digits: 56817.2148, 0.00001250."""
    if isinstance(value, float):
        is_small = value and math.isfinite(value) and abs(value) < 1
        decimals = _SIGNIFICANT - 1 - math.floor(math.log10(abs(value))) if is_small else 0
        return f"{value:.{max(_SIGNIFICANT, decimals)}f}"
    line = f"[{', '.join(map(_format, value))}]" if isinstance(value, list) else str(value)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
