"""Print metrics as lines of text."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

from composer.core import Interval, Logger, LoggerDestination, State, Time, Timestamp, TimeUnit, Trace
from composer.functional.checks import check_flags
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.loggers.values import Stream, check_stream, open_stream, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ConsoleLogger", "terminal_destinations"]

_NOT_SHOWN = frozenset(  # parts of the heading
    f"time/{counter}{part}"
    for counter in ("iteration", "epoch", "batch", "sample", "token")
    for part in ("", "_in_iteration", "_in_epoch")
) | {"trainer/device_train_microbatch_size"}
_WIDTH = 120
_WHOLE_EPOCHS = (TimeUnit.EPOCH, TimeUnit.ITERATION)


class ConsoleLogger(LoggerDestination):
    """Print a line of metrics every ``log_interval``, at the end of each epoch and after each evaluation.

    Example::

        [epoch 2/10, batch 40/120] loss/train/total=0.3215, lr-SGD/group0=0.05
        [epoch 2/10, end] metrics/train/MulticlassAccuracy=0.9417
        [epoch 2/10, batch 240, eval] metrics/eval/MulticlassAccuracy=0.9521

    A line contains the latest values logged since the previous line, losses and metrics first; long lines are wrapped.
    Values are read only when a line is printed. In a distributed run the process of rank 0 prints. Lines and a progress
    bar can share a terminal.

    Args:
        log_interval: How often: a time, a text, or a number of epochs. An interval in epochs also selects the epochs at
            whose end a line is printed; with other units there is one at the end of each.
        stream: ``"stderr"``, ``"stdout"`` or an open text file.
        log_traces: Whether to print which algorithms ran.

    Raises:
        ValueError: ``log_interval`` is not a length of time, or ``stream`` is not writable.

    Example:
        >>> from composer.core import Logger, State
        >>> console = ConsoleLogger(log_interval="10ba", stream="stdout")
        >>> Logger(State(model=None), destinations=console).log_hyperparameters({"seed": 17})
        hyperparameters: seed=17
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
        self._new: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._is_evaluating = False
        self._is_first_rank = True
        self._last_look = Timestamp()

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Print hyperparameters."""
        self._print(_folded(f"hyperparameters: {show(hyperparameters.items())}"))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store the metrics until the next line."""
        latest = self._evaluation if self._is_evaluating else self._new
        for name, value in metrics.items():
            latest[name] = value.detach() if hasattr(value, "detach") else value

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Store which algorithms ran until the next line, if ``log_traces`` is True."""
        if self.should_log_traces:
            self._new.update({name: _ran(trace) for name, trace in traces.items()})

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Print a table."""
        cells = [[str(cell) for cell in row] for row in (columns, *rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        self._print("\n".join([f"{name}:", *(line.rstrip() for line in lines)]))

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run, and print only in the process of rank 0."""
        self._new, self._evaluation, self._is_evaluating = {}, {}, False
        self._is_first_rank = state.rank == 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Count the interval from here."""
        self._is_evaluating = False
        self._last_look = state.timestamp

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print a line, if one is due."""
        if self.log_interval.every.unit not in _WHOLE_EPOCHS and self._is_due(state):
            self._print_and_clear(self._new, f"{_epoch(state, 1)}, {_batch(state)}")

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Print a line, if there are new values and no longer interval in epochs is running."""
        unit = self.log_interval.every.unit
        if unit not in _WHOLE_EPOCHS or (unit is TimeUnit.EPOCH and self._is_due(state)):
            self._print_and_clear(self._new, f"{_epoch(state)}, end")

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Print a line, if the interval is in iterations and one is due."""
        if self.log_interval.every.unit is TimeUnit.ITERATION and self._is_due(state):
            self._print_and_clear(self._new, f"{_epoch(state)}, end")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Print the remaining values."""
        self._print_and_clear(self._new, f"{_epoch(state)}, end of the fit")

    def eval_start(self, state: State, logger: Logger) -> None:
        """Collect the values of an evaluation for a separate line."""
        self._evaluation.clear()
        self._is_evaluating = True

    def eval_end(self, state: State, logger: Logger) -> None:
        """Print the values of the evaluation."""
        self._is_evaluating = False
        where = f"batch {state.timestamp.count(TimeUnit.BATCH)}, {state.dataloader_label or 'eval'}"
        self._print_and_clear(self._evaluation, where)

    def _is_due(self, state: State) -> bool:
        before, self._last_look = self._last_look, state.timestamp
        return self.log_interval.passed(before, state.timestamp, state.max_duration, state.dataloader_len)

    def _print_and_clear(self, metrics: dict[str, Any], where: str) -> None:
        shown = [(name, value) for name, value in metrics.items() if name not in _NOT_SHOWN]
        shown.sort(key=lambda pair: not pair[0].startswith(("loss/", "metrics/")))
        if shown and self._is_first_rank:
            self._print(_folded(f"[{where}] {show(shown)}"))
        metrics.clear()

    def _print(self, text: str) -> None:
        if not self._is_first_rank:
            return
        # If there are progress bars, tqdm clears them, prints, and redraws them. It is not imported just for that.
        tqdm = sys.modules.get("tqdm")
        stream = open_stream(self.stream)
        if tqdm is None:
            print(text, file=stream, flush=True)
        else:
            tqdm.tqdm.write(text, file=stream)
            stream.flush()


def terminal_destinations(
    *,
    progress_bar: bool,
    log_to_console: bool,
    stream: Stream = "stderr",
    log_interval: Time | str | int = "1ba",
    log_traces: bool = False,
) -> list[LoggerDestination]:
    """Return the destinations that show a run in a terminal: a progress bar, lines of text, both or none.

    Args:
        progress_bar: Whether to show a progress bar.
        log_to_console: Whether to print metrics as lines.
        stream: ``"stdout"``, ``"stderr"`` or an open text file.
        log_interval: How often lines are printed.
        log_traces: Whether to print which algorithms ran.

    Example:
        >>> terminal_destinations(progress_bar=False, log_to_console=False)
        []
    """
    destinations: list[LoggerDestination] = []
    if progress_bar:
        destinations.append(ProgressBarLogger(stream=stream, log_traces=log_traces))
    if log_to_console:
        destinations.append(ConsoleLogger(log_interval=log_interval, stream=stream, log_traces=log_traces))
    return destinations


def _folded(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _ran(trace: Trace) -> str:
    code = "" if trace.exit_code is None else f" ({trace.exit_code})"
    return f"ran{code}" if trace.run else "did not run"


def _epoch(state: State, unfinished: int = 0) -> str:
    whole = state.max_duration
    of = f"/{whole.value}" if whole is not None and whole.unit is TimeUnit.EPOCH else ""
    return f"epoch {state.timestamp.count(TimeUnit.EPOCH) + unfinished}{of}"


def _batch(state: State) -> str:
    """Return the batch of the training if ``max_duration`` is in batches, else the batch of the epoch."""
    clock, whole = state.timestamp, state.max_duration
    if whole is not None and whole.unit is TimeUnit.BATCH:
        return f"batch {clock.count(TimeUnit.BATCH)}/{whole.value}"
    of = "" if state.dataloader_len is None else f"/{state.dataloader_len}"
    return f"batch {int(clock.batch_in_epoch)}{of}"
