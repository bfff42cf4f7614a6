"""Show a progress bar with the loss and the last evaluation, and a line for each finished epoch."""

from __future__ import annotations

import datetime
import functools
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

from composer.core import Logger, LoggerDestination, State, TimeUnit
from composer.core.checks import printable
from composer.core.evaluator import more_is_better
from composer.functional.checks import check_flags
from composer.loggers.values import Stream, check_stream, open_stream, read, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

    from tqdm.auto import tqdm

_SECONDS_BETWEEN_DRAWINGS = 0.1
_SECONDS_BETWEEN_LINES = 10.0
_ROWS = 20
"""tqdm draws nothing on a terminal of height 0; there are at most two bars."""
_KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{rate}{postfix}]"
_UNKNOWN = "{desc}: {n_fmt}{unit} [{elapsed}{rate}{postfix}]"
_NARROW = "{desc}: {percentage:3.0f}%{postfix}"
_WITHOUT_RATE = "{l_bar}{bar}| {n:.0f}/{total_fmt}s{postfix}"
_TASK = re.compile(r"\b(Multiclass|Multilabel|Binary)(?=[A-Z])")
"""The beginning of the names of torchmetrics, which is the same for all metrics of a model."""


class ProgressBarLogger(LoggerDestination):
    """Draw one bar for a fit, and a temporary one for each evaluation in it and each prediction.

    After each epoch one line stays above the bar: its time, the loss of its last batch, the metrics of its evaluation,
    and the best value so far of the first of them::

        epoch 2/10, 1.4 s: Accuracy=0.9512 (best 0.9561 in epoch 1), loss=0.2215, CrossEntropy=0.1562

    The first metric is the model's first one that improves when it grows, or else its first. Names are shortened as
    long as they remain different. If the terminal is too narrow for all values, the last ones are omitted.

    If the stream is not a terminal (a file, a pipe, the log of a server), there is no bar: a line with the progress is
    written every ten seconds, and the line of each epoch.

    The bar of a fit counts in the unit of ``max_duration``; epochs are counted in batches, whose number is known if the
    data loader has a length. The loss is read only when the bar is drawn, at most ten times per second. In a
    distributed run the process of rank 0 draws.

    Args:
        stream: ``"stderr"``, ``"stdout"`` or an open text file.
        log_traces: Whether to print above the bar which algorithms ran.

    Raises:
        ValueError: ``stream`` is none of these.

    Example:
        >>> from composer.core import Logger, State
        >>> logger = Logger(State(model=None), destinations=ProgressBarLogger(stream="stdout"))
    """

    def __init__(self, stream: Stream = "stderr", log_traces: bool = False) -> None:
        self.stream = check_stream(stream)
        check_flags(log_traces=log_traces)
        self.should_log_traces = log_traces
        self._fit_bar: _Bar | None = None
        self._short_bar: _Bar | None = None
        self._unit = TimeUnit.BATCH
        self._loss: Any = None
        self._evaluation: dict[str, Any] = {}
        self._best: dict[str, tuple[float, int]] = {}
        self._is_evaluating = self._has_news = False
        self._epoch_began = 0.0

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store the loss, and the metrics of an evaluation, until the bar is drawn."""
        if self._is_evaluating:
            self._evaluation.update({name: value for name, value in metrics.items() if name.startswith("metrics/")})
        else:
            loss = metrics.get("loss/train/total")
            if loss is not None:
                self._loss = loss.detach() if getattr(loss, "requires_grad", False) else loss

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Print above the bar which algorithms ran, if ``log_traces`` is True."""
        if self.should_log_traces and self._fit_bar is not None:
            for name, trace in traces.items():
                self._fit_bar.write(f"{name}: {trace}")

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self._loss, self._evaluation, self._best = None, {}, {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the bar of the fit."""
        if not state.timestamp.count(TimeUnit.BATCH):
            self._loss, self._evaluation, self._best = None, {}, {}
        self._close_bars()
        self._is_evaluating = self._has_news = False
        self._epoch_began = time.monotonic()
        if state.rank == 0 and state.max_duration is not None:
            unit = state.max_duration.unit
            self._unit = TimeUnit.BATCH if unit in {TimeUnit.EPOCH, TimeUnit.ITERATION} else unit
            done = state.timestamp.count(self._unit)
            self._fit_bar = self._open_bar(f"Epoch {_epoch_of(state, 1)}", _total(state), self._unit, done)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Show the epoch and the total, which may be known only now."""
        self._epoch_began = time.monotonic()
        if self._fit_bar is not None:
            self._fit_bar.bar.total = _total(state)
            self._fit_bar.bar.set_description_str(f"Epoch {_epoch_of(state, 1)}", refresh=False)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Draw the bar, if it is due."""
        if self._fit_bar is not None:
            self._has_news = True
            if time.monotonic() >= self._fit_bar.due_at:
                self._fit_bar.draw(state.timestamp.count(self._unit), self._values(state))

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Leave a line for the epoch, whose evaluation, if any, is done."""
        if self._fit_bar is not None:
            seconds = time.monotonic() - self._epoch_began
            spent = f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
            self._fit_bar.write_fitting(f"epoch {_epoch_of(state)}, {spent}: ", self._values(state, best=True))
            self._has_news = False

    def fit_end(self, state: State, logger: Logger) -> None:
        """Draw the bar a last time and leave it, and write what ended the training early."""
        if state.stop_reason is not None and self._fit_bar is not None:
            self._fit_bar.write(f"training ended: {state.stop_reason}")
        self._draw_fit_bar(state, is_last=self._has_news)
        self._close_bars()

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Draw the last batch, which the fit's bar shows during the evaluation."""
        self._is_evaluating = True
        self._draw_fit_bar(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Open the bar of an evaluation, which stays if there is no fit."""
        self._open_short_bar(state, state.dataloader_label or "eval", leave=self._fit_bar is None)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Draw the bar of the evaluation or prediction, if it is due."""
        if self._short_bar is not None:
            self._short_bar.count += 1
            if time.monotonic() >= self._short_bar.due_at:
                self._short_bar.draw(self._short_bar.count, ())

    def eval_end(self, state: State, logger: Logger) -> None:
        """Remove the bar of the evaluation; one that stays shows the metrics."""
        if self._short_bar is not None and self._fit_bar is None:
            prefix = f"metrics/{state.dataloader_label}/"
            own = {name: value for name, value in self._evaluation.items() if name.startswith(prefix)}
            self._short_bar.draw(self._short_bar.count, _shown(_ordered(own, state)), is_last=True)
        self._close_short_bar()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Show the metrics of the evaluation on the fit's bar."""
        self._is_evaluating, self._has_news = False, True
        self._update_best(state)
        self._draw_fit_bar(state)

    def predict_start(self, state: State, logger: Logger) -> None:
        """Open the bar of a prediction."""
        self._open_short_bar(state, "Predicting")

    predict_batch_end = eval_batch_end

    def predict_end(self, state: State, logger: Logger) -> None:
        """Remove the bar of the prediction."""
        self._close_short_bar()

    def close(self, state: State, logger: Logger) -> None:
        """Close the open bars, for example after an error."""
        self._close_bars()

    def _draw_fit_bar(self, state: State, *, is_last: bool = False) -> None:
        if self._fit_bar is not None:
            self._fit_bar.draw(state.timestamp.count(self._unit), self._values(state), is_last=is_last)

    def _values(self, state: State, *, best: bool = False) -> list[str]:
        """Return the metrics of the last evaluation and the loss as strings, the most important first."""
        metrics = _ordered(self._evaluation, state)
        first = next(iter(metrics), "")
        *shown, loss = _shown({**metrics, "loss": self._loss})
        if best and first in self._best:
            value, epoch = self._best[first]
            shown[0] += f" (best {value:.4g} in epoch {epoch})"
        return shown if self._loss is None else [*shown[:1], loss, *shown[1:]]

    def _update_best(self, state: State) -> None:
        for name, value in zip(self._evaluation, read(list(self._evaluation.values())), strict=True):
            more = _more(name, state)
            if more is not None and isinstance(value, (int, float)):
                best = self._best.get(name, (value, 0))[0]
                if name not in self._best or (value > best if more else value < best):
                    is_within_epoch = bool(state.timestamp.counts.batch_in_epoch)
                    self._best[name] = value, int(state.timestamp.count(TimeUnit.EPOCH)) + is_within_epoch

    def _open_bar(
        self, description: str, total: float | None, unit: TimeUnit, done: float = 0, *, leave: bool = True
    ) -> _Bar:
        text = printable(description)
        return _Bar(open_stream(self.stream), unit, total, desc=text, initial=done, leave=leave)

    def _open_short_bar(self, state: State, description: str, *, leave: bool = False) -> None:
        self._close_short_bar()
        if state.rank == 0:
            self._short_bar = self._open_bar(description, state.dataloader_len, TimeUnit.BATCH, leave=leave)

    def _close_short_bar(self) -> None:
        if self._short_bar is not None:
            # In a notebook a bar that is closed before its end stays, in red; its last batches may not have been drawn.
            self._short_bar.bar.n = max(self._short_bar.bar.n, self._short_bar.count)
            self._short_bar.bar.close()
            self._short_bar = None

    def _close_bars(self) -> None:
        self._close_short_bar()
        if self._fit_bar is not None:
            self._fit_bar.bar.close()
            self._fit_bar = None


@functools.cache
def _bar_class() -> tuple[type[tqdm[Any]], bool]:
    """Return tqdm's class, and whether it is a widget of a notebook."""
    # Imported only by runs with a bar.
    from tqdm.auto import tqdm  # noqa: PLC0415
    from tqdm.std import tqdm as standard  # noqa: PLC0415

    # tqdm's monitor thread is not needed, and data loaders fork more safely without it.
    kind: type[tqdm[Any]] = type("tqdm", (tqdm,), {"monitor_interval": 0})
    return kind, kind.status_printer is not standard.status_printer


class _NullFile:
    """A file that discards the bar itself if lines are written instead."""

    def write(self, line: str) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Write nothing."""


class _Bar:
    """A tqdm bar that is drawn on request; lines with the same numbers if the stream is not a terminal.

    Args:
        stream: The stream.
        unit: What is counted.
        total: The number of units; None if unknown.
        settings: Further arguments of tqdm.
    """

    def __init__(self, stream: TextIO, unit: TimeUnit, total: float | None, **settings: Any) -> None:
        make, self._is_widget = _bar_class()
        is_terminal = callable(getattr(stream, "isatty", None)) and stream.isatty()
        self._stream, self._unit, self.count = stream, unit, 0
        self._is_plain = not is_terminal and not self._is_widget
        self.bar = make(
            file=_NullFile() if self._is_plain else stream,
            ncols=None if self._is_widget else self._width(),
            dynamic_ncols=self._is_widget,
            nrows=_ROWS,
            bar_format=next(self._layouts((), known=total is not None))[0],
            mininterval=0,
            miniters=0,
            total=total,
            unit=unit.value,
            unit_scale=unit in {TimeUnit.SAMPLE, TimeUnit.TOKEN},
            **settings,
        )
        self._wait()

    def draw(self, done: float, values: Sequence[str], *, is_last: bool = False) -> None:
        """Draw the bar. If lines are written instead, write one only if it is due or the last one."""
        if self.bar.disable or (self._is_plain and not is_last and time.monotonic() < self.due_at):
            return
        bar, width = self.bar, self._width()
        for layout, shown in self._layouts(values, known=bar.total is not None):
            bar.bar_format = layout
            bar.set_postfix_str(printable(", ".join(shown)), refresh=False)
            # Without a width, the bar itself has ten characters.
            line = bar.format_meter(**{**bar.format_dict, "n": done, "ncols": None})
            if self._is_plain or self._is_widget or len(line) <= width:
                break
        bar.ncols = None if self._is_widget else width
        bar.update(done - bar.n)
        if self._is_plain:
            self.write(line)
        self._wait()

    def write_fitting(self, beginning: str, values: Sequence[str]) -> None:
        """Write a line above the bar, with as many values as the terminal has room for."""
        while len(values) > 1 and len(beginning) + len(", ".join(values)) > self._width() and not self._is_plain:
            values = values[:-1]
        self.write(beginning + ", ".join(values))

    def write(self, line: str) -> None:
        """Write a line above the bar."""
        line = printable(line)
        if self._is_plain or self.bar.disable:  # tqdm reads TQDM_DISABLE
            print(line, file=self._stream, flush=True)
        else:
            self.bar.write(line, file=self.bar.fp)

    def _layouts(self, values: Sequence[str], *, known: bool) -> Iterator[tuple[str | None, Sequence[str]]]:
        """Yield formats of tqdm with the values to show, the most detailed first."""
        if self._unit is TimeUnit.SECOND:
            detailed = short = _WITHOUT_RATE
        elif self._is_widget:
            yield None, values
            return
        else:
            template = _KNOWN if known else _UNKNOWN
            detailed, short = template.replace("{rate}", ", {rate_fmt}"), template.replace("{rate}", "")
        if self._is_plain:
            detailed = detailed.replace("|{bar}|", "")
        yield detailed, values
        for count in range(len(values), 0, -1):
            yield short, values[:count]
        yield _NARROW if known else short, values[:1]
        yield _NARROW if known else short, ()  # rather than a number that is cut off

    def _width(self) -> int:
        """Return the terminal's number of columns, which is 80 where it is unknown or 0."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (AttributeError, OSError, ValueError):
            columns = 0
        return columns or shutil.get_terminal_size().columns

    def _wait(self) -> None:
        self.due_at = time.monotonic() + (_SECONDS_BETWEEN_LINES if self._is_plain else _SECONDS_BETWEEN_DRAWINGS)


def _shown(metrics: Mapping[str, Any]) -> list[str]:
    """Return metrics as strings, with names that are as short as possible while they differ."""
    labels = {name.split("/")[1] for name in metrics if "/" in name}
    names = [name.split("/", 2 if len(labels) == 1 else 1)[-1] for name in metrics]
    short = [_TASK.sub("", name) for name in names]
    values = read(list(metrics.values()))
    short = short if len({*short}) == len(short) else names
    return [f"{name}={show(value)}" for name, value in zip(short, values, strict=True)]


def _ordered(metrics: Mapping[str, Any], state: State) -> dict[str, Any]:
    """Return the metrics, first what ``save_best`` or a stopper follows, then those that improve when they grow."""
    followed = {getattr(callback, "monitored_metric", None) for callback in state.callbacks}
    return {
        name: metrics[name] for name in sorted(metrics, key=lambda name: (name not in followed, not _more(name, state)))
    }


def _more(name: str, state: State) -> bool | None:
    """Return whether a metric of an evaluator improves when it grows; None if that is unknown."""
    _, label, metric = [*name.split("/", 2), "", ""][:3]
    return more_is_better(state.eval_metrics.get(label, {}), metric)


def _epoch_of(state: State, unfinished: int = 0) -> str:
    whole = state.max_duration
    of = f"/{whole.value}" if whole is not None and whole.unit is TimeUnit.EPOCH else ""
    return f"{state.timestamp.count(TimeUnit.EPOCH) + unfinished}{of}"


def _total(state: State) -> float | None:
    """Return the total of the bar of a fit; None if it is unknown."""
    whole = state.max_duration
    if whole is None or whole.unit not in {TimeUnit.EPOCH, TimeUnit.ITERATION}:
        return None if whole is None else whole.value
    if state.dataloader_len is None:
        return None
    if whole.unit is TimeUnit.EPOCH:
        return whole.value * state.dataloader_len
    length = state.iteration_length
    return whole.value * length.value * state.dataloader_len if length.unit is TimeUnit.EPOCH else None
