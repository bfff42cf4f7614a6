"""The learning rate range test (Smith 2017, arXiv:1506.01186)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from composer.core import DataSpec
from composer.core.step import Step
from composer.diagnostics.trial import data_of, trial, weighted_microbatches
from composer.distributed import get_world_size
from composer.functional.checks import check_interval, check_whole
from composer.loggers.products import import_product
from composer.loggers.values import smoothed
from composer.trainer.data.batches import prepare_batch
from composer.trainer.data.order import make_order
from composer.trainer.data.settings import check_trainable
from composer.trainer.optimization import Optimization

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from composer.core import State
    from composer.trainer import Trainer

_WINDOW = 20
"""A loss is smoothed over a tenth of the steps: over this part of them before it, and as many after it."""


@attrs.frozen
class LRSearch:
    """The result of a learning rate range test: the loss at learning rates that grow from step to step.

    Args:
        lrs: The learning rates of the steps, in ascending order.
        losses: The loss of each batch before its step.

    Example:
        >>> search = LRSearch(lrs=(0.001, 0.01, 0.1, 1.0, 10.0), losses=(2.3, 2.2, 1.5, 0.9, 8.0))
        >>> search.suggestion
        0.1
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The losses, each averaged with its neighbours before and after it."""
        return tuple(smoothed(self.losses, max(1, len(self.losses) // _WINDOW))) if self.losses else ()

    @property
    def suggestion(self) -> float | None:
        """The learning rate from which the smoothed loss stays below the middle between its first and lowest value.

        It is a first guess for a constant rate, and depends little on the batches; a schedule with a warm-up may start
        from a larger one. None if no step decreases the smoothed loss.
        """
        values = self.smoothed
        lowest = values.index(min(values)) if values else 0
        if not lowest:
            return None
        middle = (values[0] + values[lowest]) / 2
        return self.lrs[max(step for step in range(lowest) if values[step] > middle) + 1]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss over the learning rate, with the suggestion.

        Args:
            ax: Axes to draw into; new axes if None.

        Returns:
            The axes; ``ax.figure.savefig("lr.png")`` saves the figure.

        Raises:
            ModuleNotFoundError: Matplotlib is not installed.
        """
        if ax is None:
            ax = import_product("matplotlib.pyplot", "plot").subplots(layout="constrained")[1]
        assert ax is not None
        ax.plot(self.lrs, self.losses, alpha=0.35, label="loss")
        ax.plot(self.lrs, self.smoothed, label="smoothed loss")
        if self.suggestion is not None:
            ax.axvline(self.suggestion, color="gray", label=f"suggestion: {self.suggestion:.2g}")
        low, high = min(self.smoothed), max(self.smoothed[0], self.losses[0])
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
        ax.set_ylim(low - 0.1 * (high - low) - 1e-9, high + 0.5 * (high - low) + 1e-9)
        ax.legend()
        return ax


def find_lr(
    trainer: Trainer,
    *,
    start_lr: float = 1e-6,
    end_lr: float = 10.0,
    num_batches: int = 100,
    stop_factor: float = 4.0,
) -> LRSearch:
    """Train a few batches with growing learning rates and return the losses (range test, arXiv:1506.01186).

    The rates grow from step to step by the same factor, in each parameter group in proportion. Afterwards weights,
    optimizers and generators are restored bit for bit. No algorithm runs at its events; those that have changed the
    model or wrapped the optimizers are in effect. It runs in one process.

    Args:
        trainer: The trainer, with its data.
        start_lr: The first learning rate.
        end_lr: The last one.
        num_batches: The number of steps; the data are repeated if they have fewer batches.
        stop_factor: The search ends early at a loss that is higher than the first one and so many times the lowest.

    Returns:
        The rates and losses; ``search.suggestion`` is a first guess, and ``search.plot()`` draws them.

    Raises:
        TypeError: ``trainer`` is something else, such as a model.
        ValueError: A value is out of range, there is no data, or the first loss is not finite.

    Example:
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> batches = [(torch.rand(8, 4), torch.zeros(8, dtype=torch.long))]
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model=model, train_dataloader=batches, optimizers=optimizer, progress_bar=False)
        >>> len(find_lr(trainer, num_batches=20).losses)
        20
    """
    state, spec = data_of(trainer)
    _check(start_lr, end_lr, num_batches, stop_factor)
    if spec is None or isinstance(spec.dataloader, Iterator):
        got = "none" if spec is None else "an iterator, whose batches would be missing in the training"
        raise ValueError(f"find_lr needs a train_dataloader that can be iterated over again, got {got}.")
    if get_world_size() > 1:
        raise ValueError(f"find_lr runs in one process, and there are {get_world_size()}: run it without torchrun.")
    check_trainable(state.model)
    lrs = [start_lr * (end_lr / start_lr) ** (step / (num_batches - 1)) for step in range(num_batches)]
    losses: list[float] = []
    with trial(state, spec.dataloader, steps=True):
        optimization = Optimization(state, torch.zeros((), dtype=torch.int64, device=state.device))
        optimization.train_mode()
        for lr, batch in zip(lrs, _batches(spec, state), strict=False):
            _set_lr(state, lr)
            state.batch = batch
            loss = train_step(state, spec, optimization)
            if not math.isfinite(loss):
                break
            losses.append(loss)
            # abs, because a loss may be negative; more than the first one, because losses near 0 vary by any factor.
            if loss > stop_factor * abs(min(losses)) and loss > losses[0]:
                break
    if not losses:
        raise ValueError("find_lr: the loss of the first batch is not a finite number; see the guide to debugging.")
    return LRSearch(tuple(lrs[: len(losses)]), tuple(losses))


def _check(start_lr: float, end_lr: float, num_batches: int, stop_factor: float) -> None:
    check_interval("start_lr", start_lr, 0.0, math.inf, "It is the first learning rate.", open_low=True, open_high=True)
    check_interval("end_lr", end_lr, start_lr, math.inf, "It is more than start_lr.", open_low=True, open_high=True)
    check_whole("num_batches", num_batches, 2, "It is the number of steps.")
    check_interval("stop_factor", stop_factor, 1.0, math.inf, "The search ends at a loss so many times the lowest.")


def _batches(spec: DataSpec, state: State) -> Iterator[Any]:
    """Yield batches of as many epochs as are wanted, from the first on, without moving the position of the training."""
    order = make_order(spec.dataloader, state.rank_zero_seed)
    for epoch in itertools.count():
        batch = None
        for batch in order.begin(epoch):
            yield prepare_batch(batch, spec, state.device, "train_dataloader", 0)
        if batch is None:
            raise ValueError("find_lr: train_dataloader has no batches.")


def _set_lr(state: State, lr: float) -> None:
    """Set the largest learning rate of all parameter groups to ``lr``, and the others in proportion."""
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    largest = max(float(group["lr"]) for group in groups)
    for group in groups:
        rate = lr * (float(group["lr"]) / largest if largest else 1.0)
        # A learning rate may be a tensor, which compiled steps read.
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
        if "initial_lr" in group:  # decoupled weight decay is relative to it
            group["initial_lr"] = group["lr"]


def train_step(state: State, spec: DataSpec, optimization: Optimization) -> float:
    """Train on the state's batch without events, and return its loss before the step."""
    forward, loss = optimization.in_precision(state.model), optimization.in_precision(state.compute_loss)
    step = Step(
        state,
        defaultdict(tuple),
        forward,
        loss,
        split=lambda: weighted_microbatches(state, spec, state.device_train_microbatch_size),
        complete=optimization.unscale,
    )
    optimization.step(step.compute_gradients)
    return float(step.losses["total"])
