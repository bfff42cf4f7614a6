"""The picture of a study: quality against time, and the front of best trade-offs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from composer.core.files import write_atomically
from composer.loggers.products import import_product

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from composer.ablation.results import Settings
    from composer.ablation.statistics import Difference
    from composer.ablation.table import Row

__all__ = ["front", "plot_rows"]


def front(points: dict[str, tuple[float, float]], sign: int) -> list[str]:
    """Return the names of the points that no other point surpasses in time and quality, the fastest first.

    Example:
        >>> front({"slow": (3.0, 0.8), "good": (2.0, 0.9), "fast": (1.0, 0.5)}, sign=1)
        ['fast', 'good']
    """
    found: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -sign * points[name][1])):
        if not found or sign * points[name][1] > sign * points[found[-1]][1]:
            found.append(name)
    return found


def plot_rows(rows: Sequence[Row], settings: Settings, path: str | os.PathLike[str] | None = None) -> Figure:
    """Plot each arm's metric against its time of training; see :meth:`.Study.plot`."""
    figures = import_product("matplotlib.figure", "ablation")
    points = {
        row.label: (row.seconds, row.metric) for row in rows if row.metric is not None and row.seconds is not None
    }
    if not points:
        raise ValueError("A study must have a result to be plotted, and no arm has one.")
    # A figure of its own: pyplot would keep it open, and need a display in some environments.
    figure: Figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    best = front(points, settings.sign)
    axes.plot(*zip(*(points[name] for name in best), strict=True), "--", color="tab:gray", zorder=1)
    shown = [row for row in rows if row.label in points]
    scale = next((row.seconds for row in shown if not row.arm), None)  # of the ratios: the baseline's time
    for row in shown:
        x, y = points[row.label]
        colour = "black" if not row.arm else "tab:blue" if row.label in best else "tab:gray"
        errors = _bars(row.time_ratio, scale or 0.0), _bars(row.difference, 1.0)
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], fmt="o", color=colour, capsize=3, zorder=2)
        axes.annotate(row.label, (x, y), xytext=(6, 6), textcoords="offset points", fontsize=8, color=colour)
    several = len(settings.seeds) > 1
    axes.set_xlabel(f"time of training in seconds{' (rough)' if settings.is_rough else ''}")
    axes.set_ylabel(f"{settings.metric} ({'higher' if settings.mode == 'max' else 'lower'} is better)")
    bars = "bars: 95 % intervals of the difference to the baseline" if several else "one seed: no intervals"
    axes.set_title(f"Mean of {len(settings.seeds)} seed{'s' if several else ''}; {bars}; dashed: the best trade-offs")
    axes.title.set_fontsize(9)
    axes.margins(0.15)
    axes.grid(visible=True, alpha=0.3)
    if path is not None:
        target = Path(path)
        form = target.suffix.removeprefix(".") or "png"
        write_atomically(lambda unfinished: figure.savefig(unfinished, dpi=150, format=form), target)
    return figure


def _bars(difference: Difference | None, scale: float) -> list[list[float]] | None:
    """Return the distances from a mean to the ends of its interval."""
    if difference is None or difference.low is None or difference.high is None:
        return None
    return [[scale * (difference.mean - difference.low)], [scale * (difference.high - difference.mean)]]
