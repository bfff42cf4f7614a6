"""The picture of a study: quality against time, and the front of best trade-offs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from composer.ablation.results import label
from composer.core.files import write_atomically
from composer.loggers.products import import_product

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from composer.ablation.statistics import Difference
    from composer.ablation.study import Study

Arm = tuple[str, ...]


def front(times: Mapping[Arm, float], compare: Callable[[Arm, Arm], tuple[bool, bool]]) -> list[Arm]:
    """Return arms of which each is clearly better than the one before, and clearly slower; the fastest is the first.

    Args:
        times: The time of each arm.
        compare: ``f(arm, other)``: whether the arm is clearly better, and whether it is clearly slower.

    Example:
        >>> quality = {("slow",): 0.8, ("good",): 0.9, ("fast",): 0.5}
        >>> times = {("slow",): 3.0, ("good",): 2.0, ("fast",): 1.0}
        >>> front(times, lambda one, other: (quality[one] > quality[other], times[one] > times[other]))
        [('fast',), ('good',)]
    """
    found: list[Arm] = []
    for arm in sorted(times, key=times.__getitem__):
        is_better, is_slower = compare(arm, found[-1]) if found else (True, True)
        if is_better:
            found[-1:] = [*found[-1:], arm] if is_slower else [arm]
    return found


def plot_study(study: Study, path: str | os.PathLike[str] | None = None) -> Figure:
    """Plot each arm's metric against its time of training; see :meth:`.Study.plot`."""
    settings, rows = study.settings, {row.arm: row for row in study.rows}
    points = {
        arm: (row.seconds, row.metric)
        for arm, row in rows.items()
        if row.metric is not None and row.seconds is not None
    }
    if not points:
        raise ValueError("A study must have a result to be plotted, and no arm has one.")
    # A picture needs a figure of its own: pyplot would keep it open, and need a display in some environments.
    module, make = ("matplotlib.pyplot", "figure") if path is None else ("matplotlib.figure", "Figure")
    figure: Figure = getattr(import_product(module, "ablation"), make)(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    gains = {arm for arm in points if not arm or study.compare(arm)[0] or study.compare((), arm)[1]}
    best = front({arm: points[arm][0] for arm in gains}, study.compare)
    if len(best) > 1:
        axes.plot(*zip(*(points[arm] for arm in best), strict=True), "--", color="tab:gray", zorder=1)
    scale = rows[()].seconds or 0.0  # of the ratios: the baseline's time
    colours = {arm: "black" if not arm else "tab:blue" if arm in gains else "tab:gray" for arm in points}
    for arm, (x, y) in points.items():
        errors = _bars(rows[arm].time_ratio, scale), _bars(rows[arm].difference, 1.0)
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], fmt="o", color=colours[arm], capsize=3, zorder=2)
    several = len(settings.seeds) > 1
    axes.set_xlabel(f"time of training in seconds{' (rough)' if settings.is_rough else ''}")
    axes.set_ylabel(f"{settings.metric} ({'higher' if settings.mode == 'max' else 'lower'} is better)")
    bars = "bars: 95 % intervals of the difference to the baseline" if several else "one seed: no intervals"
    line = "; dashed: clearly slower and better" if len(best) > 1 else ""
    axes.set_title(f"Mean of {len(settings.seeds)} seed{'s' if several else ''}; {bars}{line}", fontsize=9)
    axes.margins(0.15)
    axes.grid(visible=True, alpha=0.3)
    figure.draw_without_rendering()  # computes where the points are
    _write_labels(axes, {label(arm): (*point, colours[arm]) for arm, point in points.items()})
    if path is not None:
        target = Path(path)
        form = target.suffix.removeprefix(".") or "png"
        write_atomically(lambda unfinished: figure.savefig(unfinished, dpi=150, format=form), target)
    return figure


def _write_labels(axes: Axes, points: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label beside its point, where it covers no point and no other label; the figure was drawn."""
    bbox = import_product("matplotlib.transforms", "ablation").Bbox
    taken = [bbox.from_bounds(*(axes.transData.transform((x, y)) - 4), 8, 8) for x, y, _ in points.values()]
    for name, (x, y, colour) in points.items():
        # Above on the right, below, on the left, and then further away.
        for distance, is_left, is_below in itertools.product(range(6, 90, 9), (False, True), (False, True)):
            text = axes.annotate(
                name,
                (x, y),
                xytext=(-6 if is_left else 6, -distance if is_below else distance),
                textcoords="offset points",
                ha="right" if is_left else "left",
                va="top" if is_below else "bottom",
                fontsize=8,
                color=colour,
                in_layout=False,
            )
            place = text.get_window_extent()
            if not place.count_overlaps(taken) and axes.bbox.x0 < place.x0 and place.x1 < axes.bbox.x1:
                break
            text.remove()
        else:
            axes.add_artist(text)
        taken.append(place)


def _bars(difference: Difference | None, scale: float) -> list[list[float]] | None:
    """Return the distances from a mean to the ends of its interval."""
    if difference is None or difference.low is None or difference.high is None:
        return None
    return [[scale * (difference.mean - difference.low)], [scale * (difference.high - difference.mean)]]
