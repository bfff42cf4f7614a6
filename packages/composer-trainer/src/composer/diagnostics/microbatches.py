"""Whether microbatches give the gradients of the batch."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer.core import Precision, State
from composer.core.step import Step
from composer.diagnostics.trial import data_of, trial, weighted_microbatches
from composer.functional.checks import check_whole
from composer.functional.dtensors import is_sharded
from composer.trainer.data.batches import first_batch
from composer.trainer.optimization import Optimization

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from composer.core.step import Microbatch
    from composer.trainer import Trainer

_ROUNDING, _ROUNDING_16_BITS = 1e-3, 0.02
"""Relative differences of gradients that rounding may cause."""


def check_microbatches(trainer: Trainer, microbatch_size: int | None = None) -> float:
    """Raise an error if microbatches do not give the gradients of the first batch.

    The gradients of the batch are computed twice as a whole and once in microbatches, in training mode without dropout
    and without algorithms, and with the weights of losses by which the trainer adds them. Afterwards the model and all
    generators are restored bit for bit.

    Args:
        trainer: The trainer, before ``fit``.
        microbatch_size: The samples of a microbatch; if None, the trainer's, or half of the batch.

    Returns:
        The largest difference, relative to the gradient of its parameter and a hundredth of that of the model.

    Raises:
        TypeError: ``trainer`` is something else, such as a model.
        ValueError: The gradients differ by more than rounding, in microbatches or because the model draws random
            numbers; there is no batch or only one microbatch, or the model is sharded.

    Example:
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> batches = [(torch.rand(8, 4), torch.zeros(8, dtype=torch.long))]
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model=model, train_dataloader=batches, optimizers=optimizer, progress_bar=False)
        >>> check_microbatches(trainer, 2) < 1e-4
        True
    """
    state, spec = data_of(trainer)
    if spec is None or is_sharded(state.model):
        raise ValueError("check_microbatches needs a train_dataloader, and must be called before fit().")
    with trial(state, spec.dataloader, steps=False), _NoDropout():
        state.batch, state.scaler = first_batch(state, spec, "train_dataloader"), None
        samples = int(spec.get_num_samples_in_batch(state.batch))
        size = microbatch_size
        if size is None:
            size = state.device_train_microbatch_size or (samples + 1) // 2
        check_whole("microbatch_size", size, 1, "It counts samples.")
        if size >= samples:
            raise ValueError(f"microbatch_size must be less than the {samples} samples of the batch, got {size}.")
        by_tokens = trainer._compute.weighs_by_tokens  # noqa: SLF001
        splits = [weighted_microbatches(state, spec, one, by_tokens=by_tokens) for one in (None, None, size)]
        whole, again, parts = (_gradients(state, one) for one in splits)
    tolerance = _ROUNDING if state.precision is Precision.FP32 else _ROUNDING_16_BITS
    _, drawn = _difference(whole, again)
    name, difference = _difference(whole, parts)
    if not drawn <= tolerance:
        raise ValueError(
            f"The model must not draw random numbers to compare its gradients, which differ by {drawn:.2g} between two "
            "computations of the same batch: set the rates of what draws, such as stochastic depth, to 0."
        )
    if not difference <= tolerance:
        raise ValueError(
            f"Microbatches of {size} samples do not give the step of the batch of {samples}: the gradient of {name} "
            f"differs by {difference:.2g} of its norm. If the loss is a mean over other elements than samples, define "
            "count_loss_terms(batch) in the model, and if it is a sum, loss_is_sum = True. If samples are compared or "
            "normalized together, train with complete batches (device_train_microbatch_size=None)."
        )
    return difference


def _gradients(state: State, microbatches: Sequence[Microbatch]) -> dict[str, Tensor]:
    """Return the gradients of the state's batch by parameter."""
    optimization = Optimization(state, torch.zeros((), dtype=torch.int64, device=state.device))
    forward, loss = optimization.in_precision(state.model), optimization.in_precision(state.compute_loss)
    Step(state, defaultdict(tuple), forward, loss, split=lambda: microbatches).compute_gradients()
    found = {name: one.grad for name, one in state.model.named_parameters() if one.grad is not None}
    state.model.zero_grad()
    return found


def _difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the parameter whose gradient differs most, and how much.

    A hundredth of the norm of all gradients is added to that of each, as some gradients are only rounding.
    """
    norms = {name: float(gradient.float().norm()) for name, gradient in expected.items()}
    total = math.hypot(*norms.values())
    differences = {
        name: float((found.get(name, 0) - gradient).float().norm()) / (norms[name] + total / 100 or 1)
        for name, gradient in expected.items()
    }
    return max(differences.items(), key=lambda item: (math.isnan(item[1]), item[1]))


class _NoDropout(TorchFunctionMode):
    """A context in which torch's functions compute without dropout, also in modules that call them in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "training" in kwargs and ("dropout" in func.__name__ or "attention" in func.__name__):
            kwargs["training"] = False
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
