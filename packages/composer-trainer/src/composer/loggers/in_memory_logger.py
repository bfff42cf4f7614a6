"""Keep all logged values in memory."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from composer.core import Interval, Logger, LoggerDestination, State, Time, Timestamp
from composer.core.evaluator import nearest_metric
from composer.core.interval import to_interval
from composer.core.logger import detach_to_host
from composer.core.time import Counts
from composer.loggers.images import to_images
from composer.loggers.products import import_product
from composer.loggers.values import html_table, read, smoothed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

_MOST_UNREAD = 10_000
_MANY_VALUES = 40
"""Fewer values are not smoothed."""
_FIRST_VALUE = 1 + len(Counts._fields)
_STORED_UNCHANGED = frozenset({int, float, str, bool, type(None)})


class LoggedFloat(float):
    """A number that also has the method ``item`` of a tensor.

    Example:
        >>> LoggedFloat(0.5), LoggedFloat(0.5).item()
        (0.5, 0.5)
    """

    item = float.__float__


class InMemoryLogger(LoggerDestination):
    """Keep all logged values in memory.

    Numbers that a device still computes are read together when they are accessed, and at the end of each epoch. A
    second run starts empty.

    Args:
        every: How often metrics are stored: a time, a string or a number of epochs; always if None.

    Attributes:
        hyperparameters: Hyperparameters by name.
        tables: Tables by name, each ``{"columns": […], "rows": [[…], …]}``.
        images: Images by name, each time with the clock: a list of ``(H, W, C)`` tensors of bytes on the CPU.

    Example:
        >>> from composer.core import Engine
        >>> state, history = State(model=None), InMemoryLogger()
        >>> logger = Logger(state, history)
        >>> Engine(state, logger).run_event("init")
        >>> logger.log_metrics({"loss/train/total": 0.5})
        >>> history.get_timeseries("loss/train/total")["loss/train/total"]
        [0.5]
    """

    def __init__(self, *, every: Interval | Time | str | int | None = None) -> None:
        self.every = to_interval(every)
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, dict[str, list[Any]]] = {}
        self.images: dict[str, list[tuple[Timestamp, list[Tensor]]]] = {}
        self._data: dict[str, list[tuple[Timestamp, Any]]] = {}
        # Logged values that are not in `_data` yet: names, counts of the clock and values in one tuple. Sorting them
        # into `_data` at every step would be slower; so would more objects, through garbage collection.
        self._rows: list[tuple[Any, ...]] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._num_read = 0
        self._state: State | None = None

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, Any]]]:
        """The values of each metric with their timestamps."""
        self._read()
        for row in self._rows:
            clock = Timestamp.of(Counts(*row[1:_FIRST_VALUE]))
            for name, value in zip(row[0], row[_FIRST_VALUE:], strict=True):
                self._data.setdefault(name, []).append((clock, LoggedFloat(value) if type(value) is float else value))
        self._rows.clear()
        self._num_read = 0
        return self._data

    @property
    def most_recent_values(self) -> dict[str, Any]:
        """The last value of each metric."""
        return {name: entries[-1][1] for name, entries in self.data.items()}

    @property
    def most_recent_timestamps(self) -> dict[str, Timestamp]:
        """The timestamp of the last value of each metric."""
        return {name: entries[-1][0] for name, entries in self.data.items()}

    def get_timeseries(self, metric: str) -> dict[str, list[Any]]:
        """Return a metric as columns: its values under its name, and one column per field of the clock.

        Args:
            metric: The metric's name.

        Returns:
            Lists of one length: ``{"loss/train/total": […], "epoch": […], "batch": […], …, "total_wct": […]}``. Wall
            clock times are in seconds.

        Raises:
            ValueError: Nothing was logged under the name.
        """
        data = self.data
        if metric not in data:
            known, hint = ", ".join(data) or "none yet", nearest_metric(metric, data)
            raise ValueError(f"metric must be one that was logged ({known}), got {metric!r}{hint}")
        entries = data[metric]
        clocks = [timestamp.state_dict() for timestamp, _ in entries]
        return {metric: [value for _, value in entries]} | {
            part: [clock[part] for clock in clocks] for part in clocks[0]
        }

    def plot(self, metrics: str | Sequence[str], ax: Axes | None = None, x: str = "batch") -> Axes:
        """Plot metrics as lines, those with many values with a moving average over a twentieth of them.

        Args:
            metrics: One or several names.
            ax: Axes to draw into. If None, metrics of one scale get new axes, below those of another scale.
            x: The field of the clock on the x-axis: ``"batch"``, ``"epoch"``, ``"sample"``, ``"total_wct"`` (seconds),
                …

        Returns:
            The axes, the uppermost ones if there are several; ``ax.figure.savefig("loss.png")`` saves the figure.

        Raises:
            ValueError: Nothing was logged under a name, or the clock has no such field.
            ModuleNotFoundError: Matplotlib is not installed.
        """
        drawn: Sequence[Axes]
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        series = {name: self.get_timeseries(name) for name in names}
        parts = list(Timestamp().state_dict())
        if x not in parts:
            raise ValueError(f"x must be one of {', '.join(parts)}, got {x!r}.")
        groups = [names] if ax is not None else _by_scale({name: series[name][name] for name in names})
        drawn = [] if ax is None else [ax]
        if ax is None:
            pyplot = import_product("matplotlib.pyplot", "plot")
            drawn = pyplot.subplots(len(groups), sharex=True, squeeze=False, layout="constrained")[1][:, 0]
        for one, group in zip(drawn, groups, strict=True):
            for name in group:
                _draw(one, name, series[name][x], series[name][name])
            one.legend() if len(group) > 1 else one.set_ylabel(group[0])
        drawn[-1].set_xlabel("seconds" if x.endswith("_wct") else x)
        return drawn[0]

    def _repr_html_(self) -> str:  # the method that notebooks call
        rows = []
        for name, entries in self.data.items():
            if numbers := [value for _, value in entries if isinstance(value, (int, float))]:
                shown = [f"{value:.4g}" for value in (numbers[-1], min(numbers), max(numbers))]
                rows.append((name, len(numbers), *shown))
        return html_table(rows, ("metric", "values", "last", "lowest", "highest"))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Store hyperparameters."""
        self.hyperparameters.update(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store numbers with the clock; a ``step`` replaces the clock's batch."""
        state, names, values = self._state, tuple(metrics), list(metrics.values())
        is_now = state is not None and (step is None or step == state.timestamp.counts.batch)
        clock = state.timestamp.counts if state is not None and is_now else self._clock(step).counts
        # At each step: numbers of the CPU are read now, which costs less than storing a tensor until it is read.
        for place, value in enumerate(values):
            kind = type(value)
            if kind is Tensor and value.is_cpu and not value.ndim:
                values[place] = value.item()
            elif kind not in _STORED_UNCHANGED:
                values[place] = detach_to_host(value)
        rows = self._rows
        # The same tuple of names for all rows, which saves memory.
        rows.append((self._names.setdefault(names, names), *clock, *values))
        if len(rows) - self._num_read >= _MOST_UNREAD:
            self._read()

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Store a table, replacing an earlier one of the same name."""
        self.tables[name] = {"columns": list(columns), "rows": [list(row) for row in rows]}

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Store images with the clock."""
        converted = to_images(images, channels_last=channels_last)
        self.images.setdefault(name, []).append((self._clock(step), converted))

    def init(self, state: State, logger: Logger) -> None:
        """Store the run's clock, and drop the values of another run."""
        if self._state is not None and self._state is not state:
            # New containers: those returned by the earlier run stay unchanged.
            self.hyperparameters, self.tables, self.images, self._data = {}, {}, {}, {}
            self._rows, self._num_read = [], 0
        self._state = state

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Read the values that the device has computed."""
        self._read()

    def _clock(self, step: int | None) -> Timestamp:
        clock = Timestamp() if self._state is None else self._state.timestamp
        return clock if step is None else clock.copy(batch=step)

    def _read(self) -> None:
        """Replace tensors by numbers."""
        rows = self._rows
        unread = [
            place
            for place in range(self._num_read, len(rows))
            if any(isinstance(value, Tensor) for value in rows[place])
        ]
        values = iter(read([value for place in unread for value in rows[place]]))
        for place in unread:
            rows[place] = tuple(itertools.islice(values, len(rows[place])))
        self._num_read = len(rows)


def _by_scale(values: Mapping[str, list[Any]]) -> list[list[str]]:
    """Return the names in groups, in which the largest absolute values differ by less than a factor of ten."""
    groups: dict[float, list[str]] = {}
    for name, each in values.items():
        numbers = [abs(value) for value in each if isinstance(value, (int, float)) and math.isfinite(value)]
        scale = math.log10(max(numbers, default=0.0) or 1.0)
        near = next((other for other in groups if abs(other - scale) < 1), scale)
        groups.setdefault(near, []).append(name)
    return list(groups.values())


def _draw(ax: Axes, name: str, places: list[Any], values: list[Any]) -> None:
    is_long = len(values) >= _MANY_VALUES and all(isinstance(value, (int, float)) for value in values)
    # A line through a single value would be invisible.
    (line,) = ax.plot(places, values, label=name, marker="o" if len(values) == 1 else None)
    if is_long:
        line.set(alpha=0.3, label="_" + name)
        ax.plot(places, smoothed(values, len(values) // _MANY_VALUES), color=line.get_color(), label=name)
