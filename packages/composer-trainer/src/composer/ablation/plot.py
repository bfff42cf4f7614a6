"""The picture of a study: quality against time, and the front of best trade-offs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from composer.core.files import write_atomically
from composer.loggers.products import import_product

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure

    from composer.ablation.study import Row, Study

__all__ = ["front", "plot_study"]


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


def plot_study(study: Study, path: str | os.PathLike[str] | None = None) -> Figure:
    """Plot each arm's metric against its time of training; see :meth:`.Study.plot`."""
    figures = import_product("matplotlib.figure", "ablation")
    rows = {row.label: row for row in study.rows if row.metric is not None and row.seconds is not None}
    if not rows:
        raise ValueError("A study must have a result to be plotted, and no arm has one.")
    # A figure of its own: pyplot would keep it open, and need a display in some environments.
    figure: Figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    best = front({name: _point(row) for name, row in rows.items()}, study.settings.sign)
    axes.plot(*zip(*(_point(rows[name]) for name in best), strict=True), "--", color="tab:gray", zorder=1)
    baseline = rows.get("baseline")
    for name, row in rows.items():
        colour = "black" if name == "baseline" else "tab:blue" if name in best else "tab:gray"
        errors, x, y = _errors(row, baseline), *_point(row)
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], fmt="o", color=colour, capsize=3, zorder=2)
        axes.annotate(name, (x, y), xytext=(6, 6), textcoords="offset points", fontsize=8, color=colour)
    settings, several = study.settings, len(study.settings.seeds) > 1
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


def _point(row: Row) -> tuple[float, float]:
    assert row.seconds is not None
    assert row.metric is not None
    return row.seconds, row.metric


def _errors(row: Row, baseline: Row | None) -> tuple[list[list[float]] | None, list[list[float]] | None]:
    """Return the distances to the ends of the intervals of time and metric, both relative to the baseline."""
    difference, ratio = row.difference, row.time_ratio
    horizontal = vertical = None
    if difference is not None and difference.low is not None and difference.high is not None:
        vertical = [[difference.mean - difference.low], [difference.high - difference.mean]]
    if ratio is not None and ratio.low is not None and ratio.high is not None and baseline and baseline.seconds:
        scale = baseline.seconds
        horizontal = [[scale * (ratio.mean - ratio.low)], [scale * (ratio.high - ratio.mean)]]
    return horizontal, vertical
