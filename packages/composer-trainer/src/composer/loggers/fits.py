"""The calls of ``fit`` of a process: their losses, their learning rates, and what differs from the call before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from composer.core.checks import shortened
from composer.core.saving.components import by_key
from composer.loggers.hyperparameters import hyperparameters, plain_settings
from composer.loggers.values import Number, flat, html_table, show, smoothed

if TYPE_CHECKING:
    from array import array

    from torch.optim import Optimizer

    from composer.core import State

_WIDTH, _HEIGHT = 480, 120
_MOST_POINTS, _MOST_CALLS, _MOST_CHANGES = 400, 10, 5
_NOT_COMPARED = ("run_name", "max_duration", "enabled_algorithms")
"""What may differ although nobody has changed it, and names of MosaicML Composer."""
_FIRST = ("optimizers", "algorithms", "schedulers", "precision")


@attrs.define(eq=False)
class Fit:
    """A call of ``fit``.

    Attributes:
        first_batch: The number of batches before it.
        losses: The mean loss of each batch, known after each epoch and at the end.
        before: The call that it is compared with: the last one of the same Trainer, or of another in this process.
        changed: What differs from that call, before and now: ``{"optimizers/SGD/lr": (0.1, 0.01)}``. Learning rates are
            those that schedules multiply; those of the same Trainer are compared with its last batch. Of an optimizer
            or evaluator that is new or gone, only its first setting.
        lrs: The learning rates of the groups by optimizer, at the first batch and after the last one.
        reason: Why it ended.
    """

    first_batch: int
    losses: array[float] = attrs.field(repr=False)
    before: str
    changed: Mapping[str, tuple[Any, Any]]
    lrs: list[dict[str, list[Number]]]
    reason: str = "an error"

    def rows(self) -> dict[str, str | None]:
        """Return rows of a table: the learning rates, and what has changed, if anything."""
        return {"learning rate": self.learning_rates() or None, f"new since {self.before}": self.changes() or None}

    def learning_rates(self) -> str:
        """Return the learning rates of each optimizer, ``"SGD 0.1 → 0.05"`` if they differ at the end."""
        spans = {key: dict.fromkeys(_span(one[key]) for one in self.lrs if key in one) for key in self.lrs[0]}
        return ", ".join(f"{key} {' → '.join(each)}" for key, each in spans.items())

    def changes(self) -> str:
        """Return what has changed, ``"optimizers/SGD/lr 0.1 → 0.01"``."""
        shown = [f"{key} {_shown(old)} → {_shown(new)}" for key, (old, new) in self.changed.items()]
        more = len(shown) - _MOST_CHANGES
        return ", ".join([*shown[:_MOST_CHANGES], *([f"and {more} more"] if more > 0 else [])])


class Fits:
    """The calls of ``fit`` of a trainer, the latest one last."""

    _latest: ClassVar[Fits | None] = None
    """Those of the trainer that this process has trained last."""

    def __init__(self, seed: int | None = None) -> None:
        self.calls: list[Fit] = []
        self.run_name, self.seed, self.settings = "", seed, dict[str, Any]()  # a seed that is drawn is no setting

    def begin(self, state: State, schedulers: Iterable[Any], losses: array[float]) -> None:
        """Add a call, to whose losses the run appends, and compare it with the one before."""
        latest, Fits._latest = Fits._latest, self
        former = {} if latest is None else latest.settings
        described = hyperparameters(state, schedulers=schedulers)
        described |= {"optimizers": _optimizers(state), "rank_zero_seed": self.seed}
        described = {name: value for name, value in described.items() if value != {}}
        settings = {name: value for name, value in flat(described).items() if not name.startswith(_NOT_COMPARED)}
        both = {name: (former.get(name), settings.get(name)) for name in {**former, **settings} if former}
        changed = _ordered({name: (old, new) for name, (old, new) in both.items() if old != new}, former, settings)
        before = "the last fit" if latest is self else f"run {latest.run_name}" if latest is not None else ""
        self.run_name, self.settings = state.run_name, settings
        self.calls.append(Fit(int(state.timestamp.batch), losses, before, changed, [_lrs(state)]))

    def end(self, state: State, reason: str) -> None:
        """Complete the last call, also one that a signal has stopped."""
        self.calls[-1].reason = reason
        self.calls[-1].lrs.append(_lrs(state))
        self.settings |= flat({"optimizers": _optimizers(state)})

    def to_html(self, title: str, metrics: Mapping[str, Number], acted: Mapping[str, tuple[int, str]]) -> str:
        """Return a curve of the losses, the last calls, the metrics and what the algorithms did, as HTML."""
        facts = [(name, show(value)) for name, value in metrics.items()]
        facts += [(name, f"{count} {unit}") for name, (count, unit) in acted.items()]
        head = ("batches", "learning rate", "loss", "ended", "new since the call before")
        rows = [
            (
                f"{fit.first_batch} to {fit.first_batch + len(fit.losses)}",
                fit.learning_rates(),
                show(fit.losses[-1]) if fit.losses else "",
                fit.reason,
                fit.changes(),
            )
            for fit in self.calls[-_MOST_CALLS:]
        ]
        calls = html_table(rows, head, left=len(head)) if rows else ""
        return f"<p>{escape(title)}</p>{loss_curve(self.calls)}{calls}{html_table(facts, left=2)}"


def loss_curve(fits: Sequence[Fit]) -> str:
    """Return the losses of calls as an SVG, with a moving average; an empty string if there are fewer than two."""
    points = [(batch, loss) for fit in fits for batch, loss in enumerate(fit.losses, fit.first_batch + 1)]
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return ""
    step = -(-len(points) // _MOST_POINTS)
    parts = [points[start : start + step] for start in range(0, len(points), step)]
    batches, losses = [part[0][0] for part in parts], [sum(loss for _, loss in part) / len(part) for part in parts]
    low, high, left, right = min(losses), max(losses), min(batches), max(batches)
    lines = []
    for values, opacity in ((losses, 0.3), (smoothed(losses, len(losses) // 40), 1)):
        drawn, last = "", math.inf
        for batch, loss in zip(batches, values, strict=True):
            x, y = _WIDTH * (batch - left) / (right - left or 1), _HEIGHT * (high - loss) / (high - low or 1)
            drawn += f"{'L' if batch > last else 'M'}{x:.1f} {y:.1f}"  # the clock may have been reset
            last = batch
        lines.append(f'<path d="{drawn}" fill="none" stroke="#1f77b4" stroke-opacity="{opacity}"/>')
    size = f'viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" width="{_WIDTH}" height="{_HEIGHT}"'
    caption = f"loss/train/total: {show(low)} to {show(high)}, batch {left} to {right}"
    return f"<figure><figcaption>{caption}</figcaption><svg {size}>{''.join(lines)}</svg></figure>"


def _ordered(changed: dict[str, Any], former: Iterable[str], now: Iterable[str]) -> dict[str, Any]:
    """Return changes in the order of :data:`_FIRST`, without all settings of what is new or gone."""
    alone = {_component(name) for name in former} ^ {_component(name) for name in now}
    firsts = {_component(name): name for name in reversed(changed)}
    kept = [name for name in changed if _component(name) not in alone or firsts[_component(name)] == name]
    order = {kind: place for place, kind in enumerate(_FIRST)}
    return {name: changed[name] for name in sorted(kept, key=lambda name: order.get(name.split("/")[0], len(order)))}


def _component(name: str) -> tuple[str, ...]:
    """Return the optimizer or evaluator that a setting belongs to; of others, the setting."""
    parts = tuple(name.split("/"))
    return parts[:2] if parts[0] in {"optimizers", "evaluators"} else parts


def _lrs(state: State) -> dict[str, list[Number]]:
    return {key: [float(group["lr"]) for group in one.param_groups] for key, one in by_key(state.optimizers).items()}


def _optimizers(state: State) -> dict[str, Any]:
    return {key: _settings_of_groups(one) for key, one in by_key(state.optimizers).items()}


def _settings_of_groups(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer, each a list if its groups differ."""
    groups = optimizer.param_groups
    settings = {}
    for name in optimizer.defaults:
        source = "initial_lr" if name == "lr" and "scheduled_lr" in groups[0] else name
        values = [plain_settings({name: group.get(source)})[name] for group in groups]
        settings[name] = values[0] if values.count(values[0]) == len(values) else values
    return settings


def _span(rates: Sequence[Number]) -> str:
    low, high = show(min(rates)), show(max(rates))
    return low if low == high else f"{low} to {high}"


def _shown(value: object) -> str:
    return show(value) if isinstance(value, (float, str)) else shortened(value)
