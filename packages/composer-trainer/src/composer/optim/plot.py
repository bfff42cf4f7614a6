"""Plot schedules over a run."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs
import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State, Time, Timestamp, TimeUnit
from composer.functional.checks import check_sizes, check_whole
from composer.optim.scheduler import ComposerScheduler, compile_composer_scheduler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.optim import Optimizer

_VISIBLE_STEPS = 100

Schedule: TypeAlias = "ComposerScheduler | Callable[[Optimizer], LRScheduler]"


def plot_schedule(
    schedulers: Schedule | Sequence[Schedule] | Mapping[str, Schedule],
    max_duration: Time | str | int,
    *,
    batches_in_epoch: int | None = None,
    scale_schedule_ratio: float = 1.0,
    step_schedulers_every_batch: bool = False,
    base_lr: float = 1.0,
    ax: Axes | None = None,
    num_points: int = 1000,
) -> Axes:
    """Plot the learning rates of a run.

    Args:
        schedulers: A schedule, several, or several by label: functions ``f(state, ssr)``, or functions ``f(optimizer)``
            that return a torch scheduler. The state's clock counts the unit of ``max_duration``, and epochs and
            batches if ``batches_in_epoch`` is set.
        max_duration: Length of the run, and the unit of the x-axis; a whole number counts epochs.
        batches_in_epoch: Batches per epoch; required if both epochs and batches occur.
        scale_schedule_ratio: Factor by which the run and the schedules are stretched.
        step_schedulers_every_batch: Whether torch schedulers step after each batch instead of after each epoch.
        base_lr: The optimizer's learning rate, which the schedules multiply.
        ax: Axes to draw into; a new figure if None.
        num_points: Maximum number of points, at least 2, evenly spaced over the run. Each is the learning rate of one
            batch; the first and the last batch are included.

    Returns:
        The axes, with one line per schedule.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: A schedule is not a function.
        ValueError: There is no schedule, a value is out of range, or a schedule cannot be computed for this run.

    Example:
        >>> from composer.optim import CosineAnnealingWithWarmupScheduler
        >>> warm = CosineAnnealingWithWarmupScheduler("1ep")
        >>> plot_schedule(warm, "10ep", batches_in_epoch=50, base_lr=0.1).get_xlabel()  # doctest: +SKIP
        'epochs'
    """
    if batches_in_epoch is not None:
        check_sizes(batches_in_epoch=batches_in_epoch)
    check_whole("num_points", num_points, 2)
    if not scale_schedule_ratio > 0:
        raise ValueError(f"scale_schedule_ratio must be more than 0, got {scale_schedule_ratio}.")
    length = Time.from_input(max_duration, TimeUnit.EPOCH, name="max_duration") * scale_schedule_ratio
    if length.unit is TimeUnit.DURATION or length.value <= 0:
        raise ValueError(f"max_duration must be a length of time such as '10ep', above 0, got {max_duration!r}.")
    labelled = _labelled(schedulers)
    # Epochs are counted in batches if their length is known.
    in_batches = length.unit is TimeUnit.EPOCH and batches_in_epoch is not None
    unit, per_unit = (TimeUnit.BATCH, batches_in_epoch or 1) if in_batches else (length.unit, 1)
    if unit is TimeUnit.SECOND:
        steps = [length.value * place / (num_points - 1) for place in range(num_points)]
    else:
        last = int(length.value * per_unit) - 1
        count = min(num_points, last + 1)
        steps = [last * place // max(count - 1, 1) for place in range(count)]
    ax = _new_axes() if ax is None else ax
    for label, schedule in labelled.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base_lr)
        state = State(model=None, max_duration=length, optimizers=(optimizer,))
        state.set_dataloader(None, "train", batches_in_epoch)
        rates = _rates(schedule, state, unit, steps, scale_schedule_ratio, step_schedulers_every_batch)
        # A rate is constant until the next batch; the steps are drawn where they are visible.
        style = "steps-post" if len(rates) <= _VISIBLE_STEPS else "default"
        positions = [step / per_unit for step in steps]
        ax.plot([*positions, length.value], [*rates, rates[-1]], label=label, drawstyle=style)
    ax.set_xlabel(length.unit.plural)
    ax.set_ylabel("learning rate")
    ax.set_xlim(0, length.value)
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


def _rates(
    schedule: Any, state: State, unit: TimeUnit, steps: Sequence[float], ratio: float, every_batch: bool
) -> list[float]:
    """Return the learning rates that a schedule sets after ``steps``, which are counted in ``unit``."""
    length, batches, (optimizer,) = cast("Time", state.max_duration), state.dataloader_len, state.optimizers
    # A time in a unit that this clock does not count would never be reached.
    counted = {length.unit, unit, TimeUnit.DURATION}
    if batches is not None and unit is TimeUnit.BATCH:
        counted.add(TimeUnit.EPOCH)
    stepped: TimeUnit | None = None
    if "optimizer" in inspect.signature(schedule).parameters:
        stepped = TimeUnit.BATCH if every_batch else TimeUnit.EPOCH
        if stepped not in counted:
            raise ValueError(
                "schedulers contains a torch scheduler, which counts epochs or batches, and in a run of "
                f"{length} it is not known when it steps. Give max_duration in epochs or batches, and batches_in_epoch."
            )
        scheduler = schedule(optimizer)
    else:
        _check_units(schedule, counted, length)
        scheduler = compile_composer_scheduler(schedule, state, ratio)
    rates, done = [], 0
    for step in steps:
        state.timestamp = _clock(step, unit, batches)
        # torch's schedulers count their own steps; the others read the clock.
        due = done + 1 if stepped is None else int(state.timestamp.count(stepped))
        for _ in range(due - done):
            optimizer.step()
            scheduler.step()
        done = due
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def _clock(step: float, unit: TimeUnit, batches: int | None) -> Timestamp:
    if unit is TimeUnit.SECOND:
        return Timestamp(total_wct=datetime.timedelta(seconds=step))
    if unit is TimeUnit.BATCH and batches is not None:
        epoch, batch = divmod(int(step), batches)
        return Timestamp(epoch=epoch, batch=int(step), batch_in_epoch=batch)
    return Timestamp().copy(**{unit.name.lower(): int(step)})


def _check_units(schedule: Any, counted: set[TimeUnit], length: Time) -> None:
    for name, value in _settings(schedule).items():
        for time in value if isinstance(value, tuple) else (value,):
            if isinstance(time, Time) and time.unit not in counted:
                raise ValueError(
                    f"{name}={time} cannot be drawn over {length}. Give both in one unit, or in epochs and batches, "
                    "with batches_in_epoch."
                )


def _labelled(schedulers: Any) -> dict[str, Schedule]:
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
                f"schedulers must be functions f(state, ssr), or functions f(optimizer) that return a torch scheduler, "
                f"got {schedule!r}. Write lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)."
            )
    return labelled


def _label(schedule: Any) -> str:
    """Return a short name: ``"Step(step_size=30ep)"``."""
    if not attrs.has(type(schedule)):
        return str(getattr(schedule, "__name__", type(schedule).__name__))
    defaults = {field.name: field.default for field in attrs.fields(type(schedule))}
    settings = ", ".join(
        f"{name}=[{', '.join(map(str, value))}]" if isinstance(value, tuple) else f"{name}={value}"
        for name, value in _settings(schedule).items()
        if value != defaults[name]
    )
    return f"{type(schedule).__name__.removesuffix('Scheduler')}({settings})"


def _settings(schedule: Any) -> dict[str, Any]:
    return attrs.asdict(schedule, recurse=False) if attrs.has(type(schedule)) else {}
