"""Log statistics of activations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from composer.core import Callback, Event, Logger, LoggerDestination, State, Time, TimeUnit
from composer.core.checks import is_flag, to_strings
from composer.core.interval import interval_time
from composer.core.saving.components import reset_fields, transient
from composer.functional.nested import leaves

_WANDB = "WandBLogger"


def _to_kinds(given: Sequence[str] | str | None) -> tuple[str, ...]:
    return tuple(to_strings("ignore_module_types", given))


@attrs.define(eq=False)
class ActivationMonitor(Callback):
    """Log statistics of the inputs and outputs of each module every ``interval``.

    The metrics are ``activations/<statistic>/<module>/input_<n>`` and ``…/output_<n>``, where ``n`` counts the tensors:

    - ``average``, ``max`` and ``l2_norm`` (of the last dimension),
    - ``skewness`` and ``kurtosis``, its third and fourth standardized moments; 0 and 3 for a normal distribution.

    Each is computed along the last dimension, ``hidden`` in ``(batch, length, hidden)``, and averaged over the others.
    Only floating point tensors of the first microbatch of a batch are measured. Modules have hooks only during that
    forward pass, in which a compiled model is not compiled; the callback does not change the results of training.

    Args:
        interval: How often, in batches, epochs (in their first batch) or as a fraction of the training.
        ignore_module_types: Modules whose class name contains one of these names are skipped.
        only_log_wandb: Whether to log only to destinations of the class ``WandBLogger``, because of the number of
            metrics.

    Raises:
        ValueError: ``interval`` is not a length of time.

    Example:
        >>> ActivationMonitor("100ba", ignore_module_types=["Dropout"], only_log_wandb=False)
        ActivationMonitor(interval=Time(100, TimeUnit.BATCH), ignore_module_types=('Dropout',), only_log_wandb=False)
    """

    interval: Time = attrs.field(default=Time(25, TimeUnit.BATCH), converter=interval_time)
    ignore_module_types: tuple[str, ...] = attrs.field(default=None, converter=_to_kinds)
    only_log_wandb: bool = attrs.field(default=True, validator=is_flag)

    _hooks: ExitStack = transient(factory=ExitStack)
    _metrics: dict[str, Tensor] = transient(factory=dict)
    _logged_for: int = transient(default=-1)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Measure a forward pass every ``interval``."""
        return {Event.BEFORE_FORWARD: self.interval, Event.AFTER_FORWARD: self.interval}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier training, and warn if there is no destination."""
        reset_fields(self)
        if logger.destinations and not self._destinations(logger):
            warnings.warn(
                "ActivationMonitor logs nothing: only_log_wandb is True, and there is no WandBLogger among the "
                "loggers. Set only_log_wandb=False to log to the others.",
                stacklevel=2,
            )

    def before_forward(self, state: State, logger: Logger) -> None:
        """Register the hooks."""
        batch = int(state.timestamp.count(TimeUnit.BATCH))
        # The clock counts batches when they end, so all microbatches of a batch have the same count.
        if batch == self._logged_for or not self._destinations(logger):
            return
        self._logged_for = batch
        self._hooks.enter_context(torch.compiler.set_stance("force_eager"))  # compiled modules ignore new hooks
        for name, module in state.model.named_modules():
            if name and not any(ignored in type(module).__name__ for ignored in self.ignore_module_types):
                measure = partial(self._measure, name)
                self._hooks.enter_context(module.register_forward_hook(measure, with_kwargs=True))

    def after_forward(self, state: State, logger: Logger) -> None:
        """Remove the hooks and log the statistics."""
        self._hooks.close()
        metrics, self._metrics = self._metrics, {}
        if not metrics:
            return
        step = int(state.timestamp.count(TimeUnit.BATCH))
        if not self.only_log_wandb:
            logger.log_metrics(metrics, step)
            return
        for destination in self._destinations(logger):
            try:
                destination.log_metrics(metrics, step)
            except Exception as error:  # noqa: BLE001  (as in Logger: a failing destination must not end the training)
                logger.report_failure(destination, "log_metrics", error)

    def close(self, state: State, logger: Logger) -> None:
        """Remove the hooks, in case a forward pass failed."""
        self._hooks.close()

    def _measure(self, name: str, module: nn.Module, places: Any, names: Any, outputs: Any) -> None:
        with torch.no_grad():
            for side, values in (("input", [places, names]), ("output", outputs)):
                tensors = (value for value in leaves(values) if isinstance(value, Tensor))
                for number, tensor in enumerate(tensors):
                    if tensor.is_floating_point() and tensor.ndim and tensor.numel():
                        self._metrics |= {
                            f"activations/{statistic}/{name}/{side}_{number}": value
                            for statistic, value in _statistics(tensor).items()
                        }

    def _destinations(self, logger: Logger) -> list[LoggerDestination]:
        return [one for one in logger.destinations if not self.only_log_wandb or type(one).__name__ == _WANDB]


def _statistics(tensor: Tensor) -> dict[str, Tensor]:
    """Return the statistics of the last dimension, averaged over the others, computed in at least 32 bits.

    Example:
        >>> _statistics(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))["l2_norm"]
        tensor(2.5000)
    """
    values = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    deviations = values - values.mean(dim=-1, keepdim=True)
    spread = deviations.square().mean(dim=-1, keepdim=True).sqrt()
    # A row of equal values has the moments 0 instead of NaN.
    standardized = deviations / spread.clamp_min(torch.finfo(values.dtype).tiny)
    return {
        "average": values.mean(),
        "max": values.amax(dim=-1).mean(),
        "l2_norm": torch.linalg.vector_norm(values, dim=-1).mean(),
        "skewness": standardized.pow(3).mean(),
        "kurtosis": standardized.pow(4).mean(),
    }
