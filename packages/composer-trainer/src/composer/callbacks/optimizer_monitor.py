"""Log the norms of gradients, moments, weights and updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from composer.core import Callback, Logger, State
from composer.core.checks import integer, is_flag
from composer.core.saving.components import reset_fields, transient
from composer.distributed import get_world_size
from composer.functional.dtensors import is_dtensor, local_parts

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq",)


@attrs.frozen
class _Measure:
    """Values of parameters that are computed from sums over their elements.

    The sums are complete before ``combine`` gets them: cosines of the parts of a sharded parameter cannot be combined.
    """

    name: str
    parameters: Sequence[Tensor]
    sums: tuple[Tensor, ...]
    """Each has a number for every parameter, over this process's part of it."""
    combine: Callable[..., Tensor] = torch.sqrt
    has_global: bool = False
    """Whether to log the value over all parameters, too."""

    def metrics(self, sums: Sequence[Tensor], names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return the values by name, given the sums over all processes."""
        metrics = {f"{self.name}/global": self.combine(*(one.sum() for one in sums))} if self.has_global else {}
        values = self.combine(*sums).unbind()
        return metrics | {
            f"{self.name}/{names[parameter]}": value for parameter, value in zip(self.parameters, values, strict=True)
        }


def _cosine(product: Tensor, first: Tensor, second: Tensor) -> Tensor:
    norms = first.sqrt() * second.sqrt()
    return product / norms.clamp_min(torch.finfo(norms.dtype).tiny)


def _fraction(part: Tensor, whole: Tensor) -> Tensor:
    return part / whole.clamp_min(1)


@attrs.define(eq=False)
class OptimizerMonitor(Callback):
    """Log the L2 norms of gradients and of the optimizers' updates every few batches.

    - ``l2_norm/grad/global`` and ``l2_norm/grad/<parameter>``: at ``AFTER_TRAIN_BATCH``, so unscaled, summed over
      microbatches and processes, and after algorithms such as gradient clipping.

    And with ``log_optimizer_metrics``, at ``BATCH_END``:

    - ``l2_norm/param/…``: the weights after the step;
    - ``l2_norm/update/…``: the difference of the weights before and after the step, weight decay included, for any
      optimizer;
    - ``l2_norm/moment/…`` and ``l2_norm/second_moment_sqrt/…``: ``exp_avg`` or ``momentum_buffer``, and the square root
      of ``exp_avg_sq``, where an optimizer has them;
    - ``cosine/update_grad/…`` and ``cosine/moment_grad/…``: cosines of the angles between them, 1 for plain SGD;
    - ``lost_updates/global`` and ``lost_updates/…``, for weights of 16 bits: the fraction of their elements with a
      gradient that the step did not change, because the update was less than half of the distance to the next number.
      Weights of groups with ``rounding="stochastic"`` or ``"kahan"`` (:class:`~composer.optim.DecoupledAdamW`) lose
      nothing and are left out.

    They are logged at ``BATCH_END``: of the 10th batch at step 10. Measuring a batch costs a copy of the weights that
    are not frozen. Of sharded parameters each process measures its part, and a single reduction sums them. Sparse
    gradients are skipped.

    Args:
        log_optimizer_metrics: Whether to log more than gradients.
        batch_log_interval: Batches between two measurements: 10 measures the 10th, 20th, … batch.

    Raises:
        ValueError: ``batch_log_interval`` is less than 1.

    Example:
        >>> OptimizerMonitor(batch_log_interval=100)
        OptimizerMonitor(log_optimizer_metrics=True, batch_log_interval=100)
    """

    log_optimizer_metrics: bool = attrs.field(default=True, validator=is_flag)
    batch_log_interval: int = integer(10, 1, meaning="It counts batches.")

    _before: dict[Tensor, Tensor] = transient(factory=dict)
    _measured: dict[str, Tensor] = transient(factory=dict)
    _measures: list[_Measure] = transient(factory=list)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier training."""
        reset_fields(self)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Copy the weights, to compute the update after the step."""
        if self.log_optimizer_metrics and logger.destinations and self._is_measured(state):
            groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
            parameters = [one for group in groups for one in group["params"] if one.requires_grad]
            copies = [one.detach().clone() for one in local_parts(parameters)]
            self._before = dict(zip(parameters, copies, strict=True))

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Measure the gradients of the optimizers' step."""
        if not (logger.destinations and self._is_measured(state)):
            return
        self._measured = {
            name: parameter
            for name, parameter in state.model.named_parameters()
            if parameter.grad is not None and parameter.grad.layout is torch.strided
        }
        parameters = list(self._measured.values())
        squares = _sums(_gradients(parameters), 2)
        self._measures = [_Measure("l2_norm/grad", parameters, (squares,), has_global=True)] if parameters else []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure the step, if this batch is measured, and log."""
        if not self._measured:
            return
        names = {parameter: name for name, parameter in self._measured.items()}
        if self._before:
            self._measure_step(state)
        metrics: dict[str, Tensor] = {}
        for one, sums in zip(self._measures, _sums_over_processes(self._measures), strict=True):
            metrics |= one.metrics(sums, names)
        logger.log_metrics(metrics)
        self._before, self._measured, self._measures = {}, {}, []

    def _is_measured(self, state: State) -> bool:
        """Return whether the running batch, which the clock has not counted yet, is measured."""
        return not (state.timestamp.counts.batch + 1) % self.batch_log_interval

    @torch.no_grad()
    def _measure_step(self, state: State) -> None:
        stepped = [one for one in self._measured.values() if one in self._before]
        now, gradients = local_parts(stepped), _gradients(stepped)
        updates = list(torch._foreach_sub([self._before[one] for one in stepped], now))
        with_moment, moments = _from_optimizers(state, stepped, _FIRST_MOMENTS)
        with_square, squares = _from_optimizers(state, stepped, _SECOND_MOMENTS)
        exact = _rounded_exactly(state)
        places = [place for place, one in enumerate(stepped) if one.dtype.itemsize == 2 and one not in exact]
        moving = [gradients[place] != 0 for place in places]
        lost = [(updates[place] == 0) & moves for place, moves in zip(places, moving, strict=True)]

        update_grad = _sums_of_cosine(updates, gradients)
        moment_grad = _sums_of_cosine(moments, _gradients(with_moment))
        # The squared norm of the root of the second moment is the sum of its values, which are not negative.
        measures = [
            _Measure("l2_norm/param", stepped, (_sums(now, 2),)),
            _Measure("l2_norm/update", stepped, (_sums(updates, 2),)),
            _Measure("l2_norm/moment", with_moment, (_sums(moments, 2),)),
            _Measure("l2_norm/second_moment_sqrt", with_square, (_sums(squares, 1),)),
            _Measure("cosine/update_grad", stepped, update_grad, _cosine),
            _Measure("cosine/moment_grad", with_moment, moment_grad, _cosine),
            _Measure(
                "lost_updates", [stepped[place] for place in places], (_counts(lost), _counts(moving)), _fraction, True
            ),
        ]
        self._measures += [one for one in measures if one.parameters]


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return local_parts([one.grad for one in parameters if one.grad is not None])


def _from_optimizers(
    state: State, parameters: Sequence[Tensor], fields: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters whose optimizer state has one of some fields, and the values of that field."""
    values: dict[Tensor, Tensor] = {}
    for optimizer in state.optimizers:
        for parameter in parameters:
            state_of_parameter = optimizer.state.get(parameter, {})
            for field in fields:
                if isinstance(state_of_parameter.get(field), torch.Tensor):
                    values[parameter] = state_of_parameter[field]
    return list(values), local_parts(list(values.values()))


def _rounded_exactly(state: State) -> set[Tensor]:
    """Return the parameters whose optimizers keep what rounding removes."""
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    return {one for group in groups if group.get("rounding", "nearest") != "nearest" for one in group["params"]}


def _counts(masks: Sequence[Tensor]) -> Tensor:
    """Return the number of true elements of each mask."""
    return torch.stack([mask.sum(dtype=torch.float32) for mask in masks]) if masks else torch.zeros(0)


def _sums(tensors: Sequence[Tensor], power: int) -> Tensor:
    """Return the sum of each tensor's absolute values to a power, 1 or 2, as one tensor of at least 32 bits."""
    if not tensors:
        return torch.zeros(0)
    norms = torch.stack(torch._foreach_norm(list(tensors), power, dtype=_precise(tensors)))
    return norms.square() if power == 2 else norms


def _sums_of_products(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return the dot product of each pair of tensors, as one tensor of at least 32 bits."""
    if not first:
        return torch.zeros(0)
    products = torch._foreach_mul(list(first), list(second))
    precise = _precise(products)
    return torch.stack([product.sum(dtype=precise) for product in products])


def _sums_of_cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums that :func:`_cosine` takes, of pairs of tensors."""
    return _sums_of_products(first, second), _sums(first, 2), _sums(second, 2)


def _sums_over_processes(measures: Sequence[_Measure]) -> list[list[Tensor]]:
    """Return the sums of each measure over all processes' parts, which takes one reduction."""
    flat = [(one.parameters, sums) for one in measures for sums in one.sums]
    total = torch.cat([sums for _, sums in flat])
    parameters = [parameter for parameters, _ in flat for parameter in parameters]
    if any(map(is_dtensor, parameters)):
        # Each replica of a part has the same sum, which must count once.
        shares = torch.tensor([_num_shards(one) for one in parameters], dtype=total.dtype) / get_world_size()
        total = total * shares.to(total.device, non_blocking=True)
        torch.distributed.all_reduce(total)
    parts = iter(torch.split(total, [len(sums) for _, sums in flat]))
    return [list(itertools.islice(parts, len(one.sums))) for one in measures]


def _num_shards(tensor: Tensor) -> int:
    if not is_dtensor(tensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def _precise(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(one.dtype is torch.float64 for one in tensors) else torch.float32
