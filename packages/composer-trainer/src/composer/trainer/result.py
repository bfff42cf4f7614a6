"""The result of a training."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from composer.core import TimeUnit
from composer.core.checks import printable
from composer.distributed import all_reduce_min
from composer.loggers.fits import Fit, loss_curve
from composer.loggers.values import Number, aligned, html_table, numbers_by_name
from composer.trainer.evaluation.metrics import is_matrix

if TYPE_CHECKING:
    from composer.core import State, Timestamp
    from composer.trainer.run import Run


@attrs.frozen(repr=False)
class FitResult:
    """The result of a call of :meth:`Trainer.fit`. It prints as a table.

    Args:
        run_name: The name of the run.
        reason: Why the training ended: its duration was reached, it was already complete, a signal stopped it, or what
            called ``state.stop_training``, such as an early stopper with its metric and patience.
        timestamp: The clock at the end.
        steps: The number of batches that this call trained on.
        seconds: The time of this call, with its evaluations, in seconds.
        metrics: The final loss and the latest values of the metrics, by the names under which they are logged.
        checkpoint: The newest checkpoint that this run has saved; None if there is none.
        best_checkpoint: The best one by the metric of ``save_best``; None if there is none.
        acted: What each algorithm did since the training began, as ``Plan.acted``: ``{"MixUp": (72, "times")}``.
        fit: The loss of each batch, the learning rates, and what differs from the call before; None without a step.
        averaged_by: The algorithms whose averages are evaluated, while the model has the training weights; in the
            context of :func:`composer.core.evaluation_weights` it has the averages.

    Example:
        >>> from composer.core import Timestamp
        >>> clock = Timestamp(epoch=3, batch=72, sample=4500)
        >>> FitResult("digits", "max_duration='3ep' is reached", clock, 72, 0.5, {"metrics/eval/Accuracy": 0.9375})
        run                    digits
        ended                  max_duration='3ep' is reached
        steps                  72, 144.0 per second
        clock                  epoch 3, batch 72, sample 4500
        seconds                0.5
        metrics/eval/Accuracy  0.9375
    """

    run_name: str
    reason: str
    timestamp: Timestamp
    steps: int
    seconds: float
    metrics: dict[str, Number]
    checkpoint: str | None = None
    best_checkpoint: str | None = None
    acted: Mapping[str, tuple[int, str]] = attrs.field(factory=dict)
    fit: Fit | None = None
    averaged_by: Sequence[str] = ()

    def __repr__(self) -> str:
        """Return the table."""
        return printable("\n".join(aligned(self._rows())))

    def _repr_html_(self) -> str:  # the method that notebooks call
        return html_table(self._rows(), left=2) + ("" if self.fit is None else loss_curve([self.fit]))

    def _rows(self) -> list[tuple[str, str]]:
        speed = f", {self.steps / self.seconds:.1f} per second" if self.steps and self.seconds else ""
        tokens = [TimeUnit.TOKEN] if self.timestamp.count(TimeUnit.TOKEN) else []
        averaging = ", ".join(self.averaged_by)
        units = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, *tokens)
        rows = {
            "run": self.run_name,
            "ended": self.reason,
            "steps": f"{self.steps}{speed}",
            "clock": ", ".join(f"{unit.name.lower()} {self.timestamp.count(unit)}" for unit in units),
            "seconds": f"{self.seconds:.4g}",
            **({} if self.fit is None else self.fit.rows()),
            "checkpoint": self.checkpoint,
            "best": self.best_checkpoint,
            "algorithms": ", ".join(f"{name} {count} {unit}" for name, (count, unit) in self.acted.items()) or None,
            "weights": f"those of training; evaluated are the averages of {averaging}" if averaging else None,
            **{name: f"{value:.4g}" for name, value in self.metrics.items()},
        }
        return [(name, value) for name, value in rows.items() if value is not None]


def final_metrics(state: State, losses: Mapping[str, Any]) -> dict[str, Number]:
    """Return the last losses and the latest metric values as numbers, which waits for the device once.

    Args:
        state: The run.
        losses: The losses of the last batch by name; empty if there was none.
    """
    values = {f"loss/train/{name}": loss for name, loss in losses.items()}
    of_labels: dict[str | None, Any] = {state.dataloader_label: state.train_metric_values}
    of_labels.update(state.eval_metric_values)
    for label, metrics in of_labels.items():
        if isinstance(metrics, Mapping):  # a custom loop may have set values by name only
            values |= {f"metrics/{label}/{name}": value for name, value in metrics.items() if not is_matrix(value)}
    return numbers_by_name([values])[0]


def reason_of_end(run: Run) -> str:
    """Return why a training ended, the same in all processes; all must call it."""
    state = run.state
    if run.signals.is_agreed:  # in all processes or in none
        number = -all_reduce_min(-(run.signals.received or 0))  # that of a process that has received one
        return f"stopped by {signal.Signals(number).name}"
    if not run.has_ended_early:
        return f"max_duration='{run.end}' is reached"
    if state.stop_reason is None:
        return f"max_duration='{state.max_duration}' is reached, to which it was changed from '{run.end}'"
    is_reached = run.end is not None and state.has_reached(run.end)
    return f"{state.stop_reason}; max_duration='{run.end}' is {'' if is_reached else 'not '}reached"
