"""A picture of schedules over a run."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State, Time, Timestamp, TimeUnit
from composer.optim.scheduler import ComposerScheduler, compile_composer_scheduler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.optim import Optimizer

__all__ = ["plot_schedule"]

_VISIBLE_STAIRS = 100

Drawn: TypeAlias = "ComposerScheduler | Callable[[Optimizer], LRScheduler]"


def plot_schedule(
    schedulers: Drawn | Sequence[Drawn] | Mapping[str, Drawn],
    max_duration: Time | str | int,
    *,
    batches_in_epoch: int | None = None,
    scale_schedule_ratio: float = 1.0,
    step_schedulers_every_batch: bool = False,
    base_lr: float = 1.0,
    ax: Axes | None = None,
    num_points: int = 1000,
) -> Axes:
    """Draw the learning rates that a run would have.

    Args:
        schedulers: A schedule, several, or several by label: functions ``f(state, ssr)``, or functions ``f(optimizer)``
            that make one of torch's. Functions of one's own see a clock that counts in the unit of ``max_duration``,
            and in epochs and batches where ``batches_in_epoch`` is given.
        max_duration: How long the run is; a whole number counts epochs. The unit is that of the picture.
        batches_in_epoch: How many batches an epoch has; needed where epochs and batches both occur.
        scale_schedule_ratio: By how much run and schedules are stretched.
        step_schedulers_every_batch: Whether torch's own step after each batch; else they step after each epoch.
        base_lr: The optimizer's learning rate, which the schedules multiply.
        ax: Where to draw; a new figure if None.
        num_points: How many points are computed at most, at least 2, evenly over the run. Each is a batch with the
            learning rate that it is trained with, the first and the last of the run among them.

    Returns:
        The axes, with a line for each schedule.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: A schedule is not a function.
        ValueError: There is no schedule, a value is out of range, or a schedule cannot be computed in this run.

    Example:
        >>> from composer.optim import CosineAnnealingWithWarmupScheduler
        >>> warm = CosineAnnealingWithWarmupScheduler("1ep")
        >>> plot_schedule(warm, "10ep", batches_in_epoch=50, base_lr=0.1).get_xlabel()  # doctest: +SKIP
        'epochs'
    """
    run = _Run.make(
        max_duration, batches_in_epoch, scale_schedule_ratio, step_schedulers_every_batch, base_lr, num_points
    )
    labelled = _labelled(schedulers)
    if ax is None:
        ax = _new_axes()
    for label, schedule in labelled.items():
        rates = run.rates(schedule)
        # A rate holds until the next batch, and the last to the end of the run: stairs, where they can be seen.
        style = "steps-post" if len(rates) <= _VISIBLE_STAIRS else "default"
        ax.plot([*run.positions, run.length.value], [*rates, rates[-1]], label=label, drawstyle=style)
    ax.set_xlabel(run.length.unit.plural)
    ax.set_ylabel("learning rate")
    ax.set_xlim(0, run.length.value)
    ax.set_ylim(bottom=-0.02 * ax.get_ylim()[1])
    ax.grid(visible=True, alpha=0.3)
    ax.legend()
    return ax


def _new_axes() -> Axes:
    try:
        from matplotlib import pyplot  # noqa: PLC0415  (optional, and slow to import)
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plot_schedule draws with matplotlib: pip install matplotlib") from None
    axes: Axes = pyplot.subplots(figsize=(8, 4), layout="constrained")[1]
    return axes


@attrs.frozen
class _Run:
    """The run that is drawn: how long it is, and at which times.

    ``steps`` is what has been done at each point, in batches where these are known, else in the length's own unit.
    """

    length: Time
    batches_in_epoch: int | None
    ratio: float
    every_batch: bool
    base_lr: float
    unit: TimeUnit
    steps: list[float]

    @classmethod
    def make(
        cls,
        max_duration: Time | str | int,
        batches: int | None,
        ratio: float,
        every_batch: bool,
        base_lr: float,
        num_points: int,
    ) -> _Run:
        if batches is not None and batches < 1:
            raise ValueError(f"batches_in_epoch must be at least 1, got {batches}.")
        if num_points < 2:
            raise ValueError(f"num_points must be at least 2, got {num_points}.")
        if not ratio > 0:
            raise ValueError(f"scale_schedule_ratio must be more than 0, got {ratio}.")
        length = Time.from_input(max_duration, TimeUnit.EPOCH, name="max_duration") * ratio
        if length.unit is TimeUnit.DURATION or length.value <= 0:
            raise ValueError(f"max_duration must be a length of time such as '10ep', above 0, got {max_duration!r}.")
        in_batches = length.unit is TimeUnit.EPOCH and batches is not None
        whole = length.value * (batches or 1) if in_batches else length.value
        unit = TimeUnit.BATCH if in_batches else length.unit
        last = whole if unit is TimeUnit.SECOND else whole - 1
        count = num_points if unit is TimeUnit.SECOND else min(num_points, int(whole))
        points = [last * place / max(count - 1, 1) for place in range(count)]
        steps: list[float] = points if unit is TimeUnit.SECOND else [int(point) for point in points]
        return cls(length, batches, ratio, every_batch, base_lr, unit, steps)

    @property
    def positions(self) -> list[float]:
        """The points in the length's unit."""
        scale = self.batches_in_epoch or 1 if self.unit is not self.length.unit else 1
        return [step / scale for step in self.steps]

    def rates(self, schedule: Drawn) -> list[float]:
        """Return the learning rate at each point."""
        return self._rates_of_torch(schedule) if _makes_torchs(schedule) else self._rates_by_clock(schedule)

    def _rates_by_clock(self, schedule: Any) -> list[float]:
        self._check_units(schedule)
        optimizer = self._optimizer()
        state = State(model=None, max_duration=self.length, optimizers=(optimizer,))
        state.set_dataloader(None, "train", self.batches_in_epoch)
        scheduler = compile_composer_scheduler(schedule, state, self.ratio)
        rates = []
        for step in self.steps:
            state.timestamp = self._clock(step)
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    def _check_units(self, schedule: Any) -> None:
        """Refuse a time that this run's clock does not count: the schedule would never move."""
        known = {self.length.unit, self.unit, TimeUnit.DURATION}
        if self.batches_in_epoch is not None and self.unit is TimeUnit.BATCH:
            known |= {TimeUnit.EPOCH}
        for name, value in _settings(schedule).items():
            for time in value if isinstance(value, tuple) else (value,):
                if isinstance(time, Time) and time.unit not in known:
                    raise ValueError(
                        f"{name}={time} cannot be drawn over {self.length}. Give both in one unit, or in epochs and "
                        "batches, with batches_in_epoch."
                    )

    def _clock(self, step: float) -> Timestamp:
        if self.unit is TimeUnit.SECOND:
            return Timestamp(total_wct=datetime.timedelta(seconds=step))
        if self.unit is not TimeUnit.BATCH or self.batches_in_epoch is None:
            return Timestamp().copy(**{self.unit.name.lower(): int(step)})
        epoch, batch = divmod(int(step), self.batches_in_epoch)
        return Timestamp(epoch=epoch, batch=int(step), batch_in_epoch=batch)

    def _rates_of_torch(self, make: Any) -> list[float]:
        optimizer, every = self._optimizer(), self._steps_between()
        scheduler = make(optimizer)
        rates, wanted = [], set(self.steps)
        for step in range(int(self.steps[-1]) + 1):
            if step in wanted:
                rates.append(float(optimizer.param_groups[0]["lr"]))
            if (step + 1) % every == 0:
                optimizer.step()
                scheduler.step()
        return rates

    def _steps_between(self) -> int:
        """Return after how many steps a scheduler of torch's steps."""
        if self.unit is TimeUnit.BATCH and self.every_batch:
            return 1
        if self.unit is TimeUnit.BATCH and self.batches_in_epoch is not None:
            return self.batches_in_epoch
        if self.unit is TimeUnit.EPOCH and not self.every_batch:
            return 1
        raise ValueError(
            f"schedulers holds one of torch's, which counts epochs or batches, and in a run of {self.length} it is not "
            "known when it steps. Give max_duration in epochs or batches, and batches_in_epoch."
        )

    def _optimizer(self) -> torch.optim.SGD:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=self.base_lr)


def _labelled(schedulers: Any) -> dict[str, Drawn]:
    if isinstance(schedulers, Mapping):
        labelled = {str(label): schedule for label, schedule in schedulers.items()}
    else:
        several = list(schedulers) if isinstance(schedulers, Iterable) else [schedulers]
        labelled = {}
        for schedule in several:
            label = _label(schedule)
            labelled[label if label not in labelled else f"{label} ({len(labelled) + 1})"] = schedule
    if not labelled:
        raise ValueError("schedulers must be at least one schedule, got none.")
    for schedule in labelled.values():
        if isinstance(schedule, (LRScheduler, type)) or not callable(schedule):
            raise TypeError(
                f"schedulers must be functions f(state, ssr), or functions f(optimizer) that make one of torch's, got "
                f"{schedule!r}. Write lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)."
            )
    return labelled


def _makes_torchs(schedule: Any) -> bool:
    return "optimizer" in inspect.signature(schedule).parameters


def _label(schedule: Any) -> str:
    """Return a short name: ``"StepScheduler(step_size=30ep)"``."""
    if not attrs.has(type(schedule)):
        return str(getattr(schedule, "__name__", type(schedule).__name__))
    defaults = {field.name: field.default for field in attrs.fields(type(schedule))}
    settings = {name: value for name, value in _settings(schedule).items() if value != defaults[name]}
    told = ", ".join(f"{name}={_reported(value)}" for name, value in settings.items())
    return f"{type(schedule).__name__.removesuffix('Scheduler')}({told})"


def _settings(schedule: Any) -> dict[str, Any]:
    fields = attrs.fields(type(schedule)) if attrs.has(type(schedule)) else ()
    return {field.name: getattr(schedule, field.name) for field in fields}


def _reported(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
