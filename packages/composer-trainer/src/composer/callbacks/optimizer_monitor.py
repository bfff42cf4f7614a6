"""How large gradients, moments, weights and steps are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from composer.callbacks._norms import local, sums_of, sums_of_products, sums_of_squares, sums_over_processes
from composer.core import Callback, Event, Logger, State, Time, TimeUnit
from composer.core.checks import true_or_false, whole_number_from
from composer.core.serialization import reset_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

__all__ = ["OptimizerMonitor"]

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq",)


@attrs.define
class _Sums:
    """What has been summed over each of some parameters, or over this process's part of each, by name."""

    parameters: dict[str, Sequence[Tensor]] = attrs.field(factory=dict)
    sums: list[Tensor] = attrs.field(factory=list)

    def add(self, name: str, parameters: Sequence[Tensor], sums: Tensor) -> None:
        """Add the squares of what has a norm."""
        if parameters:
            self.parameters[name] = parameters
            self.sums.append(sums)

    def add_cosine(
        self, name: str, parameters: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> None:
        """Add what makes the cosines of the angles between pairs of tensors."""
        self.add(name, parameters, sums_of_products(first, second))
        self.add(f"{name} first", parameters, sums_of_squares(first))
        self.add(f"{name} second", parameters, sums_of_squares(second))

    def over_processes(self) -> dict[str, Tensor]:
        """Return the sums over whole parameters, by name."""
        everything = [one for parameters in self.parameters.values() for one in parameters]
        total = sums_over_processes(torch.cat(self.sums), everything)
        return dict(zip(self.parameters, torch.split(total, [len(one) for one in self.sums]), strict=True))

    def metrics(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return norms and cosines by the names of the parameters."""
        totals, metrics = self.over_processes(), {}
        metrics["l2_norm/grad/global"] = totals["l2_norm/grad"].sum().sqrt()
        for name, total in totals.items():
            if name.startswith("l2_norm/"):
                values = total.sqrt()
            elif f"{name} first" in totals:
                norms = totals[f"{name} first"].sqrt() * totals[f"{name} second"].sqrt()
                values = total / norms.clamp_min(torch.finfo(norms.dtype).tiny)
            else:
                continue
            for parameter, value in zip(self.parameters[name], values.unbind(), strict=True):
                metrics[f"{name}/{names[parameter]}"] = value
        return metrics


@attrs.define(eq=False)
class OptimizerMonitor(Callback):
    """Log the L2 norms of the gradients, and of what the optimizers make of them, every few batches.

    - ``l2_norm/grad/global`` and ``l2_norm/grad/<parameter>``: at ``AFTER_TRAIN_BATCH``, so unscaled, added up over
      microbatches and processes, and after algorithms, such as gradient clipping, have changed them.

    And with ``log_optimizer_metrics``, at ``BATCH_END``:

    - ``l2_norm/param/…``: the weights after the step;
    - ``l2_norm/update/…``: what the step has taken from them, weight decay included, whatever the optimizer is;
    - ``l2_norm/moment/…`` and ``l2_norm/second_moment_sqrt/…``: ``exp_avg`` or ``momentum_buffer``, and the square root
      of ``exp_avg_sq``, where an optimizer has them;
    - ``cosine/update_grad/…`` and ``cosine/moment_grad/…``: of the angles between them, 1 for plain SGD.

    They are logged for the batch that they belong to, as its loss is. A batch that is measured costs a copy of the
    weights, which the update is told from. Of sharded parameters each process measures its part, and one reduction adds
    up all numbers. Sparse gradients are left out.

    Args:
        log_optimizer_metrics: Whether to log more than gradients.
        batch_log_interval: Batches from one measurement to the next; the first batch is not measured, except with 1.

    Raises:
        ValueError: ``batch_log_interval`` is less than 1.

    Example:
        >>> OptimizerMonitor(batch_log_interval=100)
        OptimizerMonitor(log_optimizer_metrics=True, batch_log_interval=100)
    """

    log_optimizer_metrics: bool = attrs.field(default=True, validator=true_or_false)
    batch_log_interval: int = attrs.field(default=10, validator=whole_number_from(1, meaning="It counts batches."))

    _before: dict[Tensor, Tensor] = attrs.field(factory=dict, init=False, repr=False)
    _measured: dict[str, Tensor] = attrs.field(factory=dict, init=False, repr=False)
    _sums: _Sums = attrs.field(factory=_Sums, init=False, repr=False)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Measure every so many batches."""
        every = Time(self.batch_log_interval, TimeUnit.BATCH)
        return {Event.BATCH_START: every, Event.AFTER_TRAIN_BATCH: every}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Forget what an earlier training has left."""
        del state, logger
        reset_fields(self)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Keep a copy of the weights: the update is what the step takes from them."""
        if self.log_optimizer_metrics and logger.destinations:
            held = [
                one for optimizer in state.optimizers for group in optimizer.param_groups for one in group["params"]
            ]
            copies = [one.detach().clone() for one in local(held)]
            self._before = dict(zip(held, copies, strict=True))

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Measure the gradients that the optimizers step with."""
        if not logger.destinations:
            return
        self._measured = {name: one for name, one in state.model.named_parameters() if _has_gradient(one)}
        parameters = list(self._measured.values())
        self._sums = _Sums()
        self._sums.add("l2_norm/grad", parameters, sums_of_squares(_gradients(parameters)))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure what the optimizers have made of them, if this batch is measured, and log."""
        if not self._measured:
            return
        names = {parameter: name for name, parameter in self._measured.items()}
        if self._before:
            self._measure_step(state)
        logger.log_metrics(self._sums.metrics(names), step=int(state.timestamp.count(TimeUnit.BATCH)) - 1)
        self._before, self._measured, self._sums = {}, {}, _Sums()

    @torch.no_grad()
    def _measure_step(self, state: State) -> None:
        sums, stepped = self._sums, [one for one in self._measured.values() if one in self._before]
        now, gradients = local(stepped), _gradients(stepped)
        updates = list(torch._foreach_sub([self._before[one] for one in stepped], now))
        with_moment, moments = _from_optimizers(state, stepped, _FIRST_MOMENTS)
        with_square, squares = _from_optimizers(state, stepped, _SECOND_MOMENTS)

        sums.add("l2_norm/param", stepped, sums_of_squares(now))
        sums.add("l2_norm/update", stepped, sums_of_squares(updates))
        sums.add("l2_norm/moment", with_moment, sums_of_squares(moments))
        sums.add("l2_norm/second_moment_sqrt", with_square, sums_of(squares))
        sums.add_cosine("cosine/update_grad", stepped, updates, gradients)
        sums.add_cosine("cosine/moment_grad", with_moment, moments, _gradients(with_moment))


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return local([one.grad for one in parameters if one.grad is not None])


def _from_optimizers(
    state: State, parameters: Sequence[Tensor], fields: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of which an optimizer holds one of some fields, and what it holds."""
    held: dict[Tensor, Tensor] = {}
    for optimizer in state.optimizers:
        for parameter in parameters:
            fields_held = optimizer.state.get(parameter, {})
            for field in fields:
                if isinstance(fields_held.get(field), torch.Tensor):
                    held[parameter] = fields_held[field]
    return list(held), local(list(held.values()))
