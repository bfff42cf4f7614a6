"""Show a progress bar with the loss and the last evaluation."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from composer.core import Logger, LoggerDestination, State, TimeUnit
from composer.functional.checks import check_flags
from composer.loggers.values import Stream, check_stream, open_stream, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tqdm.auto import tqdm

__all__ = ["ProgressBarLogger"]

_SECONDS_BETWEEN_DRAWINGS = 0.1
_UNITS = {TimeUnit.BATCH: "ba", TimeUnit.SAMPLE: "sp", TimeUnit.TOKEN: "tok"}
_WITHOUT_RATE = "{l_bar}{bar}| {n:.0f}/{total_fmt}s{postfix}"


class ProgressBarLogger(LoggerDestination):
    """Draw one bar for a fit, and a temporary one for each evaluation in it and each prediction.

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
        self._is_evaluating = False

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
                self._fit_bar.bar.write(f"{name}: {trace}", file=self._fit_bar.bar.fp)

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self._loss, self._evaluation = None, {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the bar of the fit."""
        if not state.timestamp.count(TimeUnit.BATCH):
            self._loss, self._evaluation = None, {}
        self._close_bars()
        self._is_evaluating = False
        if state.rank == 0 and state.max_duration is not None:
            unit = state.max_duration.unit
            self._unit = TimeUnit.BATCH if unit in {TimeUnit.EPOCH, TimeUnit.ITERATION} else unit
            done = state.timestamp.count(self._unit)
            self._fit_bar = self._open_bar(_epoch_of(state), _total(state), self._unit, done)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Show the epoch and the total, which may be known only now."""
        if self._fit_bar is not None:
            self._fit_bar.bar.total = _total(state)
            self._fit_bar.bar.set_description_str(_epoch_of(state), refresh=False)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Draw the bar, if it is due."""
        if self._fit_bar is not None and time.monotonic() >= self._fit_bar.due_at:
            self._draw_fit_bar(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Draw the bar a last time and leave it."""
        self._draw_fit_bar(state)
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
                self._short_bar.draw(self._short_bar.count, "")

    def eval_end(self, state: State, logger: Logger) -> None:
        """Remove the bar of the evaluation; one that stays shows the metrics."""
        if self._short_bar is not None and self._fit_bar is None:
            prefix = f"metrics/{state.dataloader_label}/"
            self._short_bar.draw(self._short_bar.count, _numbers(self._evaluation, prefix))
        self._close_short_bar()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Show the metrics of the evaluation on the fit's bar."""
        self._is_evaluating = False
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

    def _draw_fit_bar(self, state: State) -> None:
        if self._fit_bar is not None:
            loss = {} if self._loss is None else {"metrics/loss": self._loss}
            numbers = _numbers(loss | self._evaluation, "metrics/")
            self._fit_bar.draw(state.timestamp.count(self._unit), numbers)

    def _open_bar(
        self, description: str, total: float | None, unit: TimeUnit, done: float = 0, *, leave: bool = True
    ) -> _Bar:
        shape: dict[str, Any] = {"unit": _UNITS[unit]} if unit in _UNITS else {"bar_format": _WITHOUT_RATE}
        return _Bar(
            _bar_class()(
                desc=description,
                total=total,
                initial=done,
                leave=leave,
                file=open_stream(self.stream),
                dynamic_ncols=True,
                mininterval=0,
                miniters=0,
                unit_scale=unit in {TimeUnit.SAMPLE, TimeUnit.TOKEN},
                **shape,
            )
        )

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
def _bar_class() -> type[tqdm[Any]]:
    # Imported only by runs with a bar.
    from tqdm.auto import tqdm  # noqa: PLC0415

    # tqdm's monitor thread is not needed, and data loaders fork more safely without it.
    return type("tqdm", (tqdm,), {"monitor_interval": 0})


class _Bar:
    """A tqdm bar that is drawn on request, at most every ``_SECONDS_BETWEEN_DRAWINGS``."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.count = 0
        self.bar = bar
        self.due_at = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def draw(self, done: float, numbers: str) -> None:
        self.bar.set_postfix_str(numbers, refresh=False)
        self.bar.update(done - self.bar.n)
        self.due_at = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS


def _numbers(metrics: Mapping[str, Any], prefix: str) -> str:
    return show((name.removeprefix(prefix), value) for name, value in metrics.items() if name.startswith(prefix))


def _epoch_of(state: State) -> str:
    whole = state.max_duration
    of = f"/{whole.value}" if whole is not None and whole.unit is TimeUnit.EPOCH else ""
    return f"Epoch {state.timestamp.count(TimeUnit.EPOCH) + 1}{of}"


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
